"""Encoder blocks by hand, each in another spelling: [B, N, C] -> [B, N, C], built with (width, heads)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_fast.reading.forms import ReadModule


class Packed(nn.Module):
    """qkv packed, matmul + softmax, LayerScale, dropout."""

    def __init__(self, width: int, heads: int, order: str = "qkv h d") -> None:
        super().__init__()
        self.heads, self.scale, self.order = heads, (width // heads) ** -0.5, order.split()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.gamma1, self.gamma2 = (nn.Parameter(torch.full((width,), 1e-5)) for _ in range(2))
        self.drop = nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def attend(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        sizes = {"qkv": 3, "h": self.heads, "d": C // self.heads}
        qkv = self.qkv(x).view(B, N, *(sizes[name] for name in self.order))
        q, k, v = qkv.permute(2 + self.order.index("qkv"), 0, 2 + self.order.index("h"), 1, 2 + self.order.index("d"))
        weights = self.drop((q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1))
        return self.out((weights @ v).transpose(1, 2).reshape(B, N, C))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma1 * self.attend(self.norm1(x))
        return x + self.gamma2 * self.mlp(self.norm2(x))


class HeadsFirst(Packed):
    """The rows of qkv in the order [head, qkv, channel]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, "h qkv d")


class ChannelsFirst(Packed):
    """The rows of qkv in the order [channel, qkv, head]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, "d qkv h")


class RootMeanSquare(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * self.g


class Separate(nn.Module):
    """SDPA, separate projections, RMSNorm by hand, q/k norm, SwiGLU with separate gate."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.pre, self.post = RootMeanSquare(width), RootMeanSquare(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = RootMeanSquare(width // heads), RootMeanSquare(width // heads)
        self.gate, self.up, self.down = nn.Linear(width, 96), nn.Linear(width, 96), nn.Linear(96, width)

    def forward(self, x: Tensor, *, causal: bool = False) -> tuple[Tensor, None]:
        y = self.pre(x)
        q, k, v = (each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=causal)
        x = self.o(y.transpose(1, 2).flatten(2)) + x
        y = self.post(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y)), None


class Einsum(nn.Module):
    """einsum with heads in the middle, LayerNorm by hand, tanh GELU by hand, packed k and v."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.w1, self.b1, self.w2, self.b2 = (nn.Parameter(torch.ones(width) * (i % 2 == 0)) for i in range(4))
        self.q, self.kv, self.o = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 96), nn.Linear(96, width)

    @staticmethod
    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x, self.w1, self.b1)
        q, (k, v) = self.q(y), self.kv(y).chunk(2, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)) for each in (q / q.new_tensor(8.0).sqrt(), k, v))
        weights = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
        x = x + self.o(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))
        h = self.fc1(self.norm(x, self.w2, self.b2))
        h = 0.5 * h * (1 + torch.tanh(0.7978845608028654 * (h + 0.044715 * h**3)))
        return x + self.fc2(h)


class Head(nn.Module):
    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, channels, bias=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        return torch.matmul(F.softmax(scores, dim=-1), v)


class Tutorial(nn.Module):
    """A beginner's tutorial: one module per head, whose outputs are concatenated."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(width, width // heads) for _ in range(heads)])
        self.proj = nn.Linear(width, width)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ffwd = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        x = x + self.proj(torch.cat([head(y) for head in self.heads], dim=-1))
        return x + self.ffwd(self.ln2(x))


class LayerNormInFp32(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.type(torch.float32)).type(x.dtype)


class SequenceFirst(nn.Module):
    """nn.MultiheadAttention on [N, B, C], norms in fp32, and QuickGELU: OpenAI's CLIP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads)
        self.ln_1, self.ln_2 = LayerNormInFp32(width), LayerNormInFp32(width)
        self.c_fc, self.c_proj = nn.Linear(width, 96), nn.Linear(96, width)

    def attend(self, y: Tensor) -> Tensor:
        return self.attn(y, y, y, need_weights=False, attn_mask=None)[0]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        h = self.c_fc(self.ln_2(x))
        return x + self.c_proj(h * torch.sigmoid(1.702 * h))


class Flat(nn.Module):
    """baddbmm of batch and heads in one dimension, packed gate, scale of q before the product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_a, self.ln_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.w12, self.w3 = nn.Linear(width, 192), nn.Linear(96, width)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        parts = self.in_proj(self.ln_a(x)).chunk(3, dim=-1)
        q, k, v = (each.view(B, N, self.heads, -1).transpose(1, 2).reshape(B * self.heads, N, -1) for each in parts)
        scores = torch.baddbmm(q.new_empty(1, N, N), q, k.mT, beta=0, alpha=q.shape[-1] ** -0.5)
        y = torch.bmm(scores.softmax(-1), v).view(B, self.heads, N, -1).permute(0, 2, 1, 3).reshape(B, N, C)
        x = torch.add(x, self.out_proj(y))
        gate, up = self.w12(self.ln_b(x)).chunk(2, dim=-1)
        return torch.add(x, self.w3(F.gelu(gate) * up))


class DropPath(nn.Module):
    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.drop_prob:
            return x
        kept = 1 - self.drop_prob
        return x * torch.bernoulli(x.new_full((len(x),) + (1,) * (x.dim() - 1), kept)) / kept


class Residual(nn.Module):
    def __init__(self, width: int, function: nn.Module) -> None:
        super().__init__()
        self.norm, self.function, self.drop_path = nn.LayerNorm(width), function, DropPath(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.function(self.norm(x)))


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Residuals(nn.Sequential):
    """Residual modules of halves, with drop path."""

    def __init__(self, width: int, heads: int) -> None:
        mlp = nn.Sequential(nn.Linear(width, 96), nn.SiLU(), nn.Linear(96, width))
        super().__init__(Residual(width, SelfAttention(width, heads)), Residual(width, mlp))


class PostNorm(nn.Module):
    """norm(x + f(x)), as in BERT and nn.TransformerEncoderLayer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = SelfAttention(width, heads), nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width), nn.Dropout(0.1))
        self.drop_path, self.gamma = DropPath(0.1), nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class NormedBranch(PostNorm):
    """x + norm(f(x)), as in Swin v2."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.norm1(self.attention(x)))
        return x + self.drop_path(self.norm2(self.mlp(x)))


class NormedResidual(PostNorm):
    """The second residual is the normed input, as in CCT."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(x + self.drop_path(self.attention(self.norm1(x))))
        return x + self.drop_path(self.gamma * self.mlp(x))


class Grouped(nn.Module):
    """Grouped keys: two heads share each key and value, which one layer computes with the queries."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.sizes, self.channels = (heads, heads // 2, heads // 2), width // heads
        self.qkv, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.channels)).transpose(1, 2).split(self.sizes, 1)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Tiled(Grouped):
    """Heads i and i + 2 share keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat((each, each), 1) for each in (k, v))
        return (q @ k.mT / self.channels**0.5).softmax(-1) @ v


class ListOfHeads(nn.Module):
    """One layer per head, and values that are computed after the softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.ModuleList(nn.Linear(width, width // heads, bias=i > 0) for _ in range(heads)) for i in range(3)
        )
        self.out, self.norm1, self.norm2 = nn.Linear(width, width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))

    def forward(self, x: Tensor) -> Tensor:
        y, mixed = self.norm1(x), []
        for q, k, v in zip(self.q, self.k, self.v):
            weights = torch.softmax(q(y) @ k(y).mT / q.out_features**0.5, -1)
            mixed.append(weights @ v(y))
        x = x + self.out(torch.cat(mixed, -1))
        return x + self.mlp(self.norm2(x))


class Parallel(nn.Module):
    """Attention and MLP of the same tokens, as in ViT-22B, with one layer for q, k, v and the hidden channels."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.sizes = heads, (96, width, width, width)
        self.norm, self.into = nn.LayerNorm(width), nn.Linear(width, sum(self.sizes))
        self.out, self.fc2 = nn.Linear(width, width), nn.Linear(96, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden, *qkv = self.into(self.norm(x)).split(self.sizes, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in qkv)
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.gamma * (y + self.fc2(F.gelu(hidden)))


class Modulated(SelfAttention):
    """Norms and LayerScale from one table, as in DiT, a low-rank update of qkv, and an RMSNorm of 1 + weight."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.table, self.weight = nn.Parameter(torch.ones(1, 3, width)), nn.Parameter(torch.zeros(width))
        self.down, self.up = nn.Parameter(torch.ones(2, width)), nn.Parameter(torch.ones(3 * width, 2) / width)
        self.norm, self.gate = nn.RMSNorm(width, eps=1e-6, elementwise_affine=False), nn.Parameter(torch.ones(1))
        self.mlp = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))

    def forward(self, x: Tensor) -> Tensor:
        shift, scale, gate = self.table.chunk(3, 1)
        y = F.rms_norm(x, x.shape[-1:], eps=1e-6) * scale
        y = F.linear(y, self.to_qkv.weight + self.up @ self.down, self.to_qkv.bias + shift[0, 0].mean())
        q, k, v = y.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + gate * self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.gate.tanh() * self.mlp(self.norm(x) * (1 + self.weight))


BLOCKS: list[Any] = [
    Packed, HeadsFirst, ChannelsFirst, Separate, Einsum, Tutorial, SequenceFirst, Flat, Residuals, Grouped, Tiled,
    ListOfHeads, Modulated,
]  # fmt: skip
OTHER_BLOCKS: list[Any] = [PostNorm, NormedBranch, NormedResidual, Parallel]  # not pre-norm blocks


class Variant(Packed):
    def scores(self, scores: Tensor) -> Tensor:
        return scores

    def mixed(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = self.mixed(self.scores(q @ k.mT * self.scale).softmax(-1) @ v)
        x = x + self.out(y)
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """A classifier with blocks of one spelling."""

    def __init__(self, block: Any, depth: int = 2, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.layers = nn.ModuleList(block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x.mean(1))


def runs_fused(model: nn.Module, run: Callable[[], Any]) -> bool:
    """Returns True if no module inside a fused module is called, except drop paths."""
    called: set[nn.Module] = set()
    original = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.add(self)
        return original(self, *args, **kwargs)

    fused = [each for each in model.modules() if isinstance(each, ReadModule)]
    inside = {part for each in fused for part in each.modules() if part is not each and not hasattr(part, "drop_prob")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "__call__", call)
        run()
    return bool(fused) and not inside & called

"""A pre-norm encoder block: equations 2 and 3 of section 3.1 of arXiv 2010.11929.

Parameter names are timm's. Axes: B images, N tokens, C = embed_dim, H heads, D = C / H.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .config import ViTConfig
from .errors import UnsupportedInputError
from .fusion.block import forward_block, parts_of, positions_of, runs_whole
from .fusion.freezing import Freezable
from .fusion.packing import is_packable, run_packed_block
from .fusion.parts import AttentionParts, BlockParts, MlpParts, drops
from .fusion.plain import does_nothing
from .fusion.reading import Reader, read_block
from .layers import MLPS, DropPath, LayerScale, make_norm, read_norm_mlp
from .ops import Rope, attention_qkvpacked, qk_norm_rope, reference, scaled_dot_product_attention


class Attention(nn.Module):
    """Multi-head self-attention, MSA of equation 2: one qkv linear, softmax attention per head, one output linear."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.attn_drop_rate = config.attn_drop_rate
        self.rotates_halves = config.rope is not None and config.rope.layout == "half"
        self.backend = "sdpa"
        self.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim, bias=config.qkv_bias)
        self.q_norm, self.k_norm = (
            make_norm(config, config.head_dim) if config.qk_norm else nn.Identity() for _ in range(2)
        )
        self.norm = make_norm(config, config.embed_dim) if config.scale_attn_norm else nn.Identity()
        self.proj = nn.Linear(config.embed_dim, config.embed_dim, bias=config.proj_bias)
        self.proj_drop = nn.Dropout(config.proj_drop_rate)

    def forward(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """[B, N, C], and positions where the model has rotary ones -> [B, N, C]."""
        qkv = self._project(x, rope)  # [B, N, 3, H, D]
        if self.training and self.attn_drop_rate:
            mixed = self._attention_with_dropout(qkv)
        else:
            mixed = attention_qkvpacked(qkv, backend=self.backend)
        return self.proj_drop(self.proj(self.norm(mixed.flatten(2))))

    def attention_map(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """softmax(q k^T / sqrt(D)) of tokens [B, N, C]: [B, H, N, N], rows sum to one."""
        q, k, _ = self._project(x, rope).transpose(1, 3).unbind(2)
        return reference.attention_weights(q, k)

    def _project(self, x: Tensor, rope: Rope | None) -> Tensor:
        qkv: Tensor = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        children: Any = self._modules  # nn.Module looks attributes up in Python
        q_norm, k_norm = children["q_norm"], children["k_norm"]
        if not (does_nothing(q_norm) and does_nothing(k_norm)):
            q, k, v = qkv.unbind(2)
            qkv = torch.stack((q_norm(q).to(v.dtype), k_norm(k).to(v.dtype), v), 2)
        return qkv if rope is None else qk_norm_rope(qkv, rope=rope, backend=self.backend)

    def _attention_with_dropout(self, qkv: Tensor) -> Tensor:
        if self.backend == "triton":
            raise UnsupportedInputError(
                "attention with backend='triton'", [f"dropout {self.attn_drop_rate} in training"]
            )
        q, k, v = qkv.transpose(1, 3).unbind(2)
        if self.backend == "eager":
            return reference.attention(q, k, v, dropout_p=self.attn_drop_rate).transpose(1, 2)
        return scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop_rate).transpose(1, 2)


class Block(Freezable):
    """A pre-norm encoder block: equations 2 and 3, each branch with optional LayerScale and drop path."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        C = config.embed_dim
        self.backend, self.head_dim = "sdpa", config.head_dim
        self.norm1 = make_norm(config, C)
        self.attn = Attention(config)
        self.ls1 = _layer_scale(config)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = make_norm(config, C)
        self.mlp = MLPS[config.mlp_layer](config, config.proj_drop_rate)
        self.ls2 = _layer_scale(config)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """[B, N, C] -> [B, N, C]; each half as kernels or one operator where nothing in it is a module to be called."""
        parts = None if self.leaves_all_to_torch() else parts_of(self)
        if parts is not None and parts.fp8 is not None:
            parts.fp8.check(self.backend)
        if parts is None or parts.mlp is None:
            x = self._attend(x, rope)
            return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        if not drops(parts.mlp.dropouts):
            if self.runs_on_torch() and (output := run_packed_block(parts, x, rope)) is not None:
                return output
            attend = None if runs_whole(parts, self.backend) else partial(self._attend, rope=rope)
            return forward_block(self, parts, x, rope=rope, backend=self.backend, attend=attend)
        x = self._attend(x, rope)
        if self.backend == "triton":
            raise UnsupportedInputError(
                "layer_norm_mlp with backend='triton'",
                [f"dropout {self.mlp.drop.p} inside the MLP in training"],
            )
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))

    def whole(self) -> BlockParts | None:
        """Its parts where it is nothing but kernels now."""
        parts = parts_of(self)
        return parts if runs_whole(parts, self.backend) else None

    def packable(self) -> BlockParts | None:
        parts = parts_of(self)
        return parts if is_packable(parts, self.backend) else None

    def runs_on_torch(self) -> bool:
        return self.backend == "sdpa"

    def read(self) -> BlockParts:
        """What it consists of."""
        return read_block(self, read_mlp, read_attention)

    def attention_map(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """The attention weights [B, H, N, N] of this block's input [B, N, C]."""
        return self.attn.attention_map(self.norm1(x), rope)

    def _attend(self, x: Tensor, rope: Rope | None) -> Tensor:
        return x + self.drop_path1(self.ls1(self.attn(self.norm1(x), *positions_of(rope))))


def read_attention(block: Reader) -> AttentionParts | None:
    """Equation 2 of a block of ours."""
    return block.attention(
        "attn",
        "norm1",
        ("attn.qkv",),
        "attn.proj",
        qk_norm=("attn.q_norm", "attn.k_norm"),
        inside={"attn": (Attention,), "ls1": (LayerScale, nn.Identity), "drop_path1": (DropPath,)},
        empty=("attn.norm",),
        dropouts=("attn.proj_drop",),
        rates=("attn.attn_drop_rate",),
        num_heads=block.value("attn.num_heads"),
        rotates_halves=block.value("attn.rotates_halves"),
        layer_scale="ls1.gamma",
        drop_path="drop_path1",
    )


def read_mlp(block: Reader) -> MlpParts | None:
    """Equation 3 of a block of ours."""
    inside = {"ls2": (LayerScale, nn.Identity), "drop_path2": (DropPath,)}
    return read_norm_mlp(block, "norm2", inside=inside, layer_scale="ls2.gamma", drop_path="drop_path2")


def _layer_scale(config: ViTConfig) -> nn.Module:
    return nn.Identity() if config.init_values is None else LayerScale(config.embed_dim, config.init_values)

"""fuse(model, example=...) reads rotary embeddings whose tables are arguments of forward."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spellings import Packed, runs_fused
from torch import Tensor, nn

import vit_fast

Tables = Callable[[Tensor], Any]  # from angles [N, D/2]


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def of_patches(x: Tensor, table: Tensor) -> Tensor:
    sin, cos = table.tensor_split(2, -1)
    patches = x[:, :, 1:]
    pairs = torch.stack((-patches[..., 1::2], patches[..., ::2]), -1).reshape(patches.shape)
    return torch.cat((x[:, :, :1], patches * cos + pairs * sin), 2).type_as(table)


def after_prefix(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    prefix = x.shape[-2] - sin.shape[-2]
    return torch.cat((x[:, :, :prefix], by_halves(x[:, :, prefix:], cos, sin)), dim=-2)


def by_complex_numbers(x: Tensor, table: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.transpose(1, 2).float().unflatten(-1, (-1, 2)))
    shape = [size if i in (1, 3) else 1 for i, size in enumerate(pairs.shape)]
    return torch.view_as_real(pairs * table.view(*shape)).flatten(3).type_as(x).transpose(1, 2)


def opposite(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.transpose(1, 2).chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1).transpose(1, 2)


def twice(angles: Tensor) -> list[Tensor]:
    return [torch.cat((each, each), -1) for each in (angles.cos(), angles.sin())]


# Tables from angles [N, D/2] and a batch size, and their use on q and k [B, H, N, D]
ROTARY: dict[str, tuple[Callable[[Tensor, int], Any], Callable[..., Tensor]]] = {
    "[N, D]": (lambda t, B: tuple(twice(t)), by_halves),
    "[B, N, D]": (
        lambda t, B: tuple(torch.stack([each * (i + 1) for i in range(B)]) for each in twice(t)),
        lambda x, cos, sin: by_halves(x.float(), cos.unsqueeze(1), sin.unsqueeze(1)).to(x.dtype),
    ),
    "[H, N, D]": (lambda t, B: tuple(torch.stack([each * (i + 1) for i in range(4)]) for each in twice(t)), by_halves),
    "[B, 1, N, D]": (lambda t, B: tuple(each.expand(B, 1, *each.shape) for each in twice(t)), by_halves),
    "[N - 1, 2 D]": (lambda t, B: (torch.cat((t.sin(), t.cos()), -1).repeat_interleave(2, -1)[1:],), of_patches),
    "[N - 3, D]": (lambda t, B: tuple(twice(t[3:]))[::-1], after_prefix),
    "complex [N, D/2]": (lambda t, B: (torch.polar(torch.ones_like(t), t),), by_complex_numbers),
    "angles [1, N, 1, D/2]": (lambda t, B: (t[None, :, None],), opposite),
}


def tables(name: str, batch: int, tokens: int) -> Any:
    return ROTARY[name][0]((torch.arange(tokens)[:, None] + 1) * 0.3 ** torch.arange(1.0, 5.0), batch)


def plain(turn: Any, q: Tensor, k: Tensor, *rope: Any) -> tuple[Tensor, Tensor]:
    return turn(q, *rope), turn(k, *rope)


class Block(Packed):
    """Heads of 8 channels."""

    def __init__(self, name: str, rotate: Callable[..., Any] = plain) -> None:
        super().__init__(32, 4)
        self.turn, self.turn_both = ROTARY[name][1], rotate

    def forward(self, hidden_states: Tensor, rope: Any = None, **kwargs: Any) -> Tensor:
        q, k, v = self.qkv(self.norm1(hidden_states)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if rope is not None:
            q, k = self.turn_both(self.turn, q, k, *rope)
        x = hidden_states + self.out(F.scaled_dot_product_attention(q, k, v, **kwargs).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Computes tables once for all blocks."""

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*args) for _ in range(2))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x: Tensor, rope: Any = None, **kwargs: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, rope, **kwargs)
        return x


def case(name: str, *args: Any) -> tuple[nn.Module, nn.Module, Tensor, Any]:
    """Returns a fused model, its original, tokens and tables."""
    torch.manual_seed(0)
    original, x = Model(name, *args).eval(), torch.randn(2, 20, 32)
    model, rope = copy.deepcopy(original), tables(name, 2, 20)
    vit_fast.fuse(model, "eager", example=(x, rope))
    return model, original, x, rope


def assert_near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.fast_cases("[B, N, D]", "[N - 1, 2 D]", "[N - 3, D]", "complex [N, D/2]")
@pytest.mark.parametrize("name", ROTARY)
def test_tables_that_are_arguments(name: str) -> None:
    """Calls use their tables, for other numbers of tokens too; calls without tables run the original."""
    model, original, x, rope = case(name)
    for batch, tokens in ((3, 9), (1, 31)):
        other, rope_of_other = torch.randn(batch, tokens, 32), tables(name, batch, tokens)
        assert runs_fused(model, functools.partial(model, other, rope_of_other))
        assert_near(model(other, rope_of_other), original(other, rope_of_other))
        assert_near(model(other), original(other))
        assert not runs_fused(model, functools.partial(model, other, rope_of_other, is_causal=True))
    for net in (model, original):
        net(x, rope).square().sum().backward()
    for a, b in zip(model.parameters(), original.parameters()):
        assert (a.grad is None) is (b.grad is None)
        assert a.grad is None or (a.grad - b.grad).norm() <= 1e-4 * b.grad.norm()
    learned = [tuple(each.clone().requires_grad_() for each in rope) for _ in range(2)]
    for net, given in zip((model, original), learned):
        net(x, given).square().sum().backward()
    for a, b in zip(*learned):
        assert (a.grad - b.grad).norm() <= 1e-4 * b.grad.norm()
    vit_fast.fuse(model, "sdpa")
    assert len(vit_fast.freeze(model)) == 2
    unfused = copy.deepcopy(model)
    vit_fast.unfuse(unfused)
    with torch.inference_mode():
        for net in (model, copy.deepcopy(model), unfused):
            assert_near(net(x, rope), original(x, rope))
        assert runs_fused(model, lambda: model(x, rope))


HOSTILE: dict[str, Callable[..., Any]] = {
    "only q": lambda turn, q, k, *rope: (turn(q, *rope), k),
    "negated sine of k": lambda turn, q, k, cos, sin: (turn(q, cos, sin), turn(k, cos, -sin)),
    "negated sine": lambda turn, q, k, cos, sin: plain(turn, q, k, cos, -sin),
    "swapped pairs of k": lambda turn, q, k, *rope: (turn(q, *rope), turn(k.roll(4, -1), *rope)),
    "rolled tables": lambda turn, q, k, cos, sin: plain(turn, q, k, cos.roll(1, 0), sin + 1),
    "only few tokens": lambda turn, q, k, *rope: plain(turn, q, k, *rope) if len(q[0, 0]) < 25 else (q, k),
    "clamp": lambda turn, q, k, cos, sin: plain(turn, q, k, cos.clamp(max=0.9), sin),
}


@pytest.mark.fast_cases("only q", "negated sine", "only few tokens")
@pytest.mark.parametrize("name", HOSTILE)
def test_other_rotations_are_read_or_refused(name: str) -> None:
    model, original, *_ = case("[N, D]", HOSTILE[name])
    for batch, tokens in ((2, 20), (3, 9), (2, 31)):
        x, (cos, sin) = torch.randn(batch, tokens, 32), tables("[N, D]", batch, tokens)
        for rope in ((cos, sin), (1 - cos, sin), (cos.flip(0), sin * 2)):
            assert_near(model(x, rope), original(x, rope))


def test_channels_of_a_pair_with_different_angles_are_refused() -> None:
    original, x = Model("[N, D]").eval(), torch.randn(2, 20, 32)
    report = vit_fast.fuse(original, "eager", example=(x, tuple(torch.rand(2, 20, 8))))
    assert "different values for both channels" in " ".join(str(report).split())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["[N - 1, 2 D]", "complex [N, D/2]"])
def test_compile_and_export(name: str) -> None:
    model, original, x, rope = case(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch, tokens in ((2, 20), (3, 9)):
        other, rope_of_other = torch.randn(batch, tokens, 32), tables(name, batch, tokens)
        assert_near(compiled(other, rope_of_other), original(other, rope_of_other))
    assert_near(torch.export.export(model, (x, rope)).module()(x, rope), original(x, rope))


@pytest.mark.slow
@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_dinov3_without_class_readers(library: str) -> None:
    """Blocks of a subclass are read by their computation, for images of another size too."""
    torch.manual_seed(0)
    if library == "timm":
        timm = pytest.importorskip("timm")
        sizes = {"depth": 2, "embed_dim": 64, "num_heads": 4, "img_size": 64}
        original = timm.create_model("vit_small_patch16_dinov3", dynamic_img_size=True, **sizes).eval()
    else:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        original = transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(image_size=64, **sizes)).eval()
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.1)
    blocks = [each for each in original.modules() if type(each).__name__ in ("EvaBlock", "DINOv3ViTLayer")]
    parent: Any = type(blocks[0])

    class Own(parent):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    for block in blocks:
        block.__class__ = Own
    model = copy.deepcopy(original)
    report = vit_fast.fuse(model, "eager", example=torch.randn(2, 3, 64, 64)).require_all()
    assert [row.part for row in report.fused] == ["attention, norm + MLP"] * 2
    images = torch.randn(3, 3, 32, 48)
    assert runs_fused(model, lambda: model(images))
    assert_near(*(net(images) if library == "timm" else net(images)[0] for net in (model, original)))

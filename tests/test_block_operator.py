"""The block operator: its halves one after the other, bit for bit, each half against fp64, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mlp_support import DEVICE, assert_rule
from torch import Tensor

from vit_fast import UnsupportedInputError
from vit_fast.ops import Norm, attention_qkvpacked
from vit_fast.ops.block import fused_block
from vit_fast.ops.descriptions import BlockTensors
from vit_fast.ops.folded import fold
from vit_fast.ops.reference import normalize

WIDTH, HEADS, HIDDEN = 32, 2, 48
SHAPES = BlockTensors(
    (WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,), (WIDTH,),
    (HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,), (WIDTH,),
)  # fmt: skip
NEEDED = ("qkv_weight", "proj_weight", "fc1_weight", "fc2_weight")
OPTIONAL = {name: None for name in SHAPES._fields if name not in NEEDED}
SETTINGS: dict[str, Any] = {
    "heads": HEADS, "attention_scale": None, "eps": (1e-6, 1e-5), "activation": "gelu", "next_statistics": True,
}  # fmt: skip


def make(dtype: torch.dtype, parameter_dtype: torch.dtype | None = None, **absent: None) -> tuple[Tensor, BlockTensors]:
    """x [2, 5, C] and the parameters, leaves that require gradients."""
    generator = torch.Generator().manual_seed(0)

    def leaf(shape: Any, target: torch.dtype) -> Tensor:
        return (0.5 * torch.randn(shape, generator=generator)).to(DEVICE, target).requires_grad_()

    x = leaf((2, 5, WIDTH), dtype)
    return x, BlockTensors(*(leaf(shape, parameter_dtype or dtype) for shape in SHAPES[:14]))._replace(**absent)


def first_half(x: Tensor, statistics: Tensor | None, t: BlockTensors, **options: Any) -> tuple[Tensor, Tensor | None]:
    absent: Any = (None,) * 7
    settings = {"heads": HEADS, "eps": (1e-6, 0.0), "next_statistics": True, **options}
    return fused_block(x, statistics, BlockTensors(*t[:7], *absent), **settings)[:2]


def by_halves(
    x: Tensor, statistics: Tensor | None, t: BlockTensors, norm: str = "layer_norm"
) -> tuple[Tensor, Tensor | None]:
    x, statistics = first_half(x, statistics, t, norm=norm)
    second = t._replace(**dict.fromkeys(BlockTensors._fields[:7]))
    return fused_block(x, statistics, second, eps=(0.0, 1e-5), norm=norm, next_statistics=True)[:2]


def by_one(
    x: Tensor, statistics: Tensor | None, tensors: BlockTensors, norm: str = "layer_norm"
) -> tuple[Tensor, Tensor | None]:
    return fused_block(x, statistics, tensors, norm=norm, **SETTINGS)[:2]


@pytest.mark.parametrize(
    ("dtype", "parameters", "options"),
    [
        (torch.float32, None, {}),
        (torch.float16, None, {}),
        (torch.bfloat16, torch.float32, {}),
        (torch.bfloat16, torch.float32, {"autocast": True}),
        (torch.bfloat16, None, {"absent": OPTIONAL}),
        (torch.bfloat16, None, {"absent": {"norm1_bias": None, "norm2_bias": None}, "norm": "rms_norm"}),
    ],
    ids=["fp32", "fp16", "parameters in fp32", "autocast", "nothing optional", "RMSNorm"],
)
def test_it_is_its_halves(dtype: torch.dtype, parameters: torch.dtype | None, options: dict[str, Any]) -> None:
    """Bit for bit: two blocks, of which the second reuses the statistics of the first; and every gradient."""
    norm = options.get("norm", "layer_norm")
    x, tensors = make(dtype, parameters, **options.get("absent", {}))
    leaves = [tensor for tensor in (x, *tensors) if tensor is not None]
    found = []
    with torch.autocast(DEVICE, torch.bfloat16, enabled="autocast" in options):
        for run in (by_one, by_halves):
            with torch.no_grad():
                inference = run(*run(x, None, tensors, norm), tensors, norm)
            y, _ = run(x, None, tensors, norm)
            found.append((*inference, y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("rows", ["usual", "constant", "far from 0", "wide"])
def test_the_first_half_against_fp64(rows: str, residual: bool, norm: str, dtype: torch.dtype) -> None:
    """Every third row constant, all with a mean of 1000 spreads, or wider than a program reads at once."""
    width = 2100 if rows == "wide" else WIDTH
    shapes = ((width,), None if norm == "rms_norm" else (width,), (96, width), (96,), (width, 32), (width,), (width,))
    base = [None if s is None else torch.randn(s, device=DEVICE) * (s[-1] ** -0.5 if s[1:] else 1) for s in shapes]
    x = torch.randn(2, 5, width, device=DEVICE)
    if rows == "constant":
        x[:, ::3] = 3.0
    elif rows == "far from 0":
        x = x * width**0.5 + 1000
    grad = torch.randn(2, 5, width, device=DEVICE).to(dtype)

    def results(target: torch.dtype, fused: bool) -> dict[str, Tensor]:
        own = [None if t is None else t.to(dtype).to(target).requires_grad_() for t in (x, *base)]
        tokens, gamma, beta, qkv_weight, qkv_bias, proj, proj_bias, scale = own
        if fused:
            absent: Any = (None,) * 7
            y, _ = first_half(tokens, None, BlockTensors(*own[1:], *absent), norm=norm, residual=residual)
        else:
            qkv = F.linear(normalize(tokens, Norm(gamma, beta, 1e-6, norm)), qkv_weight, qkv_bias)
            mixed = attention_qkvpacked(qkv.unflatten(-1, (3, HEADS, -1)), backend="eager").flatten(2)
            y = F.linear(mixed, proj, proj_bias) * scale
            y = tokens + y if residual else y
        leaves = [leaf for leaf in own if leaf is not None]
        gradients = torch.autograd.grad(y, leaves, grad.to(target))
        return {"y": y.detach(), **{f"d {i}": gradient for i, gradient in enumerate(gradients)}}

    assert_rule(results(dtype, True), results(dtype, False), results(torch.float64, False))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)], ids=str)
def test_no_rows(shape: tuple[int, ...]) -> None:
    _, tensors = make(torch.float16)
    x = torch.randn(*shape, WIDTH, device=DEVICE, dtype=torch.float16, requires_grad=True)
    if 0 in shape[1:]:
        with pytest.raises(UnsupportedInputError, match="must have at least one token"):
            by_one(x, None, tensors)
        return
    y, _ = by_one(x, None, tensors)
    y.sum().backward()
    assert y.shape == x.shape and x.grad is not None and x.grad.shape == x.shape
    assert tensors.qkv_weight.grad is not None and not tensors.qkv_weight.grad.any()


@pytest.mark.parametrize("gamma", [1e-5, 1e-6, 3e-8])
def test_a_small_layer_scale_keeps_its_branch(gamma: float) -> None:
    """Without a residual, as before drop path, the branch is fp32 as torch's: fp16 would round it to a few bits."""
    x, t = make(torch.float32)
    scale = torch.full((WIDTH,), gamma, device=DEVICE, requires_grad=True)

    def eager(x: Tensor, t: BlockTensors) -> Tensor:
        normed = F.layer_norm(x, (WIDTH,), t.norm1_weight, t.norm1_bias, 1e-6)
        qkv = F.linear(normed, t.qkv_weight, t.qkv_bias).unflatten(-1, (3, HEADS, -1))
        mixed = attention_qkvpacked(qkv, backend="eager").flatten(2)
        return F.linear(mixed, t.proj_weight, t.proj_bias) * scale.to(x.dtype if x.dtype == torch.float64 else scale)

    with torch.autocast(DEVICE, torch.float16):
        y, _ = first_half(x, None, t._replace(scale1=scale), residual=False)
        usual = eager(x, t)
    exact = eager(x.double(), BlockTensors(*(None if each is None else each.double() for each in t)))
    assert y.dtype == usual.dtype == torch.float32
    assert (y - exact).abs().max() <= 2 * (usual - exact).abs().max()
    assert torch.autograd.grad(y.sum(), scale)[0].isfinite().all()


def test_what_is_refused() -> None:
    x, tensors = make(torch.float32)
    with pytest.raises(UnsupportedInputError, match=r"weight must be .*, got torch\.float64"):
        by_one(x, None, tensors._replace(qkv_weight=tensors.qkv_weight.double()))
    with torch.no_grad(), pytest.raises(UnsupportedInputError, match=r"got torch\.bfloat16"):
        by_one(x, None, fold(tensors, torch.bfloat16))
    with pytest.raises(UnsupportedInputError, match="folded weights have no gradients"):
        by_one(x, None, fold(tensors, torch.float32))

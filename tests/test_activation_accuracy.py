"""Activations and their slopes in the kernels match fp64, for every number of fp16 and bf16."""

from __future__ import annotations

import math

import mlp_support as support
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from vit_fast.kernels.activations import ACTIVATIONS, activate, activate_with_slope
from vit_fast.ops.reference import ACTIVATIONS as REFERENCE

# numpy warns under the interpreter, where 2^x and x^2 correctly go to infinity
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@triton.jit
def _activate_kernel(
    x_ptr, value_ptr, slope_ptr, alone_ptr, ACTIVATION: tl.constexpr, EXACT: tl.constexpr, SIZE: tl.constexpr
):
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + offsets)
    value, slope = activate_with_slope(x, ACTIVATION, EXACT)
    tl.store(value_ptr + offsets, value)
    tl.store(slope_ptr + offsets, slope)
    tl.store(alone_ptr + offsets, activate(x, ACTIVATION, EXACT))


def _run(x: Tensor, activation: str, exact: bool) -> tuple[Tensor, Tensor]:
    """Returns value and slope in fp32 for each element of x."""
    whole = torch.full((len(x) // 1024 * 1024 + 1024,), float("nan"), device=support.DEVICE)
    whole[: len(x)] = x
    value, slope, alone = (torch.full_like(whole, float("nan")) for _ in range(3))
    _activate_kernel[(len(whole) // 1024,)](whole, value, slope, alone, activation, exact, 1024)
    assert torch.equal(value.nan_to_num(7.0), alone.nan_to_num(7.0))
    assert value[len(x) :].isnan().all()
    return value[: len(x)], slope[: len(x)]


def _exact(activation: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns value and slope in fp64."""
    leaf = x.double().requires_grad_()
    value = (
        0.5 * leaf * torch.special.erfc(-leaf / math.sqrt(2)) if activation == "gelu" else REFERENCE[activation](leaf)
    )
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_precision_numbers_are_within_one_rounding(activation: str, dtype: torch.dtype) -> None:
    """Relative to each result, down to 1e-8, where the negative tail of gelu ends; below that within 1e-8."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(support.DEVICE)
    x = x[x.isfinite()]
    (value, slope), (exact, exact_slope) = _run(x.float(), activation, exact=False), _exact(activation, x)
    info = torch.finfo(dtype)
    spacing = info.eps * torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(info.tiny))))
    allowed = spacing.clamp_min(1e-8)
    error = (value.double() - exact).abs()
    worst = int((error / allowed).argmax())
    assert (error <= allowed).all(), f"{activation}({x[worst]}) = {value[worst]}, exactly {exact[worst]}"
    slope_error = (slope.double() - exact_slope).abs()[x != 0].max()  # relu has no slope at 0
    assert slope_error < info.eps / 2
    if activation == "gelu":
        assert error[x.abs() < 8].max() < 1e-4 and slope_error < 2e-4


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fp32_has_at_most_twice_the_error_of_torch(activation: str) -> None:
    """Tests magnitudes from 2^-100 to 2^100, with both signs."""
    steps = torch.exp2(torch.linspace(-100, 100, 4096, dtype=torch.float64))
    x = torch.cat([steps, -steps, torch.linspace(-12, 12, 8192, dtype=torch.float64)]).to(support.DEVICE, torch.float32)
    (value, slope), (exact, exact_slope) = _run(x, activation, exact=True), _exact(activation, x)
    scale = exact.abs().clamp_min(1e-3)
    own, eager = (((found.double() - exact).abs() / scale).max() for found in (value, REFERENCE[activation](x)))
    assert own <= 2 * eager + 1e-6
    assert (slope.double() - exact_slope).abs()[x != 0].max() < 2e-6

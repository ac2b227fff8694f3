"""The activations and slopes of the kernels against fp64, over every value that fp16 and bf16 can hold."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlp_support as support
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from vit_fast.kernels.activations import ACTIVATIONS, activate, activate_with_slope
from vit_fast.ops.reference import ACTIVATIONS as REFERENCE

# numpy says so under the interpreter, where 2^x and x^2 go to infinity as they should
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
HALF = [torch.float16, torch.bfloat16]


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
    """(value, slope) in fp32 of fp32 x, whose length is a multiple of 1024; NaN of NaN."""
    x = torch.cat([x, x.new_full((1024,), float("nan"))])
    value, slope, alone = (torch.full_like(x, float("nan")) for _ in range(3))
    _activate_kernel[(x.numel() // 1024,)](x, value, slope, alone, activation, exact, 1024)
    assert torch.equal(value.nan_to_num(7.0), alone.nan_to_num(7.0))
    assert value[-1024:].isnan().all()
    return value[:-1024], slope[:-1024]


def _every_finite(dtype: torch.dtype) -> Tensor:
    """Every finite value of a 16-bit dtype, padded with zeros to a multiple of 1024."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    return torch.cat([values, values.new_zeros(-values.numel() % 1024)]).to(support.DEVICE)


def _exact_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * torch.special.erfc(-x / math.sqrt(2))


def _exact_slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf).sum(), leaf)[0]


def _one_rounding(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of a dtype at each value: what one rounding, to either side, can move it by."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(exact.abs().clamp_min(info.tiny)))
    return info.eps * torch.exp2(exponent)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_half_precision_number_is_within_one_rounding(activation: str, dtype: torch.dtype) -> None:
    """Relative to each result, down to 1e-8, where the negative tail of gelu ends; below that within 1e-8."""
    x = _every_finite(dtype)
    value, slope = _run(x.float(), activation, exact=False)
    function = _exact_gelu if activation == "gelu" else REFERENCE[activation]
    exact = function(x.double())
    allowed = _one_rounding(exact, dtype).clamp_min(1e-8)
    error = (value.double() - exact).abs()
    worst = int((error / allowed).argmax())
    assert (error <= allowed).all(), f"{activation}({x[worst]}) = {value[worst]}, exactly {exact[worst]}"
    differentiable = x != 0 if activation == "relu" else torch.ones_like(x, dtype=torch.bool)
    slope_error = (slope.double() - _exact_slope(function, x.double())).abs()[differentiable].max()
    assert slope_error < torch.finfo(dtype).eps / 2
    if activation == "gelu":
        assert error[x.abs() < 8].max() < 1e-4 and slope_error < 2e-4


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fp32_is_no_worse_than_twice_torch(activation: str) -> None:
    """Tests magnitudes from 2^-100 to 2^100, with both signs."""
    steps = torch.exp2(torch.linspace(-100, 100, 4096, dtype=torch.float64))
    x = torch.cat([steps, -steps, torch.linspace(-12, 12, 8192, dtype=torch.float64)]).to(support.DEVICE, torch.float32)
    value, slope = _run(x, activation, exact=True)
    exact, eager = REFERENCE[activation](x.double()), REFERENCE[activation](x)
    scale = exact.abs().clamp_min(1e-3)
    own, peer = (((found.double() - exact).abs() / scale).max() for found in (value, eager))
    assert own <= 2 * peer + 1e-6
    exact_slope = _exact_slope(REFERENCE[activation], x.double())
    assert (slope.double() - exact_slope).abs()[x != 0].max() < 2e-6

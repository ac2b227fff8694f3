"""layer_norm_linear and linear_residual as torch operators: against fp64, registration, rows of every kind."""

from __future__ import annotations

from typing import Any

import mlp_support as support
import pytest
import torch
import torch.nn.functional as F
from mlp_support import DEVICE, assert_rule, combined, statistics_of
from torch import Tensor

from vit_fast.ops.linear import layer_norm_linear, linear_residual
from vit_fast.ops.linear_op import (
    layer_norm_linear_op,
    layer_norm_linear_training_op,
    linear_residual_op,
)

support.make_bf16_exact()


def _linear_arguments() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shapes = ((2, 9, 32), (32,), (32,), (48, 32), (48,))
    x, gamma, beta, weight, bias = (torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes)
    return x, gamma, beta, weight, bias


@pytest.mark.slow
def test_opcheck_of_the_linear_layers() -> None:
    x, gamma, beta, weight, bias = _linear_arguments()
    parameters = (gamma, beta, weight, bias, 1e-6, "layer_norm")
    half = x.detach().bfloat16().requires_grad_()
    for arguments in (
        (x, None, *parameters, torch.float32),
        (x, None, *parameters, torch.bfloat16),
        (half, None, *parameters, torch.bfloat16),
        (half, statistics_of(half), *parameters, torch.bfloat16),
    ):
        torch.library.opcheck(layer_norm_linear_training_op, arguments)
    detached = (t.detach() for t in (gamma, beta, weight, bias))
    torch.library.opcheck(layer_norm_linear_op, (x.detach(), None, *detached, 1e-6, "layer_norm", torch.float32))
    h = torch.randn(2, 9, 48, device=DEVICE, requires_grad=True)
    back = weight.detach().t().contiguous().requires_grad_()
    torch.library.opcheck(linear_residual_op, (h, back, beta, gamma, x, True))
    torch.library.opcheck(linear_residual_op, (h.detach().half().requires_grad_(), back, beta, gamma, x, False))
    torch.library.opcheck(linear_residual_op, (h, back, None, None, None, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_linear_layers_against_fp64(dtype: torch.dtype) -> None:
    """LN + linear, then linear + LayerScale + residual, and the statistics that the second hands on."""
    base = [tensor.detach() for tensor in _linear_arguments()]

    def leaves(target: torch.dtype) -> list[Tensor]:
        return [tensor.to(dtype).to(target).requires_grad_() for tensor in base]

    def plain(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        x, gamma, beta, weight, bias = tensors
        h = F.linear(F.layer_norm(x, (32,), gamma, beta, 1e-6), weight, bias)
        return x + gamma * F.linear(h, weight.t(), beta), *tensors

    def fused(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        x, gamma, beta, weight, bias = tensors
        h = layer_norm_linear(x, gamma, beta, weight, bias, eps=1e-6)
        y, statistics = linear_residual(h, weight.t(), beta, layer_scale=gamma, residual=x, next_statistics=True)
        if dtype == torch.float32:  # which the next LayerNorm normalises itself
            assert statistics is None
            return y, *tensors
        assert statistics is not None
        found, exact = (combined(part, 32, 1e-6) for part in (statistics, statistics_of(y)))
        torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)
        return y, *tensors

    def results(run: Any, target: torch.dtype) -> dict[str, Tensor]:
        y, *tensors = run(leaves(target))
        gradients = torch.autograd.grad(y, tensors, torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y).to(y))
        return {"y": y.detach(), **{f"d {i}": gradient for i, gradient in enumerate(gradients)}}

    assert_rule(results(fused, dtype), results(plain, dtype), results(plain, torch.float64))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("unusual", ["constant", "far from 0", "wide"])
def test_layer_norm_linear_of_unusual_rows(unusual: str, dtype: torch.dtype) -> None:
    """Every third row constant, all with a mean of 1000 spreads, or wider than a program reads at once."""
    width = 2100 if unusual == "wide" else 32
    shapes = ((18, width), (width,), (width,), (48, width), (48,))
    base = [torch.randn(shape, device=DEVICE) * (width**-0.5 if len(shape) == 2 else 1) for shape in shapes]
    if unusual == "constant":
        base[0][::3] = 3.0
    elif unusual == "far from 0":
        base[0] = base[0] * width**0.5 + 1000
    grad = torch.randn(18, 48, device=DEVICE).to(dtype)

    def results(precision: torch.dtype, fused: bool) -> dict[str, Tensor]:
        leaves = [tensor.to(dtype).to(precision).requires_grad_() for tensor in base]
        x, gamma, beta, weight, bias = leaves
        if fused:
            y = layer_norm_linear(x, gamma, beta, weight, bias, eps=1e-6)
        else:
            y = F.linear(F.layer_norm(x, (width,), gamma, beta, 1e-6), weight, bias)
        gradients = torch.autograd.grad(y, leaves, grad.to(precision))
        return {"y": y.detach(), **dict(zip(("d x", "d gamma", "d beta", "d weight", "d bias"), gradients))}

    assert_rule(results(dtype, True), results(dtype, False), results(torch.float64, False))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_no_rows_of_a_linear_layer(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(*shape, 32, device=DEVICE, dtype=dtype, requires_grad=True)
    weight = torch.randn(48, 32, device=DEVICE, dtype=dtype, requires_grad=True)
    y = layer_norm_linear(x, None, None, weight, None, eps=1e-6)
    assert y.shape == (*shape, 48)
    z, _ = linear_residual(y, weight.t(), None, layer_scale=None, residual=x)
    z.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert weight.grad is not None and not weight.grad.any()

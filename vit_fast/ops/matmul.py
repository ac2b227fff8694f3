"""Operator for x W^T with the Triton matmul. Only benchmarks use it; models call F.linear for a single linear layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .registration import Gradient, operator


def _product(x: Tensor, weight: Tensor) -> Tensor:
    from ..kernels.linear.linear import linear_residual

    return linear_residual(x.flatten(0, -2), weight, None, None, None)[0].view(*x.shape[:-1], weight.shape[0])


def _matmul_gradient(grad_output: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    from ..kernels.linear import linear, scaled_weights, weight_matmuls
    from ..kernels.linear.weight_gradients import ResidualMatmul, parameter_gradients

    grad, rows = grad_output.flatten(0, -2).contiguous(), x.flatten(0, -2)
    (scaled,) = scaled_weights.scaled_weights([(weight, None)], x.dtype)
    (part,) = weight_matmuls.weight_matmuls((grad, rows))
    matmuls = [ResidualMatmul(part, grad, weight, None, None)]
    _, (gradients,) = parameter_gradients([], matmuls)
    return [linear.matmul_gradient(grad, scaled).view(x.shape), gradients.weight]


_matmul_backward = operator(
    "matmul_backward", "(Tensor grad_output, Tensor x, Tensor weight) -> Tensor[]", _matmul_gradient,
    what="a matmul", flop=lambda grad, x, w: 4 * math.prod(x) * w[0],
    fake=lambda grad, x, weight: [torch.empty_like(x), torch.empty_like(weight)],
)  # fmt: skip
matmul = operator(
    "matmul", "(Tensor x, Tensor weight) -> Tensor", _product, what="a matmul",
    flop=lambda x, weight: 2 * math.prod(x) * weight[0],
    fake=lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]),
    gradient=Gradient(lambda args, out: (args, None), lambda grad, saved, rest: _matmul_backward(grad, *saved)),
)  # fmt: skip

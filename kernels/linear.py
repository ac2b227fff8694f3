"""Linear layers with what surrounds them in a block, forward and backward, as sequences of launches.

Forward: `layer_norm_linear` (LayerNorm, linear, activation; `_keeping` for training) and `linear_residual` (linear,
LayerScale, residual).
Backward: `activation_gradient`, `input_gradient`, `folded_gradients` and `residual_gradients`, which the operators
compose. All tensors are contiguous, rows [M, *].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .gradients import (
    folded_weight_gradients,
    residual_weight_gradients,
    scale_gradient_launch,
    scale_gradient_parts,
)
from .layer_norm import FoldedLinear, RowStatistics, combine_statistics_launch
from .matmul_launch import Operands, matmul_launch
from .matmul_policy import matmul_config, split_count


@dataclass(frozen=True)
class FoldedGradient:
    """The gradient of a folded linear layer's output, in the form its matmuls take.

    Args:
        scaled: dz~ = rstd dz [M, F], the dtype of x; dz itself in the rows that are constant.
        coefficient: rstd^2 sum_f dz (z - c) / C, fp32 [M].
        grad_sum: sum_m dz, fp32 [F]: the gradient of the bias.
        shifted_sum: sum_m dz~ mean, fp32 [F].
    """

    scaled: Tensor
    coefficient: Tensor
    grad_sum: Tensor
    shifted_sum: Tensor


def layer_norm_linear(rows: RowStatistics, folded: FoldedLinear, activation: str = "identity") -> Tensor:
    """act(LayerNorm(x) W^T + b) [M, F]."""
    return _layer_norm_linear(rows, folded, activation, None)


def layer_norm_linear_keeping(rows: RowStatistics, folded: FoldedLinear, activation: str) -> tuple[Tensor, Tensor]:
    """As `layer_norm_linear`, and the argument z [M, F] of the activation, for the backward."""
    z = rows.source.new_empty((rows.source.shape[0], folded.weight.shape[0]))
    return _layer_norm_linear(rows, folded, activation, z), z


def _layer_norm_linear(rows: RowStatistics, folded: FoldedLinear, activation: str, z: Tensor | None) -> Tensor:
    x = rows.source
    out = x.new_empty((x.shape[0], folded.weight.shape[0]))
    operands = Operands(
        x, folded.weight, out, b_is_nk=True, z=z, mean=rows.mean, rstd=rows.rstd,
        bias=folded.shift, weight_sum=folded.weight_sum,
    )  # fmt: skip
    config = matmul_config(operands, "layer_norm")
    matmul_launch(operands, epilogue="layer_norm", config=config, activation=activation).run()
    return out


def linear_residual(
    h: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, residual: Tensor | None,
    statistics_eps: float | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """[residual +] scale (h W^T + b) [M, C]; with `statistics_eps` also (mean, rstd) of its rows, fp32 [M] each."""
    M, C = h.shape[0], weight.shape[0]
    bias, scale = (vector if vector is None else vector.contiguous() for vector in (bias, scale))
    out = torch.empty(M, C, dtype=h.dtype, device=h.device)
    operands = Operands(h, weight, out, b_is_nk=True, residual=residual, bias=bias, scale=scale)
    config = matmul_config(operands, "residual")
    if statistics_eps is None:
        matmul_launch(operands, epilogue="residual", config=config).run()
        return out, None
    part, mean, rstd = _statistics_buffers(config.row_parts(C), M, h.device)
    operands = Operands(h, weight, out, b_is_nk=True, residual=residual, bias=bias, scale=scale, row_part=part)
    matmul_launch(operands, epilogue="residual", config=config).run()
    combine_statistics_launch(part, config.piece, C, statistics_eps, mean, rstd, h.dtype).run()
    return out, (mean, rstd)


def _statistics_buffers(parts: int, M: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    buffer = torch.empty(2 * parts + 2, M, dtype=torch.float32, device=device)
    return buffer[2:].view(parts, 2, M), buffer[0], buffer[1]


def scaled_weight(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """diag(scale) W / factor in the dtype of the activations, and the factor, fp32 [1]; None stands for 1.

    The backward's weight of a linear layer with LayerScale. In fp16, where a LayerScale of 1e-5 (CaiT, DINOv2) would
    take it below the smallest number and no loss scaling could lift it, the largest scale is taken out as a power of 2.
    """
    if scale is None:
        return weight.to(dtype), None
    if dtype != torch.float16:
        return (weight * scale[:, None]).to(dtype), None
    largest = scale.float().abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    factor = torch.exp2(torch.floor(torch.log2(largest))).reshape(1)
    return (weight.float() * (scale.float() / factor)[:, None]).to(dtype), factor


def activation_gradient(
    grad: Tensor, weight: Tensor, scale: Tensor | None, z: Tensor, rows: RowStatistics, folded: FoldedLinear,
    activation: str,
) -> tuple[FoldedGradient, Tensor]:  # fmt: skip
    """The gradient of fc1's output from that of fc2's, and h = act(z) [M, F] again.

    Args:
        grad: dy [M, C].
        weight: W2 [C, F].
        scale: ls [C] or None.
        z: fc1's output [M, F].
    """
    scaled, factor = scaled_weight(weight, scale, grad.dtype)
    out, h = torch.empty_like(z), torch.empty_like(z)
    operands = Operands(grad, scaled, out, z=z, h=h, mean=rows.mean, rstd=rows.rstd, bias=folded.shift)
    config = matmul_config(operands, "activation_grad")
    M, F = z.shape
    row_part = torch.empty(config.row_parts(F), M, dtype=torch.float32, device=z.device)
    column_part = torch.empty(config.column_parts(M), 2, F, dtype=torch.float32, device=z.device)
    operands = Operands(
        grad, scaled, out, z=z, h=h, mean=rows.mean, rstd=rows.rstd, bias=folded.shift, scale=factor,
        row_part=row_part, column_part=column_part,
    )  # fmt: skip
    matmul_launch(operands, epilogue="activation_grad", config=config, activation=activation).run()
    return _folded_gradient(out, row_part, column_part, rows), h


def linear_gradient(grad: Tensor, z: Tensor, rows: RowStatistics, folded: FoldedLinear) -> FoldedGradient:
    """As `activation_gradient` where no activation and no second linear follow: grad is dz [M, F] itself."""
    out = torch.empty_like(z)
    row_part, column_part = scale_gradient_parts(z.shape[0], z.shape[1], z.device)
    scale_gradient_launch(grad, z, out, rows.mean, rows.rstd, folded.shift, row_part, column_part).run()
    return _folded_gradient(out, row_part, column_part, rows)


def _folded_gradient(out: Tensor, row_part: Tensor, column_part: Tensor, rows: RowStatistics) -> FoldedGradient:
    coefficient = row_part.sum(0) * rows.rstd.square() / rows.source.shape[1]
    grad_sum, shifted_sum = column_part.sum(0)
    return FoldedGradient(out, coefficient, grad_sum, shifted_sum)


def input_gradient(
    gradient: FoldedGradient, rows: RowStatistics, folded: FoldedLinear, residual: Tensor | None
) -> Tensor:
    """dx [M, C] through the linear layer and its LayerNorm, [residual +] included."""
    out = torch.empty_like(rows.source)
    operands = Operands(
        gradient.scaled, folded.weight, out, x=rows.source, residual=residual, mean=rows.mean,
        rstd=rows.rstd, coefficient=gradient.coefficient,
    )  # fmt: skip
    matmul_launch(operands, epilogue="layer_norm_grad", config=matmul_config(operands, "layer_norm_grad")).run()
    return out


def product_gradient(grad: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """dh = dy diag(ls) W [M, F], for a linear layer whose input is nobody's activation."""
    scaled, factor = scaled_weight(weight, scale, grad.dtype)
    out = torch.empty(grad.shape[0], scaled.shape[1], dtype=grad.dtype, device=grad.device)
    factors = None if factor is None else factor.expand(scaled.shape[1]).contiguous()
    operands = Operands(grad, scaled, out, scale=factors)
    matmul_launch(operands, epilogue="residual", config=matmul_config(operands, "residual")).run()
    return out


def _partial_products(a: Tensor, b: Tensor) -> Tensor:
    """a^T b of a [M, P], b [M, Q] as fp32 parts [splits, P, Q]."""
    P, Q = a.shape[1], b.shape[1]
    single = Operands(a, b, torch.empty(1, P, Q, dtype=torch.float32, device=a.device), a_is_km=True)
    config = matmul_config(single, "partial")
    splits = split_count(single, config)
    out = single.out if splits == 1 else torch.empty(splits, P, Q, dtype=torch.float32, device=a.device)
    operands = Operands(a, b, out, a_is_km=True)
    matmul_launch(operands, epilogue="partial", config=config, split_k=splits).run()
    return out


def folded_gradients(
    gradient: FoldedGradient, rows: RowStatistics, weight: Tensor, gamma: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dW in the dtype of `weight`; dgamma, dbeta and db in fp32."""
    part = _partial_products(gradient.scaled, rows.source)
    weight_grad, gamma_grad, beta_grad = folded_weight_gradients(
        part, gradient.grad_sum, gradient.shifted_sum, weight, gamma, beta
    )
    return weight_grad, gamma_grad, beta_grad, gradient.grad_sum


def residual_gradients(
    grad: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dW in the dtype of `weight`; db and the gradient of LayerScale in fp32."""
    weight_grad, scale_grad = residual_weight_gradients(_partial_products(grad, h), weight, scale)
    grad_sum = grad.sum(0, dtype=torch.float32)
    if scale is None or scale_grad is None:
        return weight_grad, grad_sum, None
    if bias is not None:
        scale_grad = scale_grad + bias * grad_sum
    return weight_grad, grad_sum * scale, scale_grad

"""The fused linear layers of a block by the Triton kernels: LayerNorm + linear, and linear + LayerScale + residual.

They have no other backend: elsewhere a block is made of torch's own LayerNorm and Linear.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import matmul_dtype
from .layer_norm_mlp import needs_gradient, residual_stream
from .linear_op import layer_norm_linear_op, layer_norm_linear_training, linear_residual_kernel, sum_dtype


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    statistics: Tensor | None = None,
) -> Tensor:
    """LN(x) W^T + b.

    Args:
        x: Tokens [..., C]; fp32, fp16 or bf16.
        norm_weight, norm_bias: LayerNorm's affine [C]; None means ones, zeros.
        weight, bias: The linear layer's, [F, C] and [F]; bias None means zeros.
        eps: LayerNorm's epsilon, in units of x squared.
        statistics: (mean, rstd) of the rows of x, fp32 [2, M]; None computes them. Those of fp32 x are not used.
    Returns:
        [..., F] in x.dtype, in autocast's where autocast is on.
    Raises:
        UnsupportedInputError: the kernels cannot run this input; lists all reasons.
    """
    dtype, x = matmul_dtype(x), residual_stream(x)
    if needs_gradient(x, norm_weight, norm_bias, weight, bias):
        out, _, _ = layer_norm_linear_training(x, statistics, norm_weight, norm_bias, weight, bias, eps, dtype)
        return out
    return layer_norm_linear_op(x, statistics, norm_weight, norm_bias, weight, bias, eps, dtype)


def linear_residual(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    layer_scale: Tensor | None,
    residual: Tensor | None,
    next_eps: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """[residual +] layer_scale * (h W^T + b).

    Args:
        h: [..., F]; fp32, fp16 or bf16.
        weight, bias: [C, F] and [C]; bias None means zeros.
        layer_scale: [C]; None means ones.
        residual: [..., C]; None adds nothing.
        next_eps: Epsilon of the LayerNorm that follows; None means that its statistics are not wanted.
    Returns:
        [..., C] in residual.dtype, without one in h.dtype or in layer_scale's where that is fp32; autocast's, where it
        is on, in place of fp16 and bf16. And (mean, rstd) of its rows, fp32 [2, M], or None of fp32 rows.
    Raises:
        UnsupportedInputError: the kernels cannot run this input; lists all reasons.
    """
    h = h.to(matmul_dtype(h))
    if residual is not None:
        residual = residual_stream(residual)
    if sum_dtype(h, layer_scale, residual) == torch.float32:  # rows that the next LayerNorm normalises itself
        next_eps = None
    y, statistics = linear_residual_kernel(h, weight, bias, layer_scale, residual, next_eps)
    return y, None if next_eps is None else statistics

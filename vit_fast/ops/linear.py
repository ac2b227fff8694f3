"""The fused linear layers of a block by the Triton kernels: LayerNorm + linear, and linear + LayerScale + residual.

They have no other backend: elsewhere a block is made of torch's own LayerNorm and Linear.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import matmul_dtype, residual_stream
from .linear_op import layer_norm_linear_op, layer_norm_linear_training, linear_residual_kernel, sum_dtype
from .transforms import needs_gradient


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    norm: str = "layer_norm",
    statistics: Tensor | None = None,
) -> Tensor:
    """LN(x) W^T + b, or with an RMSNorm in the place of the LayerNorm.

    Args:
        x: Tokens [..., C]; fp32, fp16 or bf16.
        norm_weight, norm_bias: LayerNorm's affine [C]; None means ones, zeros.
        weight, bias: The linear layer's, [F, C] and [F]; bias None means zeros.
        eps: LayerNorm's epsilon, in units of x squared.
        norm: "layer_norm" or "rms_norm".
        statistics: Of the rows of x, as the operator before gave them; None computes them. Those of fp32 x are not
            used.
    Returns:
        [..., F] in x.dtype, in autocast's where autocast is on.
    Raises:
        UnsupportedInputError: the kernels cannot run this input; lists all reasons.
    """
    dtype, x = matmul_dtype(x), residual_stream(x)
    if needs_gradient(x, norm_weight, norm_bias, weight, bias):
        out, _, _ = layer_norm_linear_training(x, statistics, norm_weight, norm_bias, weight, bias, eps, norm, dtype)
        return out
    return layer_norm_linear_op(x, statistics, norm_weight, norm_bias, weight, bias, eps, norm, dtype)


def linear_residual(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    layer_scale: Tensor | None,
    residual: Tensor | None,
    next_statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """[residual +] layer_scale * (h W^T + b).

    Args:
        h: [..., F]; fp32, fp16 or bf16.
        weight, bias: [C, F] and [C]; bias None means zeros.
        layer_scale: [C]; None means ones.
        residual: [..., C]; None adds nothing.
        next_statistics: Whether a LayerNorm follows that takes the statistics of the rows over.
    Returns:
        [..., C] in residual.dtype, without one in h.dtype or in layer_scale's where that is fp32; autocast's, where it
        is on, in place of fp16 and bf16. And the statistics of its rows, as `kept_rows.py` has them, or None where they
        are not wanted and of fp32 rows, which the next LayerNorm normalises itself.
    Raises:
        UnsupportedInputError: the kernels cannot run this input; lists all reasons.
    """
    h = h.to(matmul_dtype(h))
    if residual is not None:
        residual = residual_stream(residual)
    wanted = next_statistics and sum_dtype(h, layer_scale, residual) != torch.float32
    y, statistics = linear_residual_kernel(h, weight, bias, layer_scale, residual, wanted)
    return y, statistics if wanted else None

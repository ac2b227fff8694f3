"""A block with linear layers in e4m3 as one operator for inference: `vit_fast::block_fp8`.

It takes five launches, like the half-precision block. The kernel that computes an operand also writes it in e4m3: x8
next to x and its LayerNorm statistics. LayerNorm stays folded. With a = x8, W8 and s of `reference.fp8_weight`,

    z = rstd (scale (a W8^T) - mean weight_sum) + shift,  weight_sum = rowsum(scale W8 / s)

so the mean is multiplied by the same rounded weight as x. A layer whose operand has no scale stays in half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from ..kernels.row_parts import row_parts
from .attention_op import attention_flop
from .attention_op import unsupported_reasons as attention_reasons
from .backends import fp8_reasons
from .block_backward import SETTINGS, BlockSettings
from .checks import contiguous_rows, rows_of
from .operators import operator
from .rotary import QkTensors, qkv_step

E4M3 = torch.float8_e4m3fn
HALF = (torch.float16, torch.bfloat16)
DIVISOR = 16  # tensor cores and TMA descriptors need rows of a multiple of 16 bytes


class Fp8Linear(NamedTuple):
    """Tensors of a linear layer, in the form that the matmul reads.

    Attributes:
        weight: [F, K] in e4m3, or in half precision if it is not quantized.
        shift: After a norm, c of `folding.py`, fp32 [F]; otherwise the bias (e4m3: divided by the row's scale) or None.
        scale: Multiplier of the products, fp32 [F]: for e4m3 the scale of each row, times LayerScale before a residual;
            in half precision LayerScale alone, or None.
        weight_sum: After a LayerNorm, row sums of the weight that multiplies x, fp32 [F]; otherwise None.
        operand_factor: Multiplier of the operand before rounding, the reciprocal of its scale, fp32: [C] for the
            residual stream, otherwise [1]. None if not quantized.
    """

    weight: Tensor
    shift: Tensor | None
    scale: Tensor | None
    weight_sum: Tensor | None
    operand_factor: Tensor | None


def unsupported_reasons(
    x: Tensor, x8: Tensor | None, next_factor: Tensor | None, linears: Sequence[Fp8Linear]
) -> list[str]:
    """Returns all reasons why the kernels cannot run on x [B, N, C] with qkv, proj, fc1 and fc2."""
    reasons, C = fp8_reasons(x.device), x.shape[-1]
    if x.dtype not in HALF:
        reasons.append(f"x must be float16 or bfloat16, got {x.dtype}")
    for name, linear in zip(("qkv", "proj", "fc1", "fc2"), linears):
        if linear.weight.dtype not in (E4M3, x.dtype):
            reasons.append(f"{name} must be {x.dtype} like x, got {linear.weight.dtype}: quantize the block again")
        if linear.weight.device != x.device:
            reasons.append(f"{name} must be on {x.device} like x, got {linear.weight.device}")
    if linears[0].weight.shape[1] != C:
        reasons.append(f"x must have {linears[0].weight.shape[1]} channels like qkv's weight, got {C}")
    if x8 is not None and (x8.shape != x.shape or x8.dtype != E4M3 or x8.device != x.device):
        reasons.append(f"x8 must be {E4M3} with shape and device of x, got {x8.dtype} {tuple(x8.shape)} on {x8.device}")
    if next_factor is not None:
        if tuple(next_factor.shape) != (C,) or next_factor.dtype != torch.float32 or next_factor.device != x.device:
            reasons.append(f"next_factor must be float32 {(C,)} on {x.device}, got {next_factor.dtype} "
                           f"{tuple(next_factor.shape)} on {next_factor.device}")  # fmt: skip
        if C % DIVISOR:
            reasons.append(f"the width of x must be a multiple of {DIVISOR} in FP8, got {C}")
    return reasons


def _linears(tensors: Sequence[Any]) -> tuple[Fp8Linear, Fp8Linear, Fp8Linear, Fp8Linear]:
    """Returns qkv, proj, fc1 and fc2 from the operator's list of tensors."""
    qkv, proj, fc1, fc2 = (Fp8Linear._make(tensors[first : first + 5]) for first in range(3, 23, 5))
    return qkv, proj, fc1, fc2


class Fp8Inputs(NamedTuple):
    """Tensors reused from the previous block and for the next one; see `fused_block_fp8`."""

    x8: Tensor | None
    statistics: Tensor | None
    next_factor: Tensor | None


def _inputs(tensors: Sequence[Any]) -> Fp8Inputs:
    return Fp8Inputs._make(tensors[:3])


def block_fp8_forward(x: Tensor, tensors: Sequence[Tensor | None], *settings: Any) -> list[Tensor]:
    """Runs a block on x [B, N, C], and returns its output.

    With `next_factor` [C], also returns the output times this factor in e4m3; with `next_statistics`, its LayerNorm
    statistics.

    Args:
        tensors: `Fp8Inputs`; the layers qkv, proj, fc1 and fc2, five tensors each; and the first six of `QkTensors`.
        settings: See `block_forward`.
    """
    from ..kernels.attention.attention import attention_forward
    from ..kernels.linear.linear import layer_norm_linear, linear_residual

    x8, statistics, next_factor = _inputs(tensors)
    qkv, proj, fc1, fc2 = _linears(tensors)
    s = BlockSettings.read(settings)
    if reasons := unsupported_reasons(x, x8, next_factor, (qkv, proj, fc1, fc2)):
        raise UnsupportedInputError("a block in FP8", reasons)
    step = qkv_step(QkTensors(*tensors[23:]), s.qk, s.prefix, qkv.weight.shape[0] // (3 * s.heads), True)
    rows, dtype = contiguous_rows(x), x.dtype
    first = _first_operand(rows, x8, statistics, qkv.operand_factor)
    flat = layer_norm_linear(_rows(*first, s.eps1), _folded(qkv), head_step=step.of_heads(x.shape[1]), dtype=dtype)
    packed = flat.view(*x.shape[:-1], 3, s.heads, step.head_dim)
    step.check(packed)
    q, k, v = step.forward(packed)[0].transpose(1, 3).unbind(2)
    if reasons := attention_reasons(q, k, v, s.scale):
        raise UnsupportedInputError("a block in FP8", reasons)
    mixed = torch.empty_like(packed[:, :, 0], dtype=_written(proj, dtype), memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    attention_forward(q, k, v, mixed.transpose(1, 2), lse, s.scale, proj.operand_factor)
    between8 = None if fc1.operand_factor is None else torch.empty_like(rows, dtype=E4M3)
    between, statistics2 = linear_residual(
        contiguous_rows(mixed.flatten(2)), proj.weight, proj.shift, proj.scale, rows, True, out8=between8,
        out_scale=fc1.operand_factor,
    )  # fmt: skip
    gated = fc1.weight.shape[0] != fc2.weight.shape[1]
    h = layer_norm_linear(
        _rows(between if between8 is None else between8, statistics2, s.eps2), _folded(fc1), s.activation, gated,
        dtype=_written(fc2, dtype), out_scale=fc2.operand_factor,
    )  # fmt: skip
    y8 = None if next_factor is None else torch.empty_like(x, dtype=E4M3, memory_format=torch.contiguous_format)
    y, emitted = linear_residual(
        h, fc2.weight, fc2.shift, fc2.scale, between, s.next_statistics,
        out8=None if y8 is None else contiguous_rows(y8), out_scale=next_factor,
    )  # fmt: skip
    return [y.view(x.shape), *(tensor for tensor in (y8, emitted) if tensor is not None)]


def _first_operand(
    rows: Tensor, x8: Tensor | None, statistics: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the operand of the first matmul and LayerNorm statistics; one launch computes those not passed in."""
    from ..kernels.layer_norm import new_statistics, row_statistics_launch

    if scale is None:
        x8 = None
    elif x8 is not None:
        x8 = contiguous_rows(x8)
    if statistics is None or (scale is not None and x8 is None):
        statistics = new_statistics(rows.shape[0], rows.shape[1], rows.device)
        x8 = None if scale is None else torch.empty_like(rows, dtype=E4M3)
        row_statistics_launch(rows, statistics, x8, scale).run()
    return rows if x8 is None else x8, statistics


def _rows(source: Tensor, statistics: Tensor | None, eps: float) -> Any:
    from ..kernels.layer_norm import InputRows

    assert statistics is not None, "half-precision tokens must have statistics"
    return InputRows(source, statistics, eps)


def _folded(linear: Fp8Linear) -> Any:
    from ..kernels.linear.folding import FoldedLinear

    assert linear.shift is not None, "a folded layer has a shift"
    return FoldedLinear(linear.weight, linear.weight_sum, linear.shift, linear.scale)


def _written(linear: Fp8Linear, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a layer's operand."""
    return dtype if linear.operand_factor is None else E4M3


def _fake(x: Tensor, tensors: Sequence[Tensor | None], *settings: Any) -> list[Tensor]:
    outputs = [x.new_empty(x.shape)]
    if _inputs(tensors).next_factor is not None:
        outputs.append(x.new_empty(x.shape, dtype=E4M3))
    if BlockSettings.read(settings).next_statistics:
        rows = x.shape[0] * x.shape[1]
        outputs.append(x.new_empty((rows, 2, row_parts(x.shape[-1])), dtype=torch.float32))
    return outputs


def _flop(x: Any, tensors: Any, *settings: Any) -> int:
    linears = _linears(tensors)
    matmuls = sum(2 * rows_of(x) * int(linear.weight[0]) * int(linear.weight[1]) for linear in linears)
    images, tokens = rows_of(x) // max(int(x[-2]), 1), int(x[-2])
    return matmuls + attention_flop(images, 1, tokens, tokens, int(linears[1].weight[1]))


block_fp8_kernel = operator(
    "vit_fast::block_fp8", f"(Tensor x, Tensor?[] tensors, {SETTINGS}) -> Tensor[]", block_fp8_forward,
    what="a block in FP8", fake=_fake, flop=_flop, cached=4,
)  # fmt: skip

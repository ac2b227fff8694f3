"""A block whose linear layers read e4m3, as one operator for inference: `vit_fast::block_fp8`.

Five launches, as of the half-precision block: each operand is written in e4m3 by the kernel that makes it, x8 beside x
and the statistics of its rows. LayerNorm stays folded: with a = x8, W8 and s of `reference.fp8_weight`,

    z = rstd (scale (a W8^T) - mean weight_sum) + shift,  weight_sum = rowsum(scale W8 / s)

so that the mean meets the weight that x was really multiplied by. A layer without an operand's scale stays in half
precision, and so does its operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from .attention_op import attention_flop, new_lse
from .attention_op import unsupported_reasons as attention_reasons
from .backends import fp8_reasons
from .block_op import KEPT
from .checks import contiguous_rows, no_tensor, refuse_vmap, rows_of
from .flops import flop_formula
from .kept_rows import fake_statistics
from .operators import fake, operator
from .qkv import qkv_step

E4M3 = torch.float8_e4m3fn
HALF = (torch.float16, torch.bfloat16)
DIVISOR = 16  # of the length of a row in e4m3: what a tensor core and a descriptor read at once


class Fp8Linear(NamedTuple):
    """A linear layer as the matmul reads it.

    Attributes:
        weight: [F, K] in e4m3, or in half precision where it is not quantised.
        shift: Behind a norm c, fp32 [F]; else the bias, of e4m3 divided by the scale of its row, or None.
        scale: Of e4m3 what products are multiplied by, fp32 [F]; before a residual LayerScale is a factor of it, and
            all of it in half precision; or None.
        weight_sum: Behind a LayerNorm the rows' sums of what x is multiplied by, fp32 [F]; else None.
        operand_factor: What the operand is multiplied by, the reciprocal of its scale: fp32, [C] of the residual
            stream, else [1]; None: not quantised.
    """

    weight: Tensor
    shift: Tensor | None
    scale: Tensor | None
    weight_sum: Tensor | None
    operand_factor: Tensor | None


def unsupported_reasons(
    x: Tensor, x8: Tensor | None, next_factor: Tensor | None, linears: Sequence[Fp8Linear]
) -> list[str]:
    """Every reason why the kernels cannot run on x [B, N, C] with these: qkv, proj, fc1, fc2; empty when they can."""
    reasons, C = fp8_reasons(x.device), x.shape[-1]
    if x.dtype not in HALF:
        reasons.append(f"x is {x.dtype}: accepted are float16, bfloat16")
    for name, linear in zip(("qkv", "proj", "fc1", "fc2"), linears):
        if linear.weight.dtype not in (E4M3, x.dtype):
            reasons.append(f"{name} was kept in {linear.weight.dtype}, x is {x.dtype}: quantize the block again")
        if linear.weight.device != x.device:
            reasons.append(f"{name} is on {linear.weight.device}, x is on {x.device}: they must agree")
    if linears[0].weight.shape[1] != C:
        reasons.append(f"rows have {C} channels: accepted are {linears[0].weight.shape[1]}, as qkv reads")
    if x8 is not None and (x8.shape != x.shape or x8.dtype != E4M3 or x8.device != x.device):
        reasons.append(f"x8 is {x8.dtype} {tuple(x8.shape)} on {x8.device}: accepted is {E4M3} in the shape of x")
    if next_factor is not None:
        if tuple(next_factor.shape) != (C,) or next_factor.dtype != torch.float32 or next_factor.device != x.device:
            reasons.append(f"next_factor is {next_factor.dtype} {tuple(next_factor.shape)} on {next_factor.device}: "
                           f"accepted is float32 {(C,)} beside x")  # fmt: skip
        if C % DIVISOR:
            reasons.append(f"rows have {C} channels: accepted in FP8 are multiples of {DIVISOR}")
    return reasons


def _ensure_current(x: Tensor, x8: Tensor | None, statistics: Tensor | None, scale: Tensor | None, *of: Any) -> None:
    """As of `vit_fast::block`."""
    if KEPT and (kept := KEPT.get(of[0].data_ptr())) is not None:
        kept.ensure_current()


@operator("vit_fast::block_fp8", before=_ensure_current)
def block_fp8_op(
    x: Tensor, x8: Tensor | None, statistics: Tensor | None, next_factor: Tensor | None,
    qkv_weight: Tensor, qkv_shift: Tensor | None, qkv_scale: Tensor | None, qkv_sum: Tensor | None,
    qkv_operand: Tensor | None, proj_weight: Tensor, proj_shift: Tensor | None, proj_scale: Tensor | None,
    proj_sum: Tensor | None, proj_operand: Tensor | None, fc1_weight: Tensor, fc1_shift: Tensor | None,
    fc1_scale: Tensor | None, fc1_sum: Tensor | None, fc1_operand: Tensor | None, fc2_weight: Tensor,
    fc2_shift: Tensor | None, fc2_scale: Tensor | None, fc2_sum: Tensor | None, fc2_operand: Tensor | None,
    q_weight: Tensor | None, q_bias: Tensor | None, k_weight: Tensor | None, k_bias: Tensor | None,
    cos: Tensor | None, sin: Tensor | None,
    heads: int, attention_scale: float, eps1: float, eps2: float, activation: str, qk_norm: str,
    qk_eps: float, over: str, prefix: int, layout: str, next_statistics: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The block's output [B, N, C] for x [B, N, C]; with `next_factor` [C] the same in e4m3, times that; and with
    `next_statistics` those of its rows. The layers are `Fp8Linear`."""
    from ..kernels.attention.attention import attention_forward
    from ..kernels.linear.linear import layer_norm_linear, linear_residual

    qkv = Fp8Linear(qkv_weight, qkv_shift, qkv_scale, qkv_sum, qkv_operand)
    proj = Fp8Linear(proj_weight, proj_shift, proj_scale, proj_sum, proj_operand)
    fc1 = Fp8Linear(fc1_weight, fc1_shift, fc1_scale, fc1_sum, fc1_operand)
    fc2 = Fp8Linear(fc2_weight, fc2_shift, fc2_scale, fc2_sum, fc2_operand)
    if reasons := unsupported_reasons(x, x8, next_factor, (qkv, proj, fc1, fc2)):
        raise UnsupportedInputError("a block in FP8", reasons)
    step = qkv_step(
        q_weight, q_bias, k_weight, k_bias, cos, sin, qk_norm, qk_eps, over, prefix, layout,
        qkv_weight.shape[0] // (3 * heads), True,
    )  # fmt: skip
    rows, dtype = contiguous_rows(x), x.dtype
    first = _first_operand(rows, x8, statistics, qkv_operand)
    flat = layer_norm_linear(_rows(*first, eps1), _folded(qkv), head_step=step.of_heads(x.shape[1]), dtype=dtype)
    packed = flat.view(*x.shape[:-1], 3, heads, flat.shape[1] // (3 * heads))
    step.check(packed)
    q, k, v = step.forward(packed)[0].transpose(1, 3).unbind(2)
    if reasons := attention_reasons(q, k, v, attention_scale):
        raise UnsupportedInputError("a block in FP8", reasons)
    mixed = torch.empty_like(packed[:, :, 0], dtype=_written(proj, dtype), memory_format=torch.contiguous_format)
    attention_forward(q, k, v, mixed.transpose(1, 2), new_lse(q), attention_scale, proj_operand)
    between8 = None if fc1_operand is None else torch.empty_like(rows, dtype=E4M3)
    between, known = linear_residual(
        contiguous_rows(mixed.flatten(2)), proj.weight, proj.shift, proj.scale, rows, True, out8=between8,
        out_scale=fc1_operand,
    )  # fmt: skip
    gated = fc1_weight.shape[0] != fc2_weight.shape[1]
    h = layer_norm_linear(
        _rows(between if between8 is None else between8, known, eps2), _folded(fc1), activation, gated,
        dtype=_written(fc2, dtype), out_scale=fc2_operand,
    )  # fmt: skip
    y8 = None if next_factor is None else torch.empty_like(x, dtype=E4M3, memory_format=torch.contiguous_format)
    y, emitted = linear_residual(
        h, fc2.weight, fc2.shift, fc2.scale, between, next_statistics,
        out8=None if y8 is None else contiguous_rows(y8), out_scale=next_factor,
    )  # fmt: skip
    return (
        y.view(x.shape),
        no_tensor(x) if y8 is None else y8,
        no_tensor(x) if emitted is None else emitted,
    )


def _first_operand(
    rows: Tensor, x8: Tensor | None, statistics: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What the first matmul reads, and statistics of the rows; one launch makes what nobody handed over."""
    from ..kernels.layer_norm import new_statistics, row_statistics_launch

    if scale is None:
        x8 = None
    elif x8 is not None:
        x8 = contiguous_rows(x8)
    if statistics is None or (scale is not None and x8 is None):
        statistics = new_statistics(rows.shape[0], rows.shape[1], rows.device)
        made = None if scale is None else torch.empty_like(rows, dtype=E4M3)
        row_statistics_launch(rows, statistics, made, scale).run()
        x8 = made
    return rows if x8 is None else x8, statistics


def _rows(source: Tensor, statistics: Tensor | None, eps: float) -> Any:
    from ..kernels.layer_norm import InputRows

    assert statistics is not None, "half-precision rows leave statistics"
    return InputRows(source, statistics, eps)


def _folded(linear: Fp8Linear) -> Any:
    from ..kernels.linear.folding import FoldedLinear

    assert linear.shift is not None, "a folded layer has a shift"
    return FoldedLinear(linear.weight, linear.weight_sum, linear.shift, linear.scale)


def _written(linear: Fp8Linear, dtype: torch.dtype) -> torch.dtype:
    """That of a layer's operand."""
    return dtype if linear.operand_factor is None else E4M3


@fake(block_fp8_op)
def _(
    x: Tensor, x8: Tensor | None, statistics: Tensor | None, next_factor: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    y8 = no_tensor(x) if next_factor is None else x.new_empty(x.shape, dtype=E4M3)
    return x.new_empty(x.shape), y8, fake_statistics(x, x.shape[-1], args[-1])


torch.library.register_vmap(block_fp8_op, refuse_vmap("a block in FP8"))


@flop_formula(torch.ops.vit_fast.block_fp8)
def _(x: Any, x8: Any, statistics: Any, next_factor: Any, *args: Any, **kwargs: Any) -> int:
    matmuls = sum(2 * rows_of(x) * int(weight[0]) * int(weight[1]) for weight in args[0:20:5])
    images, tokens = rows_of(x) // max(int(x[-2]), 1), int(x[-2])
    return matmuls + attention_flop(images, 1, tokens, tokens, int(args[5][1]))

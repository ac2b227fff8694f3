"""Gradients of the vectors of a block, computed in one launch from the partial sums of `weight_gradients.py`.

Vectors are gamma and beta of LayerNorms, biases before residuals, and LayerScales. The formulas are in `gradients.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from ..launch import Launch, ceil_div
from .folding import load_columns
from .gradients import add_column_parts, sum_rows
from .weight_gradients import (
    COLS,
    ROWS,
    Folded,
    FoldedGradients,
    FoldedProducts,
    Residual,
    ResidualGradients,
    ResidualProducts,
    room_for,
    slots,
    weight_grad_launch,
)

_COLS = 32  # columns per program
_REGISTERS = 64  # 32 (full occupancy) would spill, and the grid is too small for full occupancy


@triton.jit
def _affine_columns(
    vector_part_ptr, gamma_grad_ptr, beta_grad_ptr, col, F, C, WEIGHT_ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Computes COLS columns of dgamma and dbeta."""
    cols = col + tl.arange(0, COLS)
    parts = tl.cdiv(F, WEIGHT_ROWS)
    if gamma_grad_ptr is not None:
        total = sum_rows(add_column_parts(vector_part_ptr, parts, 2 * C, col, C, COLS))
        tl.store(gamma_grad_ptr + cols, total.to(gamma_grad_ptr.dtype.element_ty), mask=cols < C)
    if beta_grad_ptr is not None:
        total = sum_rows(add_column_parts(vector_part_ptr + C, parts, 2 * C, col, C, COLS))
        tl.store(beta_grad_ptr + cols, total.to(beta_grad_ptr.dtype.element_ty), mask=cols < C)


@triton.jit
def _branch_columns(
    grad_part_ptr, scale_part_ptr, bias_ptr, scale_ptr, bias_grad_ptr, scale_grad_ptr, col, F, C, sums,
    WEIGHT_COLS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Computes COLS columns of db and dls."""
    cols = col + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    if grad_part_ptr is not None:
        total = sum_rows(add_column_parts(grad_part_ptr, sums, C, col, C, COLS))
    if bias_grad_ptr is not None:
        bias_grad = total * load_columns(scale_ptr, cols, C, 1.0)
        tl.store(bias_grad_ptr + cols, bias_grad.to(bias_grad_ptr.dtype.element_ty), mask=cols < C)
    if scale_grad_ptr is not None:
        scale_grad = sum_rows(add_column_parts(scale_part_ptr, tl.cdiv(F, WEIGHT_COLS), C, col, C, COLS))
        scale_grad += total * load_columns(bias_ptr, cols, C, 0.0)
        tl.store(scale_grad_ptr + cols, scale_grad.to(scale_grad_ptr.dtype.element_ty), mask=cols < C)


@triton.jit(do_not_specialize=["sums"])
def _vector_grad_kernel(
    # LayerNorm before a linear layer, or None:
    vector_part_ptr,  # fp32 [F / WEIGHT_ROWS, 2, C]
    gamma_grad_ptr,  # output: [C] or None
    beta_grad_ptr,  # output: [C] or None
    F, C,
    # linear layer before a residual, or None:
    grad_part2_ptr,  # fp32 [sums, C2], or None
    scale_part2_ptr,  # fp32 [F2 / WEIGHT_COLS, C2], or None
    bias2_ptr,  # [C2] or None
    scale2_ptr,  # [C2] or None
    bias_grad2_ptr,  # output: [C2] or None
    scale_grad2_ptr,  # output: [C2] or None
    F2, C2,
    # a second LayerNorm and a second linear layer, or None:
    vector_part3_ptr, gamma_grad3_ptr, beta_grad3_ptr, F3, C3,
    grad_part4_ptr, scale_part4_ptr, bias4_ptr, scale4_ptr, bias_grad4_ptr, scale_grad4_ptr, F4, C4,
    sums,
    WEIGHT_ROWS: tl.constexpr, WEIGHT_COLS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = tl.cdiv(C, COLS)
    second = first + tl.cdiv(C2, COLS)
    third = second + tl.cdiv(C3, COLS)
    if program < first:
        _affine_columns(vector_part_ptr, gamma_grad_ptr, beta_grad_ptr, program * COLS, F, C, WEIGHT_ROWS, COLS)
    elif program < second:
        _branch_columns(
            grad_part2_ptr, scale_part2_ptr, bias2_ptr, scale2_ptr, bias_grad2_ptr, scale_grad2_ptr,
            (program - first) * COLS, F2, C2, sums, WEIGHT_COLS, COLS,
        )  # fmt: skip
    elif program < third:
        _affine_columns(
            vector_part3_ptr, gamma_grad3_ptr, beta_grad3_ptr, (program - second) * COLS, F3, C3, WEIGHT_ROWS, COLS
        )
    else:
        _branch_columns(
            grad_part4_ptr, scale_part4_ptr, bias4_ptr, scale4_ptr, bias_grad4_ptr, scale_grad4_ptr,
            (program - third) * COLS, F4, C4, sums, WEIGHT_COLS, COLS,
        )  # fmt: skip


def vector_grad_launch(folded: Sequence[Folded], residual: Sequence[Residual]) -> Launch:
    """Returns the launch of `_vector_grad_kernel`; the grid is empty if there are no vectors."""
    args: dict[str, Any] = {}
    programs, sums = 0, 0
    for index, ((products, found), suffix) in enumerate(slots(folded, residual)):
        F = C = 0
        if index % 2 == 0:
            if found is not None and not (found.gamma is None and found.beta is None):
                _, F, C = products.part.shape
            wanted = found if C else None
            names = {
                "vector_part": wanted and wanted.vector_part, "gamma_grad": wanted and wanted.gamma,
                "beta_grad": wanted and wanted.beta,
            }  # fmt: skip
        else:
            if found is not None and not (found.bias is None and found.scale is None):
                C, F = found.weight.shape
            wanted, given = (found, products) if C else (None, None)
            names = {
                "grad_part": wanted and wanted.grad_part, "scale_part": wanted and wanted.scale_part,
                "bias": given and given.bias, "scale": given and given.scale,
                "bias_grad": wanted and wanted.bias, "scale_grad": wanted and wanted.scale,
            }  # fmt: skip
            if wanted is not None and wanted.grad_part is not None:
                sums = wanted.grad_part.shape[0]
        programs += ceil_div(C, _COLS)
        args |= {f"{name}{suffix}_ptr": value for name, value in names.items()} | {f"F{suffix}": F, f"C{suffix}": C}
    constants = {"WEIGHT_ROWS": ROWS, "WEIGHT_COLS": COLS, "COLS": _COLS}
    device = (folded or residual)[0][0].part.device
    return Launch(
        _vector_grad_kernel, (programs,), args | {"sums": sums}, constants,
        num_warps=4, maxnreg=_REGISTERS, device=device,
    )  # fmt: skip


def parameter_gradients(
    folded: Sequence[FoldedProducts], residual: Sequence[ResidualProducts]
) -> tuple[list[FoldedGradients], list[ResidualGradients]]:
    """Returns the gradients of up to two linear layers after LayerNorms and two before residuals, with equal M."""
    first = [(products, room_for(products)) for products in folded]
    second = [(products, room_for(products)) for products in residual]
    weight_grad_launch(first, second).run()
    vector_grad_launch(first, second).run()
    return [found for _, found in first], [found for _, found in second]

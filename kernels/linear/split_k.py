"""Split-K for `linear_residual`: adds the partial sums that the "partial" epilogue of a matmul stores.

    out = [residual +] [scale] (sum of partial sums + bias), and if a LayerNorm follows, the LayerNorm statistics of out

With small batches, a matmul has too few tiles to fill a GPU. Split-K divides a tile among several programs. Each of
these programs stores a partial sum over its part of K. The kernel of this file adds the partial sums in order, so
results are deterministic. Each program of this kernel computes ROWS rows of a piece of 64 columns (`row_parts.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, ceil_div
from ..layer_norm import load_columns, piece_statistics, store_statistics
from ..matmul.forward_epilogues import BranchOutput
from ..matmul.matmul_tiles import READ_AT_ONCE
from ..ptx import divided_columns, wait_for_previous
from ..row_parts import PIECE, row_parts

_ROWS = 16  # rows per program; M is small, so more rows would give too few programs
_REGISTERS = 40  # per thread; 32 would spill on blackwell
_PIECE = tl.constexpr(PIECE)


@triton.jit(do_not_specialize=["splits", "M"])
def _finish_residual_kernel(
    part_ptr,  # fp32 [splits, M, C]
    bias_ptr,  # [C] or None
    scale_ptr,  # [C] or None
    residual_ptr,  # [M, C] or None
    out_ptr,  # output: [M, C]
    row_part_ptr,  # output: LayerNorm statistics, fp32 [M, 2, PARTS]; or None
    out8_ptr,  # output: out * out_scale, rounded to e4m3, [M, C]; or None
    out_scale_ptr,  # fp32 [C], reciprocal scales of out8; or None
    splits, M, C,
    ROWS: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0) // PARTS * ROWS
    col = tl.program_id(0) % PARTS * _PIECE
    rows = row + tl.arange(0, ROWS)
    cols = tl.max_contiguous(col + tl.arange(0, _PIECE), READ_AT_ONCE)
    mask = (rows < M)[:, None] & (cols < C)[None, :]
    offsets = rows.to(tl.int64)[:, None] * C + cols[None, :]
    value = tl.zeros((ROWS, _PIECE), tl.float32)
    for split in tl.range(0, splits):
        value += tl.load(part_ptr + tl.cast(split, tl.int64) * M * C + offsets, mask=mask, other=0.0)
    value += load_columns(bias_ptr, cols, C, 0.0)[None, :]
    value *= load_columns(scale_ptr, cols, C, 1.0)[None, :]
    if residual_ptr is not None:
        value += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    stored = value.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, stored, mask=mask)
    if row_part_ptr is not None:
        mean, squares = piece_statistics(stored.to(tl.float32), col, C, _PIECE)
        store_statistics(row_part_ptr, mean, squares, row, col, M, C, ROWS, PARTS)
    if out8_ptr is not None:
        tl.store(out8_ptr + offsets, divided_columns(stored, out_scale_ptr, col, C, _PIECE), mask=mask)


def finish_residual_launch(part: Tensor, o: BranchOutput, dependent: bool = False) -> Launch:
    """Returns the launch that computes `o.out` from `part`. If `dependent`, it may start before the matmul ends."""
    splits, M, C = part.shape
    values = part, o.bias, o.scale, o.residual, o.out, o.out_part, o.out8, o.out_scale, splits, M, C
    constants = {"ROWS": _ROWS, "PARTS": row_parts(C), "DEPENDENT": dependent}
    return Launch.of(
        _finish_residual_kernel, ceil_div(M, _ROWS) * row_parts(C), values, constants=constants, maxnreg=_REGISTERS,
        device=part.device,
    )  # fmt: skip

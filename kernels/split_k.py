"""The end of a "residual" matmul that was cut along K: its parts summed, and what its epilogue would have done.

    out = [residual +] [scale] (sum over parts + bias), with (mean, rstd) of its rows where a LayerNorm follows

A few rows give too few tiles to fill a GPU; parts of K give more of them (split-K). The parts are the "partial"
epilogue's, fp32, and are added here in their order: no atomics, the same bits each run. A program has whole rows in its
registers, so their statistics need no launch of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, ceil_div
from .layer_norm import _finish_statistics, _load_columns, chunk

MAX_WIDTH = 2048  # columns of a row that a program holds


@triton.jit
def _finish_residual_kernel(
    part_ptr,  # fp32 [splits, M, C]
    bias_ptr,  # [C] or None
    scale_ptr,  # [C] or None
    residual_ptr,  # [M, C] or None
    out_ptr,  # [M, C]
    mean_ptr,  # fp32 [M], or None: no statistics are wanted
    rstd_ptr,  # fp32 [M], or None
    splits, M, C, eps,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_C)
    mask = (rows < M)[:, None] & (cols < C)[None, :]
    offsets = rows.to(tl.int64)[:, None] * C + cols[None, :]
    value = tl.zeros((ROWS, BLOCK_C), tl.float32)
    for split in tl.range(0, splits):
        value += tl.load(part_ptr + tl.cast(split, tl.int64) * M * C + offsets, mask=mask, other=0.0)
    value += _load_columns(bias_ptr, cols, C, 0.0)[None, :]
    value *= _load_columns(scale_ptr, cols, C, 1.0)[None, :]
    if residual_ptr is not None:
        value += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    stored = value.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, stored, mask=mask)
    if mean_ptr is not None:
        value = tl.where(mask, stored.to(tl.float32), 0.0)
        mean = tl.sum(value, 1) / C
        deviation = tl.where(mask, value - mean[:, None], 0.0)
        rstd = _finish_statistics(mean, tl.sum(deviation * deviation, 1) / C, eps, True)
        tl.store(mean_ptr + rows, mean, mask=rows < M)
        tl.store(rstd_ptr + rows, rstd, mask=rows < M)


def finish_residual_launch(
    part: Tensor, bias: Tensor | None, scale: Tensor | None, residual: Tensor | None, out: Tensor,
    statistics: Tensor | None, eps: float,
) -> Launch:  # fmt: skip
    """The call that sums parts fp32 [splits, M, C] into out [M, C], C <= MAX_WIDTH, and its row statistics fp32 [2, M].

    Args:
        statistics: None where they are not wanted.
        eps: Of the LayerNorm that follows.
    """
    splits, M, C = part.shape
    block, rows = chunk(C)
    mean, rstd = (None, None) if statistics is None else statistics
    args = {
        "part_ptr": part, "bias_ptr": bias, "scale_ptr": scale, "residual_ptr": residual, "out_ptr": out,
        "mean_ptr": mean, "rstd_ptr": rstd, "splits": splits, "M": M, "C": C, "eps": eps,
    }  # fmt: skip
    constants = {"ROWS": rows, "BLOCK_C": block}
    return Launch(_finish_residual_kernel, (ceil_div(M, rows),), args, constants, num_warps=4, device=out.device)

"""LayerNorm statistics, and the input of a linear layer with the LayerNorm folded in (`linear/folding.py`).

The statistics of a row of x [M, C] are mean and rstd = 1 / sqrt(variance + eps). The kernel that writes x usually also
writes partial statistics: means and sums of squared deviations of pieces of 64 columns (`row_parts.py`). Otherwise, a
separate kernel writes them. The next matmul combines the pieces. Its output is z = rstd (x W''^T - mean s) + c. W'' is
the weight with the LayerNorm folded in, s its row sums, and c the bias (`linear/folding.py`). Two special cases:
- fp32 x (in an fp32 model, or under autocast): a separate kernel writes n = (x - mean) rstd in the dtype of the matmul,
  and z = n W''^T + c. Rounding x itself would lose precision if |mean| exceeds std, and x may overflow fp16.
- Constant rows in fp16 or bf16: all values equal mean, so the exact value of x W''^T - mean s is 0. Its rounding error
  would be amplified by rstd = 1 / sqrt(eps). Therefore, the kernels mark a constant row by a negative rstd. The forward
  multiplies by max(rstd, 0), so z = c. For the backward, see `matmul/gradient_epilogues.py`.

For RMSNorm, the partial statistics are the same, but rstd is 1 / sqrt(mean(x^2) + eps), and mean is replaced by 0. Only
rows of zeros count as constant.

Source: LayerNorm, arXiv 1607.06450; RMSNorm, arXiv 1910.07467; combination of partial statistics, Chan, Golub and
LeVeque, 1983.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, ceil_div
from .ptx import divided_columns
from .row_parts import PIECE, row_parts

# A row counts as constant if std <= 1e-6 |mean|. If the values of an fp16 or bf16 row are not all equal, two of them
# differ by a rounding step or more. The std is then at least 2^-12 |mean| / sqrt(C), above 1e-6 |mean| for C < 59,000.
_CONSTANT_ROW = tl.constexpr(1e-6)
_MAX_CHUNK = 2048
_PIECE = tl.constexpr(PIECE)
_AT_ONCE = tl.constexpr(16)  # pieces whose statistics are loaded at once
_ROWS = 64


@triton.jit
def piece_statistics(values, col, N, COLS: tl.constexpr, WHOLE: tl.constexpr = False):
    """Returns the mean and the sum of squared deviations of each row of `values`, [ROWS] each.

    `values` (fp32 [ROWS, COLS]) are columns col, col + 1, ... of a matrix with N columns. Columns >= N are masked out.
    Set WHOLE to skip the mask if all columns are in bounds.
    """
    if WHOLE:
        mean = tl.sum(values, 1) / COLS
        deviation = values - mean[:, None]
    else:
        inside = ((col + tl.arange(0, COLS)) < N)[None, :]
        count = tl.maximum(tl.minimum(N - col, COLS), 1).to(tl.float32)
        values = tl.where(inside, values, 0.0)
        mean = tl.sum(values, 1) / count
        deviation = tl.where(inside, values - mean[:, None], 0.0)
    return mean, tl.sum(deviation * deviation, 1)


@triton.jit
def _merge(mean, squares, count, other_mean, other_squares, other_count):
    """Merges the statistics (mean, sum of squared deviations) of two sets of numbers."""
    share = other_count / (count + other_count)
    offset = other_mean - mean
    return mean + share * offset, squares + other_squares + count * share * offset * offset


@triton.jit
def merge_next(left, right, col, N, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Merges the statistics of columns [col, col + LEFT) and of the next RIGHT columns."""
    count = tl.maximum(tl.minimum(N - col, LEFT), 1).to(tl.float32)
    other = tl.maximum(tl.minimum(N - col - LEFT, RIGHT), 0).to(tl.float32)
    return _merge(left[0], left[1], count, right[0], right[1], other)


@triton.jit
def store_statistics(part_ptr, mean, squares, row, col, M, N, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Stores the statistics of the piece that starts at column `col`; stores nothing if `col` >= N."""
    step = tl.arange(0, ROWS)
    part = part_ptr + tl.cast(row, tl.int64) * (2 * PARTS) + col // _PIECE + step * (2 * PARTS)
    mask = (row + step < M) & (col < N)
    tl.store(part, mean, mask=mask)
    tl.store(part + PARTS, squares, mask=mask)


@triton.jit
def combine_statistics(part_ptr, row, M, C, eps, ROWS: tl.constexpr, PARTS: tl.constexpr, RMS: tl.constexpr):
    """Returns mean and rstd [ROWS] of rows of C columns. rstd is negative for a constant row.

    The loaded tiles have the pieces of a row on axis 0. With the pieces on axis 1, Triton would propagate the
    layout of these loads to the accumulator tile of the matmul.
    """
    step = tl.arange(0, ROWS)
    inside = (row + step < M)[None, :]
    base = part_ptr + tl.cast(row, tl.int64) * (2 * PARTS)
    mean = tl.zeros((ROWS,), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for first in tl.static_range(0, PARTS, _AT_ONCE):
        parts = first + tl.arange(0, _AT_ONCE)
        counts = tl.maximum(tl.minimum(C - parts * _PIECE, _PIECE), 0)[:, None]
        pointers = base + (step[None, :] * (2 * PARTS) + parts[:, None])
        mask = (parts < PARTS)[:, None] & inside
        means = tl.load(pointers, mask=mask, other=0.0)
        found = tl.load(pointers + PARTS, mask=mask, other=0.0)
        counts = counts.to(tl.float32)
        count = tl.minimum(C - first * _PIECE, _AT_ONCE * _PIECE).to(tl.float32)
        of_these = tl.sum(counts * means, 0) / count
        offset = means - of_these[None, :]
        found += counts * offset * offset
        merged = _merge(mean, squares, first * _PIECE * 1.0, of_these, tl.sum(found, 0), count)
        mean = merged[0]
        squares = merged[1]
    variance = squares / C
    limit = _CONSTANT_ROW * mean
    if RMS:
        variance += mean * mean
        limit = tl.zeros((ROWS,), tl.float32)
        mean = limit
    rstd = tl.math.rsqrt(variance + eps)
    return mean, tl.where(variance <= limit * limit, -rstd, rstd)


@triton.jit(do_not_specialize=["M"])
def _layer_norm_statistics_kernel(
    x_ptr,  # [M, C] fp16 or bf16
    part_ptr,  # output: fp32 [M, 2, PARTS]
    out8_ptr,  # output: FP8 x for the next matmul, e4m3(x out_scale) [M, C] (see ptx.py); or None
    out_scale_ptr,  # fp32 [C], reciprocal scales, or None
    M, C,
    ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // PARTS * ROWS
    col = tl.program_id(0) % PARTS * _PIECE
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, _PIECE)
    mask = (rows < M)[:, None] & (cols < C)[None, :]
    x = tl.load(x_ptr + (rows.to(tl.int64)[:, None] * C + cols[None, :]), mask=mask, other=0.0)
    mean, squares = piece_statistics(x.to(tl.float32), col, C, _PIECE)
    store_statistics(part_ptr, mean, squares, row, col, M, C, ROWS, PARTS)
    if out8_ptr is not None:
        narrow = divided_columns(x, out_scale_ptr, col, C, _PIECE)
        tl.store(out8_ptr + (rows.to(tl.int64)[:, None] * C + cols[None, :]), narrow, mask=mask)


def layer_norm_statistics_launch(
    x: Tensor, part: Tensor, out8: Tensor | None = None, out_scale: Tensor | None = None
) -> Launch:
    (M, C), parts = x.shape, row_parts(x.shape[1])
    return Launch.of(
        _layer_norm_statistics_kernel, ceil_div(M, _ROWS) * parts, (x, part, out8, out_scale, M, C),
        constants={"ROWS": _ROWS, "PARTS": parts}, device=x.device,
    )  # fmt: skip


@triton.jit
def load_columns(pointer, cols, C, DEFAULT: tl.constexpr):
    """Returns elements `cols` of a vector [C] in fp32, or DEFAULT for each of them if `pointer` is None."""
    if pointer is None:
        return tl.full(cols.shape, DEFAULT, tl.float32)
    else:
        return tl.load(pointer + cols, mask=cols < C, other=0.0).to(tl.float32)


@triton.jit
def load_chunk(pointer, start, cols, mask):
    """Loads columns `cols` of rows as fp32. `start` [ROWS, 1]: offsets of the first elements of these rows."""
    return tl.load(pointer + start + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_chunk(pointer, value, start, cols, mask):
    tl.store(pointer + start + cols[None, :], value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _row_sums(x_ptr, start, inside, mean, C, POWER: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns the sum of (x - mean)^POWER over each row, [ROWS]. A `mean` of None counts as 0."""
    total = tl.zeros((ROWS,), tl.float32)
    for first in tl.range(0, C, BLOCK_C):
        cols = first + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (cols < C)[None, :]
        x = load_chunk(x_ptr, start, cols, mask)
        if mean is not None:
            x = tl.where(mask, x - mean[:, None], 0.0)
        total += tl.sum(x * x if POWER == 2 else x, 1)
    return total


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["rstd_ptr"])
def _normalize_kernel(
    x_ptr,  # [M, C] fp32
    mean_ptr,  # output: fp32 [M], or None
    rstd_ptr,  # output: fp32 [M]
    normalized_ptr,  # output: [M, C]
    M, C, eps,
    RMS: tl.constexpr,  # RMSNorm: mean is 0
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < M
    start = rows.to(tl.int64)[:, None] * C
    mean = tl.zeros((ROWS,), tl.float32)
    if not RMS:
        mean = _row_sums(x_ptr, start, inside, None, C, 1, ROWS, BLOCK_C) / C
        # correct the rounding error of the mean, so that a constant row is normalized to exactly 0
        mean += _row_sums(x_ptr, start, inside, mean, C, 1, ROWS, BLOCK_C) / C
    rstd = tl.math.rsqrt(_row_sums(x_ptr, start, inside, mean, C, 2, ROWS, BLOCK_C) / C + eps)
    tl.store(rstd_ptr + rows, rstd, mask=inside)
    if mean_ptr is not None:
        tl.store(mean_ptr + rows, mean, mask=inside)
    for first in tl.range(0, C, BLOCK_C):
        cols = first + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (cols < C)[None, :]
        normalized = (load_chunk(x_ptr, start, cols, mask) - mean[:, None]) * rstd[:, None]
        store_chunk(normalized_ptr, normalized, start, cols, mask)


def rows_launch(
    kernel: Any, rows: Sequence[int], width: int, values: Sequence[Any], device: torch.device, programs: int = 0,
    maxnreg: int | None = None, **constants: Any,
) -> Launch:  # fmt: skip
    """Returns the launch of a kernel that loops over the columns of matrices; a program computes ROWS rows.

    `rows`: of each matrix. `width`: most columns of a matrix. `values`: see `Launch.of`. `programs`: additional ones.
    """
    block = min(triton.next_power_of_2(width), _MAX_CHUNK)
    count = max(1, 4096 // block // 2)
    programs += sum(ceil_div(each, count) for each in rows)
    constants |= {"ROWS": count, "BLOCK_C": block}
    return Launch.of(kernel, programs, values, constants=constants, maxnreg=maxnreg, device=device)


def normalize_launch(
    x: Tensor, eps: float, rstd: Tensor, normalized: Tensor, rms: bool = False, mean: Tensor | None = None
) -> Launch:
    M, C = x.shape
    return rows_launch(_normalize_kernel, (M,), C, (x, mean, rstd, normalized, M, C, eps), x.device, RMS=rms)


@dataclass(frozen=True)
class NormInput:
    """Input x [M, C] of a folded linear layer, with the statistics and the epsilon of its LayerNorm."""

    source: Tensor  # operand of the matmul: x, or (x - mean) rstd in the dtype of the matmul if x is fp32
    # fp32 x: rstd, fp32 [1, M]. Half-precision x, forward: partial statistics, fp32 [M, 2, row_parts(C)]; backward:
    # mean and rstd (negative for a constant row), fp32 [2, M].
    statistics: Tensor
    eps: float = 0.0  # used in the forward only

    @property
    def part(self) -> Tensor | None:
        return self.statistics if self.statistics.dim() == 3 else None

    @property
    def mean(self) -> Tensor | None:
        return self.statistics[0] if self.statistics.shape[0] == 2 else None

    @property
    def rstd(self) -> Tensor:
        return self.statistics[-1]

    @property
    def input_dtype(self) -> torch.dtype:
        return torch.float32 if self.mean is None else self.source.dtype


def new_statistics(M: int, C: int, device: torch.device) -> Tensor:
    return torch.empty(M, 2, row_parts(C), dtype=torch.float32, device=device)


def norm_input(x: Tensor, eps: float, part: Tensor | None, dtype: torch.dtype, rms: bool = False) -> NormInput:
    """Returns x [M, C] as `NormInput`. Normalizes fp32 x to `dtype`. For other x, computes `part` if it is None."""
    M, C = x.shape
    if x.dtype == torch.float32:
        normalized, rstd = torch.empty_like(x, dtype=dtype), x.new_empty(1, M)
        normalize_launch(x, eps, rstd, normalized, rms).run()
        return NormInput(normalized, rstd, eps)
    if part is None:
        part = new_statistics(M, C, x.device)
        layer_norm_statistics_launch(x, part).run()
    return NormInput(x, part, eps)

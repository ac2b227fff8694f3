"""LayerNorm folded into the linear layer that follows it.

With gamma, beta the affine of the LayerNorm, W [F, C] and b the linear layer, mean and rstd of a row x:

    W'' = W gamma - rowmean(W gamma), rounded to the dtype of x
    s   = rowsum(W''), what the rounding left
    c   = W beta + b
    z   = rstd (x W''^T - mean s) + c          = LayerNorm(x) W^T + b

so that a matmul reads x as it lies and LayerNorm costs two numbers a row in its epilogue. Dropping s would cost 16 %
relative error in bf16 on rows whose mean is 100 times their spread.

Three kernels: the statistics of the rows, the same combined from the partial statistics that the matmul before left
behind (Chan, Golub and LeVeque, 1983), and the preparation of W'', s and c.

Two cases need care:
- fp32 rows, be it that everything is fp32 or that autocast keeps the residual stream so beside half-precision matmuls.
  A product of W'' with x itself would lose what the mean has in excess of the spread, and fp16 cannot hold every x: the
  statistics pass also writes (x - mean) rstd in the dtype of the matmuls, and z = that W''^T + c.
- A constant row of fp16 or bf16, where rstd is 1 / sqrt(eps) and would multiply the rounding noise of mean s - x W''.
  Its rstd is stored negative: the forward takes max(rstd, 0) and so returns c, as LayerNorm does; the backward, whose
  gradient through a constant row is not zero, applies the magnitude where nothing cancels (see `matmul.py`).

Source: LayerNorm, arXiv 1607.06450; the folding is vit-fast's own derivation, checked in fp64 by the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, ceil_div

# A row of fp16 or bf16 is constant or has a spread of at least 2^-11 / sqrt(C) of its mean: far above this.
_CONSTANT_ROW = tl.constexpr(1e-6)
_MAX_CHUNK = 2048


@triton.jit
def _finish_statistics(mean, variance, eps, FLAG_CONSTANT: tl.constexpr):
    """rstd of rows, negative where FLAG_CONSTANT and the row is constant."""
    rstd = tl.math.rsqrt(variance + eps)
    if FLAG_CONSTANT:
        limit = _CONSTANT_ROW * mean
        rstd = tl.where(variance <= limit * limit, -rstd, rstd)
    return rstd


@triton.jit
def _row_statistics_kernel(
    x_ptr,  # [M, C]
    mean_ptr,  # fp32 [M], or None where the rows are written normalised
    rstd_ptr,  # fp32 [M]
    normalised_ptr,  # [M, C] (x - mean) rstd, or None
    M, C, eps,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < M
    start = rows.to(tl.int64)[:, None] * C
    total = tl.zeros((ROWS,), tl.float32)
    for first in tl.range(0, C, BLOCK_C):
        cols = first + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (cols < C)[None, :]
        total += tl.sum(tl.load(x_ptr + start + cols[None, :], mask=mask, other=0.0).to(tl.float32), 1)
    mean = total / C
    if normalised_ptr is not None:
        # what the sum has lost to rounding: a constant row then becomes exact zeros
        left = tl.zeros((ROWS,), tl.float32)
        for first in tl.range(0, C, BLOCK_C):
            cols = first + tl.arange(0, BLOCK_C)
            mask = inside[:, None] & (cols < C)[None, :]
            x = tl.load(x_ptr + start + cols[None, :], mask=mask, other=0.0)
            left += tl.sum(tl.where(mask, x - mean[:, None], 0.0), 1)
        mean += left / C
    squares = tl.zeros((ROWS,), tl.float32)
    for first in tl.range(0, C, BLOCK_C):
        cols = first + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (cols < C)[None, :]
        x = tl.load(x_ptr + start + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        deviation = tl.where(mask, x - mean[:, None], 0.0)
        squares += tl.sum(deviation * deviation, 1)
    rstd = _finish_statistics(mean, squares / C, eps, normalised_ptr is None)
    tl.store(rstd_ptr + rows, rstd, mask=inside)
    if normalised_ptr is None:
        tl.store(mean_ptr + rows, mean, mask=inside)
    else:
        for first in tl.range(0, C, BLOCK_C):
            cols = first + tl.arange(0, BLOCK_C)
            mask = inside[:, None] & (cols < C)[None, :]
            x = tl.load(x_ptr + start + cols[None, :], mask=mask, other=0.0)
            normalised = (x - mean[:, None]) * rstd[:, None]
            tl.store(normalised_ptr + start + cols[None, :], normalised.to(normalised_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _combine_statistics_kernel(
    part_ptr,  # fp32 [parts, 2, M]: mean and sum of squared deviations of PIECE columns each
    mean_ptr,  # fp32 [M]
    rstd_ptr,  # fp32 [M]
    M, C, parts, eps,
    PIECE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < M
    total = tl.zeros((ROWS,), tl.float32)
    for part in tl.range(0, parts):
        count = tl.maximum(tl.minimum(C - part * PIECE, PIECE), 0)
        total += count * tl.load(part_ptr + tl.cast(part, tl.int64) * 2 * M + rows, mask=inside, other=0.0)
    mean = total / C
    squares = tl.zeros((ROWS,), tl.float32)
    for part in tl.range(0, parts):
        count = tl.maximum(tl.minimum(C - part * PIECE, PIECE), 0)
        source = part_ptr + tl.cast(part, tl.int64) * 2 * M + rows
        offset = tl.load(source, mask=inside, other=0.0) - mean
        squares += tl.load(source + M, mask=inside, other=0.0) + count * offset * offset
    rstd = _finish_statistics(mean, squares / C, eps, True)
    tl.store(mean_ptr + rows, mean, mask=inside)
    tl.store(rstd_ptr + rows, rstd, mask=inside)


@triton.jit
def _load_columns(pointer, cols, C, DEFAULT: tl.constexpr):
    """[BLOCK_C] of a vector [C] in fp32; DEFAULT throughout where there is none."""
    if pointer is None:
        return tl.full(cols.shape, DEFAULT, tl.float32)
    else:
        return tl.load(pointer + cols, mask=cols < C, other=0.0).to(tl.float32)


@triton.jit
def _prepare_weight_kernel(
    weight_ptr,  # [F, C]
    gamma_ptr,  # [C] or None
    beta_ptr,  # [C] or None
    bias_ptr,  # [F] or None
    folded_ptr,  # [F, C] W'', in the dtype of x
    sum_ptr,  # fp32 [F] s
    shift_ptr,  # fp32 [F] c
    F, C,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < F
    start = rows.to(tl.int64)[:, None] * C
    total = tl.zeros((ROWS,), tl.float32)
    shift = _load_columns(bias_ptr, rows, F, 0.0)
    for first in tl.range(0, C, BLOCK_C):
        cols = first + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (cols < C)[None, :]
        weight = tl.load(weight_ptr + start + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(weight * _load_columns(gamma_ptr, cols, C, 1.0)[None, :], 1)
        shift += tl.sum(weight * _load_columns(beta_ptr, cols, C, 0.0)[None, :], 1)
    mean = total / C
    left = tl.zeros((ROWS,), tl.float32)
    for first in tl.range(0, C, BLOCK_C):
        cols = first + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (cols < C)[None, :]
        weight = tl.load(weight_ptr + start + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        centred = tl.where(mask, weight * _load_columns(gamma_ptr, cols, C, 1.0)[None, :] - mean[:, None], 0.0)
        folded = centred.to(folded_ptr.dtype.element_ty)
        tl.store(folded_ptr + start + cols[None, :], folded, mask=mask)
        left += tl.sum(folded.to(tl.float32), 1)
    tl.store(sum_ptr + rows, left, mask=inside)
    tl.store(shift_ptr + rows, shift, mask=inside)


@dataclass(frozen=True)
class RowStatistics:
    """What a folded linear layer needs of its input, forward and backward.

    Args:
        source: What the matmuls read, [M, C] in their dtype: x, or (x - mean) rstd where x is fp32.
        statistics: fp32 [2, M], the means of the rows and 1 / sqrt(variance + eps), negative for a constant row; fp32
            [1, M], the latter alone and never negative, where `source` is normalised.
    """

    source: Tensor
    statistics: Tensor

    @property
    def mean(self) -> Tensor | None:
        """Row means fp32 [M]; None where `source` is normalised."""
        return None if is_normalised(self.statistics) else self.statistics[0]

    @property
    def input_dtype(self) -> torch.dtype:
        """The dtype of x: only fp32 rows are normalised beforehand."""
        return torch.float32 if is_normalised(self.statistics) else self.source.dtype

    @property
    def rstd(self) -> Tensor:
        """1 / sqrt(variance + eps) of the rows, fp32 [M]."""
        return self.statistics[-1]


def is_normalised(statistics: Tensor) -> bool:
    """Whether these are the statistics of rows that were normalised beforehand."""
    return statistics.shape[0] == 1


@dataclass(frozen=True)
class FoldedLinear:
    """A linear layer with the LayerNorm before it folded in.

    Args:
        weight: W'' [F, C], the dtype of x.
        weight_sum: s, fp32 [F].
        shift: c, fp32 [F].
    """

    weight: Tensor
    weight_sum: Tensor
    shift: Tensor


def chunk(width: int) -> tuple[int, int]:
    """Columns a step and rows a program of a kernel that reduces rows of this width."""
    block = min(triton.next_power_of_2(width), _MAX_CHUNK)
    return block, max(1, 4096 // block // 2)


def row_statistics_launch(x: Tensor, eps: float, statistics: Tensor, normalised: Tensor | None) -> Launch:
    """Statistics of the rows of x [M, C], as `RowStatistics` has them, and the normalised rows unless None."""
    M, C = x.shape
    block, rows = chunk(C)
    mean = statistics[0] if normalised is None else None
    return Launch(
        _row_statistics_kernel,
        (ceil_div(M, rows),),
        {
            "x_ptr": x,
            "mean_ptr": mean,
            "rstd_ptr": statistics[-1],
            "normalised_ptr": normalised,
            "M": M,
            "C": C,
            "eps": eps,
        },
        {"ROWS": rows, "BLOCK_C": block},
        num_warps=4,
        device=x.device,
    )


def combine_statistics_launch(part: Tensor, piece: int, C: int, eps: float, statistics: Tensor) -> Launch:
    """Partial statistics fp32 [parts, 2, M] of `piece` columns each into those of rows of C columns, fp32 [2, M]."""
    parts, _, M = part.shape
    return Launch(
        _combine_statistics_kernel,
        (ceil_div(M, 128),),
        {
            "part_ptr": part, "mean_ptr": statistics[0], "rstd_ptr": statistics[1],
            "M": M, "C": C, "parts": parts, "eps": eps,
        },
        {"PIECE": piece, "ROWS": 128},
        num_warps=4,
        device=part.device,
    )  # fmt: skip


def prepare_weight_launch(
    weight: Tensor, gamma: Tensor | None, beta: Tensor | None, bias: Tensor | None, folded: FoldedLinear
) -> Launch:
    """Fold a LayerNorm's affine into weight [F, C] and bias [F], into the tensors of `folded`."""
    F, C = weight.shape
    block, rows = chunk(C)
    return Launch(
        _prepare_weight_kernel,
        (ceil_div(F, rows),),
        {
            "weight_ptr": weight, "gamma_ptr": gamma, "beta_ptr": beta, "bias_ptr": bias,
            "folded_ptr": folded.weight, "sum_ptr": folded.weight_sum, "shift_ptr": folded.shift, "F": F, "C": C,
        },
        {"ROWS": rows, "BLOCK_C": block},
        num_warps=4,
        device=weight.device,
    )  # fmt: skip


def row_statistics(x: Tensor, eps: float, known: Tensor | None, dtype: torch.dtype) -> RowStatistics:
    """Statistics of the rows of x.

    Args:
        x: [M, C], contiguous.
        eps: Added to the variance.
        known: (mean, rstd) of half-precision rows, fp32 [2, M], where they are known already; fp32 rows are normalised
            anew.
        dtype: Of the matmuls: that of x, or a half precision beside fp32 x.
    """
    M = x.shape[0]
    if x.dtype != torch.float32:
        if known is None:
            known = torch.empty(2, M, dtype=torch.float32, device=x.device)
            row_statistics_launch(x, eps, known, None).run()
        return RowStatistics(x, known)
    rows = RowStatistics(torch.empty_like(x, dtype=dtype), torch.empty(1, M, dtype=torch.float32, device=x.device))
    row_statistics_launch(x, eps, rows.statistics, rows.source).run()
    return rows


def fold_linear(
    weight: Tensor, gamma: Tensor | None, beta: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> FoldedLinear:
    """Prepare a linear layer, weight [F, C], for inputs of a dtype."""
    weight = weight.contiguous()
    gamma, beta, bias = (vector if vector is None else vector.contiguous() for vector in (gamma, beta, bias))
    sums, shift = (torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device) for _ in range(2))
    folded = FoldedLinear(torch.empty_like(weight, dtype=dtype), sums, shift)
    prepare_weight_launch(weight, gamma, beta, bias, folded).run()
    return folded

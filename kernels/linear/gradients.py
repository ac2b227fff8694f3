"""Backward of linear layers after a LayerNorm or before a residual: the formulas, and the backward of the LayerNorm.

After a LayerNorm, z = n W''^T + c = LayerNorm(x) W^T + b with n = (x - mean) rstd. `folding.py` defines W'' and c. Let
dz be the gradient of z, g = dz W'' the gradient of n, and U = dz^T n. m indexes tokens, j columns of x, f columns of z:

    dx     = rstd (g - mean_j(g) - n mean_j(g * n)); for RMSNorm, without mean_j(g)
    dW     = U diag(gamma) + (sum_m dz) beta^T
    dgamma = sum_f (U * W)
    dbeta  = sum_f (sum_m dz) W
    db     = sum_m dz

For a LayerNorm, mean_j(g) is zero except for rounding errors, because each row of W'' sums to 0. mean_j(g * n) equals
sum_f(dz * (z - c)) / C, because z - c = n W''^T. dx is computed in one of two ways:

- qkv: `_layer_norm_grad_kernel` computes dx from dz W and x, with (dz W) gamma in place of g. (dz W) gamma differs from
  g by a constant per row, which cancels in dx. The kernel also writes n, which U needs.
- fc1: the matmul of `linear.activation_gradient` computes dz, sums dz * (z - c) over f, and stores dz~ = rstd dz.
  `linear.input_gradient` computes dx. U is dz~^T x with the vector sum_m(dz~ * mean) [F] subtracted from each column.

Before a residual, y = r + ls (h W^T + b) with residual r and LayerScale ls. dy is the gradient of y, V = dy^T h, and f
indexes columns of h:

    dW  = diag(ls) V
    dls = sum_f (V * W) + b sum_m dy
    db  = ls sum_m dy

Sums over m need no extra launch: matmul epilogues and extra programs of other kernels write partial sums.
`weight_gradients.py` adds the partial sums in order, and computes the gradients of the parameters.

Source: differentiation of the formulas of z and y.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ceil_div
from ..layer_norm import NormInput, load_chunk, load_columns, rows_launch, store_chunk
from ..matmul.matmul_tiles import READ_AT_ONCE, tile_mask, tile_offsets

SUM_ROWS = 256  # rows per partial sum; in shapes, M / SUM_ROWS is rounded up
_SUM_ROWS = tl.constexpr(SUM_ROWS)
_SUM_COLS = tl.constexpr(128)
_AT_ONCE = tl.constexpr(64)  # partial sums that `add_column_parts` loads at once


@triton.jit
def sum_rows(tile):
    """Returns the column sums of a tile [rows, 32 or 128]; made for four warps, without the bank conflicts of tl.sum.

    Each thread holds some rows of four columns and first sums these rows. Only the sums pass through shared memory.
    """
    COLS: tl.constexpr = tile.shape[1]
    HALVINGS: tl.constexpr = 2 if COLS == 128 else 4
    THREADS: tl.constexpr = 2**HALVINGS  # per column
    tl.static_assert(COLS * THREADS == 512, "a tile has 32 or 128 columns")
    few = tl.sum(tile.reshape(tile.shape[0] // THREADS, THREADS, COLS), 0).trans()
    for i in tl.static_range(HALVINGS):
        left, right = tl.split(few.reshape(COLS, THREADS >> (i + 1), 2))
        few = left + right
    return few.reshape(COLS)


@triton.jit
def column_sum_programs(M, N):
    """Returns the number of programs of `store_column_sums`."""
    return tl.cdiv(M, _SUM_ROWS) * tl.cdiv(N, _SUM_COLS)


@triton.jit
def store_column_sums(source_ptr, part_ptr, program, M, N):
    """Adds up to SUM_ROWS rows of `source` [M, N] in 128 columns. Stores the sum in `part`, fp32 [M / SUM_ROWS, N]."""
    tiles = tl.cdiv(N, _SUM_COLS)
    part = program // tiles
    col = program % tiles * _SUM_COLS
    cols = col + tl.arange(0, _SUM_COLS)
    total = tl.zeros((16, _SUM_COLS), tl.float32)
    for row in tl.range(part * _SUM_ROWS, min(M, part * _SUM_ROWS + _SUM_ROWS), 16):
        offsets = tile_offsets(row, col, N, 16, _SUM_COLS, READ_AT_ONCE)
        total += tl.load(source_ptr + offsets, mask=tile_mask(row, col, M, N, 16, _SUM_COLS), other=0.0).to(tl.float32)
    tl.store(part_ptr + part.to(tl.int64) * N + cols, sum_rows(total), mask=cols < N)


def new_column_sums(source: Tensor) -> Tensor:
    """Allocates the partial sums of `source` [M, N] over rows."""
    M, N = source.shape
    return torch.empty(ceil_div(M, SUM_ROWS), N, dtype=torch.float32, device=source.device)


def column_sum_tiles(source: Tensor) -> int:
    """Returns the number of programs of `store_column_sums`, on the host."""
    M, N = source.shape
    return ceil_div(M, SUM_ROWS) * ceil_div(N, _SUM_COLS.value)


@triton.jit
def add_column_parts(part_ptr, parts, stride, col, N, COLS: tl.constexpr):
    """Adds columns [col, col + COLS) of `parts` fp32 vectors [N], which start `stride` elements apart.

    Returns a tile [64, COLS], which the caller must sum over axis 0.
    """
    cols = col + tl.arange(0, COLS)
    total = tl.zeros((_AT_ONCE, COLS), tl.float32)
    for first in tl.range(0, parts, _AT_ONCE):
        part = first + tl.arange(0, _AT_ONCE)
        mask = (part < parts)[:, None] & (cols < N)[None, :]
        pointers = part_ptr + (part.to(tl.int64)[:, None] * stride + cols[None, :])
        total += tl.load(pointers, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["rstd_ptr"])
def _layer_norm_grad_kernel(
    grad_ptr,  # [M, C] dz W
    gamma_ptr,  # [C] or None
    source_ptr,  # [M, C] x; n if mean_ptr is None
    mean_ptr,  # fp32 [M], or None if x was normalized before the matmul
    rstd_ptr,  # fp32 [M]; negative for a constant row (layer_norm.py)
    residual_ptr,  # [M, C] or None
    out_ptr,  # output: [residual +] dx, [M, C]
    normalized_ptr,  # output: [M, C] n; None if mean_ptr is None
    summed_ptr,  # [M, F] dz
    sum_part_ptr,  # output: fp32 [M / SUM_ROWS, F], partial sums of dz over M
    M, C, F,
    RMS: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sums = column_sum_programs(M, F)
    if program < sums:
        store_column_sums(summed_ptr, sum_part_ptr, program, M, F)
    else:
        rows = (program - sums) * ROWS + tl.arange(0, ROWS)
        inside = rows < M
        start = rows.to(tl.int64)[:, None] * C
        rstd = tl.load(rstd_ptr + rows, mask=inside, other=0.0)
        shift = tl.zeros((ROWS,), tl.float32)
        scale = tl.full((ROWS,), 1.0, tl.float32)
        if mean_ptr is not None:
            shift = tl.load(mean_ptr + rows, mask=inside, other=0.0)
            scale = tl.maximum(rstd, 0.0)
        total = tl.zeros((ROWS,), tl.float32)
        along = tl.zeros((ROWS,), tl.float32)
        for first in tl.range(0, C, BLOCK_C):
            cols = first + tl.arange(0, BLOCK_C)
            mask = inside[:, None] & (cols < C)[None, :]
            grad = load_chunk(grad_ptr, start, cols, mask) * load_columns(gamma_ptr, cols, C, 1.0)[None, :]
            normalized = (load_chunk(source_ptr, start, cols, mask) - shift[:, None]) * scale[:, None]
            total += tl.sum(grad, 1)
            along += tl.sum(grad * normalized, 1)
        total /= C
        if RMS:
            total = tl.zeros((ROWS,), tl.float32)
        along /= C
        for first in tl.range(0, C, BLOCK_C):
            cols = first + tl.arange(0, BLOCK_C)
            mask = inside[:, None] & (cols < C)[None, :]
            grad = load_chunk(grad_ptr, start, cols, mask) * load_columns(gamma_ptr, cols, C, 1.0)[None, :]
            normalized = (load_chunk(source_ptr, start, cols, mask) - shift[:, None]) * scale[:, None]
            if mean_ptr is not None:
                store_chunk(normalized_ptr, normalized, start, cols, mask)
            # tl.fma with 0 rounds the product; `*` would be fused with the addition below, without rounding
            dx = tl.fma(tl.abs(rstd)[:, None], grad - total[:, None] - normalized * along[:, None], 0.0)
            dx = dx.to(out_ptr.dtype.element_ty)
            if residual_ptr is not None:  # add rounded values, as autograd adds the gradients of two branches
                dx = dx.to(tl.float32) + load_chunk(residual_ptr, start, cols, mask)
            store_chunk(out_ptr, dx, start, cols, mask)


def layer_norm_gradient(
    grad: Tensor, gamma: Tensor | None, x: NormInput, residual: Tensor | None, summed: Tensor,
    rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns [residual +] dx, n in the dtype of the matmuls, and partial sums of dz over M. grad: dz W. summed: dz."""
    (M, C), F = grad.shape, summed.shape[1]
    out = torch.empty_like(grad, dtype=x.input_dtype)
    normalized = None if x.mean is None else torch.empty_like(x.source)
    sum_part = new_column_sums(summed)
    values = grad, gamma, x.source, x.mean, x.rstd, residual, out, normalized, summed, sum_part, M, C, F
    rows_launch(_layer_norm_grad_kernel, (M,), C, values, grad.device, column_sum_tiles(summed), RMS=rms).run()
    return out, x.source if normalized is None else normalized, sum_part

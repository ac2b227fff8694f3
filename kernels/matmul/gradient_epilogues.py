"""Backward epilogues of `matmul.py`. acc = A B [scale]; mean and rstd are the statistics of x, the LayerNorm's input:

    "activation_grad": h = act(z),  dz = acc act'(z),  out = rstd dz
    "gated_grad":      h = act(g) u (`forward_epilogues.py`); z, dz and out are [M, 2 N]
    "layer_norm_grad": out = [residual +] acc - (x - mean) * coefficient; h, if given, is a copy of out in A's dtype
                       coefficient = rstd^2 / N * sum(dz (z - bias)) over the columns of z

In "activation_grad" and "gated_grad", acc is the gradient of h. These epilogues also store partial sums: dz (z - bias)
per row, and dz and out * mean per column. Three cases differ from the formulas:

- A row of x is constant (rstd < 0, see `layer_norm.py`): "activation_grad" and "gated_grad" use 1 in place of rstd. A
  large rstd would amplify rounding errors of the weight gradient. "layer_norm_grad" multiplies acc by |rstd| instead.
- The input was fp32. x is then n, the normalized input (`layer_norm.py`); "activation_grad" and "gated_grad" use 1 for
  rstd. "layer_norm_grad" computes out = [residual +] rstd * acc - n * coefficient; coefficient has rstd, not rstd^2.
- A norm of h follows (`hidden_norm.py`): acc is the gradient of h^, the normalized h. The formulas then use the
  gradient of h, |rstd of h| (acc - h^ * along), in place of acc. `along` is the mean of acc h^ over a row. The epilogue
  stores h^, not h.

`where` and SHAPE are as in `forward_epilogues.py`. `linear/gradients.py` explains the formulas.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..activations import activate_with_slope
from ..ptx import in_layout_of, rounded
from .matmul_tiles import load_rows, load_tile, store_tile, sum_row_parts


@triton.jit
def activation_row_factors(mean_ptr, rstd_ptr, row, M, ROWS: tl.constexpr):
    """Returns (rstd, mean) for "activation_grad" and "gated_grad"; see the first two cases above."""
    rstd = tl.full((ROWS,), 1.0, tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    if mean_ptr is not None:
        rstd = load_rows(rstd_ptr, row, M, ROWS)
        rstd = tl.where(rstd < 0.0, 1.0, rstd)
        mean = load_rows(mean_ptr, row, M, ROWS)
    return rstd, mean


@triton.jit
def layer_norm_row_factors(mean_ptr, rstd_ptr, row_part_ptr, row, M, N, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Returns (factor of acc, mean, coefficient) for "layer_norm_grad"."""
    scale = load_rows(rstd_ptr, row, M, ROWS)
    mean = tl.zeros((ROWS,), tl.float32)
    coefficient = sum_row_parts(row_part_ptr, row, M, ROWS, PARTS) * scale / N
    if mean_ptr is not None:
        coefficient *= scale
        scale = tl.where(scale < 0.0, -scale, 1.0)
        mean = load_rows(mean_ptr, row, M, ROWS)
    return scale, mean, coefficient


@triton.jit
def _through_norm(acc, hidden, statistics_ptr, along_ptr, where, SHAPE: tl.constexpr):
    """Returns the gradient of h, and h^. `hidden` is h, and `acc` the gradient of h^."""
    row, col, M, N = where
    ROWS: tl.constexpr = SHAPE[0]
    mean = load_rows(statistics_ptr, row, M, ROWS)
    rstd = load_rows(statistics_ptr + M, row, M, ROWS)
    along = load_rows(along_ptr, row, M, ROWS)
    inside = (col + tl.arange(0, SHAPE[1]) < N)[None, :]
    hidden = tl.where(inside, hidden.to(SHAPE[3]).to(tl.float32) - mean[:, None], 0.0)
    normalized = hidden * tl.maximum(rstd, 0.0)[:, None]
    return (acc - normalized * along[:, None]) * tl.abs(rstd)[:, None], normalized


@triton.jit
def activation_grad_epilogue(
    acc, out, z, h, bias_ptr, scale_ptr, row_part_ptr, column_part_ptr, hidden_ptr, along_ptr, factors, where,
    SHAPE: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, col, M, N = where
    rstd, mean = factors
    ROWS: tl.constexpr = SHAPE[0]
    COLS: tl.constexpr = SHAPE[1]
    TMA: tl.constexpr = SHAPE[2]
    DTYPE: tl.constexpr = SHAPE[3]
    WIDER: tl.constexpr = 2 if GATED else 1
    COLS_Z: tl.constexpr = WIDER * COLS
    wide = WIDER * col
    cols = wide + tl.arange(0, COLS_Z)
    rows = row + tl.arange(0, ROWS)
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr)
    anchor = tl.join(acc, acc).reshape(ROWS, COLS_Z) if GATED else acc
    pre = load_tile(z, row, wide, M, WIDER * N, ROWS, COLS_Z, TMA and EARLY == 0)
    # otherwise, the compiler would compute the activation twice, in the layouts of acc and of h
    pre = in_layout_of(pre.to(tl.float32), anchor)
    if GATED:
        gate, up = tl.split(pre.reshape(ROWS, COLS, 2))
        value, slope = activate_with_slope(gate, ACTIVATION, DTYPE == tl.float32)
        if along_ptr is not None:
            acc, hidden = _through_norm(acc, value * up, hidden_ptr, along_ptr, where, SHAPE)
        grad = tl.join(acc * up * slope, acc * value).reshape(ROWS, COLS_Z)
        value *= up
    else:
        value, slope = activate_with_slope(pre, ACTIVATION, DTYPE == tl.float32)
        if along_ptr is not None:
            acc, hidden = _through_norm(acc, value, hidden_ptr, along_ptr, where, SHAPE)
    if h is not None:
        if along_ptr is not None:
            value = hidden
        store_tile(h, value.to(DTYPE), row, col, M, N, ROWS, COLS, TMA)
    if not GATED:  # after h is stored: the kernel then needs 178 registers instead of 236
        grad = acc * slope
    width = WIDER * N
    bias = tl.load(bias_ptr + cols, mask=cols < width, other=0.0)
    # grad is 0 in rows past M and columns past N, so pre - bias may have any finite value there
    along_row = tl.sum(grad * (pre - bias[None, :]), 1)
    part = row_part_ptr + tl.cast(row, tl.int64) * PARTS + col // COLS + tl.arange(0, ROWS) * PARTS
    tl.store(part, along_row, mask=(rows < M) & (col < N))
    scaled = rounded(grad * rstd[:, None], DTYPE)
    store_tile(out, scaled, row, wide, M, width, ROWS, COLS_Z, TMA)
    # for out * mean, sum rounded values, because the matmul of the weight gradient reads rounded values
    along_column = tl.sum(grad, 0)
    shifted = tl.sum(scaled.to(tl.float32) * mean[:, None], 0)
    parts = column_part_ptr + tl.cast(row // ROWS, tl.int64) * (2 * width) + cols
    tl.store(parts, along_column, mask=cols < width)
    tl.store(parts + width, shifted, mask=cols < width)


@triton.jit
def layer_norm_grad_epilogue(acc, out, h, x, residual, factors, where, SHAPE: tl.constexpr, EARLY: tl.constexpr):
    row, col, M, N = where
    scale, mean, coefficient = factors
    ROWS: tl.constexpr = SHAPE[0]
    COLS: tl.constexpr = SHAPE[1]
    TMA: tl.constexpr = SHAPE[2]
    value = load_tile(x, row, col, M, N, ROWS, COLS, TMA and EARLY == 0)
    if residual is not None and TMA and EARLY > 0:  # x and residual are pointers: load both at once
        addend = load_tile(residual, row, col, M, N, ROWS, COLS, False)
    acc = acc * scale[:, None] - (value.to(tl.float32) - mean[:, None]) * coefficient[:, None]
    if residual is not None:
        if not (TMA and EARLY > 0):
            addend = load_tile(residual, row, col, M, N, ROWS, COLS, TMA)
        acc += addend.to(tl.float32)
    store_tile(out, acc.to(SHAPE[3]), row, col, M, N, ROWS, COLS, TMA)
    if h is not None:
        store_tile(h, acc.to(h.dtype if TMA else h.dtype.element_ty), row, col, M, N, ROWS, COLS, TMA)

"""Backward epilogues of `matmul.py`, which describes their parameters. acc = A B. x is the input of a LayerNorm.

A function NAME_epilogue follows each device function, and gives the shapes of its matrices and arguments.

`statistics` contains mean and rstd of the rows of x. If x was fp32, x is the normalized input n (`layer_norm.py`), and
`statistics` contains only rstd. rstd is negative for a constant row of x. `linear/gradients.py` explains the formulas.

Under autocast, the residual stream (out, x and residual of `layer_norm_grad`) may be fp32, while A and B are half
precision.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..activations import activate_with_slope
from ..ptx import in_layout_of, rounded
from .matmul_launch import Epilogue, MatmulConfig
from .matmul_tiles import dtype_of, load_rows, load_tile, store_tile, sum_row_parts

# --- dz = acc scale act'(z): backward of a linear layer, and of the activation (and the gate) before it ---


@triton.jit
def _activation_row_factors(statistics_ptr, row, M, ROWS: tl.constexpr):
    """Returns (rstd, mean). rstd is 1 without statistics, and in a constant row."""
    rstd = tl.full((ROWS,), 1.0, tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    if statistics_ptr is not None:
        rstd = load_rows(statistics_ptr + M, row, M, ROWS)
        rstd = tl.where(rstd < 0.0, 1.0, rstd)
        mean = load_rows(statistics_ptr, row, M, ROWS)
    return rstd, mean


@triton.jit
def _load_z(z, acc, row, col, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    # otherwise, the compiler would compute the activation twice, in the layouts of acc and of h
    return in_layout_of(load_tile(z, row, col, M, N, ROWS, COLS, TMA).to(tl.float32), acc)


@triton.jit
def _through_norm(acc, hidden, statistics_ptr, along_ptr, row, col, M, N, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """Returns the gradient of h, and h^. `hidden` is h, and `acc` the gradient of h^."""
    mean = load_rows(statistics_ptr, row, M, ROWS)
    rstd = load_rows(statistics_ptr + M, row, M, ROWS)
    along = load_rows(along_ptr, row, M, ROWS)
    inside = (col + tl.arange(0, hidden.shape[1]) < N)[None, :]
    hidden = tl.where(inside, hidden.to(DTYPE).to(tl.float32) - mean[:, None], 0.0)
    normalized = hidden * tl.maximum(rstd, 0.0)[:, None]
    return (acc - normalized * along[:, None]) * tl.abs(rstd)[:, None], normalized


@triton.jit
def _store_gradient(
    dz, z, out, bias_ptr, row_part_ptr, column_part_ptr, factors, row, col, M, N,
    INDEX, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Stores a sub-tile of out = rstd dz, and its sums: dz (z - bias) per row, and dz and out * mean per column.

    INDEX: number of the sub-tile in its row.
    """
    rstd, mean = factors
    DTYPE: tl.constexpr = dtype_of(out, TMA)
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
    # dz is 0 in rows past M and columns past N, so z - bias may have any finite value there
    along_row = tl.sum(dz * (z - bias[None, :]), 1)
    part = row_part_ptr + tl.cast(row, tl.int64) * PARTS + INDEX + tl.arange(0, ROWS) * PARTS
    tl.store(part, along_row, mask=(rows < M) & (col < N))
    scaled = rounded(dz * rstd[:, None], DTYPE)
    store_tile(out, scaled, row, col, M, N, ROWS, COLS, TMA)
    # for out * mean, sum rounded values, because the matmul of the weight gradient reads rounded values
    along_column = tl.sum(dz, 0)
    shifted = tl.sum(scaled.to(tl.float32) * mean[:, None], 0)
    parts = column_part_ptr + tl.cast(row // ROWS, tl.int64) * (2 * N) + cols
    tl.store(parts, along_column, mask=cols < N)
    tl.store(parts + N, shifted, mask=cols < N)


@triton.jit
def activation_grad(
    sub_tiles, matrices, arguments, settings, where, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr
):
    """h = act(z), dz = acc act'(z), out = rstd dz.

    With a gate, columns 2j and 2j + 1 of z are g and u; h = act(g) u, and dz = (acc act'(g) u, acc act(g)).
    settings: (PARTS of row_part, activation, True with a gate, True to load z early).
    """
    out, z, h, _ = matrices
    scale_ptr, bias_ptr, statistics_ptr, row_part_ptr, column_part_ptr, hidden_ptr, along_ptr = arguments
    row, col, M, N, _, _ = where
    DTYPE: tl.constexpr = dtype_of(out, TMA)
    GATED: tl.constexpr = settings[2]
    WIDTH: tl.constexpr = 2 if GATED else 1  # columns of z per column of h
    factors = _activation_row_factors(statistics_ptr, row, M, ROWS)
    for i in tl.static_range(len(sub_tiles)):
        start = col + i * COLS
        grad = sub_tiles[i]
        if scale_ptr is not None:
            grad *= tl.load(scale_ptr)
        anchor = tl.join(grad, grad).reshape(ROWS, 2 * COLS) if GATED else grad
        pre = _load_z(z, anchor, row, WIDTH * start, M, WIDTH * N, ROWS, WIDTH * COLS, TMA and not settings[3])
        if GATED:
            gate, up = tl.split(pre.reshape(ROWS, COLS, 2))
            value, slope = activate_with_slope(gate, settings[1], DTYPE == tl.float32)
            hidden = value * up
        else:
            value, slope = activate_with_slope(pre, settings[1], DTYPE == tl.float32)
            hidden = value
        if along_ptr is not None:
            grad, hidden = _through_norm(grad, hidden, hidden_ptr, along_ptr, row, start, M, N, ROWS, DTYPE)
        # store h before dz is computed: without a gate, the kernel then needs 178 registers instead of 236
        store_tile(h, hidden.to(DTYPE), row, start, M, N, ROWS, COLS, TMA)
        dz = tl.join(grad * up * slope, grad * value).reshape(ROWS, 2 * COLS) if GATED else grad * slope
        _store_gradient(
            dz, pre, out, bias_ptr, row_part_ptr, column_part_ptr, factors, row, WIDTH * start, M, WIDTH * N,
            start // COLS, ROWS, WIDTH * COLS, TMA, settings[0],
        )  # fmt: skip


def activation_grad_epilogue(
    out: Tensor,  # [M, N]; with a gate, out, z, bias and column_part have 2 N columns
    z: Tensor,  # [M, N]
    h: Tensor,  # output: [M, N]
    bias: Tensor,  # fp32 [N]
    statistics: Tensor | None = None,  # of x, fp32 [2, M]; None if x is normalized
    scale: Tensor | None = None,  # fp32 vector, of which the epilogue uses the first element
    hidden: Tensor | None = None,  # mean and rstd of h, fp32 [2, M]
    along: Tensor | None = None,  # fp32 [M], the mean over N of h^ * (gradient of h^)
    activation: str = "gelu",
    gated: bool = False,
    row_part: Tensor | None = None,  # output: fp32 [M, sub-tiles of N], partial sums of dz (z - bias)
    column_part: Tensor | None = None,  # output: fp32 [M / block_m, 2, N], partial sums of dz and of out * mean
) -> Epilogue:
    """For a constant row of x, 1 replaces rstd, because a large rstd would amplify rounding errors.

    If a norm of h follows (`linear/hidden_norm.py`), acc scale is the gradient of h^, the normalized h. The formulas
    then use the gradient of h, |rstd of h| (acc scale - h^ * along), in its place. The epilogue stores h^, not h.
    """

    def early(a: Tensor, config: MatmulConfig) -> int:
        # with gelu_tanh, the widest tiles leave no registers for early loads
        return int(a.element_size() == 2 and not (activation == "gelu_tanh" and config.block_n == 256))

    return Epilogue(
        "gated_grad" if gated else "activation_grad", activation_grad, (out, z, h),
        (scale, bias, statistics, row_part, column_part, hidden, along),
        (0 if row_part is None else row_part.shape[-1], activation, gated), activation=activation,
        instructions=54 if gated else 35, early=early, by_pointer=(1,),
        largest=2**31 if along is None else 128 * 128,  # larger tiles would spill
    )  # fmt: skip


# --- dx = [residual +] acc - (x - mean) coefficient: backward of a linear layer, and of the LayerNorm before it ---


@triton.jit
def layer_norm_grad(
    sub_tiles, matrices, arguments, settings, where, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr
):
    """coefficient = rstd^2 / N * sum(dz (z - bias)) over the columns of z, except for two cases below.

    settings: (PARTS of row_part, True if x is normalized, EARLY).
    """
    out, x, residual, narrow = matrices
    statistics_ptr, row_part_ptr = arguments
    row, col, M, N, _, _ = where
    EARLY: tl.constexpr = settings[2]
    NORMALIZED: tl.constexpr = settings[1]
    scale = load_rows(statistics_ptr if NORMALIZED else statistics_ptr + M, row, M, ROWS)
    mean = tl.zeros((ROWS,), tl.float32)
    coefficient = sum_row_parts(row_part_ptr, row, M, ROWS, settings[0]) * scale / N
    if not NORMALIZED:
        coefficient *= scale
        scale = tl.where(scale < 0.0, -scale, 1.0)
        mean = load_rows(statistics_ptr, row, M, ROWS)
    for i in tl.static_range(len(sub_tiles)):
        start = col + i * COLS
        value = load_tile(x, row, start, M, N, ROWS, COLS, TMA and not EARLY)
        if residual is not None and TMA and EARLY:  # x and residual are pointers: load both at once
            addend = load_tile(residual, row, start, M, N, ROWS, COLS, False)
        dx = sub_tiles[i] * scale[:, None] - (value.to(tl.float32) - mean[:, None]) * coefficient[:, None]
        if residual is not None:
            if not (TMA and EARLY):
                addend = load_tile(residual, row, start, M, N, ROWS, COLS, TMA)
            dx += addend.to(tl.float32)
        store_tile(out, dx.to(dtype_of(out, TMA)), row, start, M, N, ROWS, COLS, TMA)
        if narrow is not None:
            store_tile(narrow, dx.to(dtype_of(narrow, TMA)), row, start, M, N, ROWS, COLS, TMA)


def layer_norm_grad_epilogue(
    out: Tensor,  # [M, N], half precision or fp32
    x: Tensor,  # [M, N], in the dtype of A if x is normalized, else in the dtype of out
    statistics: Tensor,  # fp32 [2, M]; [1, M] if x is normalized
    row_part: Tensor,  # fp32 [M, parts], from `activation_grad`
    residual: Tensor | None = None,  # [M, N], in the dtype of out
    narrow: Tensor | None = None,  # output: a copy of out in another dtype, [M, N]
) -> Epilogue:
    """For a constant row of x, the factor of acc is |rstd|, because `activation_grad` did not multiply by rstd.

    If x is normalized, out = [residual +] rstd acc - x coefficient, and coefficient has rstd, not rstd^2.
    """
    early = int(x.element_size() == 2 and narrow is None)
    return Epilogue(
        "layer_norm_grad", layer_norm_grad, (out, x, residual, narrow), (statistics, row_part),
        (row_part.shape[-1], statistics.shape[0] == 1), instructions=11, early=lambda *_: early, by_pointer=(1, 2),
    )  # fmt: skip

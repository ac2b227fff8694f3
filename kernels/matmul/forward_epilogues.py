"""Forward epilogues of `matmul.py`. acc is A B; mean and rstd are the LayerNorm statistics of a row of A:

    z = rstd (acc scale - mean weight_sum) + bias
    "layer_norm":        out = act(z)
    "rotary", "qk_norm": out = z, with norms and rotary embeddings of the heads of q and k (`rotary.py`)
    "gated":             out = act(g) u, half as wide; columns 2j and 2j + 1 of z are g and u (`folding.py`)
    "residual":          out = [residual +] [scale] (acc + bias)

weight_sum contains the sums over K of a weight with a folded norm (s in `folding.py`). With such a weight,
"residual" uses rstd (acc - mean weight_sum) in place of acc. Norms of q and k read z in fp32, before any rounding.
"layer_norm" and "gated" can store out in e4m3, times a reciprocal scale (`out_scale_ptr`, see `ptx.py`).

In z, `scale` contains the row scales of an e4m3 weight [N, K]. In "residual", `scale` is LayerScale, times the row
scales of an e4m3 weight. `bias` must then be divided by the row scales, because `scale` also multiplies `bias`.

`where` is (row, column, M, N): start of a sub-tile, size of A B. SHAPE is (sub-tile rows, columns, TMA, stored dtype).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..activations import activate
from ..layer_norm import combine_statistics
from ..ptx import divided, rounded
from ..rotary import normed_pairs
from .matmul_tiles import store_tile


@triton.jit
def row_factors(
    row_part_ptr, mean_ptr, rstd_ptr, row, M, K, eps, first_column,
    ROWS: tl.constexpr, PARTS: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    """Returns (r, -r * mean), or (1, 0) if row_part_ptr is None.

    r is rstd, or 0 for a constant row, which `combine_statistics` marks by a negative rstd.
    """
    scale = tl.full((ROWS,), 1.0, tl.float32)
    shift = tl.zeros((ROWS,), tl.float32)
    if row_part_ptr is not None:
        mean, rstd = combine_statistics(row_part_ptr, row, M, K, eps, ROWS, PARTS, RMS)
        scale = tl.maximum(rstd, 0.0)
        shift = -scale * mean
        if mean_ptr is not None:
            rows = row + tl.arange(0, ROWS)
            once = (rows < M) & first_column
            tl.store(mean_ptr + rows, mean, mask=once)
            tl.store(rstd_ptr + rows, rstd, mask=once)
    return scale, shift


@triton.jit
def normed(acc, weight_sum_ptr, scale_ptr, factors, where, COLS: tl.constexpr):
    """Returns z - bias; `factors` are from `row_factors`."""
    col, N = where[1], where[3]
    cols = col + tl.arange(0, COLS)
    value = acc * factors[0][:, None]
    if scale_ptr is not None:
        value *= tl.load(scale_ptr + cols, mask=cols < N, other=0.0)[None, :]
    if weight_sum_ptr is not None:
        value += factors[1][:, None] * tl.load(weight_sum_ptr + cols, mask=cols < N, other=0.0)[None, :]
    return value


@triton.jit
def _normed_columns(value, heads, which, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """Normalizes a head of q (which = 0) or of k, [ROWS, HEAD]."""
    weights, biases, eps, _, _, _, _ = heads
    HEAD: tl.constexpr = HEADS[0]
    first, second = tl.split(value.reshape(ROWS, HEAD // 2, 2))
    pairs = tl.arange(0, HEAD // 2)[None, :]
    first, second = normed_pairs(
        first, second, weights, biases, which, 0, pairs, pairs < HEAD // 2, eps, 1, HEAD, HEADS[1], False, not HEADS[2],
    )  # fmt: skip
    return tl.join(first, second).reshape(ROWS, HEAD)


@triton.jit
def _rotated_columns(value, heads, where, ROWS: tl.constexpr, COLS: tl.constexpr, HEADS: tl.constexpr):
    """Rotates pairs of adjacent columns of q and k by the angles of each token."""
    _, _, _, tables, tokens, prefix, image_rows = heads
    row, col, M, N = where
    HEAD: tl.constexpr = HEADS[0]
    rows = row + tl.arange(0, ROWS)
    pairs = col // 2 + tl.arange(0, COLS // 2)
    position = rows % tokens - prefix
    line = (rows // tokens).to(tl.int64) * image_rows + position
    offsets = line[:, None] * HEADS[3] + (pairs % (HEAD // 2) * HEADS[4])[None, :]
    inside = ((rows < M) & (position >= 0))[:, None] & (pairs < N // 3)[None, :]
    cos = tl.load(tables[0] + offsets, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(tables[1] + offsets, mask=inside, other=0.0).to(tl.float32)
    first, second = tl.split(value.reshape(ROWS, COLS // 2, 2))
    return tl.join(first * cos - second * sin, second * cos + first * sin).reshape(ROWS, COLS)


@triton.jit
def layer_norm_epilogue(
    acc, out, z, weight_sum_ptr, bias_ptr, scale_ptr, out_scale_ptr, factors, heads, where,
    SHAPE: tl.constexpr, HEADS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Stores out, and z if z is not None. Returns out in the stored dtype.

    heads: (norm_weights, norm_biases, qk_eps, tables, tokens, prefix, image_rows) of `_matmul_kernel`.
    HEADS: (HEAD, NORM, HALVES, ROW_STEP, PAIR_STEP) of `_matmul_kernel`.
    """
    row, col, M, N = where
    ROWS: tl.constexpr = SHAPE[0]
    COLS: tl.constexpr = SHAPE[1]
    TMA: tl.constexpr = SHAPE[2]
    DTYPE: tl.constexpr = SHAPE[3]
    cols = col + tl.arange(0, COLS)
    value = normed(acc, weight_sum_ptr, scale_ptr, factors, where, COLS)
    value += tl.load(bias_ptr + cols, mask=cols < N, other=0.0)[None, :]
    if HEADS[1] != "none":
        if col < 2 * (N // 3):
            value = _normed_columns(value, heads, col // (N // 3), ROWS, HEADS)
    if heads[3][0] is not None:
        if col < 2 * (N // 3):
            value = _rotated_columns(value, heads, where, ROWS, COLS, HEADS)
    if z is not None:
        # apply the activation to the rounded z, as the backward does
        stored = rounded(value, DTYPE)
        store_tile(z, stored, row, col, M, N, ROWS, COLS, TMA)
        value = stored.to(tl.float32)
    if GATED:
        gate, up = tl.split(value.reshape(ROWS, COLS // 2, 2))
        value = divided(activate(gate, ACTIVATION, DTYPE == tl.float32) * up, out_scale_ptr)
        stored = value.to(DTYPE)
        store_tile(out, stored, row, col // 2, M, N // 2, ROWS, COLS // 2, TMA)
    else:
        stored = divided(activate(value, ACTIVATION, DTYPE == tl.float32), out_scale_ptr).to(DTYPE)
        store_tile(out, stored, row, col, M, N, ROWS, COLS, TMA)
    return stored


@triton.jit
def residual_epilogue(acc, out, z, addend, bias_ptr, scale_ptr, where, SHAPE: tl.constexpr):
    """Stores out, and acc in z if z is not None. Returns out in the stored dtype."""
    row, col, M, N = where
    ROWS: tl.constexpr = SHAPE[0]
    COLS: tl.constexpr = SHAPE[1]
    TMA: tl.constexpr = SHAPE[2]
    DTYPE: tl.constexpr = SHAPE[3]
    cols = col + tl.arange(0, COLS)
    if z is not None:
        store_tile(z, acc.to(DTYPE), row, col, M, N, ROWS, COLS, TMA)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if addend is not None:
        acc += addend.to(tl.float32)
    value = rounded(acc, DTYPE)
    store_tile(out, value, row, col, M, N, ROWS, COLS, TMA)
    return value

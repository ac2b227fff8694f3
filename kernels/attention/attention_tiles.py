"""Device helpers of the attention kernels: loads, stores and matmuls of tiles of one head.

A tile holds ROWS rows of one head, [ROWS, D]. Triton's blocks have power-of-two sizes. A tile is therefore a tuple of
one or two blocks, LO and HI columns wide (80 = 64 + 16). One block of 128 columns would need more loads and MMA.

Tensors [B, H, N, D] with arbitrary strides and last stride 1 are accessed through TMA descriptors or pointers. Related
arguments are grouped:

- source, target: (descriptor or pointer of the LO block, of the HI block, image, head, strides of images, heads, rows).
  Strides are in units of ALIGN elements: multiplying by this constant shows the compiler that rows are aligned.
- FORM: (D, LO, HI, WIDE, ALIGN). HI: 0 if there is no second block. WIDE: offsets within a tile need int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TF32 = tl.constexpr("tf32")  # triton 3.6 fails if the default of an argument is a string


@triton.jit
def _pointers(source, start, COLUMN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, FORM: tl.constexpr):
    """Returns pointers [ROWS, COLS] to a block; the offset of the tile is int64."""
    pointer, _, b, h, stride_b, stride_h, stride_n = source
    WIDE: tl.constexpr = FORM[3]
    ALIGN: tl.constexpr = FORM[4]
    row = tl.arange(0, ROWS)
    if WIDE:
        row = row.to(tl.int64)
    offsets = row[:, None] * stride_n * ALIGN + (COLUMN + tl.arange(0, COLS))[None, :]
    pointer += (tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h) * ALIGN
    return pointer + (tl.cast(start, tl.int64) * stride_n * ALIGN + offsets)


@triton.jit
def _mask(start, n_rows, COLUMN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr):
    """Returns a mask [ROWS, COLS] of a block, True for elements with row < n_rows and column < D."""
    mask = (start + tl.arange(0, ROWS))[:, None] < n_rows
    if COLUMN + COLS > D:
        mask = mask & ((COLUMN + tl.arange(0, COLS))[None, :] < D)
    return mask


@triton.jit
def _load_block(
    source, start, n_rows, INDEX: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Loads the LO (INDEX 0) or HI (INDEX 1) block of a tile; see `load_tile`."""
    D: tl.constexpr = FORM[0]
    COLS: tl.constexpr = FORM[1 + INDEX]
    COLUMN: tl.constexpr = INDEX * FORM[1]
    if TMA:
        block = source[INDEX].load([source[2], source[3], start, COLUMN]).reshape(ROWS, COLS)
    else:
        pointers = _pointers(source, start, COLUMN, ROWS, COLS, FORM)
        if MASKED:
            block = tl.load(pointers, mask=_mask(start, n_rows, COLUMN, ROWS, COLS, D), other=0.0)
        elif COLUMN + COLS > D:
            block = tl.load(pointers, mask=(COLUMN + tl.arange(0, COLS))[None, :] < D, other=0.0)
        else:
            block = tl.load(pointers)
    return block


@triton.jit
def load_tile(source, start, n_rows, ROWS: tl.constexpr, FORM: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr):
    """Loads rows start .. start + ROWS of one head. Rows past n_rows (MASKED) or the tensor (TMA) are 0."""
    lo = _load_block(source, start, n_rows, 0, ROWS, FORM, TMA, MASKED)
    if FORM[2] > 0:
        return lo, _load_block(source, start, n_rows, 1, ROWS, FORM, TMA, MASKED)
    else:
        return (lo,)


@triton.jit
def _store_block(
    target, values, start, n_rows, INDEX: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr, TMA: tl.constexpr
):
    D: tl.constexpr = FORM[0]
    COLS: tl.constexpr = FORM[1 + INDEX]
    COLUMN: tl.constexpr = INDEX * FORM[1]
    if TMA:
        block = values.to(target[INDEX].dtype).reshape(1, 1, ROWS, COLS)
        target[INDEX].store([target[2], target[3], start, COLUMN], block)
    else:
        pointers = _pointers(target, start, COLUMN, ROWS, COLS, FORM)
        values = values.to(target[0].dtype.element_ty)
        tl.store(pointers, values, mask=_mask(start, n_rows, COLUMN, ROWS, COLS, D))


@triton.jit
def store_tile(target, tile, start, n_rows, ROWS: tl.constexpr, FORM: tl.constexpr, TMA: tl.constexpr):
    """Stores rows start .. start + ROWS of one head; skips rows past n_rows (with TMA, past the end of the tensor)."""
    _store_block(target, tile[0], start, n_rows, 0, ROWS, FORM, TMA)
    if FORM[2] > 0:
        _store_block(target, tile[1], start, n_rows, 1, ROWS, FORM, TMA)


@triton.jit
def zero_tile(ROWS: tl.constexpr, FORM: tl.constexpr):
    lo = tl.zeros((ROWS, FORM[1]), tl.float32)
    if FORM[2] > 0:
        return lo, tl.zeros((ROWS, FORM[2]), tl.float32)
    else:
        return (lo,)


@triton.jit
def scaled(tile, factor):
    """Multiplies a tile by a scalar, or by one factor per row [ROWS, 1]."""
    if len(tile) > 1:
        return tile[0] * factor, tile[1] * factor
    else:
        return (tile[0] * factor,)


@triton.jit
def chosen(tile, rows):
    """Zeros the rows of a tile where `rows` [ROWS, 1] is False."""
    if len(tile) > 1:
        return tl.where(rows, tile[0], 0.0), tl.where(rows, tile[1], 0.0)
    else:
        return (tl.where(rows, tile[0], 0.0),)


@triton.jit
def dot_transposed(a, b, PRECISION: tl.constexpr = _TF32):
    """Returns a b^T, fp32 [ROWS_A, ROWS_B], for tiles a and b."""
    product = tl.dot(a[0], b[0].T, input_precision=PRECISION)
    if len(a) > 1:
        product = tl.dot(a[1], b[1].T, product, input_precision=PRECISION)
    return product


@triton.jit
def dot_add(weights, tile, acc, PRECISION: tl.constexpr = _TF32):
    """Returns the tile [acc +] weights @ tile; rounds weights, fp32 [ROWS, KEYS], to the dtype of `tile`."""
    weights = weights.to(tile[0].dtype)
    if acc is None:
        lo = tl.dot(weights, tile[0], input_precision=PRECISION)
        if len(tile) > 1:
            return lo, tl.dot(weights, tile[1], input_precision=PRECISION)
        else:
            return (lo,)
    else:
        lo = tl.dot(weights, tile[0], acc[0], input_precision=PRECISION)
        if len(tile) > 1:
            return lo, tl.dot(weights, tile[1], acc[1], input_precision=PRECISION)
        else:
            return (lo,)


@triton.jit
def assume_a_tile(n_full, TMA: tl.constexpr):
    """Tells the compiler that the loop over n_full rows has at least one iteration.

    Otherwise the compiler merges the accumulators of asynchronous wgmma with zeros, and ptxas serializes the wgmma
    instructions (warning C7515). This happens only in loops with TMA loads.
    """
    if TMA:
        tl.assume(n_full > 0)

"""Device helpers of the attention kernels: loads, stores and products of tiles of one head.

A tile holds ROWS rows of one head, [ROWS, D]. Triton's blocks have power-of-two sizes. A tile is therefore a tuple of
one or two blocks, LO and HI columns wide (80 = 64 + 16). Padding to the next power of two (128) would cost more.

Tensors [B, H, N, D] with arbitrary strides and last stride 1 are accessed through TMA descriptors or pointers. Related
arguments are grouped:

- source, target: (descriptor or pointer of the LO block, of the HI block, image, head, strides of images, heads, rows).
  Strides are in units of ALIGN elements: their product with a constant shows the compiler that rows are aligned.
- FORM: (D, LO, HI, WIDE, ALIGN). WIDE: offsets within a tile need int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TF32 = tl.constexpr("tf32")  # triton 3.6 fails with a string as default


@triton.jit
def _pointers(source, start, COLUMN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, FORM: tl.constexpr):
    """Returns pointers to a block; offsets of images and heads are int64."""
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
    """Returns True for elements of a block inside the head."""
    mask = (start + tl.arange(0, ROWS))[:, None] < n_rows
    if COLUMN + COLS > D:
        mask = mask & ((COLUMN + tl.arange(0, COLS))[None, :] < D)
    return mask


@triton.jit
def _load_block(
    source, start, n_rows, INDEX: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Loads a block; elements outside the tensor are 0, with TMA by hardware."""
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
    """Loads rows start .. start + ROWS of one head; MASKED: some may lie past its end."""
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
    """Stores rows start .. start + ROWS of one head; skips elements outside the tensor."""
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
    """Returns a b^T, fp32 [ROWS_A, ROWS_B]."""
    product = tl.dot(a[0], b[0].T, input_precision=PRECISION)
    if len(a) > 1:
        product = tl.dot(a[1], b[1].T, product, input_precision=PRECISION)
    return product


@triton.jit
def dot_add(weights, tile, acc, PRECISION: tl.constexpr = _TF32):
    """Returns [acc +] weights @ tile; rounds weights, fp32 [ROWS, KEYS], to the tile's dtype."""
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
    """Tells the compiler that a loop over n_full rows runs at least once.

    Otherwise the compiler merges the wgmma accumulators in flight with zeros, and ptxas serializes wgmma (warning
    C7515). This happens only in loops with TMA loads.
    """
    if TMA:
        tl.assume(n_full > 0)

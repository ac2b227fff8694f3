"""Device helpers shared by the attention kernels: tiles of one head in and out, and products of split tiles.

A tile is rows of one head, [ROWS, D]. Triton's blocks are powers of two, so a head_dim that is none is held as two
blocks, LO columns and HI columns (80 = 64 + 16), which costs less than padding to the next power of two (128). Where
HI is 0 the second block is an alias of the first and no code touches it.

Every helper reads a tensor [B, H, N, D] of any strides, last one 1, either through a TMA descriptor or by pointers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _head_offset(b, h, stride_b, stride_h, ALIGN: tl.constexpr):
    """Elements from a tensor's start to head h of image b, in 64 bits: a batch may pass 2^31 elements.

    Strides come in units of ALIGN elements: the product shows the compiler that it may load 16 bytes at once.
    """
    return (tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h) * ALIGN


@triton.jit
def _block_offsets(
    start, stride_n,
    COLUMN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Offsets [ROWS, COLS] of a block inside its head; WIDE where ROWS * stride_n needs more than 32 bits."""
    row = tl.arange(0, ROWS)
    if WIDE:
        row = row.to(tl.int64)
    offsets = row[:, None] * stride_n * ALIGN + (COLUMN + tl.arange(0, COLS))[None, :]
    return tl.cast(start, tl.int64) * stride_n * ALIGN + offsets


@triton.jit
def _block_mask(start, n_rows, COLUMN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr):
    """Which elements [ROWS, COLS] of a block lie inside the head."""
    mask = (start + tl.arange(0, ROWS))[:, None] < n_rows
    if COLUMN + COLS > D:
        mask = mask & ((COLUMN + tl.arange(0, COLS))[None, :] < D)
    return mask


@triton.jit
def _load_block(
    source, b, h, stride_b, stride_h, stride_n, start, n_rows,
    COLUMN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr,
    TMA: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLS] from row `start`, column COLUMN; what lies outside the tensor is 0 (TMA fills it so itself)."""
    if TMA:
        block = source.load([b, h, start, COLUMN]).reshape(ROWS, COLS)
    else:
        pointers = source + _head_offset(b, h, stride_b, stride_h, ALIGN)
        pointers += _block_offsets(start, stride_n, COLUMN, ROWS, COLS, WIDE, ALIGN)
        if MASKED:
            block = tl.load(pointers, mask=_block_mask(start, n_rows, COLUMN, ROWS, COLS, D), other=0.0)
        elif COLUMN + COLS > D:
            block = tl.load(pointers, mask=(COLUMN + tl.arange(0, COLS))[None, :] < D, other=0.0)
        else:
            block = tl.load(pointers)
    return block


@triton.jit
def load_tile(
    source, source_hi, b, h, stride_b, stride_h, stride_n, start, n_rows,
    ROWS: tl.constexpr, D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
    TMA: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + ROWS of one head as ([ROWS, LO], [ROWS, HI]); MASKED where they may pass its end.

    `source` and `source_hi` are the descriptors of the two blocks, or the same pointer twice.
    """
    lo = _load_block(
        source, b, h, stride_b, stride_h, stride_n, start, n_rows, 0, ROWS, LO, D, TMA, WIDE, ALIGN, MASKED
    )
    hi = lo
    if HI > 0:
        hi = _load_block(
            source_hi, b, h, stride_b, stride_h, stride_n, start, n_rows, LO, ROWS, HI, D, TMA, WIDE, ALIGN, MASKED
        )
    return lo, hi


@triton.jit
def _store_block(
    target, values, b, h, stride_b, stride_h, stride_n, start, n_rows,
    COLUMN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr,
    TMA: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Write [ROWS, COLS]; what lies outside the tensor is left alone (TMA clips it itself)."""
    if TMA:
        target.store([b, h, start, COLUMN], values.to(target.dtype).reshape(1, 1, ROWS, COLS))
    else:
        pointers = target + _head_offset(b, h, stride_b, stride_h, ALIGN)
        pointers += _block_offsets(start, stride_n, COLUMN, ROWS, COLS, WIDE, ALIGN)
        mask = _block_mask(start, n_rows, COLUMN, ROWS, COLS, D)
        tl.store(pointers, values.to(target.dtype.element_ty), mask=mask)


@triton.jit
def store_tile(
    target, target_hi, lo, hi, b, h, stride_b, stride_h, stride_n, start, n_rows,
    ROWS: tl.constexpr, D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
    TMA: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Write rows start .. start + ROWS of one head from its two blocks, cast to the target's dtype."""
    _store_block(target, lo, b, h, stride_b, stride_h, stride_n, start, n_rows, 0, ROWS, LO, D, TMA, WIDE, ALIGN)
    if HI > 0:
        _store_block(
            target_hi, hi, b, h, stride_b, stride_h, stride_n, start, n_rows, LO, ROWS, HI, D, TMA, WIDE, ALIGN
        )


@triton.jit
def dot_transposed(a, a_hi, b, b_hi, HI: tl.constexpr, PRECISION: tl.constexpr):
    """a b^T over head_dim, both blocks: [ROWS_A, ROWS_B] in fp32."""
    product = tl.dot(a, b.T, input_precision=PRECISION)
    if HI > 0:
        product = tl.dot(a_hi, b_hi.T, product, input_precision=PRECISION)
    return product


@triton.jit
def dot_tile(weights, tile, tile_hi, HI: tl.constexpr, PRECISION: tl.constexpr):
    """weights @ tile for both blocks; weights [ROWS, KEYS] fp32 is rounded to the tile's dtype for the product."""
    weights = weights.to(tile.dtype)
    product = tl.dot(weights, tile, input_precision=PRECISION)
    product_hi = product
    if HI > 0:
        product_hi = tl.dot(weights, tile_hi, input_precision=PRECISION)
    return product, product_hi


@triton.jit
def dot_add(weights, tile, tile_hi, acc, acc_hi, HI: tl.constexpr, PRECISION: tl.constexpr):
    """acc + weights @ tile for both blocks, rounded as `dot_tile` does."""
    weights = weights.to(tile.dtype)
    acc = tl.dot(weights, tile, acc, input_precision=PRECISION)
    if HI > 0:
        acc_hi = tl.dot(weights, tile_hi, acc_hi, input_precision=PRECISION)
    else:
        acc_hi = acc
    return acc, acc_hi


@triton.jit
def assume_a_tile(n_full, TMA: tl.constexpr):
    """Tells the compiler that a loop over n_full rows runs at least once.

    A loop that may run zero times merges accumulators of wgmma in flight with zeros, and ptxas then waits for each
    product by itself (C7515). Loads by pointers are not affected.
    """
    if TMA:
        tl.assume(n_full > 0)


@triton.jit
def zero_tile(ROWS: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr):
    """Accumulators ([ROWS, LO], [ROWS, HI]) in fp32."""
    lo = tl.zeros((ROWS, LO), tl.float32)
    hi = lo
    if HI > 0:
        hi = tl.zeros((ROWS, HI), tl.float32)
    return lo, hi

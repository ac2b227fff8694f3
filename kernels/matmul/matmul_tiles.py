"""Device helpers for tiles of row-major matrices. Source of the order of tiles: triton's matmul tutorial."""

from __future__ import annotations

import triton
import triton.language as tl

# Columns that a thread reads at once where fp32 and half precision are mixed. With 8 columns, a thread would read the
# fp32 values in two loads of 16 bytes, each of which uses only half of every 32-byte sector.
READ_AT_ONCE = tl.constexpr(4)
_GROUP_M = tl.constexpr(8)  # tile rows whose tiles are processed together, to reuse columns of B in L2


@triton.jit
def tile_position(tile, tiles_m, tiles_n):
    """Returns tile row and tile column of the `tile`-th tile."""
    group = tile // (_GROUP_M * tiles_n)
    first = group * _GROUP_M
    rows = min(tiles_m - first, _GROUP_M)
    inside = tile - group * (_GROUP_M * tiles_n)
    return first + inside % rows, inside // rows


@triton.jit
def tile_offsets(row, col, columns, ROWS: tl.constexpr, COLS: tl.constexpr, AT_ONCE: tl.constexpr = 0):
    """Returns int64 element offsets of a tile. A thread reads at most AT_ONCE adjacent columns at once; 0: no limit."""
    base = tl.cast(row, tl.int64) * columns + col
    cols = tl.arange(0, COLS)
    if AT_ONCE:
        cols = tl.max_contiguous(cols, AT_ONCE)
    return base + (tl.arange(0, ROWS)[:, None] * columns + cols[None, :])


@triton.jit
def tile_mask(row, col, rows, columns, ROWS: tl.constexpr, COLS: tl.constexpr):
    return ((row + tl.arange(0, ROWS)) < rows)[:, None] & ((col + tl.arange(0, COLS)) < columns)[None, :]


@triton.constexpr_function
def dtype_of(matrix, TMA):
    """Returns the dtype of a matrix; with TMA, `matrix` is a descriptor."""
    return matrix.dtype if TMA else matrix.dtype.element_ty


@triton.jit
def load_tile(source, row, col, rows, columns, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """Loads a tile of a matrix [rows, columns]; elements outside are 0."""
    if TMA:
        return source.load([row, col])
    else:
        pointers = source + tile_offsets(row, col, columns, ROWS, COLS)
        return tl.load(pointers, mask=tile_mask(row, col, rows, columns, ROWS, COLS), other=0.0)


@triton.jit
def store_tile(target, values, row, col, rows, columns, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """Stores a tile of a matrix [rows, columns]; skips elements outside."""
    if TMA:
        target.store([row, col], values)
    else:
        pointers = target + tile_offsets(row, col, columns, ROWS, COLS)
        tl.store(pointers, values, mask=tile_mask(row, col, rows, columns, ROWS, COLS))


@triton.jit
def accumulate(
    a, b, row, col, k_start, k_stop, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_IS_KM: tl.constexpr, B_IS_NK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Returns the fp32 tile of A B at (row, col), summed over k_start <= k < k_stop.

    a is [M, K], or [K, M] if A_IS_KM; b is [K, N], or [N, K] if B_IS_NK.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(k_start, k_stop, BLOCK_K):
        if A_IS_KM:
            a_tile = load_tile(a, k, row, K, M, BLOCK_K, BLOCK_M, TMA).T
        else:
            a_tile = load_tile(a, row, k, M, K, BLOCK_M, BLOCK_K, TMA)
        if B_IS_NK:
            b_tile = load_tile(b, col, k, N, K, BLOCK_N, BLOCK_K, TMA).T
        else:
            b_tile = load_tile(b, k, col, K, N, BLOCK_K, BLOCK_N, TMA)
        acc = tl.dot(a_tile, b_tile, acc)
    return acc


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    return tl.split(tile.reshape(ROWS, 2, COLS // 2).permute(0, 2, 1))


@triton.jit
def cut(tile, ROWS: tl.constexpr, COLS: tl.constexpr, COUNT: tl.constexpr):
    """Cuts a tile along N into a tuple of 1, 2 or 4 sub-tiles."""
    if COUNT == 1:
        return (tile,)
    elif COUNT == 2:
        return halves(tile, ROWS, COLS)
    else:
        tl.static_assert(COUNT == 4, "a tile is cut into 1, 2 or 4 sub-tiles")
        left, right = halves(tile, ROWS, COLS)
        first, second = halves(left, ROWS, COLS // 2)
        third, fourth = halves(right, ROWS, COLS // 2)
        return first, second, third, fourth


@triton.jit
def load_sub_tiles(source, row, col, rows, columns, ROWS: tl.constexpr, COLS: tl.constexpr, COUNT: tl.constexpr):
    """Loads COUNT adjacent sub-tiles by pointers; all loads are in flight at once."""
    sub_tiles = ()
    for i in tl.static_range(COUNT):
        sub_tile = load_tile(source, row, col + i * COLS, rows, columns, ROWS, COLS, False)
        sub_tiles = sub_tiles + (sub_tile,)  # type: ignore[assignment]  # triton's tuple, whose length grows
    return sub_tiles


@triton.jit
def load_rows(pointer, row, M, ROWS: tl.constexpr):
    """Loads ROWS elements of a vector [M] from index `row` on; 0 past the end."""
    rows = row + tl.arange(0, ROWS)
    return tl.load(pointer + rows, mask=rows < M, other=0.0)


@triton.jit
def sum_row_parts(pointer, row, M, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Returns the sums of ROWS rows of [M, PARTS], from `row` on."""
    # the parts are on axis 0 of the tiles, see `combine_statistics`
    step = tl.arange(0, ROWS)
    base = pointer + tl.cast(row, tl.int64) * PARTS
    total = tl.zeros((ROWS,), tl.float32)
    for first in tl.static_range(0, PARTS, 16):
        parts = first + tl.arange(0, 16)
        mask = (parts < PARTS)[:, None] & (row + step < M)[None, :]
        total += tl.sum(tl.load(base + (step[None, :] * PARTS + parts[:, None]), mask=mask, other=0.0), 0)
    return total

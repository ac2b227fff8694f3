"""Device functions of attention with terms added to the scores: windows, tiles of keys, and scores with all terms.

Related arguments are grouped as in attention_tiles.py, whose functions load and store tiles of a window:

- terms: (bias, its strides, window_mask, key_mask, its stride, rel_h, rel_w, groups, scale); an absent tensor is None.
  `_launch` in bias_launch.py gives their shapes.
- strides: of q and of the other tensors of a kernel, in the order of its arguments.
- sizes: (n_batch, n_heads, n_q, n_kv, n_masks, n_groups, group, step, height, width). n_batch: number of windows, or
  images without windows; n_masks: rows of the window mask; n_groups: windows per image; group: windows per program; the
  other three describe the tiles of keys, as follows. The launcher passes them times 16, because fewer of these kernels
  spill than with `unspecialized` (launch.py).
- TILE: constants (rows, keys, STAGES, ALIGN, GRID) of a tile of scores. ALIGN divides n_kv, step, width and the strides
  of the bias, up to 16. The compiler needs it for vector loads. GRID: 0 without `rel`, else tiles per row of the grid.

Keys form a grid of `height` rows of `width` keys: the grid of `rel`, or else one row per tile. A tile has at most
`step` keys of a row of the grid. Tiles are numbered by column, so that a program can sum over the rows of the grid.

The place of a tile of scores is a tuple `at`: (window, h, row of the grid, rows, keys, rows_inside, keys_inside). For a
tile [ROWS, KEYS], rows are [ROWS, 1] and keys are [1, KEYS]; for a transposed tile, [1, ROWS] and [KEYS, 1].
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tiles import dot_transposed

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sizes_of(encoded, TILE):
    sizes = ()
    for i in tl.static_range(len(encoded)):
        # so that the compiler knows that ALIGN divides n_kv, step and width
        size = (encoded[i] >> 4) * TILE[3] if i == 3 or i == 7 or i == 9 else encoded[i] >> 4
        sizes = sizes + (size,)
    return sizes


@triton.jit
def windows_of_program(chunk, sizes):
    """Returns (row, first, last): the program's windows are i * n_masks + row for i in first .. last.

    They have the same row of the window mask.
    """
    n_batch, n_masks, group = sizes[0], sizes[4], sizes[6]
    row = chunk % n_masks
    first = chunk // n_masks * group
    return row, first, tl.minimum(first + group, tl.cdiv(n_batch - row, n_masks))


@triton.jit
def tensor_of(pointer, window, h, strides, terms, sizes):
    """Returns the `tensor` (attention_tiles.py) of the rows of a window, which has no block HI."""
    groups, n_q, n_groups = terms[7], sizes[2], sizes[5]
    if groups is None:
        return pointer, pointer, window, h, strides
    else:
        return pointer, pointer, window // n_groups, h, strides, groups + window % n_groups * n_q


@triton.jit
def n_tiles(sizes):
    """Returns the number of tiles of keys."""
    return sizes[8] * tl.cdiv(sizes[9], sizes[7])


@triton.jit
def _tile_start(tile, sizes, TILE):
    """Returns row and first column of a tile of keys in the grid."""
    if TILE[4] > 1:
        return tile % sizes[8], tile // sizes[8] * sizes[7]
    else:
        return tile, 0


@triton.jit
def keys_of_tile(tile, sizes, TILE):
    """Returns (first, end) of the keys of a tile."""
    row, column = _tile_start(tile, sizes, TILE)
    first = row * sizes[9] + column
    end = sizes[3]
    if TILE[4] == 1:
        end = first + sizes[7]
    elif TILE[4] > 1:
        end = tl.minimum(first + sizes[7], row * sizes[9] + sizes[9])
    return first, end


@triton.jit
def scores_at(window, h, rows, tile, sizes, TILE):
    """Returns `at` of the tile of `rows` (expanded) and a tile of keys."""
    row, column = _tile_start(tile, sizes, TILE)
    key = tl.arange(0, TILE[1])
    key = key[:, None] if rows.shape[0] == 1 else key[None, :]
    keys = row * sizes[9] + (column + key)
    inside = keys < sizes[3]
    if TILE[4] == 1:
        inside = key < sizes[7]
    elif TILE[4] > 1:
        inside = (key < sizes[7]) & (column + key < sizes[9])
    return window, h, row, rows, keys, rows < sizes[2], inside


@triton.jit
def head_scale(scale, h, terms):
    """Returns the multiplier of q k^T for a head."""
    if terms[8] is not None:
        scale = tl.load(terms[8] + h).to(tl.float32)
    return scale


@triton.jit
def shared_terms(at, terms, sizes, TILE):
    """Returns the terms of a tile that all windows of a program share, times log2(e): bias and window mask.

    Keys that are not inside get -inf.
    """
    window, h, _, rows, keys, rows_inside, keys_inside = at
    bias, strides, mask = terms[0], terms[1], terms[2]
    n_q, n_kv, n_masks = sizes[2], sizes[3], sizes[4]
    inside = rows_inside & keys_inside
    added = tl.where(keys_inside, 0.0, float("-inf"))
    if bias is not None:
        ALIGN: tl.constexpr = TILE[3]
        bias += (tl.cast(window, tl.int64) * (strides[0] >> 4) + tl.cast(h, tl.int64) * (strides[1] >> 4)) * ALIGN
        values = tl.load(bias + (rows * (strides[2] >> 4) * ALIGN + keys), mask=inside, other=0.0)
        added = added + values.to(tl.float32) * LOG2_E
    if mask is not None:
        mask += tl.cast(window % n_masks, tl.int64) * n_q * n_kv
        values = tl.load(mask + (rows * n_kv + keys), mask=inside, other=0.0)
        added = added + values.to(tl.float32) * LOG2_E
    return added


@triton.jit
def scores_of(a, b, factor, shared, at, terms, sizes, PRECISION: tl.constexpr):
    """Returns a tile of scores in base 2 with all terms: a b^T factor log2(e) + ...; masked keys get -inf."""
    window, h, grid_row, rows, keys, rows_inside, keys_inside = at
    key_mask, rel_h, rel_w = terms[3], terms[5], terms[6]
    scores = dot_transposed(a, b, PRECISION) * (factor * LOG2_E) + shared
    if rel_h is not None:
        height, width = sizes[8], sizes[9]
        row = (tl.cast(window, tl.int64) * sizes[1] + h) * sizes[2] + rows
        column = tl.load(rel_h + (row * height + grid_row), mask=rows_inside, other=0.0).to(tl.float32)
        inside = rows_inside & keys_inside
        values = tl.load(rel_w + (row * width + (keys - grid_row * width)), mask=inside, other=0.0)
        scores += (column + values.to(tl.float32)) * LOG2_E
    if key_mask is not None:
        start = tl.cast(window, tl.int64) * (terms[4] >> 4)
        real = tl.load(key_mask + (start + keys), mask=keys_inside, other=0)
        scores = tl.where(real != 0, scores, float("-inf"))
    return scores

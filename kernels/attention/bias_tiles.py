"""Device functions of attention with terms added to the scores: rows of windows, tiles, and scores with all terms.

Related arguments are grouped into tuples:

- source, target: (pointer, stride of images, stride of heads, stride of rows) of a tensor [B, H, N, D], last stride 1.
- terms: see `terms_of` in bias_launch.py; an absent tensor is None.
- sizes: (n_batch, n_heads, n_q, n_kv, n_masks, n_groups, group, step, n_steps). n_batch: number of windows, or images
  without windows; n_masks: rows of the window mask; n_groups: windows per image; group: windows per program; step: keys
  per tile; n_steps: tiles of keys.
- FORM: (D, LO, HI, WIDE). A tile is a tuple of blocks with LO and HI columns, as in attention_tiles.py. WIDE: offsets
  within an image need int64.

Index tensors of a tile come expanded: for a tile [ROWS, KEYS], rows are [ROWS, 1] and keys are [1, KEYS]; for a
transposed tile [KEYS, ROWS], rows are [1, ROWS] and keys are [KEYS, 1].
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def windows_of_program(chunk, sizes):
    """Returns (row, first, last): the program's windows are i * n_masks + row for i in first .. last.

    They have the same row of the window mask.
    """
    n_batch, _, _, _, n_masks, _, group, _, _ = sizes
    row = chunk % n_masks
    first = chunk // n_masks * group
    return row, first, tl.minimum(first + group, tl.cdiv(n_batch - row, n_masks))


@triton.jit
def keys_of_tile(tile, sizes, KEYS: tl.constexpr):
    """Returns the keys [KEYS] of a tile, and True for keys that belong to it: at most `step`, before the last key."""
    n_kv, step = sizes[3], sizes[7]
    key = tl.arange(0, KEYS)
    keys = tile * step + key
    return keys, (key < step) & (keys < n_kv)


@triton.jit
def _pointers(source, window, h, rows, inside, terms, sizes, INDEX: tl.constexpr, FORM: tl.constexpr):
    """Returns pointers [ROWS, COLS] to `rows` [ROWS] of a window in block LO (INDEX 0) or HI, and their mask."""
    pointer, stride_b, stride_h, stride_n = source
    groups, n_q, n_groups = terms[11], sizes[2], sizes[5]
    COLUMN: tl.constexpr = INDEX * FORM[1]
    COLS: tl.constexpr = FORM[1 + INDEX]
    if groups is not None:
        rows = tl.load(groups + window % n_groups * n_q + rows, mask=inside, other=0)
    if FORM[3]:
        rows = rows.to(tl.int64)
    cols = COLUMN + tl.arange(0, COLS)
    pointer += tl.cast(window // n_groups, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
    mask = inside[:, None]
    if COLUMN + COLS > FORM[0]:
        mask = mask & (cols < FORM[0])[None, :]
    return pointer + (rows[:, None] * stride_n + cols[None, :]), mask


@triton.jit
def _load_block(source, window, h, rows, inside, terms, sizes, INDEX: tl.constexpr, FORM: tl.constexpr):
    pointers, mask = _pointers(source, window, h, rows, inside, terms, sizes, INDEX, FORM)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_rows(source, window, h, rows, inside, terms, sizes, FORM: tl.constexpr):
    """Loads a tile of `rows` [ROWS] of one head; rows that are not `inside` are 0."""
    lo = _load_block(source, window, h, rows, inside, terms, sizes, 0, FORM)
    if FORM[2] > 0:
        return lo, _load_block(source, window, h, rows, inside, terms, sizes, 1, FORM)
    else:
        return (lo,)


@triton.jit
def store_rows(target, tile, window, h, rows, inside, terms, sizes, FORM: tl.constexpr):
    for i in tl.static_range(1 + (FORM[2] > 0)):
        pointers, mask = _pointers(target, window, h, rows, inside, terms, sizes, i, FORM)
        tl.store(pointers, tile[i].to(target[0].dtype.element_ty), mask=mask)


@triton.jit
def row_dot(a, b):
    """Returns the sum over the columns of a * b, fp32 [ROWS], for two tiles."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if len(a) > 1:
        total += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return total


@triton.jit
def head_scale(scale, h, terms):
    """Returns the multiplier of q k^T for a head."""
    if terms[12] is not None:
        scale = tl.load(terms[12] + h).to(tl.float32)
    return scale


@triton.jit
def shared_terms(window, h, rows, keys, rows_inside, keys_inside, terms, sizes):
    """Returns the terms of a tile that all windows of a program share, times log2(e): bias and window mask.

    Keys that are not inside get -inf.
    """
    bias, bias_stride_b, bias_stride_h, bias_stride_n, mask = terms[0], terms[1], terms[2], terms[3], terms[4]
    n_q, n_kv, n_masks = sizes[2], sizes[3], sizes[4]
    inside = rows_inside & keys_inside
    added = tl.where(keys_inside, 0.0, float("-inf"))
    if bias is not None:
        bias += tl.cast(window, tl.int64) * bias_stride_b + tl.cast(h, tl.int64) * bias_stride_h
        values = tl.load(bias + (rows * bias_stride_n + keys), mask=inside, other=0.0)
        added = added + values.to(tl.float32) * LOG2_E
    if mask is not None:
        mask += tl.cast(window % n_masks, tl.int64) * n_q * n_kv
        values = tl.load(mask + (rows * n_kv + keys), mask=inside, other=0.0)
        added = added + values.to(tl.float32) * LOG2_E
    return added


@triton.jit
def with_terms(scores, shared, tile, window, h, rows, keys, rows_inside, keys_inside, terms, sizes):
    """Returns `scores` (a tile of q k^T, scaled, times log2(e)) with all terms; masked keys get -inf."""
    key_mask, key_mask_stride_b, rel_h, rel_w, Kh, Kw = terms[5], terms[6], terms[7], terms[8], terms[9], terms[10]
    scores = scores + shared
    if rel_h is not None:
        row = (tl.cast(window, tl.int64) * sizes[1] + h) * sizes[2] + rows
        column = tl.load(rel_h + (row * Kh + tile), mask=rows_inside, other=0.0).to(tl.float32)
        inside = rows_inside & keys_inside
        values = tl.load(rel_w + (row * Kw + (keys - tile * Kw)), mask=inside, other=0.0).to(tl.float32)
        scores += (column + values) * LOG2_E
    if key_mask is not None:
        real = tl.load(key_mask + (tl.cast(window, tl.int64) * key_mask_stride_b + keys), mask=keys_inside, other=0)
        scores = tl.where(real != 0, scores, float("-inf"))
    return scores

"""Attention with terms added to the scores, forward: o = softmax(scale q k^T + bias + window mask + rel) v.

Small windows are one tile of scores. A program loads bias and window mask once, and loops over windows with the same
row of the window mask. With more queries or keys, a program computes a tile of queries of one window, and loops over
tiles of keys with an online softmax (FlashAttention-2, arXiv 2307.08691).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tiles import dot_add, dot_transposed, scaled, zero_tile
from .bias_tiles import (
    LOG2_E,
    head_scale,
    keys_of_tile,
    load_rows,
    shared_terms,
    store_rows,
    windows_of_program,
    with_terms,
)


@triton.jit
def _online_step(scores, vt, state):
    """Adds a tile of scores (base 2) and values to the running maximum, sum and output of a query tile."""
    row_max, total, acc = state
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # if all keys so far are masked, avoid -inf - -inf
    p = tl.math.exp2(scores - shift[:, None])
    rescale = tl.math.exp2(row_max - shift)
    return new_max, total * rescale + tl.sum(p, 1), dot_add(p, vt, scaled(acc, rescale[:, None]))


@triton.jit
def _attention_bias_fwd_kernel(
    q, k, v, o, lse_ptr,  # lse: fp32 [n_batch, H, N_q], contiguous
    terms, sizes, scale,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n_heads, n_q, n_masks, n_steps = sizes[1], sizes[2], sizes[4], sizes[8]
    FORM: tl.constexpr = (D, LO, HI, WIDE)
    tiles = tl.cdiv(n_q, BLOCK_M)
    h = tl.program_id(0) // tiles % n_heads
    mask_row, first, last = windows_of_program(tl.program_id(0) // tiles // n_heads, sizes)
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < n_q
    qk_scale = head_scale(scale, h, terms) * LOG2_E
    r, r_in = rows[:, None], inside[:, None]
    keys, real = keys_of_tile(0, sizes, BLOCK_N)
    window = first * n_masks + mask_row
    shared = shared_terms(window, h, r, keys[None, :], r_in, real[None, :], terms, sizes)
    for i in tl.range(first, last, num_stages=STAGES if ONE_TILE else 1):
        window = i * n_masks + mask_row
        qt = load_rows(q, window, h, rows, inside, terms, sizes, FORM)
        if ONE_TILE:
            kt = load_rows(k, window, h, keys, real, terms, sizes, FORM)
            vt = load_rows(v, window, h, keys, real, terms, sizes, FORM)
            scores = dot_transposed(qt, kt) * qk_scale
            scores = with_terms(scores, shared, 0, window, h, r, keys[None, :], r_in, real[None, :], terms, sizes)
            row_max = tl.max(scores, 1)
            p = tl.math.exp2(scores - tl.where(row_max == float("-inf"), 0.0, row_max)[:, None])
            total = tl.sum(p, 1)
            acc = dot_add(p, vt, zero_tile(BLOCK_M, FORM))
        else:
            row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            state = row_max, tl.zeros((BLOCK_M,), tl.float32), zero_tile(BLOCK_M, FORM)
            for tile in tl.range(0, n_steps, num_stages=STAGES):
                keys, real = keys_of_tile(tile, sizes, BLOCK_N)
                kt = load_rows(k, window, h, keys, real, terms, sizes, FORM)
                vt = load_rows(v, window, h, keys, real, terms, sizes, FORM)
                added = shared_terms(window, h, r, keys[None, :], r_in, real[None, :], terms, sizes)
                scores = dot_transposed(qt, kt) * qk_scale
                scores = with_terms(scores, added, tile, window, h, r, keys[None, :], r_in, real[None, :], terms, sizes)
                state = _online_step(scores, vt, state)
            row_max, total, acc = state
        # queries without keys: with lse = inf, the backward computes p = 0
        lse = tl.where(total == 0.0, float("inf"), row_max + tl.math.log2(total))
        inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
        tl.store(lse_ptr + (tl.cast(window, tl.int64) * n_heads + h) * n_q + rows, lse, mask=inside)
        store_rows(o, scaled(acc, inverse[:, None]), window, h, rows, inside, terms, sizes, FORM)

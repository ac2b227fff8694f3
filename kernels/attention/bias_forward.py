"""Attention with terms added to the scores, forward: o = softmax(scale q k^T + bias + window mask + rel) v.

Small windows are one tile of scores. A program loads bias and window mask once, and loops over windows with the same
row of the window mask. With more queries or keys, a program computes a tile of queries of one window, and loops over
tiles of keys with the online softmax of attention_forward.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_forward import empty_state, online_softmax, store_state
from .attention_tiles import load_tile
from .bias_tiles import (
    head_scale,
    keys_of_tile,
    n_tiles,
    scores_at,
    scores_of,
    shared_terms,
    sizes_of,
    tensor_of,
    windows_of_program,
)


@triton.jit
def _attention_bias_fwd_kernel(
    q, k, v, o, strides,
    lse_ptr,  # fp32 [n_batch, H, N_q], contiguous
    terms, sizes, scale, FORM, TILE, ONE_TILE: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = TILE[0]
    BLOCK_N: tl.constexpr = TILE[1]
    STAGES: tl.constexpr = TILE[2]
    sizes = sizes_of(sizes, TILE)
    n_heads, n_q, n_masks = sizes[1], sizes[2], sizes[4]
    tiles = tl.cdiv(n_q, BLOCK_M)
    h = tl.program_id(0) // tiles % n_heads
    mask_row, first_window, end_window = windows_of_program(tl.program_id(0) // tiles // n_heads, sizes)
    start = tl.program_id(0) % tiles * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)[:, None]
    factor = head_scale(scale, h, terms)
    first, end = keys_of_tile(0, sizes, TILE)
    shared = shared_terms(scores_at(first_window * n_masks + mask_row, h, rows, 0, sizes, TILE), terms, sizes, TILE)
    for i in tl.range(first_window, end_window, num_stages=STAGES if ONE_TILE else 1):
        window = i * n_masks + mask_row
        q_tile = load_tile(tensor_of(q, window, h, strides[0], terms, sizes), start, n_q, BLOCK_M, FORM, True)
        k_rows = tensor_of(k, window, h, strides[1], terms, sizes)
        v_rows = tensor_of(v, window, h, strides[2], terms, sizes)
        state = empty_state(BLOCK_M, FORM)
        if ONE_TILE:
            k_tile = load_tile(k_rows, first, end, BLOCK_N, FORM, True)
            v_tile = load_tile(v_rows, first, end, BLOCK_N, FORM, True)
            at = scores_at(window, h, rows, 0, sizes, TILE)
            scores = scores_of(q_tile, k_tile, factor, shared, at, terms, sizes, "tf32")
            state = online_softmax(scores, 1.0, v_tile, state, True, True)
        else:
            for tile in tl.range(0, n_tiles(sizes), num_stages=STAGES):
                start_k, end_k = keys_of_tile(tile, sizes, TILE)
                k_tile = load_tile(k_rows, start_k, end_k, BLOCK_N, FORM, True)
                v_tile = load_tile(v_rows, start_k, end_k, BLOCK_N, FORM, True)
                here = scores_at(window, h, rows, tile, sizes, TILE)
                added = shared_terms(here, terms, sizes, TILE)
                scores = scores_of(q_tile, k_tile, factor, added, here, terms, sizes, "tf32")
                state = online_softmax(scores, 1.0, v_tile, state, True, False)
        output = tensor_of(o, window, h, strides[3], terms, sizes)
        row = (tl.cast(window, tl.int64) * n_heads + h) * n_q
        store_state(output, lse_ptr, state, None, row, start, n_q, True, BLOCK_M, FORM)

"""Attention with terms added to the scores, backward: gradients of q, k, v, bias, rel and scale, without atomics.

With p and ds as in attention_backward.py, d bias is the sum of ds over the windows, d rel_h and d rel_w are sums of ds
over the keys of a row and of a column of the grid, and d scale is the sum of ds * (q k^T). A single program sums each
element in a fixed order, or stores it in `parts`, whose sum the caller computes. There are three kernels:

- tile: One program per tile of scores and group of windows. Sums ds over the windows on chip, and stores the sum once.
  If the tile is a whole window, the kernel also computes dq, dk and dv.
- dq: One program per query tile. Computes delta = rowsum(do * o), dq, d rel_h, d rel_w, and per query ds * (q k^T).
- dkdv: One program per key tile. Reads delta.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_backward import query_tile
from .attention_tiles import dot_add, dot_transposed, load_tile, row_dot, scaled, store_tile, zero_tile
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
def _attention_bias_bwd_tile_kernel(
    q, k, v, do, dq, dk, dv, strides,
    lse_ptr, delta_ptr,  # fp32 [n_batch, H, N_q], contiguous; delta is not used if WHOLE
    dscale_ptr,  # output if WHOLE: like lse, ds * (q k^T) summed over keys; or None
    parts_ptr,  # output: fp32 [chunks, H, N_q, N_kv], ds summed over the windows of a program; or None
    terms, sizes, scale, FORM, TILE, WHOLE: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = TILE[0]
    BLOCK_N: tl.constexpr = TILE[1]
    STAGES: tl.constexpr = TILE[2]
    PRECISION: tl.constexpr = "ieee" if FORM[1] + FORM[2] > 64 else "tf32"
    sizes = sizes_of(sizes, TILE)
    n_heads, n_q, n_kv, n_masks, n_steps = sizes[1], sizes[2], sizes[3], sizes[4], n_tiles(sizes)
    tiles = tl.cdiv(n_q, BLOCK_M) * n_steps
    tile = tl.program_id(0) % n_steps
    h = tl.program_id(0) // tiles % n_heads
    chunk = tl.program_id(0) // tiles // n_heads
    mask_row, first_window, end_window = windows_of_program(chunk, sizes)
    start = tl.program_id(0) % tiles // n_steps * BLOCK_M
    query = start + tl.arange(0, BLOCK_M)
    inside = query < n_q
    first, end = keys_of_tile(tile, sizes, TILE)
    factor = head_scale(scale, h, terms)
    at = scores_at(first_window * n_masks + mask_row, h, query[:, None], tile, sizes, TILE)
    shared = shared_terms(at, terms, sizes, TILE)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.range(first_window, end_window, num_stages=STAGES):
        window = i * n_masks + mask_row
        row = (tl.cast(window, tl.int64) * n_heads + h) * n_q + query
        q_tile = load_tile(tensor_of(q, window, h, strides[0], terms, sizes), start, n_q, BLOCK_M, FORM, True)
        k_tile = load_tile(tensor_of(k, window, h, strides[1], terms, sizes), first, end, BLOCK_N, FORM, True)
        v_tile = load_tile(tensor_of(v, window, h, strides[2], terms, sizes), first, end, BLOCK_N, FORM, True)
        do_tile = load_tile(tensor_of(do, window, h, strides[3], terms, sizes), start, n_q, BLOCK_M, FORM, True)
        here = scores_at(window, h, query[:, None], tile, sizes, TILE)
        scores = scores_of(q_tile, k_tile, factor, shared, here, terms, sizes, PRECISION)
        p = tl.math.exp2(scores - tl.load(lse_ptr + row, mask=inside, other=float("inf"))[:, None])
        dp = dot_transposed(do_tile, v_tile, PRECISION)
        if WHOLE:  # the same as rowsum(do * o), without reading o
            delta = tl.sum(p * dp, 1)
        else:
            delta = tl.load(delta_ptr + row, mask=inside, other=0.0)
        ds = p * (dp - delta[:, None])
        total += ds
        if WHOLE:
            dv_tile = dot_add(tl.trans(p), do_tile, zero_tile(BLOCK_N, FORM), PRECISION)
            store_tile(tensor_of(dv, window, h, strides[6], terms, sizes), dv_tile, first, end, BLOCK_N, FORM)
            dk_tile = scaled(dot_add(tl.trans(ds), q_tile, zero_tile(BLOCK_N, FORM), PRECISION), factor)
            store_tile(tensor_of(dk, window, h, strides[5], terms, sizes), dk_tile, first, end, BLOCK_N, FORM)
            dq_tile = dot_add(ds, k_tile, zero_tile(BLOCK_M, FORM), PRECISION)
            if dscale_ptr is not None:
                tl.store(dscale_ptr + row, row_dot(dq_tile, q_tile), mask=inside)
            dq_tile = scaled(dq_tile, factor)
            store_tile(tensor_of(dq, window, h, strides[4], terms, sizes), dq_tile, start, n_q, BLOCK_M, FORM)
    if parts_ptr is not None:
        parts_ptr += (tl.cast(chunk, tl.int64) * n_heads + h) * n_q * n_kv
        tl.store(parts_ptr + (at[3] * n_kv + at[4]), total, mask=at[5] & at[6])


@triton.jit
def _attention_bias_bwd_dq_kernel(
    q, k, v, o, do, dq, strides,
    lse_ptr,  # fp32 [n_batch, H, N_q], contiguous
    delta_ptr,  # output, like lse
    dscale_ptr,  # output, like lse: ds * (q k^T) summed over keys; or None
    drel_h_ptr,  # output: fp32 [n_batch, H, N_q, tiles of keys], ds summed over the keys of a tile; or None
    drel_w_ptr,  # output: fp32 [n_batch, H, N_q, Kw], contiguous; or None
    terms, sizes, scale, FORM, TILE,
):  # fmt: skip
    BLOCK_M: tl.constexpr = TILE[0]
    BLOCK_N: tl.constexpr = TILE[1]
    STAGES: tl.constexpr = TILE[2]
    PRECISION: tl.constexpr = "ieee" if FORM[1] + FORM[2] > 64 else "tf32"
    sizes = sizes_of(sizes, TILE)
    n_heads, n_q, step, height, width = sizes[1], sizes[2], sizes[7], sizes[8], sizes[9]
    tiles = tl.cdiv(n_q, BLOCK_M)
    h = tl.program_id(0) // tiles % n_heads
    window = tl.program_id(0) // tiles // n_heads
    start = tl.program_id(0) % tiles * BLOCK_M
    query = start + tl.arange(0, BLOCK_M)
    inside = query < n_q
    head_row = (tl.cast(window, tl.int64) * n_heads + h) * n_q
    row = head_row + query
    factor = head_scale(scale, h, terms)
    q_rows = tensor_of(q, window, h, strides[0], terms, sizes)
    k_rows = tensor_of(k, window, h, strides[1], terms, sizes)
    v_rows = tensor_of(v, window, h, strides[2], terms, sizes)
    o_rows = tensor_of(o, window, h, strides[3], terms, sizes)
    do_rows = tensor_of(do, window, h, strides[4], terms, sizes)
    q_tile, do_tile, lse, delta = query_tile(
        q_rows, do_rows, o_rows, lse_ptr, delta_ptr, head_row, start, n_q, BLOCK_M, FORM
    )
    acc = zero_tile(BLOCK_M, FORM)
    tl.assume(height > 0)  # otherwise wgmma is serialized, as in `over_tiles` of attention_tiles.py
    for column in tl.static_range(TILE[4] if TILE[4] else 1):
        columns = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for tile in tl.range(column * height, column * height + height, num_stages=STAGES):
            first, end = keys_of_tile(tile, sizes, TILE)
            k_tile = load_tile(k_rows, first, end, BLOCK_N, FORM, True)
            v_tile = load_tile(v_rows, first, end, BLOCK_N, FORM, True)
            at = scores_at(window, h, query[:, None], tile, sizes, TILE)
            added = shared_terms(at, terms, sizes, TILE)
            scores = scores_of(q_tile, k_tile, factor, added, at, terms, sizes, PRECISION)
            ds = tl.math.exp2(scores - lse[:, None]) * (dot_transposed(do_tile, v_tile, PRECISION) - delta[:, None])
            acc = dot_add(ds, k_tile, acc, PRECISION)
            if drel_h_ptr is not None:
                tl.store(drel_h_ptr + row * n_tiles(sizes) + tile, tl.sum(ds, 1), mask=inside)
                columns += ds
        if drel_w_ptr is not None:
            key = column * step + tl.arange(0, BLOCK_N)[None, :]
            mask = inside[:, None] & (key < tl.minimum(width, column * step + step))
            tl.store(drel_w_ptr + (row[:, None] * width + key), columns, mask=mask)
    if dscale_ptr is not None:
        tl.store(dscale_ptr + row, row_dot(acc, q_tile), mask=inside)
    store_tile(tensor_of(dq, window, h, strides[5], terms, sizes), scaled(acc, factor), start, n_q, BLOCK_M, FORM)


@triton.jit
def _attention_bias_bwd_dkdv_kernel(
    q, k, v, do, dk, dv, strides,
    lse_ptr, delta_ptr,  # fp32 [n_batch, H, N_q], contiguous
    terms, sizes, scale, FORM, TILE,
):  # fmt: skip
    BLOCK_M: tl.constexpr = TILE[0]
    BLOCK_N: tl.constexpr = TILE[1]
    STAGES: tl.constexpr = TILE[2]
    PRECISION: tl.constexpr = "ieee" if FORM[1] + FORM[2] > 64 else "tf32"
    sizes = sizes_of(sizes, TILE)
    n_heads, n_q, n_steps = sizes[1], sizes[2], n_tiles(sizes)
    tile = tl.program_id(0) % n_steps
    h = tl.program_id(0) // n_steps % n_heads
    window = tl.program_id(0) // n_steps // n_heads
    first, end = keys_of_tile(tile, sizes, TILE)
    factor = head_scale(scale, h, terms)
    q_rows = tensor_of(q, window, h, strides[0], terms, sizes)
    do_rows = tensor_of(do, window, h, strides[3], terms, sizes)
    k_tile = load_tile(tensor_of(k, window, h, strides[1], terms, sizes), first, end, BLOCK_N, FORM, True)
    v_tile = load_tile(tensor_of(v, window, h, strides[2], terms, sizes), first, end, BLOCK_N, FORM, True)
    dk_tile, dv_tile = zero_tile(BLOCK_N, FORM), zero_tile(BLOCK_N, FORM)
    tl.assume(n_q > 0)
    for start in tl.range(0, n_q, BLOCK_M, num_stages=STAGES):
        query = start + tl.arange(0, BLOCK_M)
        inside = query < n_q
        row = (tl.cast(window, tl.int64) * n_heads + h) * n_q + query
        q_tile = load_tile(q_rows, start, n_q, BLOCK_M, FORM, True)
        do_tile = load_tile(do_rows, start, n_q, BLOCK_M, FORM, True)
        lse = tl.load(lse_ptr + row, mask=inside, other=float("inf"))
        delta = tl.load(delta_ptr + row, mask=inside, other=0.0)
        at = scores_at(window, h, query[None, :], tile, sizes, TILE)
        added = shared_terms(at, terms, sizes, TILE)
        p = tl.math.exp2(scores_of(k_tile, q_tile, factor, added, at, terms, sizes, PRECISION) - lse[None, :])
        dv_tile = dot_add(p, do_tile, dv_tile, PRECISION)
        ds = p * (dot_transposed(v_tile, do_tile, PRECISION) - delta[None, :])
        dk_tile = dot_add(ds, q_tile, dk_tile, PRECISION)
    store_tile(tensor_of(dk, window, h, strides[4], terms, sizes), scaled(dk_tile, factor), first, end, BLOCK_N, FORM)
    store_tile(tensor_of(dv, window, h, strides[5], terms, sizes), dv_tile, first, end, BLOCK_N, FORM)

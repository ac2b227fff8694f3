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

from .attention_tiles import dot_add, dot_transposed, scaled, zero_tile
from .bias_tiles import (
    LOG2_E,
    head_scale,
    keys_of_tile,
    load_rows,
    row_dot,
    shared_terms,
    store_rows,
    windows_of_program,
    with_terms,
)


@triton.jit
def _attention_bias_bwd_tile_kernel(
    q, k, v, do, dq, dk, dv,
    lse_ptr, delta_ptr,  # fp32 [n_batch, H, N_q], contiguous; delta is not used if WHOLE
    dscale_ptr,  # output if WHOLE: like lse, ds * (q k^T) summed over keys; or None
    parts_ptr,  # output: fp32 [chunks, H, N_q, N_kv], ds summed over the windows of a program; or None
    terms, sizes, scale,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n_heads, n_q, n_kv, n_masks, n_steps = sizes[1], sizes[2], sizes[3], sizes[4], sizes[8]
    FORM: tl.constexpr = (D, LO, HI, WIDE)
    PRECISION: tl.constexpr = "ieee" if LO + HI > 64 else "tf32"
    tiles = tl.cdiv(n_q, BLOCK_M) * n_steps
    tile = tl.program_id(0) % n_steps
    h = tl.program_id(0) // tiles % n_heads
    chunk = tl.program_id(0) // tiles // n_heads
    mask_row, first, last = windows_of_program(chunk, sizes)
    rows = tl.program_id(0) % tiles // n_steps * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < n_q
    keys, real = keys_of_tile(tile, sizes, BLOCK_N)
    r, r_in, c, c_in = rows[:, None], inside[:, None], keys[None, :], real[None, :]
    factor = head_scale(scale, h, terms)
    shared = shared_terms(first * n_masks + mask_row, h, r, c, r_in, c_in, terms, sizes)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.range(first, last, num_stages=STAGES):
        window = i * n_masks + mask_row
        row_offset = (tl.cast(window, tl.int64) * n_heads + h) * n_q + rows
        qt = load_rows(q, window, h, rows, inside, terms, sizes, FORM)
        kt = load_rows(k, window, h, keys, real, terms, sizes, FORM)
        vt = load_rows(v, window, h, keys, real, terms, sizes, FORM)
        dot = load_rows(do, window, h, rows, inside, terms, sizes, FORM)
        scores = dot_transposed(qt, kt, PRECISION) * (factor * LOG2_E)
        scores = with_terms(scores, shared, tile, window, h, r, c, r_in, c_in, terms, sizes)
        p = tl.math.exp2(scores - tl.load(lse_ptr + row_offset, mask=inside, other=float("inf"))[:, None])
        dp = dot_transposed(dot, vt, PRECISION)
        if WHOLE:  # the same as rowsum(do * o), without reading o
            delta = tl.sum(p * dp, 1)
        else:
            delta = tl.load(delta_ptr + row_offset, mask=inside, other=0.0)
        ds = p * (dp - delta[:, None])
        total += ds
        if WHOLE:
            dvt = dot_add(tl.trans(p), dot, zero_tile(BLOCK_N, FORM), PRECISION)
            store_rows(dv, dvt, window, h, keys, real, terms, sizes, FORM)
            dkt = dot_add(tl.trans(ds), qt, zero_tile(BLOCK_N, FORM), PRECISION)
            store_rows(dk, scaled(dkt, factor), window, h, keys, real, terms, sizes, FORM)
            dqt = dot_add(ds, kt, zero_tile(BLOCK_M, FORM), PRECISION)
            if dscale_ptr is not None:
                tl.store(dscale_ptr + row_offset, row_dot(dqt, qt), mask=inside)
            store_rows(dq, scaled(dqt, factor), window, h, rows, inside, terms, sizes, FORM)
    if parts_ptr is not None:
        parts_ptr += (tl.cast(chunk, tl.int64) * n_heads + h) * n_q * n_kv
        tl.store(parts_ptr + (r * n_kv + c), total, mask=r_in & c_in)


@triton.jit
def _attention_bias_bwd_dq_kernel(
    q, k, v, o, do, dq,
    lse_ptr,  # fp32 [n_batch, H, N_q], contiguous
    delta_ptr,  # output, like lse
    dscale_ptr,  # output, like lse: ds * (q k^T) summed over keys; or None
    drel_h_ptr, drel_w_ptr,  # output: fp32 [n_batch, H, N_q, Kh or Kw], contiguous; or None
    terms, sizes, scale,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n_heads, n_q, n_steps = sizes[1], sizes[2], sizes[8]
    FORM: tl.constexpr = (D, LO, HI, WIDE)
    PRECISION: tl.constexpr = "ieee" if LO + HI > 64 else "tf32"
    tiles = tl.cdiv(n_q, BLOCK_M)
    h = tl.program_id(0) // tiles % n_heads
    window = tl.program_id(0) // tiles // n_heads
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < n_q
    r, r_in = rows[:, None], inside[:, None]
    row_offset = (tl.cast(window, tl.int64) * n_heads + h) * n_q + rows
    factor = head_scale(scale, h, terms)
    qt = load_rows(q, window, h, rows, inside, terms, sizes, FORM)
    dot = load_rows(do, window, h, rows, inside, terms, sizes, FORM)
    delta = row_dot(dot, load_rows(o, window, h, rows, inside, terms, sizes, FORM))
    tl.store(delta_ptr + row_offset, delta, mask=inside)
    lse = tl.load(lse_ptr + row_offset, mask=inside, other=float("inf"))
    acc = zero_tile(BLOCK_M, FORM)
    columns = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    tl.assume(n_steps > 0)  # otherwise wgmma is serialized, as in `over_tiles` of attention_tiles.py
    for tile in tl.range(0, n_steps, num_stages=STAGES):
        keys, real = keys_of_tile(tile, sizes, BLOCK_N)
        c, c_in = keys[None, :], real[None, :]
        kt = load_rows(k, window, h, keys, real, terms, sizes, FORM)
        vt = load_rows(v, window, h, keys, real, terms, sizes, FORM)
        added = shared_terms(window, h, r, c, r_in, c_in, terms, sizes)
        scores = dot_transposed(qt, kt, PRECISION) * (factor * LOG2_E)
        scores = with_terms(scores, added, tile, window, h, r, c, r_in, c_in, terms, sizes)
        ds = tl.math.exp2(scores - lse[:, None]) * (dot_transposed(dot, vt, PRECISION) - delta[:, None])
        acc = dot_add(ds, kt, acc, PRECISION)
        if drel_h_ptr is not None:
            tl.store(drel_h_ptr + row_offset * terms[9] + tile, tl.sum(ds, 1), mask=inside)
            columns += ds
    if drel_w_ptr is not None:
        key = tl.arange(0, BLOCK_N)[None, :]
        tl.store(drel_w_ptr + (row_offset[:, None] * terms[10] + key), columns, mask=r_in & (key < terms[10]))
    if dscale_ptr is not None:
        tl.store(dscale_ptr + row_offset, row_dot(acc, qt), mask=inside)
    store_rows(dq, scaled(acc, factor), window, h, rows, inside, terms, sizes, FORM)


@triton.jit
def _attention_bias_bwd_dkdv_kernel(
    q, k, v, do, dk, dv,
    lse_ptr, delta_ptr,  # fp32 [n_batch, H, N_q], contiguous
    terms, sizes, scale,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n_heads, n_q, n_steps = sizes[1], sizes[2], sizes[8]
    FORM: tl.constexpr = (D, LO, HI, WIDE)
    PRECISION: tl.constexpr = "ieee" if LO + HI > 64 else "tf32"
    tile = tl.program_id(0) % n_steps
    h = tl.program_id(0) // n_steps % n_heads
    window = tl.program_id(0) // n_steps // n_heads
    keys, real = keys_of_tile(tile, sizes, BLOCK_N)
    c, c_in = keys[:, None], real[:, None]
    factor = head_scale(scale, h, terms)
    kt = load_rows(k, window, h, keys, real, terms, sizes, FORM)
    vt = load_rows(v, window, h, keys, real, terms, sizes, FORM)
    dkt, dvt = zero_tile(BLOCK_N, FORM), zero_tile(BLOCK_N, FORM)
    tl.assume(n_q > 0)
    for start in tl.range(0, n_q, BLOCK_M, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_M)
        inside = rows < n_q
        r, r_in = rows[None, :], inside[None, :]
        row_offset = (tl.cast(window, tl.int64) * n_heads + h) * n_q + rows
        qt = load_rows(q, window, h, rows, inside, terms, sizes, FORM)
        dot = load_rows(do, window, h, rows, inside, terms, sizes, FORM)
        lse = tl.load(lse_ptr + row_offset, mask=inside, other=float("inf"))
        delta = tl.load(delta_ptr + row_offset, mask=inside, other=0.0)
        added = shared_terms(window, h, r, c, r_in, c_in, terms, sizes)
        scores = dot_transposed(kt, qt, PRECISION) * (factor * LOG2_E)  # [BLOCK_N, BLOCK_M]
        scores = with_terms(scores, added, tile, window, h, r, c, r_in, c_in, terms, sizes)
        p = tl.math.exp2(scores - lse[None, :])
        dvt = dot_add(p, dot, dvt, PRECISION)
        ds = p * (dot_transposed(vt, dot, PRECISION) - delta[None, :])
        dkt = dot_add(ds, qt, dkt, PRECISION)
    store_rows(dk, scaled(dkt, factor), window, h, keys, real, terms, sizes, FORM)
    store_rows(dv, dvt, window, h, keys, real, terms, sizes, FORM)

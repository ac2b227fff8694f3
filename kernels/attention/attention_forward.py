"""Attention forward: o = softmax(scale * q k^T) v for every head, without a causal mask, accumulated in fp32.

Two kernels:
- row: whole rows of scores. All keys of a head, at most 256, stay on chip in up to three power-of-two chunks, e.g.
  197 <= 128 + 64 + 16. A program loads K and V once for TILES query tiles. It computes all scores of a query tile
  before the softmax, so it never rescales the output.
- looped: a loop over tiles of BLOCK_N keys with an online softmax.

For fixed inputs (no packed sequences, no key mask), full tiles of the looped kernel need no mask. At most two more
tiles cover the remaining keys; only the last may need a mask. For other inputs, see `over_tiles` (attention_tiles.py).

Both kernels store lse = log2(sum 2^(scale log2(e) q k^T)) for the backward. The factor scale log2(e) multiplies the
fp32 scores, because multiplying q would round q again.

Sources: online softmax, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, ceil_div, decoded
from ..ptx import divided, wait_for_previous
from .attention_launch import AttentionCall, looped_launch, tiled_launch
from .attention_policy import AttentionConfig, cover
from .attention_tiles import (
    dot_add,
    dot_transposed,
    last_unmasked,
    load_tile,
    over_tiles,
    real_keys,
    row_of_mask,
    rows_of_program,
    scaled,
    store_tile,
    zero_tile,
)

# Up to LENGTH_CLASS consecutive values of n_kv share one compiled row kernel, which compares the indices of
# LENGTH_CLASS keys with n_kv. With 8, three programs for 197 keys fit on a multiprocessor of sm_90; with 16, only two.
LENGTH_CLASS = tl.constexpr(8)


@triton.jit
def empty_state(ROWS: tl.constexpr, FORM):
    """Returns the state of a query tile before its first keys.

    A state is the maximum and the sum of the weights in base 2, [ROWS] each, and the output before the division.
    """
    return tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32), zero_tile(ROWS, FORM)


@triton.jit
def online_softmax(scores, factor, v_tile, state, EMPTY: tl.constexpr, FIRST: tl.constexpr):
    """Adds a tile of scores, times `factor` in base 2, and its values to the state of a query tile.

    EMPTY: all keys so far may be masked. The maximum is then -inf; `shift` is 0 to avoid -inf - -inf. FIRST: `state` is
    from `empty_state`.
    """
    row_max, total, acc = state
    new_max = tl.max(scores, 1) * factor
    if not FIRST:
        new_max = tl.maximum(row_max, new_max)
    shift = new_max
    if EMPTY:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.math.exp2(scores * factor - shift[:, None])
    if FIRST:
        total = tl.sum(p, 1)
    else:
        rescale = tl.math.exp2(row_max - shift)
        total = total * rescale + tl.sum(p, 1)
        acc = scaled(acc, rescale[:, None])
    return new_max, total, dot_add(p, v_tile, acc)


@triton.jit
def store_state(o, lse_ptr, state, o_scale_ptr, row, start, n_q, EMPTY: tl.constexpr, ROWS: tl.constexpr, FORM):
    """Stores lse, and o = acc / total [* o_scale], of a query tile. `row`: index of query 0 of the head in lse.

    EMPTY: some queries may have no keys.
    """
    row_max, total, acc = state
    lse = row_max + tl.math.log2(total)
    if EMPTY:  # with lse = inf, the backward computes p = 0
        lse = tl.where(total == 0.0, float("inf"), lse)
        total = tl.where(total == 0.0, 1.0, total)
    inverse = 1.0 / total
    rows = start + tl.arange(0, ROWS)
    tl.store(lse_ptr + row + rows, lse, mask=rows < n_q)
    acc = scaled(acc, inverse[:, None])
    if o_scale_ptr is not None:
        if len(acc) > 1:
            acc = divided(acc[0], o_scale_ptr), divided(acc[1], o_scale_ptr)
        else:
            acc = (divided(acc[0], o_scale_ptr),)
    store_tile(o, acc, start, n_q, ROWS, FORM)


@triton.jit
def _load_chunks(blocks, head, n_kv, COUNT: tl.constexpr, CHUNKS, STARTS, MASKED: tl.constexpr, FORM):
    """Loads all keys or values of a head in COUNT tiles. Only the last one may extend past the last key.

    blocks: (lo, hi) of each tile; head: (image, head, strides). Together, they form a tensor (attention_tiles.py).
    """
    chunks = ()
    for i in tl.static_range(COUNT):
        chunk = load_tile(blocks[i] + head, STARTS[i], n_kv, CHUNKS[i], FORM, MASKED and i == COUNT - 1)
        chunks = chunks + (chunk,)  # type: ignore[assignment]  # triton's tuple, whose length grows
    return chunks


@triton.jit
def _attention_fwd_row_kernel(
    # FORM, strides, sizes, and blocks LO and HI of tiles: see attention_tiles.py; k_a, k_b, k_c: of the chunks of k
    q_lo, q_hi, o_lo, o_hi, k_a_lo, k_a_hi, k_b_lo, k_b_hi, k_c_lo, k_c_hi,
    v_a_lo, v_a_hi, v_b_lo, v_b_hi, v_c_lo, v_c_hi,
    strides,  # of q, o, k and v
    sizes,  # heads, N_q, N_kv
    lse_ptr,  # fp32 [B, H, N_q], contiguous
    qk_scale,
    o_scale_ptr,  # fp32 [1], reciprocal scale of o in e4m3; or None
    FORM,
    ROW,  # BLOCK_M, TILES, rows of three chunks (0: no chunk), SURE, MASKED, STAGES: see below
    DEPENDENT: tl.constexpr,  # starts before the previous kernel ends (ptx.py)
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    BLOCK_M: tl.constexpr = ROW[0]
    TILES: tl.constexpr = ROW[1]
    CHUNKS: tl.constexpr = (ROW[2], ROW[3], ROW[4])
    STARTS: tl.constexpr = (0, ROW[2], ROW[2] + ROW[3])
    COUNT: tl.constexpr = 1 + (ROW[3] > 0) + (ROW[4] > 0)
    SURE: tl.constexpr = ROW[5]  # n_kv is SURE + 1 .. SURE + LENGTH_CLASS
    MASKED: tl.constexpr = ROW[6]  # the last chunk extends past the last key
    STAGES: tl.constexpr = ROW[7]
    n_heads, n_q, n_kv = decoded(sizes[0]), decoded(sizes[1]), decoded(sizes[2])
    groups = tl.cdiv(n_q, BLOCK_M * TILES)
    bh = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    b = bh // n_heads
    h = bh % n_heads
    q_strides, o_strides, k_strides, v_strides = strides
    q = (q_lo, q_hi, b, h, q_strides)  # [B, H, N_q, D]
    o = (o_lo, o_hi, b, h, o_strides)  # [B, H, N_q, D]
    k_blocks = ((k_a_lo, k_a_hi), (k_b_lo, k_b_hi), (k_c_lo, k_c_hi))
    v_blocks = ((v_a_lo, v_a_hi), (v_b_lo, v_b_hi), (v_c_lo, v_c_hi))
    keys = _load_chunks(k_blocks, (b, h, k_strides), n_kv, COUNT, CHUNKS, STARTS, MASKED, FORM)  # of k [B, H, N_kv, D]
    values = _load_chunks(v_blocks, (b, h, v_strides), n_kv, COUNT, CHUNKS, STARTS, MASKED, FORM)

    for tile in tl.range(0, TILES, num_stages=STAGES):
        start = (group * TILES + tile) * BLOCK_M
        q_tile = load_tile(q, start, n_q, BLOCK_M, FORM, True)
        scores = ()
        for i in tl.static_range(COUNT):
            score = dot_transposed(q_tile, keys[i])  # [BLOCK_M, CHUNK]
            if MASKED and i == COUNT - 1:
                # only LENGTH_CLASS columns need a comparison with n_kv
                key = tl.arange(0, CHUNKS[i]) + STARTS[i]
                real = (key < SURE) | ((key < SURE + LENGTH_CLASS) & (key < n_kv))
                score = tl.where(real[None, :], score, float("-inf"))
            scores = scores + (score,)  # type: ignore[assignment]  # triton's tuple
        row_max = tl.max(scores[0], 1)  # type: ignore[misc]  # not empty
        for i in tl.static_range(1, COUNT):
            row_max = tl.maximum(row_max, tl.max(scores[i], 1))
        row_max = row_max * qk_scale
        p = tl.math.exp2(scores[0] * qk_scale - row_max[:, None])  # type: ignore[misc]  # not empty
        total = tl.sum(p, 1)
        acc = dot_add(p, values[0], (None, None))
        for i in tl.static_range(1, COUNT):
            p = tl.math.exp2(scores[i] * qk_scale - row_max[:, None])
            total += tl.sum(p, 1)
            acc = dot_add(p, values[i], acc)
        state = row_max, total, acc
        store_state(o, lse_ptr, state, o_scale_ptr, bh.to(tl.int64) * n_q, start, n_q, False, BLOCK_M, FORM)


@triton.jit
def _online_step(pair, start, n_kv, shared, state, KEYS: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr, FORM):
    """Adds keys start .. start + KEYS to the state of a query tile; a step of `over_tiles` (attention_tiles.py)."""
    k, v = pair
    q_tile, mask, qk_scale = shared
    k_tile = load_tile(k, start, n_kv, KEYS, FORM, MASKED)
    v_tile = load_tile(v, start, n_kv, KEYS, FORM, MASKED)
    scores = dot_transposed(q_tile, k_tile)  # [BLOCK_M, KEYS]
    if MASKED or mask[0] is not None:
        scores = tl.where(real_keys(mask, start, n_kv, KEYS)[None, :], scores, float("-inf"))
    return online_softmax(scores, qk_scale, v_tile, state, mask[0] is not None, FIRST)


@triton.jit
def _attention_fwd_looped_kernel(
    # strides to LOOP, and blocks LO and HI of tiles: see attention_tiles.py; k_a: k for full tiles; k_b, k_c: k for the
    # remaining keys
    q_lo, q_hi, o_lo, o_hi, k_a_lo, k_a_hi, k_b_lo, k_b_hi, k_c_lo, k_c_hi,
    v_a_lo, v_a_hi, v_b_lo, v_b_hi, v_c_lo, v_c_hi,
    strides,  # of q, o, k and v
    sizes, limits,
    lse_ptr,  # fp32 [B, H, N_q], contiguous
    qk_scale,
    o_scale_ptr,  # fp32 [1], reciprocal scale of o in e4m3; or None
    FORM, LOOP,
    DEPENDENT: tl.constexpr,  # starts before the previous kernel ends (ptx.py)
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    BLOCK_M: tl.constexpr = LOOP[0]
    FIXED: tl.constexpr = limits[0] is None and limits[2] is None  # neither `sequences` nor `key_mask`
    n_heads, n_q, n_kv = decoded(sizes[0]), decoded(sizes[1]), decoded(sizes[2])
    b, h, bh, start, begin, end, kv_end = rows_of_program(limits, n_heads, n_q, n_kv, BLOCK_M)
    q_strides, o_strides, k_strides, v_strides = strides
    q = (q_lo, q_hi, b, h, q_strides)  # [B, H, N_q, D]
    o = (o_lo, o_hi, b, h, o_strides)  # [B, H, N_q, D]
    full = (k_a_lo, k_a_hi, b, h, k_strides), (v_a_lo, v_a_hi, b, h, v_strides)  # k and v [B, H, N_kv, D]
    tail_b = (k_b_lo, k_b_hi, b, h, k_strides), (v_b_lo, v_b_hi, b, h, v_strides)
    tail_c = (k_c_lo, k_c_hi, b, h, k_strides), (v_c_lo, v_c_hi, b, h, v_strides)
    mask = (limits[2], row_of_mask(limits, b))
    if not FIXED:
        if start >= end:
            return
        if mask[0] is not None:
            kv_end = last_unmasked(mask, n_kv)

    q_tile = load_tile(q, start, end, BLOCK_M, FORM, True)
    state = over_tiles(
        _online_step, full, (tail_b, tail_c), (q_tile, mask, qk_scale), empty_state(BLOCK_M, FORM),
        begin, kv_end, FIXED, FORM, LOOP,
    )  # fmt: skip
    store_state(o, lse_ptr, state, o_scale_ptr, bh.to(tl.int64) * n_q, start, end, not FIXED, BLOCK_M, FORM)


def forward_launch(
    call: AttentionCall, o: Tensor, config: AttentionConfig, o_scale: Tensor | None = None
) -> Launch:  # fmt: skip
    """Returns the launch of the forward; `attention.attention_forward` describes o and o_scale."""
    own, streamed, args = {"q": call.q, "o": o}, {"k": call.k, "v": call.v}, {"o_scale_ptr": o_scale}
    n_q, n_kv, constants = call.q.shape[2], call.k.shape[2], {"DEPENDENT": config.dependent}
    if not config.chunks:
        kernel = _attention_fwd_looped_kernel
        return looped_launch(kernel, call, own, streamed, config, args, matmuls=2, tails=2, **constants)
    chunks = cover(n_kv, config.block_n, config.chunks)
    if not chunks:
        raise ValueError(f"n_kv must be between 1 and {config.chunks * config.block_n} for {config}, got {n_kv}")
    masked, sure = sum(chunks) != n_kv, (n_kv - 1) // LENGTH_CLASS.value * LENGTH_CLASS.value
    chunks = (*chunks, 0, 0)[:3]
    tiles = ceil_div(n_q, config.block_m)
    per_program = ceil_div(tiles, ceil_div(tiles, config.tiles))  # evenly, e.g. 5 tiles as 3 + 2, not 4 + 1
    row = config.block_m, per_program, *chunks, sure, masked, config.num_stages
    return tiled_launch(
        _attention_fwd_row_kernel, call, own, streamed, config, args, block=config.block_m, pieces=chunks, matmuls=2,
        tiles=per_program, ROW=row, **constants,
    )  # fmt: skip

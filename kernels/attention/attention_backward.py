"""Attention backward: dq, dk and dv from q, k, v, o, lse and do, without an [N, N] matrix in memory.

The kernels recompute p = softmax(scale q k^T) per tile as 2^(scale log2(e) q k^T - lse), with lse in base 2. Then:

    delta = rowsum(do * o)          ds = p * (do v^T - delta)
    dq = scale ds k                 dk = scale ds^T q                 dv = p^T do

A single program sums each gradient element in a fixed order, so results are deterministic. There are two kernels:
- dq: one program per query tile computes and stores delta, then computes dq in a loop over key tiles.
- dkdv: one program per key tile loads delta and computes dk and dv in a loop over query tiles.

For fixed inputs (no packed sequences, no key mask), full tiles need no mask, and at most one tile covers the rest. For
queries past the end, lse is read as +inf, so that p is 0. The matmuls of fp32 tiles wider than 64 columns use input
precision "ieee", because their registers would spill with "tf32".

Source: FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, decoded
from .attention_launch import AttentionCall, looped_launch
from .attention_policy import AttentionConfig
from .attention_tiles import (
    chosen,
    dot_add,
    dot_transposed,
    last_unmasked,
    load_tile,
    over_tiles,
    real_keys,
    row_dot,
    row_of_mask,
    rows_of_program,
    scaled,
    store_tile,
    zero_tile,
)


@triton.jit
def _dq_step(pair, start, n_kv, shared, dq, KEYS: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr, FORM):
    """Adds the contribution of keys start .. start + KEYS to dq of a query tile, before dq is multiplied by scale.

    Like `_dkdv_step`, a step of `over_tiles` (attention_tiles.py).
    """
    k, v = pair
    q_tile, do_tile, lse, delta, mask, qk_scale = shared
    PRECISION: tl.constexpr = "ieee" if FORM[1] + FORM[2] > 64 else "tf32"
    k_tile = load_tile(k, start, n_kv, KEYS, FORM, MASKED)
    v_tile = load_tile(v, start, n_kv, KEYS, FORM, MASKED)
    scores = dot_transposed(q_tile, k_tile, PRECISION)  # [BLOCK_M, KEYS]
    p = tl.math.exp2(scores * qk_scale - lse[:, None])
    if MASKED or mask[0] is not None:
        # lse includes neither masked keys nor keys past the end: for such keys, exp2 may overflow, but p must be 0
        p = tl.where(real_keys(mask, start, n_kv, KEYS)[None, :], p, 0.0)
    dp = dot_transposed(do_tile, v_tile, PRECISION)
    return dot_add(p * (dp - delta[:, None]), k_tile, dq, PRECISION)


@triton.jit
def query_tile(q, do, o, lse_ptr, delta_ptr, row, start, n_q, ROWS: tl.constexpr, FORM):
    """Returns q, do, lse and delta of a query tile; stores delta. `row`: index of query 0 of the head in lse."""
    do_early = load_tile(do, start, n_q, ROWS, FORM, True)
    o_tile = load_tile(o, start, n_q, ROWS, FORM, True)
    delta = row_dot(do_early, o_tile)
    rows = start + tl.arange(0, ROWS)
    row += rows
    tl.store(delta_ptr + row, delta, mask=rows < n_q)
    # reload do and delta after a barrier: otherwise, do would stay in registers in the reduction's layout, and spill
    tl.debug_barrier()
    delta = tl.load(delta_ptr + row, mask=rows < n_q, other=0.0)
    q_tile = load_tile(q, start, n_q, ROWS, FORM, True)
    do_tile = load_tile(do, start, n_q, ROWS, FORM, True)
    lse = tl.load(lse_ptr + row, mask=rows < n_q, other=float("inf"))
    return q_tile, do_tile, lse, delta


@triton.jit
def _attention_bwd_dq_kernel(
    # strides to LOOP, and blocks LO and HI of tiles: see attention_tiles.py; k_a: k for full tiles; k_b: for the rest
    q_lo, q_hi, do_lo, do_hi, o_lo, o_hi, dq_lo, dq_hi, k_a_lo, k_a_hi, k_b_lo, k_b_hi, v_a_lo, v_a_hi, v_b_lo, v_b_hi,
    strides,  # of q, do, o, dq, k and v
    sizes, limits,
    lse_ptr,  # fp32 [B, H, N_q], contiguous
    delta_ptr,  # output: fp32 [B, H, N_q], contiguous
    qk_scale, scale, FORM, LOOP,
):  # fmt: skip
    BLOCK_M: tl.constexpr = LOOP[0]
    FIXED: tl.constexpr = limits[0] is None and limits[2] is None  # neither `sequences` nor `key_mask`
    n_heads, n_q, n_kv = decoded(sizes[0]), decoded(sizes[1]), decoded(sizes[2])
    b, h, bh, start, begin, end, kv_end = rows_of_program(limits, n_heads, n_q, n_kv, BLOCK_M)
    q_strides, do_strides, o_strides, dq_strides, k_strides, v_strides = strides
    q = (q_lo, q_hi, b, h, q_strides)  # [B, H, N_q, D]
    do = (do_lo, do_hi, b, h, do_strides)  # [B, H, N_q, D]
    o = (o_lo, o_hi, b, h, o_strides)  # [B, H, N_q, D]
    dq = (dq_lo, dq_hi, b, h, dq_strides)  # [B, H, N_q, D]
    full = (k_a_lo, k_a_hi, b, h, k_strides), (v_a_lo, v_a_hi, b, h, v_strides)  # k and v [B, H, N_kv, D]
    tail = (k_b_lo, k_b_hi, b, h, k_strides), (v_b_lo, v_b_hi, b, h, v_strides)
    mask = (limits[2], row_of_mask(limits, b))
    if not FIXED:
        if start >= end:
            return
        if mask[0] is not None:
            kv_end = last_unmasked(mask, n_kv)

    q_tile, do_tile, lse, delta = query_tile(
        q, do, o, lse_ptr, delta_ptr, bh.to(tl.int64) * n_q, start, end, BLOCK_M, FORM
    )
    acc = over_tiles(
        _dq_step, full, (tail,), (q_tile, do_tile, lse, delta, mask, qk_scale), zero_tile(BLOCK_M, FORM),
        begin, kv_end, FIXED, FORM, LOOP,
    )  # fmt: skip
    store_tile(dq, scaled(acc, scale), start, end, BLOCK_M, FORM)


@triton.jit
def _dkdv_step(
    pair, start, n_q, shared, gradients, QUERIES: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr, FORM
):
    """Adds the contribution of queries start .. start + QUERIES to dv and dk (before scaling) of a key tile."""
    q, do = pair
    k_tile, v_tile, lse_ptr, delta_ptr, row, qk_scale = shared
    dk, dv = gradients
    PRECISION: tl.constexpr = "ieee" if FORM[1] + FORM[2] > 64 else "tf32"
    q_tile = load_tile(q, start, n_q, QUERIES, FORM, MASKED)
    do_tile = load_tile(do, start, n_q, QUERIES, FORM, MASKED)
    rows = start + tl.arange(0, QUERIES)
    if MASKED:
        lse = tl.load(lse_ptr + row + rows, mask=rows < n_q, other=float("inf"))
        delta = tl.load(delta_ptr + row + rows, mask=rows < n_q, other=0.0)
    else:
        lse = tl.load(lse_ptr + row + rows)
        delta = tl.load(delta_ptr + row + rows)
    scores = dot_transposed(k_tile, q_tile, PRECISION)  # k q^T, [BLOCK_N, QUERIES]
    p = tl.math.exp2(scores * qk_scale - lse[None, :])
    dv = dot_add(p, do_tile, dv, PRECISION)
    dp = dot_transposed(v_tile, do_tile, PRECISION)
    return dot_add(p * (dp - delta[None, :]), q_tile, dk, PRECISION), dv


@triton.jit
def _attention_bwd_dkdv_kernel(
    # strides to LOOP, and blocks LO and HI of tiles: see attention_tiles.py; q_a: q for full tiles; q_b: for the rest
    k_lo, k_hi, v_lo, v_hi, dk_lo, dk_hi, dv_lo, dv_hi,
    q_a_lo, q_a_hi, q_b_lo, q_b_hi, do_a_lo, do_a_hi, do_b_lo, do_b_hi,
    strides,  # of k, v, dk, dv, q and do
    sizes, limits,
    lse_ptr,  # fp32 [B, H, N_q], contiguous
    delta_ptr,  # fp32 [B, H, N_q], contiguous
    qk_scale, scale, FORM, LOOP,
):  # fmt: skip
    BLOCK_N: tl.constexpr = LOOP[0]
    FIXED: tl.constexpr = limits[0] is None and limits[2] is None  # neither `sequences` nor `key_mask`
    n_heads, n_q, n_kv = decoded(sizes[0]), decoded(sizes[1]), decoded(sizes[2])
    b, h, bh, start, begin, end, q_end = rows_of_program(limits, n_heads, n_kv, n_q, BLOCK_N)
    k_strides, v_strides, dk_strides, dv_strides, q_strides, do_strides = strides
    k = (k_lo, k_hi, b, h, k_strides)  # [B, H, N_kv, D]
    v = (v_lo, v_hi, b, h, v_strides)  # [B, H, N_kv, D]
    dk = (dk_lo, dk_hi, b, h, dk_strides)  # [B, H, N_kv, D]
    dv = (dv_lo, dv_hi, b, h, dv_strides)  # [B, H, N_kv, D]
    full = (q_a_lo, q_a_hi, b, h, q_strides), (do_a_lo, do_a_hi, b, h, do_strides)  # q and do [B, H, N_q, D]
    tail = (q_b_lo, q_b_hi, b, h, q_strides), (do_b_lo, do_b_hi, b, h, do_strides)
    mask = (limits[2], row_of_mask(limits, b))
    if not FIXED:
        if start >= end:
            return
        if mask[0] is not None:
            here = real_keys(mask, start, end, BLOCK_N)
            q_end = tl.where(tl.sum(here.to(tl.int32), 0) > 0, q_end, begin)

    k_tile = load_tile(k, start, end, BLOCK_N, FORM, True)
    v_tile = load_tile(v, start, end, BLOCK_N, FORM, True)
    dk_tile, dv_tile = over_tiles(
        _dkdv_step, full, (tail,), (k_tile, v_tile, lse_ptr, delta_ptr, bh.to(tl.int64) * n_q, qk_scale),
        (zero_tile(BLOCK_N, FORM), zero_tile(BLOCK_N, FORM)), begin, q_end, FIXED, FORM, LOOP,
    )  # fmt: skip
    if mask[0] is not None:
        # the loop also accumulated gradients of masked keys; these gradients must be 0
        here = real_keys(mask, start, end, BLOCK_N)[:, None]
        dk_tile = chosen(dk_tile, here)
        dv_tile = chosen(dv_tile, here)
    store_tile(dk, scaled(dk_tile, scale), start, end, BLOCK_N, FORM)
    store_tile(dv, dv_tile, start, end, BLOCK_N, FORM)


def backward_launches(
    call: AttentionCall, o: Tensor, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, delta: Tensor,
    for_dq: AttentionConfig, for_dkdv: AttentionConfig,
) -> tuple[Launch, Launch]:  # fmt: skip
    """Returns the launches of both kernels; `attention.attention_backward` describes the tensors."""
    args, keys, queries = {"delta_ptr": delta, "scale": call.scale}, {"k": call.k, "v": call.v}, {"q": call.q, "do": do}
    query_tiles, key_tiles = queries | {"o": o, "dq": dq}, keys | {"dk": dk, "dv": dv}
    return (
        looped_launch(_attention_bwd_dq_kernel, call, query_tiles, keys, for_dq, args, matmuls=3),
        looped_launch(_attention_bwd_dkdv_kernel, call, key_tiles, queries, for_dkdv, args, matmuls=4),
    )

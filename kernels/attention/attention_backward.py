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

import torch
import triton
import triton.language as tl

from ..launch import Launch
from .attention_launch import LOG2_E, UNSPECIALIZED, looped_launch
from .attention_policy import BackwardConfig
from .attention_tiles import (
    chosen,
    dot_add,
    dot_transposed,
    last_unmasked,
    load_tile,
    over_tiles,
    real_keys,
    rows_of_program,
    scaled,
    store_tile,
    zero_tile,
)


@triton.jit
def _dq_step(
    k, v, start, n_kv, queries, dq,
    KEYS: tl.constexpr, FORM: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of keys start .. start + KEYS to dq of a query tile, before dq is multiplied by scale."""
    qt, dot, lse, delta, key_mask, qk_scale = queries
    PRECISION: tl.constexpr = "ieee" if FORM[1] + FORM[2] > 64 else "tf32"
    kt = load_tile(k, start, n_kv, KEYS, FORM, TMA, MASKED)
    vt = load_tile(v, start, n_kv, KEYS, FORM, TMA, MASKED)
    scores = dot_transposed(qt, kt, PRECISION)  # [BLOCK_M, KEYS]
    p = tl.math.exp2(scores * qk_scale - lse[:, None])
    if MASKED or key_mask is not None:
        # lse includes neither masked keys nor keys past the end: for such keys, exp2 may overflow, but p must be 0
        p = tl.where(real_keys(key_mask, start, n_kv, KEYS)[None, :], p, 0.0)
    dp = dot_transposed(dot, vt, PRECISION)
    return dot_add(p * (dp - delta[:, None]), kt, dq, PRECISION)


@triton.jit
def _query_tile(
    queries, gradients, outputs, lse_ptr, delta_ptr, row_offset, start, n_q,
    ROWS: tl.constexpr, FORM: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Returns q, do, lse and delta of a query tile; stores delta. `row_offset`: index of query 0 of the head in lse."""
    do_early = load_tile(gradients, start, n_q, ROWS, FORM, TMA, True)
    ot = load_tile(outputs, start, n_q, ROWS, FORM, TMA, True)
    delta = tl.sum(do_early[0].to(tl.float32) * ot[0].to(tl.float32), 1)
    if len(ot) > 1:
        delta += tl.sum(do_early[1].to(tl.float32) * ot[1].to(tl.float32), 1)
    rows = start + tl.arange(0, ROWS)
    row_offset += rows
    tl.store(delta_ptr + row_offset, delta, mask=rows < n_q)
    # reload do and delta after a barrier: otherwise, do would stay in registers in the reduction's layout, and spill
    tl.debug_barrier()
    delta = tl.load(delta_ptr + row_offset, mask=rows < n_q, other=0.0)
    qt = load_tile(queries, start, n_q, ROWS, FORM, TMA, True)
    dot = load_tile(gradients, start, n_q, ROWS, FORM, TMA, True)
    lse = tl.load(lse_ptr + row_offset, mask=rows < n_q, other=float("inf"))
    return qt, dot, lse, delta


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _attention_bwd_dq_kernel(
    # q, q_hi: pointers to q, or descriptors of blocks LO and HI (attention_tiles.py)
    # k_a: k for full tiles. k_b: k for the last tile, or for all tiles if one loop masks all (over_tiles)
    q, q_hi, do, do_hi, o, o_hi, dq, dq_hi, k_a, k_a_hi, k_b, k_b_hi, v_a, v_a_hi, v_b, v_b_hi,
    lse_ptr,  # fp32 [B, H, N_q], contiguous
    delta_ptr,  # output: fp32 [B, H, N_q], contiguous
    sequences, key_mask,
    q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, o_stride_b, o_stride_h, o_stride_n,
    do_stride_b, do_stride_h, do_stride_n, dq_stride_b, dq_stride_h, dq_stride_n, key_mask_stride_b,
    n_sequences, n_heads, n_q, n_kv, qk_scale, scale,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr, TAIL_B: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    b, h, bh, start, begin, end, kv_end = rows_of_program(sequences, n_sequences, n_heads, n_q, n_kv, BLOCK_M)
    FIXED: tl.constexpr = sequences is None and key_mask is None
    FORM: tl.constexpr = (D, LO, HI, WIDE, ALIGN)
    queries = (q, q_hi, b, h, q_stride_b, q_stride_h, q_stride_n)
    outputs = (o, o_hi, b, h, o_stride_b, o_stride_h, o_stride_n)
    gradients = (do, do_hi, b, h, do_stride_b, do_stride_h, do_stride_n)
    out = (dq, dq_hi, b, h, dq_stride_b, dq_stride_h, dq_stride_n)
    keys = (k_a, k_a_hi, b, h, k_stride_b, k_stride_h, k_stride_n)
    values = (v_a, v_a_hi, b, h, v_stride_b, v_stride_h, v_stride_n)
    last_keys = (k_b, k_b_hi, b, h, k_stride_b, k_stride_h, k_stride_n)
    last_values = (v_b, v_b_hi, b, h, v_stride_b, v_stride_h, v_stride_n)
    if not FIXED:
        if start >= end:
            return
        if key_mask is not None:
            key_mask += tl.cast(b, tl.int64) * key_mask_stride_b
            kv_end = last_unmasked(key_mask, n_kv)
    full_end = begin + (kv_end - begin) // BLOCK_N * BLOCK_N

    qt, dot, lse, delta = _query_tile(
        queries, gradients, outputs, lse_ptr, delta_ptr, bh.to(tl.int64) * n_q, start, end, BLOCK_M, FORM, TMA and FIXED
    )
    acc = over_tiles(
        _dq_step, keys, values, last_keys, last_values, (qt, dot, lse, delta, key_mask, qk_scale),
        zero_tile(BLOCK_M, FORM), begin, full_end, kv_end, BLOCK_N, FORM, TMA, STAGES, FIXED, FULL, TAIL_B, MASKED,
    )  # fmt: skip
    store_tile(out, scaled(acc, scale), start, end, BLOCK_M, FORM, TMA and FIXED)


@triton.jit
def _dkdv_step(
    q, do, start, n_q, keys, gradients,
    QUERIES: tl.constexpr, FORM: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of queries start .. start + QUERIES to dv and dk (before scaling) of a key tile."""
    kt, vt, lse_ptr, delta_ptr, row_offset, qk_scale = keys
    dk, dv = gradients
    PRECISION: tl.constexpr = "ieee" if FORM[1] + FORM[2] > 64 else "tf32"
    qt = load_tile(q, start, n_q, QUERIES, FORM, TMA, MASKED)
    dot = load_tile(do, start, n_q, QUERIES, FORM, TMA, MASKED)
    rows = start + tl.arange(0, QUERIES)
    if MASKED:
        lse = tl.load(lse_ptr + row_offset + rows, mask=rows < n_q, other=float("inf"))
        delta = tl.load(delta_ptr + row_offset + rows, mask=rows < n_q, other=0.0)
    else:
        lse = tl.load(lse_ptr + row_offset + rows)
        delta = tl.load(delta_ptr + row_offset + rows)
    scores = dot_transposed(kt, qt, PRECISION)  # k q^T, [BLOCK_N, QUERIES]
    p = tl.math.exp2(scores * qk_scale - lse[None, :])
    dv = dot_add(p, dot, dv, PRECISION)
    dp = dot_transposed(vt, dot, PRECISION)
    return dot_add(p * (dp - delta[None, :]), qt, dk, PRECISION), dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _attention_bwd_dkdv_kernel(
    # k, k_hi: pointers to k, or descriptors of blocks LO and HI (attention_tiles.py)
    # q_a: q for full tiles. q_b: q for the last tile, or for all tiles if one loop masks all (over_tiles)
    q_a, q_a_hi, do_a, do_a_hi, q_b, q_b_hi, do_b, do_b_hi, k, k_hi, v, v_hi, dk, dk_hi, dv, dv_hi,
    lse_ptr,  # fp32 [B, H, N_q], contiguous
    delta_ptr,  # fp32 [B, H, N_q], contiguous
    sequences, key_mask,
    q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, do_stride_b, do_stride_h, do_stride_n,
    dk_stride_b, dk_stride_h, dk_stride_n, dv_stride_b, dv_stride_h, dv_stride_n, key_mask_stride_b,
    n_sequences, n_heads, n_q, n_kv, qk_scale, scale,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr, TAIL_B: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    b, h, bh, start, begin, end, q_end = rows_of_program(sequences, n_sequences, n_heads, n_kv, n_q, BLOCK_N)
    FIXED: tl.constexpr = sequences is None and key_mask is None
    FORM: tl.constexpr = (D, LO, HI, WIDE, ALIGN)
    keys = (k, k_hi, b, h, k_stride_b, k_stride_h, k_stride_n)
    values = (v, v_hi, b, h, v_stride_b, v_stride_h, v_stride_n)
    key_gradients = (dk, dk_hi, b, h, dk_stride_b, dk_stride_h, dk_stride_n)
    value_gradients = (dv, dv_hi, b, h, dv_stride_b, dv_stride_h, dv_stride_n)
    queries = (q_a, q_a_hi, b, h, q_stride_b, q_stride_h, q_stride_n)
    gradients = (do_a, do_a_hi, b, h, do_stride_b, do_stride_h, do_stride_n)
    last_queries = (q_b, q_b_hi, b, h, q_stride_b, q_stride_h, q_stride_n)
    last_gradients = (do_b, do_b_hi, b, h, do_stride_b, do_stride_h, do_stride_n)
    if not FIXED:
        if start >= end:
            return
        if key_mask is not None:
            key_mask += tl.cast(b, tl.int64) * key_mask_stride_b
            here = real_keys(key_mask, start, end, BLOCK_N)
            q_end = tl.where(tl.sum(here.to(tl.int32), 0) > 0, q_end, begin)
    full_end = begin + (q_end - begin) // BLOCK_M * BLOCK_M
    row_offset = bh.to(tl.int64) * n_q

    kt = load_tile(keys, start, end, BLOCK_N, FORM, TMA and FIXED, True)
    vt = load_tile(values, start, end, BLOCK_N, FORM, TMA and FIXED, True)
    dkt, dvt = over_tiles(
        _dkdv_step, queries, gradients, last_queries, last_gradients,
        (kt, vt, lse_ptr, delta_ptr, row_offset, qk_scale), (zero_tile(BLOCK_N, FORM), zero_tile(BLOCK_N, FORM)),
        begin, full_end, q_end, BLOCK_M, FORM, TMA, STAGES, FIXED, FULL, TAIL_B, MASKED,
    )  # fmt: skip
    if key_mask is not None:
        # the loop also accumulated gradients of masked keys; these gradients must be 0
        here = real_keys(key_mask, start, end, BLOCK_N)[:, None]
        dkt = chosen(dkt, here)
        dvt = chosen(dvt, here)
    store_tile(key_gradients, scaled(dkt, scale), start, end, BLOCK_N, FORM, TMA and FIXED)
    store_tile(value_gradients, dvt, start, end, BLOCK_N, FORM, TMA and FIXED)


def backward_launches(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, do: torch.Tensor, lse: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, delta: torch.Tensor, scale: float,
    for_dq: BackwardConfig, for_dkdv: BackwardConfig,
    sequences: torch.Tensor | None = None, key_mask: torch.Tensor | None = None,
) -> tuple[Launch, Launch]:  # fmt: skip
    """Returns the launches of both kernels; `attention.attention_backward` describes the tensors."""
    args = {"lse_ptr": lse, "delta_ptr": delta, "qk_scale": scale * LOG2_E, "scale": scale}
    keys, queries, form = {"k": k, "v": v}, {"q": q, "do": do}, (sequences, key_mask)
    return (
        looped_launch(_attention_bwd_dq_kernel, queries | {"o": o, "dq": dq}, keys, for_dq, args, *form),
        looped_launch(_attention_bwd_dkdv_kernel, keys | {"dk": dk, "dv": dv}, queries, for_dkdv, args, *form),
    )

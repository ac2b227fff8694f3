"""Attention forward: o = softmax(scale * q k^T) v for every head, without a causal mask, accumulated in fp32.

Two kernels:
- row: all keys of a head, at most 256, stay on chip in up to three power-of-two chunks, e.g. 197 <= 128 + 64 + 16.
  A program loads K and V once for TILES query tiles. It computes all scores of a query tile before the softmax, so
  it never rescales the output.
- looped: a loop over tiles of BLOCK_N keys with an online softmax.

For fixed inputs (no packed sequences, no key mask), full tiles of the looped kernel need no mask. At most two more
tiles cover the remaining keys; only the last may need a mask. For other inputs, see `over_tiles` (attention_tiles.py).

Both kernels store lse = log2(sum 2^(scale log2(e) q k^T)) for the backward. The factor scale log2(e) multiplies the
fp32 scores, because multiplying q would round q again.

Sources: online softmax, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..launch import Launch, ceil_div
from ..ptx import divided, wait_for_previous
from .attention_launch import LOG2_E, UNSPECIALIZED, looped_launch, tiled_launch
from .attention_policy import ForwardConfig, cover
from .attention_tiles import (
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

# Up to LENGTH_CLASS consecutive values of n_kv share one compiled row kernel, which compares the indices of
# LENGTH_CLASS keys with n_kv. With 8, three programs for 197 keys fit on a multiprocessor of sm_90; with 16, only two.
LENGTH_CLASS = tl.constexpr(8)


@triton.jit
def _store_output(target, acc, inverse, o_scale_ptr, start, n_q, ROWS: tl.constexpr, FORM: tl.constexpr,
                  TMA: tl.constexpr):  # fmt: skip
    acc = scaled(acc, inverse[:, None])
    if o_scale_ptr is not None:
        if len(acc) > 1:
            acc = divided(acc[0], o_scale_ptr), divided(acc[1], o_scale_ptr)
        else:
            acc = (divided(acc[0], o_scale_ptr),)
    store_tile(target, acc, start, n_q, ROWS, FORM, TMA)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _attention_fwd_row_kernel(
    # q, q_hi: pointers to q, or descriptors of blocks LO and HI (attention_tiles.py). k_a, k_b, k_c: k for 3 chunks
    q, q_hi, k_a, k_a_hi, k_b, k_b_hi, k_c, k_c_hi, v_a, v_a_hi, v_b, v_b_hi, v_c, v_c_hi, o, o_hi,
    lse_ptr,  # fp32 [B, H, N_q], contiguous
    o_scale_ptr,  # fp32 [1], reciprocal scale of o in e4m3; or None
    q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, o_stride_b, o_stride_h, o_stride_n,
    n_heads, n_q, n_kv, qk_scale,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, TILES: tl.constexpr,
    CHUNK_A: tl.constexpr, CHUNK_B: tl.constexpr, CHUNK_C: tl.constexpr, SURE: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    groups = tl.cdiv(n_q, BLOCK_M * TILES)
    bh = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    b = bh // n_heads
    h = bh % n_heads
    FORM: tl.constexpr = (D, LO, HI, WIDE, ALIGN)
    CHUNKS: tl.constexpr = (CHUNK_A, CHUNK_B, CHUNK_C, 0)
    STARTS: tl.constexpr = (0, CHUNK_A, CHUNK_A + CHUNK_B)
    COUNT: tl.constexpr = 1 + (CHUNK_B > 0) + (CHUNK_C > 0)
    queries = (q, q_hi, b, h, q_stride_b, q_stride_h, q_stride_n)
    out = (o, o_hi, b, h, o_stride_b, o_stride_h, o_stride_n)
    key_sources = ((k_a, k_a_hi), (k_b, k_b_hi), (k_c, k_c_hi))
    value_sources = ((v_a, v_a_hi), (v_b, v_b_hi), (v_c, v_c_hi))

    # only the last chunk may extend past the last key
    keys = ()
    values = ()
    for i in tl.static_range(COUNT):
        source = key_sources[i] + (b, h, k_stride_b, k_stride_h, k_stride_n)
        chunk = load_tile(source, STARTS[i], n_kv, CHUNKS[i], FORM, TMA, MASKED and i == COUNT - 1)
        keys = keys + (chunk,)  # type: ignore[assignment]  # triton's tuple, whose length grows
    for i in tl.static_range(COUNT):
        source = value_sources[i] + (b, h, v_stride_b, v_stride_h, v_stride_n)
        chunk = load_tile(source, STARTS[i], n_kv, CHUNKS[i], FORM, TMA, MASKED and i == COUNT - 1)
        values = values + (chunk,)  # type: ignore[assignment]  # triton's tuple

    for tile in tl.range(0, TILES, num_stages=STAGES):
        start = (group * TILES + tile) * BLOCK_M
        qt = load_tile(queries, start, n_q, BLOCK_M, FORM, TMA, True)
        scores = ()
        for i in tl.static_range(COUNT):
            score = dot_transposed(qt, keys[i])  # [BLOCK_M, CHUNK]
            if MASKED and i == COUNT - 1:
                # SURE < n_kv <= SURE + LENGTH_CLASS: only LENGTH_CLASS columns need a comparison with n_kv
                key = STARTS[i] + tl.arange(0, CHUNKS[i])
                real = (key < SURE) | ((key < SURE + LENGTH_CLASS) & (key < n_kv))
                score = tl.where(real[None, :], score, float("-inf"))
            scores = scores + (score,)  # type: ignore[assignment]  # triton's tuple
        row_max = tl.max(scores[0], 1)  # type: ignore[misc]  # not empty
        for i in tl.static_range(1, COUNT):
            row_max = tl.maximum(row_max, tl.max(scores[i], 1))
        row_max = row_max * qk_scale
        p = tl.math.exp2(scores[0] * qk_scale - row_max[:, None])  # type: ignore[misc]  # not empty
        total = tl.sum(p, 1)
        acc = dot_add(p, values[0], (None, None))  # type: ignore[misc]  # not empty
        for i in tl.static_range(1, COUNT):
            p = tl.math.exp2(scores[i] * qk_scale - row_max[:, None])
            total += tl.sum(p, 1)
            acc = dot_add(p, values[i], acc)
        rows = start + tl.arange(0, BLOCK_M)
        inverse = 1.0 / total
        tl.store(lse_ptr + bh.to(tl.int64) * n_q + rows, row_max + tl.math.log2(total), mask=rows < n_q)
        _store_output(out, acc, inverse, o_scale_ptr, start, n_q, BLOCK_M, FORM, TMA)


@triton.jit
def _online_step(
    k, v, start, n_kv, queries, state,
    KEYS: tl.constexpr, FORM: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Adds keys start .. start + KEYS to the running maximum, sum and output of a query tile.

    With `key_mask`, all keys so far may be masked. The running maximum is then -inf; `shift` is 0 to avoid -inf - -inf.
    """
    qt, key_mask, qk_scale = queries
    row_max, total, acc = state
    kt = load_tile(k, start, n_kv, KEYS, FORM, TMA, MASKED)
    vt = load_tile(v, start, n_kv, KEYS, FORM, TMA, MASKED)
    scores = dot_transposed(qt, kt)  # [BLOCK_M, KEYS]
    if MASKED or key_mask is not None:
        scores = tl.where(real_keys(key_mask, start, n_kv, KEYS)[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * qk_scale)
    shift = new_max
    if key_mask is not None:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.math.exp2(scores * qk_scale - shift[:, None])
    rescale = tl.math.exp2(row_max - shift)
    total = total * rescale + tl.sum(p, 1)
    if not FIRST:
        acc = scaled(acc, rescale[:, None])
    return new_max, total, dot_add(p, vt, acc)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _attention_fwd_looped_kernel(
    # q, q_hi: pointers to q, or descriptors of blocks LO and HI (attention_tiles.py)
    # k_a: k for full tiles. k_b, k_c: k for the remaining keys
    q, q_hi, k_a, k_a_hi, k_b, k_b_hi, k_c, k_c_hi, v_a, v_a_hi, v_b, v_b_hi, v_c, v_c_hi, o, o_hi,
    lse_ptr,  # fp32 [B, H, N_q], contiguous
    o_scale_ptr,  # fp32 [1], reciprocal scale of o in e4m3; or None
    sequences, key_mask,
    q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, o_stride_b, o_stride_h, o_stride_n, key_mask_stride_b,
    n_sequences, n_heads, n_q, n_kv, qk_scale,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr,
    TAIL_B: tl.constexpr, TAIL_C: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    b, h, bh, start, begin, end, kv_end = rows_of_program(sequences, n_sequences, n_heads, n_q, n_kv, BLOCK_M)
    FIXED: tl.constexpr = sequences is None and key_mask is None
    FORM: tl.constexpr = (D, LO, HI, WIDE, ALIGN)
    queries = (q, q_hi, b, h, q_stride_b, q_stride_h, q_stride_n)
    out = (o, o_hi, b, h, o_stride_b, o_stride_h, o_stride_n)
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

    qt = load_tile(queries, start, end, BLOCK_M, FORM, TMA and FIXED, True)
    state = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32), zero_tile(BLOCK_M, FORM)
    shared = (qt, key_mask, qk_scale)
    state = over_tiles(
        _online_step, keys, values, last_keys, last_values, shared, state, begin, full_end, kv_end,
        BLOCK_N, FORM, TMA, STAGES, FIXED, FULL, TAIL_B, MASKED and TAIL_C == 0,
    )  # fmt: skip
    if TAIL_C > 0:
        state = _online_step(
            (k_c, k_c_hi, b, h, k_stride_b, k_stride_h, k_stride_n),
            (v_c, v_c_hi, b, h, v_stride_b, v_stride_h, v_stride_n),
            full_end + TAIL_B, n_kv, shared, state, TAIL_C, FORM, TMA, MASKED, False,
        )  # fmt: skip
    row_max, total, acc = state
    lse = row_max + tl.math.log2(total)
    if not FIXED:  # queries without keys: with lse = inf, the backward computes p = 0
        lse = tl.where(total == 0.0, float("inf"), lse)
        total = tl.where(total == 0.0, 1.0, total)
    rows = start + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + bh.to(tl.int64) * n_q + rows, lse, mask=rows < end)
    _store_output(out, acc, 1.0 / total, o_scale_ptr, start, end, BLOCK_M, FORM, TMA and FIXED)


def forward_launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, scale: float,
    config: ForwardConfig, o_scale: torch.Tensor | None = None, sequences: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> Launch:  # fmt: skip
    """Returns the launch of the forward; `attention.attention_forward` describes the tensors."""
    n_kv, own, streamed = k.shape[2], {"q": q, "o": o}, {"k": k, "v": v}
    args = {"lse_ptr": lse, "o_scale_ptr": o_scale, "qk_scale": scale * LOG2_E}
    constants: dict[str, Any] = {"DEPENDENT": config.dependent}
    if config.scheme == "looped":
        return looped_launch(
            _attention_fwd_looped_kernel, own, streamed, config, args, sequences, key_mask, 2, constants
        )  # fmt: skip
    chunks = cover(n_kv, config.block_n, config.chunks)
    if not chunks:
        raise ValueError(f"n_kv must be between 1 and {config.chunks * config.block_n} for {config}, got {n_kv}")
    chunks = (*chunks, 0, 0)[:3]
    tiles = ceil_div(q.shape[2], config.block_m)
    groups = ceil_div(tiles, config.tiles)
    constants |= {
        "BLOCK_M": config.block_m, "TILES": ceil_div(tiles, max(groups, 1)),
        "CHUNK_A": chunks[0], "CHUNK_B": chunks[1], "CHUNK_C": chunks[2], "MASKED": sum(chunks) != n_kv,
        "SURE": (n_kv - 1) // LENGTH_CLASS.value * LENGTH_CLASS.value,
    }  # fmt: skip
    return tiled_launch(
        _attention_fwd_row_kernel, own, streamed, config.block_m, chunks, groups, config, args, constants
    )

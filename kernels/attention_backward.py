"""Attention backward: dq, dk and dv from q, k, v, o, lse and do, without any [N, N] matrix.

With p = 2^(scale log2(e) q k^T - lse) recomputed tile by tile:

    delta = sum_D do * o            ds = p * (do v^T - delta)
    dq = scale ds k                 dk = scale ds^T q                 dv = p^T do

Two kernels, so that every gradient element is summed by one program in one order (no atomics, the same bits each
run): one program for each query tile computes delta and dq and runs first; one for each key tile computes dk and dv.
Both stream the other side in full unmasked tiles and one smaller power-of-two tile for the rest. Rows past the end
are read as 0, lse as +inf there, so that their p is 0. Source: FlashAttention-2, arXiv 2307.08691.

In full fp32 that is not enough. Two roundings are shared by a whole row, and eager has neither: lse is one fp32 number,
so every p of a row is off by one factor, up to 2^(|lse| 2^-24), 6e-5 at scores of 1000; and delta, summed from o,
differs by a rounding of its own from sum_j p_j (do v_j), although in a row with a single large p both stand for the
same number and should cancel. So there the dq kernel sums p, ds and p k of a row beside dq,

    total = sum_j p_j           excess = sum_j ds_j / total
    dq = scale (sum_j ds_j k_j - excess sum_j p_j k_j) / total

and leaves 1 / total and delta + excess to the other kernel. p / total adds up to 1 whatever lse rounded to; delta +
excess equals do v_j to the last bit where they cancel; and excess, of the order of a rounding, costs none of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .attention_forward import real_keys
from .attention_launch import (
    LOG2_E,
    UNSPECIALISED,
    shared_constants,
    stride_arguments,
    tile_arguments,
    tma_allows,
)
from .attention_policy import BackwardConfig, cover
from .attention_tiles import assume_a_tile, dot_add, dot_transposed, load_tile, store_tile, zero_tile
from .launch import Launch


@triton.jit
def dq_step(
    k, k_hi, v, v_hi, b, h, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    keep, start, n_kv, qk_scale, qt, qt_hi, dot, dot_hi, lse, delta, dq, dq_hi, total, excess, mean, mean_hi,
    KEYS: tl.constexpr, D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr, MASKED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Add what keys start .. start + KEYS contribute to dq (without scale) of a query tile.

    Where EXACT also to the row's sums of p, of ds, and of p k.
    """
    kt, kt_hi = load_tile(
        k, k_hi, b, h, k_stride_b, k_stride_h, k_stride_n, start, n_kv, KEYS, D, LO, HI, TMA, WIDE, ALIGN, MASKED
    )
    vt, vt_hi = load_tile(
        v, v_hi, b, h, v_stride_b, v_stride_h, v_stride_n, start, n_kv, KEYS, D, LO, HI, TMA, WIDE, ALIGN, MASKED
    )
    scores = dot_transposed(qt, qt_hi, kt, kt_hi, HI, PRECISION)  # [BLOCK_M, KEYS]
    p = tl.math.exp2(scores * qk_scale - lse[:, None])
    if MASKED or keep is not None:
        # a key that is not there has score 0, which may overflow p where every real score is far below
        p = tl.where(real_keys(keep, start, n_kv, KEYS)[None, :], p, 0.0)
    dp = dot_transposed(dot, dot_hi, vt, vt_hi, HI, PRECISION)
    ds = p * (dp - delta[:, None])
    dq, dq_hi = dot_add(ds, kt, kt_hi, dq, dq_hi, HI, PRECISION)
    if EXACT:
        total += tl.sum(p, 1)
        excess += tl.sum(ds, 1)
        mean, mean_hi = dot_add(p, kt, kt_hi, mean, mean_hi, HI, PRECISION)
    return dq, dq_hi, total, excess, mean, mean_hi


@triton.jit
def query_tile(
    q, q_hi, do, do_hi, o, o_hi, lse_ptr, delta_ptr, b, h,
    q_stride_b, q_stride_h, q_stride_n, do_stride_b, do_stride_h, do_stride_n, o_stride_b, o_stride_h, o_stride_n,
    row_offset, start, n_q,
    ROWS: tl.constexpr, D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
    TMA: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """What dq needs of queries start .. start + ROWS: q, do, lse and delta, which it writes. `row_offset`: of row 0."""
    do_early, do_early_hi = load_tile(
        do, do_hi, b, h, do_stride_b, do_stride_h, do_stride_n, start, n_q, ROWS, D, LO, HI, TMA, WIDE, ALIGN, True
    )
    ot, ot_hi = load_tile(
        o, o_hi, b, h, o_stride_b, o_stride_h, o_stride_n, start, n_q, ROWS, D, LO, HI, TMA, WIDE, ALIGN, True
    )
    delta = tl.sum(do_early.to(tl.float32) * ot.to(tl.float32), 1)
    if HI > 0:
        delta += tl.sum(do_early_hi.to(tl.float32) * ot_hi.to(tl.float32), 1)
    rows = start + tl.arange(0, ROWS)
    row_offset += rows
    tl.store(delta_ptr + row_offset, delta, mask=rows < n_q)
    # Read do and delta again: one tile for both uses would stay in registers in the layout of the sum, and spill.
    tl.debug_barrier()
    delta = tl.load(delta_ptr + row_offset, mask=rows < n_q, other=0.0)
    qt, qt_hi = load_tile(
        q, q_hi, b, h, q_stride_b, q_stride_h, q_stride_n, start, n_q, ROWS, D, LO, HI, TMA, WIDE, ALIGN, True
    )
    dot, dot_hi = load_tile(
        do, do_hi, b, h, do_stride_b, do_stride_h, do_stride_n, start, n_q, ROWS, D, LO, HI, TMA, WIDE, ALIGN, True
    )
    lse = tl.load(lse_ptr + row_offset, mask=rows < n_q, other=float("inf"))
    return qt, qt_hi, dot, dot_hi, lse, delta


@triton.jit(do_not_specialize=UNSPECIALISED)
def _attention_bwd_dq_kernel(
    q, q_hi, do, do_hi, o, o_hi, dq, dq_hi, k_a, k_a_hi, k_b, k_b_hi, v_a, v_a_hi, v_b, v_b_hi,
    lse_ptr,  # fp32 [B, H, N_q], contiguous
    delta_ptr,  # written: fp32 [B, H, N_q], contiguous
    inverse_ptr,  # written: fp32 [B, H, N_q], contiguous, 1 / sum of p; None where not to be exact
    q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, o_stride_b, o_stride_h, o_stride_n,
    do_stride_b, do_stride_h, do_stride_n, dq_stride_b, dq_stride_h, dq_stride_n,
    n_heads, n_q, n_kv, qk_scale, scale,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n_q, BLOCK_M)
    bh = tl.program_id(0) // tiles
    start = (tl.program_id(0) % tiles) * BLOCK_M
    b = bh // n_heads
    h = bh % n_heads
    n_full = n_kv // BLOCK_N * BLOCK_N

    rows = start + tl.arange(0, BLOCK_M)
    row_offset = bh.to(tl.int64) * n_q
    qt, qt_hi, dot, dot_hi, lse, delta = query_tile(
        q, q_hi, do, do_hi, o, o_hi, lse_ptr, delta_ptr, b, h,
        q_stride_b, q_stride_h, q_stride_n, do_stride_b, do_stride_h, do_stride_n, o_stride_b, o_stride_h, o_stride_n,
        row_offset, start, n_q, BLOCK_M, D, LO, HI, TMA, WIDE, ALIGN,
    )  # fmt: skip
    EXACT: tl.constexpr = inverse_ptr is not None
    acc, acc_hi = zero_tile(BLOCK_M, LO, HI)
    total = tl.zeros((BLOCK_M,), tl.float32)
    excess = tl.zeros((BLOCK_M,), tl.float32)
    mean, mean_hi = zero_tile(BLOCK_M, LO, HI)
    if FULL:
        assume_a_tile(n_full, TMA)
        for n in tl.range(0, n_full, BLOCK_N, num_stages=STAGES):
            acc, acc_hi, total, excess, mean, mean_hi = dq_step(
                k_a, k_a_hi, v_a, v_a_hi, b, h, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
                None, n, n_kv, qk_scale, qt, qt_hi, dot, dot_hi, lse, delta, acc, acc_hi, total, excess, mean, mean_hi,
                BLOCK_N, D, LO, HI, PRECISION, TMA, WIDE, ALIGN, False, EXACT,
            )  # fmt: skip
    if TAIL > 0:
        acc, acc_hi, total, excess, mean, mean_hi = dq_step(
            k_b, k_b_hi, v_b, v_b_hi, b, h, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
            None, n_full, n_kv, qk_scale, qt, qt_hi, dot, dot_hi, lse, delta, acc, acc_hi, total, excess, mean, mean_hi,
            TAIL, D, LO, HI, PRECISION, TMA, WIDE, ALIGN, MASKED, EXACT,
        )  # fmt: skip
    if EXACT:
        inverse = 1.0 / tl.where(rows < n_q, total, 1.0)
        excess *= inverse
        tl.store(delta_ptr + row_offset + rows, delta + excess, mask=rows < n_q)
        tl.store(inverse_ptr + row_offset + rows, inverse, mask=rows < n_q)
        acc = (acc - mean * excess[:, None]) * inverse[:, None]
        if HI > 0:
            acc_hi = (acc_hi - mean_hi * excess[:, None]) * inverse[:, None]
    store_tile(
        dq, dq_hi, acc * scale, acc_hi * scale, b, h, dq_stride_b, dq_stride_h, dq_stride_n, start, n_q, BLOCK_M,
        D, LO, HI, TMA, WIDE, ALIGN,
    )  # fmt: skip


@triton.jit
def dkdv_step(
    q, q_hi, do, do_hi, b, h, q_stride_b, q_stride_h, q_stride_n, do_stride_b, do_stride_h, do_stride_n,
    lse_ptr, delta_ptr, inverse_ptr, row_offset, start, n_q, qk_scale, kt, kt_hi, vt, vt_hi, dk, dk_hi, dv, dv_hi,
    QUERIES: tl.constexpr, D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what queries start .. start + QUERIES contribute to dk (without scale) and dv of a key tile."""
    qt, qt_hi = load_tile(
        q, q_hi, b, h, q_stride_b, q_stride_h, q_stride_n, start, n_q, QUERIES, D, LO, HI, TMA, WIDE, ALIGN, MASKED
    )
    dot, dot_hi = load_tile(
        do, do_hi, b, h, do_stride_b, do_stride_h, do_stride_n, start, n_q, QUERIES, D, LO, HI, TMA, WIDE, ALIGN, MASKED
    )
    rows = start + tl.arange(0, QUERIES)
    if MASKED:
        lse = tl.load(lse_ptr + row_offset + rows, mask=rows < n_q, other=float("inf"))
        delta = tl.load(delta_ptr + row_offset + rows, mask=rows < n_q, other=0.0)
    else:
        lse = tl.load(lse_ptr + row_offset + rows)
        delta = tl.load(delta_ptr + row_offset + rows)
    scores = dot_transposed(kt, kt_hi, qt, qt_hi, HI, PRECISION)  # [BLOCK_N, QUERIES], transposed
    p = tl.math.exp2(scores * qk_scale - lse[None, :])
    if inverse_ptr is not None:
        p *= tl.load(inverse_ptr + row_offset + rows, mask=rows < n_q, other=0.0)[None, :]
    dv, dv_hi = dot_add(p, dot, dot_hi, dv, dv_hi, HI, PRECISION)
    dp = dot_transposed(vt, vt_hi, dot, dot_hi, HI, PRECISION)
    ds = p * (dp - delta[None, :])
    dk, dk_hi = dot_add(ds, qt, qt_hi, dk, dk_hi, HI, PRECISION)
    return dk, dk_hi, dv, dv_hi


@triton.jit(do_not_specialize=UNSPECIALISED)
def _attention_bwd_dkdv_kernel(
    q_a, q_a_hi, do_a, do_a_hi, q_b, q_b_hi, do_b, do_b_hi, k, k_hi, v, v_hi, dk, dk_hi, dv, dv_hi,
    lse_ptr,  # fp32 [B, H, N_q], contiguous
    delta_ptr,  # fp32 [B, H, N_q], contiguous
    inverse_ptr,  # as the dq kernel wrote it, or None
    q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, do_stride_b, do_stride_h, do_stride_n,
    dk_stride_b, dk_stride_h, dk_stride_n, dv_stride_b, dv_stride_h, dv_stride_n,
    n_heads, n_q, n_kv, qk_scale, scale,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n_kv, BLOCK_N)
    bh = tl.program_id(0) // tiles
    start = (tl.program_id(0) % tiles) * BLOCK_N
    b = bh // n_heads
    h = bh % n_heads
    n_full = n_q // BLOCK_M * BLOCK_M
    row_offset = bh.to(tl.int64) * n_q

    kt, kt_hi = load_tile(
        k, k_hi, b, h, k_stride_b, k_stride_h, k_stride_n, start, n_kv, BLOCK_N, D, LO, HI, TMA, WIDE, ALIGN, True
    )
    vt, vt_hi = load_tile(
        v, v_hi, b, h, v_stride_b, v_stride_h, v_stride_n, start, n_kv, BLOCK_N, D, LO, HI, TMA, WIDE, ALIGN, True
    )
    dkt, dkt_hi = zero_tile(BLOCK_N, LO, HI)
    dvt, dvt_hi = zero_tile(BLOCK_N, LO, HI)
    if FULL:
        assume_a_tile(n_full, TMA)
        for m in tl.range(0, n_full, BLOCK_M, num_stages=STAGES):
            dkt, dkt_hi, dvt, dvt_hi = dkdv_step(
                q_a, q_a_hi, do_a, do_a_hi, b, h, q_stride_b, q_stride_h, q_stride_n,
                do_stride_b, do_stride_h, do_stride_n,
                lse_ptr, delta_ptr, inverse_ptr, row_offset, m, n_q, qk_scale,
                kt, kt_hi, vt, vt_hi, dkt, dkt_hi, dvt, dvt_hi,
                BLOCK_M, D, LO, HI, PRECISION, TMA, WIDE, ALIGN, False,
            )  # fmt: skip
    if TAIL > 0:
        dkt, dkt_hi, dvt, dvt_hi = dkdv_step(
            q_b, q_b_hi, do_b, do_b_hi, b, h, q_stride_b, q_stride_h, q_stride_n,
            do_stride_b, do_stride_h, do_stride_n,
            lse_ptr, delta_ptr, inverse_ptr, row_offset, n_full, n_q, qk_scale,
            kt, kt_hi, vt, vt_hi, dkt, dkt_hi, dvt, dvt_hi,
            TAIL, D, LO, HI, PRECISION, TMA, WIDE, ALIGN, MASKED,
        )  # fmt: skip
    store_tile(
        dk, dk_hi, dkt * scale, dkt_hi * scale, b, h, dk_stride_b, dk_stride_h, dk_stride_n, start, n_kv, BLOCK_N,
        D, LO, HI, TMA, WIDE, ALIGN,
    )  # fmt: skip
    store_tile(
        dv, dv_hi, dvt, dvt_hi, b, h, dv_stride_b, dv_stride_h, dv_stride_n, start, n_kv, BLOCK_N, D, LO, HI, TMA,
        WIDE, ALIGN,
    )  # fmt: skip


def dq_launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    delta: torch.Tensor,
    inverse: torch.Tensor | None,
    scale: float,
    config: BackwardConfig,
    precision: str = "ieee",
) -> Launch:
    """The call that writes dq [B, H, N_q, D], delta and inverse (fp32 [B, H, N_q]); layouts as for the forward.

    inverse None leaves out what only full fp32 needs.
    """
    batch, heads, n_q, _ = q.shape
    n_kv = k.shape[2]
    tma = config.tma and tma_allows(q, k, v, o, do, dq)
    constants = shared_constants(q, k, v, o, do, dq, tma=tma, precision=precision)
    rest = n_kv % config.block_n
    tail = (*cover(rest, config.block_n, 1), 0)[0]
    constants |= _tile_constants(config, n_kv >= config.block_n, tail, tail != rest)
    args: dict[str, Any] = {}
    for name, tensor in (("q", q), ("do", do), ("o", o), ("dq", dq)):
        args |= tile_arguments(name, tensor, config.block_m, tma)
        args |= stride_arguments(name, tensor, constants["ALIGN"])
    for name, tensor in (("k", k), ("v", v)):
        args |= tile_arguments(f"{name}_a", tensor, config.block_n, tma)
        args |= stride_arguments(name, tensor, constants["ALIGN"])
        args |= tile_arguments(f"{name}_b", tensor, tail, tma)
    return Launch(
        kernel=_attention_bwd_dq_kernel,
        grid=(batch * heads * -(-n_q // config.block_m),),
        args=args | common_arguments(q, k, lse, delta, inverse, scale),
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.maxnreg,
        device=q.device,
    )


def dkdv_launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    inverse: torch.Tensor | None,
    dk: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    config: BackwardConfig,
    precision: str = "ieee",
) -> Launch:
    """The call that writes dk and dv [B, H, N_kv, D]; needs the delta and inverse that `dq_launch` writes."""
    batch, heads, n_q, _ = q.shape
    n_kv = k.shape[2]
    tma = config.tma and tma_allows(q, k, v, do, dk, dv)
    constants = shared_constants(q, k, v, do, dk, dv, tma=tma, precision=precision)
    rest = n_q % config.block_m
    tail = (*cover(rest, config.block_m, 1), 0)[0]
    constants |= _tile_constants(config, n_q >= config.block_m, tail, tail != rest)
    args: dict[str, Any] = {}
    for name, tensor in (("k", k), ("v", v), ("dk", dk), ("dv", dv)):
        args |= tile_arguments(name, tensor, config.block_n, tma)
        args |= stride_arguments(name, tensor, constants["ALIGN"])
    for name, tensor in (("q", q), ("do", do)):
        args |= tile_arguments(f"{name}_a", tensor, config.block_m, tma)
        args |= stride_arguments(name, tensor, constants["ALIGN"])
        args |= tile_arguments(f"{name}_b", tensor, tail, tma)
    return Launch(
        kernel=_attention_bwd_dkdv_kernel,
        grid=(batch * heads * -(-n_kv // config.block_n),),
        args=args | common_arguments(q, k, lse, delta, inverse, scale),
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.maxnreg,
        device=q.device,
    )


def common_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    inverse: torch.Tensor | None,
    scale: float,
) -> dict[str, object]:
    return {
        "lse_ptr": lse,
        "delta_ptr": delta,
        "inverse_ptr": inverse,
        "n_heads": q.shape[1],
        "n_q": q.shape[2],
        "n_kv": k.shape[2],
        "qk_scale": scale * LOG2_E,
        "scale": scale,
    }


def _tile_constants(config: BackwardConfig, full: bool, tail: int, masked: bool) -> dict[str, object]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "FULL": full,
        "TAIL": tail,
        "MASKED": masked,
        "STAGES": config.num_stages,
    }

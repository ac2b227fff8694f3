"""Attention over sequences of any lengths, backward: dq, dk and dv; the forms are those of attention_varlen.py.

The formulas, and what full fp32 needs beside them, are those of attention_backward.py, tile by tile; how tiles are read
is as in the forward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention_backward import common_arguments, dkdv_step, dq_step, query_tile
from .attention_forward import real_keys
from .attention_policy import BackwardConfig
from .attention_tiles import load_tile, store_tile, zero_tile
from .attention_varlen import VARLEN_UNSPECIALISED, last_kept, ragged_launch, rows_of_program
from .launch import Launch


@triton.jit(do_not_specialize=VARLEN_UNSPECIALISED)
def _attention_varlen_dq_kernel(
    q, k, v, o, do, dq, k_a, k_a_hi, v_a, v_a_hi,
    lse_ptr,  # fp32 [B, H, N_q], contiguous
    delta_ptr,  # written: fp32 [B, H, N_q], contiguous
    inverse_ptr,  # written: fp32 [B, H, N_q], contiguous, 1 / sum of p; None where not to be exact
    sequences, keep,
    q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, o_stride_b, o_stride_h, o_stride_n,
    do_stride_b, do_stride_h, do_stride_n, dq_stride_b, dq_stride_h, dq_stride_n, keep_stride_b,
    n_sequences, n_heads, n_q, n_kv, qk_scale, scale,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    b, h, start, begin, end, kv_end = rows_of_program(sequences, n_sequences, n_heads, n_q, n_kv, BLOCK_M)
    if start >= end:
        return
    kept = keep
    if keep is not None:
        kept = keep + tl.cast(b, tl.int64) * keep_stride_b
        kv_end = last_kept(kept, n_kv)
    full_end = begin + (kv_end - begin) // BLOCK_N * BLOCK_N

    row_offset = (tl.cast(b, tl.int64) * n_heads + h) * n_q
    qt, qt_hi, dot, dot_hi, lse, delta = query_tile(
        q, q, do, do, o, o, lse_ptr, delta_ptr, b, h,
        q_stride_b, q_stride_h, q_stride_n, do_stride_b, do_stride_h, do_stride_n, o_stride_b, o_stride_h, o_stride_n,
        row_offset, start, end, BLOCK_M, D, LO, HI, False, WIDE, ALIGN,
    )  # fmt: skip
    EXACT: tl.constexpr = inverse_ptr is not None
    acc, acc_hi = zero_tile(BLOCK_M, LO, HI)
    total = tl.zeros((BLOCK_M,), tl.float32)
    excess = tl.zeros((BLOCK_M,), tl.float32)
    mean, mean_hi = zero_tile(BLOCK_M, LO, HI)
    if TMA:
        for n in tl.range(begin, full_end, BLOCK_N, num_stages=STAGES):
            acc, acc_hi, total, excess, mean, mean_hi = dq_step(
                k_a, k_a_hi, v_a, v_a_hi, b, h,
                k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
                kept, n, kv_end, qk_scale, qt, qt_hi, dot, dot_hi, lse, delta,
                acc, acc_hi, total, excess, mean, mean_hi,
                BLOCK_N, D, LO, HI, PRECISION, True, WIDE, ALIGN, False, EXACT,
            )  # fmt: skip
        if full_end < kv_end:
            acc, acc_hi, total, excess, mean, mean_hi = dq_step(
                k, k, v, v, b, h, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
                kept, full_end, kv_end, qk_scale, qt, qt_hi, dot, dot_hi, lse, delta,
                acc, acc_hi, total, excess, mean, mean_hi,
                BLOCK_N, D, LO, HI, PRECISION, False, WIDE, ALIGN, True, EXACT,
            )  # fmt: skip
    else:
        for n in tl.range(begin, kv_end, BLOCK_N, num_stages=STAGES):
            acc, acc_hi, total, excess, mean, mean_hi = dq_step(
                k, k, v, v, b, h, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
                kept, n, kv_end, qk_scale, qt, qt_hi, dot, dot_hi, lse, delta,
                acc, acc_hi, total, excess, mean, mean_hi,
                BLOCK_N, D, LO, HI, PRECISION, False, WIDE, ALIGN, True, EXACT,
            )  # fmt: skip
    if EXACT:
        rows = start + tl.arange(0, BLOCK_M)
        inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
        excess *= inverse
        tl.store(delta_ptr + row_offset + rows, delta + excess, mask=rows < end)
        tl.store(inverse_ptr + row_offset + rows, inverse, mask=rows < end)
        acc = (acc - mean * excess[:, None]) * inverse[:, None]
        if HI > 0:
            acc_hi = (acc_hi - mean_hi * excess[:, None]) * inverse[:, None]
    store_tile(
        dq, dq, acc * scale, acc_hi * scale, b, h, dq_stride_b, dq_stride_h, dq_stride_n, start, end, BLOCK_M,
        D, LO, HI, False, WIDE, ALIGN,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARLEN_UNSPECIALISED)
def _attention_varlen_dkdv_kernel(
    q, k, v, do, dk, dv, q_a, q_a_hi, do_a, do_a_hi,
    lse_ptr,  # fp32 [B, H, N_q], contiguous
    delta_ptr,  # fp32 [B, H, N_q], contiguous
    inverse_ptr,  # as the dq kernel wrote it, or None
    sequences, keep,
    q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, do_stride_b, do_stride_h, do_stride_n,
    dk_stride_b, dk_stride_h, dk_stride_n, dv_stride_b, dv_stride_h, dv_stride_n, keep_stride_b,
    n_sequences, n_heads, n_q, n_kv, qk_scale, scale,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    b, h, start, begin, end, q_end = rows_of_program(sequences, n_sequences, n_heads, n_kv, n_q, BLOCK_N)
    if start >= end:
        return
    kept = keep
    if keep is not None:
        kept = keep + tl.cast(b, tl.int64) * keep_stride_b
        here = real_keys(kept, start, end, BLOCK_N)
        q_end = tl.where(tl.sum(here.to(tl.int32), 0) > 0, q_end, begin)
    full_end = begin + (q_end - begin) // BLOCK_M * BLOCK_M
    row_offset = (tl.cast(b, tl.int64) * n_heads + h) * n_q

    kt, kt_hi = load_tile(
        k, k, b, h, k_stride_b, k_stride_h, k_stride_n, start, end, BLOCK_N, D, LO, HI, False, WIDE, ALIGN, True
    )
    vt, vt_hi = load_tile(
        v, v, b, h, v_stride_b, v_stride_h, v_stride_n, start, end, BLOCK_N, D, LO, HI, False, WIDE, ALIGN, True
    )
    dkt, dkt_hi = zero_tile(BLOCK_N, LO, HI)
    dvt, dvt_hi = zero_tile(BLOCK_N, LO, HI)
    if TMA:
        for m in tl.range(begin, full_end, BLOCK_M, num_stages=STAGES):
            dkt, dkt_hi, dvt, dvt_hi = dkdv_step(
                q_a, q_a_hi, do_a, do_a_hi, b, h, q_stride_b, q_stride_h, q_stride_n,
                do_stride_b, do_stride_h, do_stride_n,
                lse_ptr, delta_ptr, inverse_ptr, row_offset, m, q_end, qk_scale,
                kt, kt_hi, vt, vt_hi, dkt, dkt_hi, dvt, dvt_hi,
                BLOCK_M, D, LO, HI, PRECISION, True, WIDE, ALIGN, False,
            )  # fmt: skip
        if full_end < q_end:
            dkt, dkt_hi, dvt, dvt_hi = dkdv_step(
                q, q, do, do, b, h, q_stride_b, q_stride_h, q_stride_n,
                do_stride_b, do_stride_h, do_stride_n,
                lse_ptr, delta_ptr, inverse_ptr, row_offset, full_end, q_end, qk_scale,
                kt, kt_hi, vt, vt_hi, dkt, dkt_hi, dvt, dvt_hi,
                BLOCK_M, D, LO, HI, PRECISION, False, WIDE, ALIGN, True,
            )  # fmt: skip
    else:
        for m in tl.range(begin, q_end, BLOCK_M, num_stages=STAGES):
            dkt, dkt_hi, dvt, dvt_hi = dkdv_step(
                q, q, do, do, b, h, q_stride_b, q_stride_h, q_stride_n,
                do_stride_b, do_stride_h, do_stride_n,
                lse_ptr, delta_ptr, inverse_ptr, row_offset, m, q_end, qk_scale,
                kt, kt_hi, vt, vt_hi, dkt, dkt_hi, dvt, dvt_hi,
                BLOCK_M, D, LO, HI, PRECISION, False, WIDE, ALIGN, True,
            )  # fmt: skip
    if keep is not None:
        # rows of keys are summed apart: what a left-out key gathered is in its own row only
        here = real_keys(kept, start, end, BLOCK_N)[:, None]
        dkt, dvt = tl.where(here, dkt, 0.0), tl.where(here, dvt, 0.0)
        if HI > 0:
            dkt_hi, dvt_hi = tl.where(here, dkt_hi, 0.0), tl.where(here, dvt_hi, 0.0)
    store_tile(
        dk, dk, dkt * scale, dkt_hi * scale, b, h, dk_stride_b, dk_stride_h, dk_stride_n, start, end, BLOCK_N,
        D, LO, HI, False, WIDE, ALIGN,
    )  # fmt: skip
    store_tile(
        dv, dv, dvt, dvt_hi, b, h, dv_stride_b, dv_stride_h, dv_stride_n, start, end, BLOCK_N, D, LO, HI, False,
        WIDE, ALIGN,
    )  # fmt: skip


def varlen_dq_launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    delta: torch.Tensor,
    inverse: torch.Tensor | None,
    sequences: torch.Tensor | None,
    keep: torch.Tensor | None,
    scale: float,
    config: BackwardConfig,
    precision: str = "ieee",
) -> Launch:
    """The call that writes dq [B, H, N_q, D], delta and inverse (fp32 [B, H, N_q]); the rest as for the forward.

    inverse None leaves out what only full fp32 needs.
    """
    tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "dq": dq}
    extra = common_arguments(q, k, lse, delta, inverse, scale)
    return ragged_launch(_attention_varlen_dq_kernel, tensors, "by queries", sequences, keep, extra, config, precision)


def varlen_dkdv_launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    inverse: torch.Tensor | None,
    dk: torch.Tensor,
    dv: torch.Tensor,
    sequences: torch.Tensor | None,
    keep: torch.Tensor | None,
    scale: float,
    config: BackwardConfig,
    precision: str = "ieee",
) -> Launch:
    """The call that writes dk and dv [B, H, N_kv, D]; needs the delta and inverse that `varlen_dq_launch` writes."""
    tensors = {"q": q, "k": k, "v": v, "do": do, "dk": dk, "dv": dv}
    extra = common_arguments(q, k, lse, delta, inverse, scale)
    return ragged_launch(_attention_varlen_dkdv_kernel, tensors, "by keys", sequences, keep, extra, config, precision)

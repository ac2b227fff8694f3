"""Attention forward: o = softmax(scale * q k^T) v for every head, not causal, accumulated in fp32.

Two kernels:
- row: all keys of a head (at most 256) stay on chip in up to three power-of-two chunks (197 -> 128 + 64 + 16), so a
  query tile sees its whole row of scores at once: one maximum, one exponential a score, no rescaling. A program keeps
  K and V for TILES query tiles.
- looped: keys stream through in BLOCK_N tiles with the running maximum and sum of online softmax (Milakov and
  Gimelshein, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691). Full tiles need no mask; the rest is covered by
  at most two smaller power-of-two tiles, of which only the last is masked.

Both keep lse = log2(sum 2^(scale log2(e) q k^T)), base 2, for the backward. scale log2(e) is folded into the fp32
multiply-add before exp2, never into q.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention_launch import (
    LOG2_E,
    UNSPECIALISED,
    shared_constants,
    stride_arguments,
    tile_arguments,
    tma_allows,
)
from .attention_policy import ForwardConfig, cover
from .attention_tiles import assume_a_tile, dot_add, dot_tile, dot_transposed, load_tile, store_tile, zero_tile
from .fp8 import divided
from .launch import Launch

# Lengths of which the row kernel makes no difference between those that need the same number of these. By 16 keys the
# one for 197 would hold two programs a multiprocessor on sm_90, not three; by 8 its loop is half a percent longer than
# with the length itself as a constant.
LENGTH_CLASS = tl.constexpr(8)


@triton.jit
def real_keys(keep, start, n_kv, KEYS: tl.constexpr):
    """Which of keys start .. start + KEYS there are: before n_kv and, unless None, true in `keep`, a row of bool."""
    key = start + tl.arange(0, KEYS)
    real = key < n_kv
    if keep is not None:
        real = real & (tl.load(keep + key, mask=real, other=0) != 0)
    return real


@triton.jit
def _masked_row(scores, n_kv, START: tl.constexpr, KEYS: tl.constexpr, SURE: tl.constexpr):
    """Scores [ROWS, KEYS] of keys from START on, with -inf for keys past the last.

    SURE < n_kv <= SURE + LENGTH_CLASS tells the compiler all but LENGTH_CLASS columns: the others cost nothing.
    """
    key = START + tl.arange(0, KEYS)
    real = (key < SURE) | ((key < SURE + LENGTH_CLASS) & (key < n_kv))
    return tl.where(real[None, :], scores, float("-inf"))


@triton.jit(do_not_specialize=UNSPECIALISED)
def _attention_fwd_row_kernel(
    q, q_hi, k_a, k_a_hi, k_b, k_b_hi, k_c, k_c_hi, v_a, v_a_hi, v_b, v_b_hi, v_c, v_c_hi, o, o_hi,
    lse_ptr,  # fp32 [B, H, N_q], contiguous
    o_scale_ptr,  # fp32 [1], what o is multiplied by, which is of e4m3 then; or None
    q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, o_stride_b, o_stride_h, o_stride_n,
    n_heads, n_q, n_kv, qk_scale,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
    BLOCK_M: tl.constexpr, TILES: tl.constexpr,
    CHUNK_A: tl.constexpr, CHUNK_B: tl.constexpr, CHUNK_C: tl.constexpr, SURE: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    groups = tl.cdiv(n_q, BLOCK_M * TILES)
    bh = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    b = bh // n_heads
    h = bh % n_heads
    TWO: tl.constexpr = CHUNK_B > 0
    THREE: tl.constexpr = CHUNK_C > 0
    START_C: tl.constexpr = CHUNK_A + CHUNK_B
    MASK_A: tl.constexpr = MASKED and not TWO
    MASK_B: tl.constexpr = MASKED and TWO and not THREE

    # K and V of the head, [CHUNK, D] each; only the last chunk can pass the end
    ka, ka_hi = load_tile(
        k_a, k_a_hi, b, h, k_stride_b, k_stride_h, k_stride_n, 0, n_kv, CHUNK_A, D, LO, HI, TMA, WIDE, ALIGN, MASK_A
    )
    if TWO:
        kb, kb_hi = load_tile(
            k_b, k_b_hi, b, h, k_stride_b, k_stride_h, k_stride_n, CHUNK_A, n_kv, CHUNK_B, D, LO, HI, TMA, WIDE,
            ALIGN, MASK_B,
        )  # fmt: skip
    if THREE:
        kc, kc_hi = load_tile(
            k_c, k_c_hi, b, h, k_stride_b, k_stride_h, k_stride_n, START_C, n_kv, CHUNK_C, D, LO, HI, TMA, WIDE,
            ALIGN, MASKED,
        )  # fmt: skip
    va, va_hi = load_tile(
        v_a, v_a_hi, b, h, v_stride_b, v_stride_h, v_stride_n, 0, n_kv, CHUNK_A, D, LO, HI, TMA, WIDE, ALIGN, MASK_A
    )
    if TWO:
        vb, vb_hi = load_tile(
            v_b, v_b_hi, b, h, v_stride_b, v_stride_h, v_stride_n, CHUNK_A, n_kv, CHUNK_B, D, LO, HI, TMA, WIDE,
            ALIGN, MASK_B,
        )  # fmt: skip
    if THREE:
        vc, vc_hi = load_tile(
            v_c, v_c_hi, b, h, v_stride_b, v_stride_h, v_stride_n, START_C, n_kv, CHUNK_C, D, LO, HI, TMA, WIDE,
            ALIGN, MASKED,
        )  # fmt: skip

    for tile in tl.range(0, TILES, num_stages=STAGES):
        start = (group * TILES + tile) * BLOCK_M
        qt, qt_hi = load_tile(
            q, q_hi, b, h, q_stride_b, q_stride_h, q_stride_n, start, n_q, BLOCK_M, D, LO, HI, TMA, WIDE, ALIGN, True
        )
        sa = dot_transposed(qt, qt_hi, ka, ka_hi, HI, PRECISION)  # [BLOCK_M, CHUNK_A]
        if MASK_A:
            sa = _masked_row(sa, n_kv, 0, CHUNK_A, SURE)
        row_max = tl.max(sa, 1)
        if TWO:
            sb = dot_transposed(qt, qt_hi, kb, kb_hi, HI, PRECISION)
            if MASK_B:
                sb = _masked_row(sb, n_kv, CHUNK_A, CHUNK_B, SURE)
            row_max = tl.maximum(row_max, tl.max(sb, 1))
        if THREE:
            sc = dot_transposed(qt, qt_hi, kc, kc_hi, HI, PRECISION)
            if MASKED:
                sc = _masked_row(sc, n_kv, START_C, CHUNK_C, SURE)
            row_max = tl.maximum(row_max, tl.max(sc, 1))
        row_max = row_max * qk_scale

        pa = tl.math.exp2(sa * qk_scale - row_max[:, None])
        total = tl.sum(pa, 1)
        acc, acc_hi = dot_tile(pa, va, va_hi, HI, PRECISION)
        if TWO:
            pb = tl.math.exp2(sb * qk_scale - row_max[:, None])
            total += tl.sum(pb, 1)
            acc, acc_hi = dot_add(pb, vb, vb_hi, acc, acc_hi, HI, PRECISION)
        if THREE:
            pc = tl.math.exp2(sc * qk_scale - row_max[:, None])
            total += tl.sum(pc, 1)
            acc, acc_hi = dot_add(pc, vc, vc_hi, acc, acc_hi, HI, PRECISION)

        inverse = (1.0 / total)[:, None]
        rows = start + tl.arange(0, BLOCK_M)
        tl.store(lse_ptr + bh.to(tl.int64) * n_q + rows, row_max + tl.math.log2(total), mask=rows < n_q)
        store_tile(
            o, o_hi, divided(acc * inverse, o_scale_ptr), divided(acc_hi * inverse, o_scale_ptr),
            b, h, o_stride_b, o_stride_h, o_stride_n, start, n_q, BLOCK_M, D, LO, HI, TMA, WIDE, ALIGN,
        )  # fmt: skip


@triton.jit
def online_step(
    k, k_hi, v, v_hi, b, h, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    keep, start, n_kv, qk_scale, qt, qt_hi, row_max, total, acc, acc_hi,
    KEYS: tl.constexpr, D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr, MASKED: tl.constexpr,
    FIRST: tl.constexpr = False,
):  # fmt: skip
    """Take in keys start .. start + KEYS: new running maximum, sum and weighted values of a query tile.

    `keep` as for `real_keys`: with it a row may have had no key yet, and its maximum then is -inf. FIRST: acc is zero.
    """
    kt, kt_hi = load_tile(
        k, k_hi, b, h, k_stride_b, k_stride_h, k_stride_n, start, n_kv, KEYS, D, LO, HI, TMA, WIDE, ALIGN, MASKED
    )
    vt, vt_hi = load_tile(
        v, v_hi, b, h, v_stride_b, v_stride_h, v_stride_n, start, n_kv, KEYS, D, LO, HI, TMA, WIDE, ALIGN, MASKED
    )
    scores = dot_transposed(qt, qt_hi, kt, kt_hi, HI, PRECISION)  # [BLOCK_M, KEYS]
    if MASKED or keep is not None:
        scores = tl.where(real_keys(keep, start, n_kv, KEYS)[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * qk_scale)
    shift = new_max
    if keep is not None:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.math.exp2(scores * qk_scale - shift[:, None])
    rescale = tl.math.exp2(row_max - shift)
    total = total * rescale + tl.sum(p, 1)
    if not FIRST:
        acc = acc * rescale[:, None]
        if HI > 0:
            acc_hi = acc_hi * rescale[:, None]
    acc, acc_hi = dot_add(p, vt, vt_hi, acc, acc_hi, HI, PRECISION)
    return new_max, total, acc, acc_hi


@triton.jit(do_not_specialize=UNSPECIALISED)
def _attention_fwd_looped_kernel(
    q, q_hi, k_a, k_a_hi, k_b, k_b_hi, k_c, k_c_hi, v_a, v_a_hi, v_b, v_b_hi, v_c, v_c_hi, o, o_hi,
    lse_ptr,  # fp32 [B, H, N_q], contiguous
    o_scale_ptr,  # fp32 [1], what o is multiplied by, which is of e4m3 then; or None
    q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, o_stride_b, o_stride_h, o_stride_n,
    n_heads, n_q, n_kv, qk_scale,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr,
    TAIL_B: tl.constexpr, TAIL_C: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # query tiles of one head are neighbours on the grid, so that its K and V are read from L2
    tiles = tl.cdiv(n_q, BLOCK_M)
    bh = tl.program_id(0) // tiles
    start = (tl.program_id(0) % tiles) * BLOCK_M
    b = bh // n_heads
    h = bh % n_heads
    n_full = n_kv // BLOCK_N * BLOCK_N

    qt, qt_hi = load_tile(
        q, q_hi, b, h, q_stride_b, q_stride_h, q_stride_n, start, n_q, BLOCK_M, D, LO, HI, TMA, WIDE, ALIGN, True
    )
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc, acc_hi = zero_tile(BLOCK_M, LO, HI)
    if FULL:
        assume_a_tile(n_full, TMA)
        for n in tl.range(0, n_full, BLOCK_N, num_stages=STAGES):
            row_max, total, acc, acc_hi = online_step(
                k_a, k_a_hi, v_a, v_a_hi, b, h, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
                None, n, n_kv, qk_scale, qt, qt_hi, row_max, total, acc, acc_hi,
                BLOCK_N, D, LO, HI, PRECISION, TMA, WIDE, ALIGN, False,
            )  # fmt: skip
    if TAIL_B > 0:
        row_max, total, acc, acc_hi = online_step(
            k_b, k_b_hi, v_b, v_b_hi, b, h, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
            None, n_full, n_kv, qk_scale, qt, qt_hi, row_max, total, acc, acc_hi,
            TAIL_B, D, LO, HI, PRECISION, TMA, WIDE, ALIGN, MASKED and TAIL_C == 0, not FULL,
        )  # fmt: skip
    if TAIL_C > 0:
        row_max, total, acc, acc_hi = online_step(
            k_c, k_c_hi, v_c, v_c_hi, b, h, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
            None, n_full + TAIL_B, n_kv, qk_scale, qt, qt_hi, row_max, total, acc, acc_hi,
            TAIL_C, D, LO, HI, PRECISION, TMA, WIDE, ALIGN, MASKED,
        )  # fmt: skip

    inverse = (1.0 / total)[:, None]
    rows = start + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + bh.to(tl.int64) * n_q + rows, row_max + tl.math.log2(total), mask=rows < n_q)
    store_tile(
        o, o_hi, divided(acc * inverse, o_scale_ptr), divided(acc_hi * inverse, o_scale_ptr),
        b, h, o_stride_b, o_stride_h, o_stride_n, start, n_q, BLOCK_M, D, LO, HI, TMA, WIDE, ALIGN,
    )  # fmt: skip


def forward_launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    config: ForwardConfig,
    precision: str = "ieee",
    o_scale: torch.Tensor | None = None,
) -> Launch:
    """The forward kernel's call for one configuration.

    Args:
        q: Queries [B, H, N_q, D]; fp32, fp16 or bf16; last stride 1.
        k: Keys [B, H, N_kv, D], N_kv >= 1; at most 256 for the row scheme.
        v: Values [B, H, N_kv, D].
        o: Written: [B, H, N_q, D] of q's dtype, or e4m3; last stride 1.
        lse: Written: fp32 [B, H, N_q], contiguous; base 2.
        scale: Multiplier of q k^T, positive.
        config: Which kernel and which tiles.
        precision: Of fp32 products: "ieee" or "tf32".
        o_scale: fp32 [1], what o is multiplied by where it is of e4m3; else None.
    """
    batch, heads, n_q, _ = q.shape
    n_kv = k.shape[2]
    tma = config.tma and tma_allows(q, k, v, o)
    constants = {
        **shared_constants(q, k, v, o, tma=tma, precision=precision),
        "BLOCK_M": config.block_m,
        "STAGES": config.num_stages,
    }
    tiles = -(-n_q // config.block_m)
    if config.scheme == "row":
        chunks = cover(n_kv, config.block_n, config.chunks)
        if not chunks:
            raise ValueError(f"{config} holds {config.chunks * config.block_n} keys a row, got {n_kv}")
        chunks = (*chunks, 0, 0)[:3]
        groups = -(-tiles // config.tiles)
        constants |= {
            "TILES": -(-tiles // groups) if groups else 1,
            "CHUNK_A": chunks[0],
            "CHUNK_B": chunks[1],
            "CHUNK_C": chunks[2],
            "SURE": (n_kv - 1) // LENGTH_CLASS.value * LENGTH_CLASS.value,
            "MASKED": sum(chunks) != n_kv,
        }
        kernel = _attention_fwd_row_kernel
    else:
        rest = n_kv % config.block_n
        tail = (*cover(rest, config.block_n, 2), 0, 0)[:2]
        chunks = (config.block_n, *tail)
        groups = tiles
        constants |= {
            "BLOCK_N": config.block_n,
            "FULL": n_kv >= config.block_n,
            "TAIL_B": tail[0],
            "TAIL_C": tail[1],
            "MASKED": sum(tail) != rest,
        }
        kernel = _attention_fwd_looped_kernel
    args = {**tile_arguments("q", q, config.block_m, tma), **tile_arguments("o", o, config.block_m, tma)}
    for letter, rows in zip("abc", chunks):
        args |= tile_arguments(f"k_{letter}", k, rows, tma)
        args |= tile_arguments(f"v_{letter}", v, rows, tma)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("o", o)):
        args |= stride_arguments(name, tensor, constants["ALIGN"])
    args |= {
        "lse_ptr": lse,
        "o_scale_ptr": o_scale,
        "n_heads": heads,
        "n_q": n_q,
        "n_kv": n_kv,
        "qk_scale": scale * LOG2_E,
    }
    return Launch(
        kernel=kernel,
        grid=(batch * heads * groups,),
        args=args,
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.maxnreg,
        device=q.device,
    )

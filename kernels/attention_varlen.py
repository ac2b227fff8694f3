"""Attention over sequences of any lengths, forward: packed one behind the other, or a batch of which keys are left out.

Two forms of the same kernels, here and in attention_varlen_backward.py:

- packed: q, k, v [1, H, total, D], and `sequences` int32 [S + 1] on the device, where each sequence starts and the last
  one ends. The host does not know the lengths. Sequence i has the tile slots from sequences[i] // BLOCK + i on, which
  are enough for it wherever it starts, so total // BLOCK + S + 1 programs a head do for every S sequences, and a
  program finds its own by a search for which nothing has to be computed before. Empty sequences have a slot that leaves
  at once. Rows behind the last sequence are in none: they have no keys, and their outputs and gradients are 0.
- masked: q [B, H, N_q, D], k and v [B, H, N_kv, D], and `keep` bool [B, N_kv], the keys of each image. The loop ends
  with the last key that is kept. A row without any has the output 0, as in torch's own attention.

Full tiles of keys are read through TMA descriptors where the layout allows, and the tile that ends a sequence by masked
pointers, because a box of a descriptor would go on into the next one: whose NaN must not come over. Where there are no
descriptors one loop of masked tiles does for both: a second one beside it would spill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from .attention_forward import online_step
from .attention_launch import (
    LOG2_E,
    UNSPECIALISED,
    shared_constants,
    stride_arguments,
    tile_arguments,
    tma_allows,
)
from .attention_policy import BackwardConfig, ForwardConfig
from .attention_tiles import load_tile, store_tile, zero_tile
from .launch import Launch, ceil_div

VARLEN_UNSPECIALISED = [*UNSPECIALISED, "n_sequences", "keep_stride_b"]
_WAYS = tl.constexpr(128)  # sequences looked at together: two steps find one of 16,384
_KEYS_AT_ONCE = tl.constexpr(1024)


@triton.jit
def _slots_begun(sequences, index, inside, slot, BLOCK: tl.constexpr):
    """How many of the sequences `index` have their first slot at or before this one."""
    first = tl.load(sequences + index, mask=inside, other=0) // BLOCK + index
    return tl.sum((inside & (first <= slot)).to(tl.int32), 0)


@triton.jit
def find_rows(sequences, n_sequences, n_rows, slot, BLOCK: tl.constexpr):
    """First row of a slot's tile, and where its sequence begins, ends, and ends for the other side.

    The last but for the rows behind all sequences, which meet nothing, is the same as the end.
    """
    stride = tl.cdiv(n_sequences + 1, _WAYS)
    index = tl.arange(0, _WAYS) * stride
    low = tl.maximum(_slots_begun(sequences, index, index <= n_sequences, slot, BLOCK) - 1, 0) * stride
    begun = 0
    for step in range(low, low + stride, _WAYS):
        index = step + tl.arange(0, _WAYS)
        inside = (index < low + stride) & (index <= n_sequences)
        begun += _slots_begun(sequences, index, inside, slot, BLOCK)
    found = low + tl.maximum(begun - 1, 0)
    begin = tl.load(sequences + found)
    end = tl.load(sequences + tl.minimum(found + 1, n_sequences))
    behind = found == n_sequences
    start = begin + (slot - begin // BLOCK - found) * BLOCK
    # whatever stands there, memory outside the tensors is never touched
    begin = tl.minimum(tl.maximum(begin, 0), n_rows)
    end = tl.minimum(tl.where(behind, n_rows, end), n_rows)
    return tl.maximum(start, begin), begin, end, tl.where(behind, begin, end)


@triton.jit
def rows_of_program(
    sequences, n_sequences, n_heads, n_rows, n_others, BLOCK: tl.constexpr
):  # fmt: skip
    """Image, head, first row, where its sequence begins and ends, and where that ends for the other side."""
    if sequences is not None:
        slots = n_rows // BLOCK + n_sequences + 1
        b = 0
        h = tl.program_id(0) // slots
        start, begin, end, others_end = find_rows(sequences, n_sequences, n_rows, tl.program_id(0) % slots, BLOCK)
    else:
        tiles = tl.cdiv(n_rows, BLOCK)
        b = tl.program_id(0) // tiles // n_heads
        h = tl.program_id(0) // tiles % n_heads
        start = tl.program_id(0) % tiles * BLOCK
        begin = 0
        end = n_rows
        others_end = n_others
    return b, h, start, begin, end, others_end


@triton.jit
def last_kept(kept, n_keys):
    """One more than the last key that is kept; 0 without any."""
    end = 0
    for first in range(0, n_keys, _KEYS_AT_ONCE):
        key = first + tl.arange(0, _KEYS_AT_ONCE)
        real = tl.load(kept + key, mask=key < n_keys, other=0) != 0
        end = tl.maximum(end, tl.max(tl.where(real, key + 1, 0), 0))
    return end


@triton.jit(do_not_specialize=VARLEN_UNSPECIALISED)
def _attention_varlen_fwd_kernel(
    q, k, v, o, k_a, k_a_hi, v_a, v_a_hi,
    lse_ptr,  # fp32 [B, H, N_q], contiguous
    sequences, keep,
    q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, o_stride_b, o_stride_h, o_stride_n, keep_stride_b,
    n_sequences, n_heads, n_q, n_kv, qk_scale,
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

    qt, qt_hi = load_tile(
        q, q, b, h, q_stride_b, q_stride_h, q_stride_n, start, end, BLOCK_M, D, LO, HI, False, WIDE, ALIGN, True
    )
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc, acc_hi = zero_tile(BLOCK_M, LO, HI)
    if TMA:
        for n in tl.range(begin, full_end, BLOCK_N, num_stages=STAGES):
            row_max, total, acc, acc_hi = online_step(
                k_a, k_a_hi, v_a, v_a_hi, b, h,
                k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
                kept, n, kv_end, qk_scale, qt, qt_hi, row_max, total, acc, acc_hi,
                BLOCK_N, D, LO, HI, PRECISION, True, WIDE, ALIGN, False,
            )  # fmt: skip
        if full_end < kv_end:
            row_max, total, acc, acc_hi = online_step(
                k, k, v, v, b, h, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
                kept, full_end, kv_end, qk_scale, qt, qt_hi, row_max, total, acc, acc_hi,
                BLOCK_N, D, LO, HI, PRECISION, False, WIDE, ALIGN, True,
            )  # fmt: skip
    else:
        for n in tl.range(begin, kv_end, BLOCK_N, num_stages=STAGES):
            row_max, total, acc, acc_hi = online_step(
                k, k, v, v, b, h, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
                kept, n, kv_end, qk_scale, qt, qt_hi, row_max, total, acc, acc_hi,
                BLOCK_N, D, LO, HI, PRECISION, False, WIDE, ALIGN, True,
            )  # fmt: skip

    # lse = inf makes every p of the backward 0
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    inverse = (1.0 / total)[:, None]
    rows = start + tl.arange(0, BLOCK_M)
    lse = tl.where(none, float("inf"), row_max + tl.math.log2(total))
    tl.store(lse_ptr + (tl.cast(b, tl.int64) * n_heads + h) * n_q + rows, lse, mask=rows < end)
    store_tile(
        o, o, acc * inverse, acc_hi * inverse, b, h, o_stride_b, o_stride_h, o_stride_n, start, end, BLOCK_M,
        D, LO, HI, False, WIDE, ALIGN,
    )  # fmt: skip


def varlen_forward_launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    sequences: torch.Tensor | None,
    keep: torch.Tensor | None,
    scale: float,
    config: ForwardConfig,
    precision: str = "ieee",
) -> Launch:
    """The forward kernel's call for one configuration of the looped scheme.

    Args:
        q: Queries [B, H, N_q, D]; fp32, fp16 or bf16; last stride 1. B is 1 where packed.
        k: Keys [B, H, N_kv, D]; so are v, and o of q's shape and dtype, which is written.
        lse: Written: fp32 [B, H, N_q], contiguous; base 2, inf where there is no key.
        sequences: Packed: int32 [S + 1], contiguous. None where masked.
        keep: Masked: bool [B, N_kv], last stride 1. None where packed.
        scale: Multiplier of q k^T, positive.
    """
    extra = {
        "lse_ptr": lse,
        "n_heads": q.shape[1],
        "n_q": q.shape[2],
        "n_kv": k.shape[2],
        "qk_scale": scale * LOG2_E,
    }
    tensors = {"q": q, "k": k, "v": v, "o": o}
    return ragged_launch(_attention_varlen_fwd_kernel, tensors, "by queries", sequences, keep, extra, config, precision)


def ragged_launch(
    kernel: Any,
    tensors: dict[str, torch.Tensor],
    sides: str,
    sequences: torch.Tensor | None,
    keep: torch.Tensor | None,
    extra: Mapping[str, object],
    config: ForwardConfig | BackwardConfig,
    precision: str,
) -> Launch:
    """The call of one of the kernels, forward or backward.

    Args:
        tensors: [B, H, N, D] each, by the names of the kernel's pointers.
        sides: "by queries": each program takes a tile of queries and meets all keys; "by keys".
        extra: The kernel's other arguments but those that say which rows meet which.
    """
    by_queries = sides == "by queries"
    rows, block, others_block = tensors["q"], config.block_m, config.block_n
    if not by_queries:
        rows, block, others_block = tensors["k"], others_block, block
    met = ("k", "v") if by_queries else ("q", "do")
    tma = config.tma and tma_allows(*(tensors[name] for name in met))
    constants = shared_constants(*tensors.values(), tma=tma, precision=precision)
    args: dict[str, object] = dict(tensors)
    for name in met:
        args |= tile_arguments(f"{name}_a", tensors[name], others_block, tma)
    for name, tensor in tensors.items():
        args |= stride_arguments(name, tensor, constants["ALIGN"])
    batch, heads, tokens, _ = rows.shape
    programs = batch * heads * ceil_div(tokens, block)
    if sequences is not None:
        programs = heads * (tokens // block + sequences.shape[0])
    return Launch(
        kernel=kernel,
        grid=(programs,),
        args={
            **args,
            **extra,
            "sequences": sequences,
            "keep": keep,
            "keep_stride_b": 0 if keep is None else keep.stride(0),
            "n_sequences": 0 if sequences is None else sequences.shape[0] - 1,
        },
        constants=constants | {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "STAGES": config.num_stages},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.maxnreg,
        device=rows.device,
    )

"""The matmul kernel: out = epilogue(A B), with the surrounding pointwise operations fused into the epilogue.

The kernel is persistent: a program loops over output tiles, and accumulates each tile in fp32 over K. A and B are
loaded through TMA descriptors if GPU and layout allow this, else by pointers. B may be [N, K], like the weight of
torch.nn.Linear. `matmul_launch.py` launches the kernel, and `matmul_policy.py` chooses tile sizes.

`forward_epilogues.py` and `gradient_epilogues.py` contain the formulas of most epilogues. The epilogue "partial" is for
split-K: out[split] = A B over one of `splits` parts of K, in fp32. `split_k.py` sums the parts.

If A and B are e4m3 (`ptx.py`), the tensor cores of sm_90 accumulate in about 14 bits: each MMA over 32 elements of K
adds a relative error of up to 2^-13. For comparison, rounding an operand to e4m3 has a relative error of up to 2^-4.
Adding partial sums in fp32 every 128 elements would be more precise, but 128 x 256 tiles would spill.

Under autocast, the residual stream (out and residual of the epilogues "residual" and "layer_norm_grad") may be fp32,
while A and B are half precision.

To save registers, the epilogue processes a wide tile in SUB_TILES sub-tiles along N. Every sum has a fixed order,
without atomics, so results are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..layer_norm import merge_next, piece_statistics, store_statistics
from ..ptx import divided_columns, prefetch_rows, wait_for_previous
from .forward_epilogues import layer_norm_epilogue, normed, residual_epilogue, row_factors
from .gradient_epilogues import (
    activation_grad_epilogue,
    activation_row_factors,
    layer_norm_grad_epilogue,
    layer_norm_row_factors,
)
from .matmul_tiles import accumulate, cut, load_sub_tiles, store_tile, tile_position


@triton.jit
def _unit(unit, tiles_m, tiles_n, K, splits, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr):
    """Returns (tile row, tile column, start and end along K) of a unit: a tile, or if SPLIT, a part of K of a tile."""
    tiles = tiles_m * tiles_n
    tile_m, tile_n = tile_position(unit % tiles if SPLIT else unit, tiles_m, tiles_n)
    if SPLIT:
        steps = tl.cdiv(tl.cdiv(K, BLOCK_K), splits) * BLOCK_K
        start = unit // tiles * steps
        return tile_m, tile_n, start, min(K, start + steps)
    else:
        return tile_m, tile_n, 0, K


# Not specialized: sizes, and the alignment of pointers into tensors [2, M], which depends on M.
@triton.jit(
    do_not_specialize=["M", "N", "K", "splits", "tokens", "prefix", "image_rows"],
    do_not_specialize_on_alignment=["mean_ptr", "rstd_ptr", "hidden_ptr"],
)
def _matmul_kernel(
    a,  # [M, K]
    b,  # [K, N], or [N, K] if B_IS_NK
    out,  # [M, N]; "gated": [M, N / 2]; "gated_grad": [M, 2 N], like z; "partial": fp32 [splits, M, N]
    # below, "layer_norm" stands also for "gated", "rotary" and "qk_norm", and "activation_grad" also for "gated_grad"
    z,  # [M, N] or None. "layer_norm" stores the pre-activation, "activation_grad" reads it; "residual" stores acc
    h,  # [M, N] or None. "activation_grad" stores the hidden layer h, or the normalized h^ if a norm of h follows;
    # "layer_norm_grad" stores out in a's dtype
    x,  # [M, N] or None. "layer_norm_grad" reads the LayerNorm's input, normalized if it was fp32 (layer_norm.py)
    residual,  # [M, N] or None
    mean_ptr,  # fp32 [M] or None. Forward epilogues store it, gradient epilogues read it (None if x is normalized)
    rstd_ptr,  # fp32 [M] or None, like mean_ptr; negative for a constant row (layer_norm.py)
    bias_ptr,  # [N] or None; "gated_grad": [2 N]
    weight_sum_ptr,  # fp32 [N] or None: sums over K of a weight with a folded LayerNorm (s in folding.py)
    scale_ptr,  # None, or factors. "layer_norm": of acc, fp32 [N]; "residual": of acc + bias, [N]; "activation_grad":
    # of acc, an fp32 vector whose first element is used
    out8,  # [M, N] e4m3 or None: "residual" stores out * out_scale (a reciprocal scale, ptx.py)
    out_scale_ptr,  # fp32 [N] for out8; fp32 [1] if "layer_norm" stores `out` in e4m3; else None
    row_part_ptr,  # fp32 or None. Forward: [M, 2, PARTS], partial LayerNorm statistics of A (row_parts.py).
    # Gradients: [M, PARTS], partial sums of dz (z - bias) per row (gradient_epilogues.py), which "activation_grad"
    # stores and "layer_norm_grad" reads
    out_part_ptr,  # fp32 [M, 2, OUT_PARTS] or None: "residual" and "gated" store partial LayerNorm statistics of out
    column_part_ptr,  # fp32 [M / BLOCK_M, 2, columns of z]: "activation_grad" stores column sums of dz, out * mean
    hidden_ptr,  # "activation_grad": fp32 [2, M], mean and rstd of h if a norm of h follows; else None
    along_ptr,  # fp32 [M], mean over N of h^ * (gradient of h^); None without a norm of h
    norm_weights, norm_biases,  # "qk_norm": vectors [HEAD] for q and k; (None, None): weights 1, biases 0
    tables,  # "rotary", "qk_norm": cos and sin [images or 1, tokens - prefix, HEAD / 2]; (None, None): no rotation
    b_ptr,  # B as a pointer if DEPENDENT, else None
    M, N, K, eps, splits, qk_eps,
    tokens, prefix, image_rows,  # per image: tokens, tokens without rotation, and rows of the tables (0 if shared)
    EPILOGUE: tl.constexpr, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr,  # DTYPE: of out
    B_IS_NK: tl.constexpr, TMA: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SUB_TILES: tl.constexpr,
    # "residual": number of sub-tiles of the residual that are loaded ahead. Gradients: if not 0, x, z and residual are
    # pointers even with TMA
    EARLY: tl.constexpr,
    PARTS: tl.constexpr,  # last dimension of row_part_ptr
    OUT_PARTS: tl.constexpr,  # last dimension of out_part_ptr: pieces of 64 columns per row of out (row_parts.py)
    TIMES: tl.constexpr,  # sub-tiles per piece
    WHOLE: tl.constexpr,  # all pieces have full width
    HEAD: tl.constexpr,  # "rotary", "qk_norm": channels of a head; in "qk_norm" also columns of a sub-tile
    NORM: tl.constexpr,  # of q and k: "layer_norm", "rms_norm" or "none"
    HALVES: tl.constexpr,  # rotary pairs: (j, j + HEAD / 2) in norm weights and biases; (2j, 2j + 1) in z (folding.py)
    ROW_STEP: tl.constexpr, PAIR_STEP: tl.constexpr,  # strides of the tables: rows, pairs
    ALIGN: tl.constexpr,  # divides the length of every row that is read or written by tiles
    DEPENDENT: tl.constexpr,  # starts before the previous kernel ends, and prefetches B (ptx.py)
):  # fmt: skip
    # Triton must not specialize on sizes. For K = 1, Triton would remove the loop over K and pipeline the loop over
    # tiles, which takes too much shared memory. The next two lines state the alignment that vector loads need.
    N = N // ALIGN * ALIGN
    K = K // ALIGN * ALIGN
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    OF_HEADS: tl.constexpr = EPILOGUE == "rotary" or EPILOGUE == "qk_norm"
    FOLDED: tl.constexpr = EPILOGUE == "layer_norm" or EPILOGUE == "gated" or OF_HEADS
    BEFORE_ACTIVATION: tl.constexpr = EPILOGUE == "activation_grad" or EPILOGUE == "gated_grad"
    COLS: tl.constexpr = BLOCK_N // SUB_TILES
    WIDTH: tl.constexpr = COLS // 2 if EPILOGUE == "gated" else COLS  # columns that a sub-tile stores
    SHAPE: tl.constexpr = (BLOCK_M, COLS, TMA, DTYPE)
    HEADS: tl.constexpr = (HEAD, NORM, HALVES, ROW_STEP, PAIR_STEP)
    heads = (norm_weights, norm_biases, qk_eps, tables, tokens, prefix, image_rows)
    units = tiles * splits if EPILOGUE == "partial" else tiles
    if DEPENDENT:
        _, tile_n, k_start, k_stop = _unit(
            tl.program_id(0), tiles_m, tiles_n, K, splits, BLOCK_K, EPILOGUE == "partial"
        )
        prefetch_rows(b_ptr, tile_n * BLOCK_N, k_start, k_stop, N, K, BLOCK_N, BLOCK_K)
    wait_for_previous(DEPENDENT)
    for tile in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n, k_start, k_stop = _unit(tile, tiles_m, tiles_n, K, splits, BLOCK_K, EPILOGUE == "partial")
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = accumulate(
            a, b, row, col, k_start, k_stop, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, False, B_IS_NK, TMA,
        )  # fmt: skip

        if EPILOGUE == "partial":
            base = out + tl.cast(tile // tiles, tl.int64) * M * N
            store_tile(base, acc, row, col, M, N, BLOCK_M, BLOCK_N, False)
        if FOLDED or EPILOGUE == "residual":
            factors = row_factors(
                row_part_ptr, mean_ptr, rstd_ptr, row, M, K, eps, tile_n == 0, BLOCK_M, PARTS, weight_sum_ptr is None
            )
        elif BEFORE_ACTIVATION:
            factors = activation_row_factors(mean_ptr, rstd_ptr, row, M, BLOCK_M)
        elif EPILOGUE == "layer_norm_grad":
            factors = layer_norm_row_factors(mean_ptr, rstd_ptr, row_part_ptr, row, M, N, BLOCK_M, PARTS)

        if EPILOGUE == "residual" and residual is not None:
            added = load_sub_tiles(residual, row, col, M, N, BLOCK_M, COLS, EARLY)
        if EPILOGUE != "partial":
            sub_tiles = cut(acc, BLOCK_M, BLOCK_N, SUB_TILES)
            for i in tl.static_range(SUB_TILES):
                where = (row, col + i * COLS, M, N)
                if FOLDED:
                    value = layer_norm_epilogue(
                        sub_tiles[i], out, z, weight_sum_ptr, bias_ptr, scale_ptr, out_scale_ptr, factors, heads, where,
                        SHAPE, HEADS, ACTIVATION, EPILOGUE == "gated",
                    )  # fmt: skip
                elif EPILOGUE == "residual":
                    addend = added[i] if residual is not None else None
                    if residual is not None and i + EARLY < SUB_TILES:
                        later = col + (i + EARLY) * COLS
                        added = added + load_sub_tiles(residual, row, later, M, N, BLOCK_M, COLS, 1)
                    sub_tile = sub_tiles[i]
                    if row_part_ptr is not None:
                        sub_tile = normed(sub_tile, weight_sum_ptr, None, factors, where, COLS)
                    value = residual_epilogue(sub_tile, out, z, addend, bias_ptr, scale_ptr, where, SHAPE)
                elif BEFORE_ACTIVATION:
                    activation_grad_epilogue(
                        sub_tiles[i], out, z, h, bias_ptr, scale_ptr, row_part_ptr, column_part_ptr, hidden_ptr,
                        along_ptr, factors, where, SHAPE, ACTIVATION, EPILOGUE == "gated_grad", PARTS, EARLY,
                    )  # fmt: skip
                else:
                    tl.static_assert(EPILOGUE == "layer_norm_grad", "unknown epilogue")
                    layer_norm_grad_epilogue(sub_tiles[i], out, h, x, residual, factors, where, SHAPE, EARLY)
                if out_part_ptr is not None:  # statistics of the stored values, merged over TIMES sub-tiles
                    width = N // 2 if EPILOGUE == "gated" else N
                    start = col // 2 if EPILOGUE == "gated" else col
                    found = piece_statistics(value.to(tl.float32), start + i * WIDTH, width, WIDTH, WHOLE)
                    first = start + i // TIMES * TIMES * WIDTH
                    if i % TIMES == 0:
                        merged = found
                    else:
                        merged = merge_next(merged, found, first, width, i % TIMES * WIDTH, WIDTH)
                    if i % TIMES == TIMES - 1:
                        store_statistics(out_part_ptr, merged[0], merged[1], row, first, M, width, BLOCK_M, OUT_PARTS)
                if out8 is not None:  # after the statistics, because this order needs fewer registers
                    narrow = divided_columns(value, out_scale_ptr, col + i * COLS, N, COLS)
                    store_tile(out8, narrow, row, col + i * COLS, M, N, BLOCK_M, COLS, TMA)

"""The matmuls of weight gradients: a^T b for one to four pairs a [M, P], b [M, Q], in one launch.

    part[split] = a^T b over one of `splits` parts of M, fp32

A weight gradient has few output tiles, and each tile is a sum over M. To occupy all multiprocessors, several programs
share a tile: each sums over a part of M. One launch computes all four gradients of a transformer block. It has more
tiles than a launch of a single gradient, so it needs fewer parts. `weight_gradients.py` adds the parts in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import gpu_of
from ..launch import Launch, decoded, unspecialized
from ..matmul.matmul_launch import MatmulConfig, tiled
from ..matmul.matmul_policy import matmuls_config
from ..matmul.matmul_tiles import accumulate, store_tile, tile_position


@triton.jit
def _store_parts(
    pair, start, M, splits,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
    TMA: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Computes every num_programs-th unit of a pair, from `start` on. A unit is a tile of a^T b over a part of M.

    The units of all pairs form one sequence. Returns this program's first unit in the next pair.
    """
    a, b, out, P, Q = pair
    # Sizes are not specialized (see `matmul.py`); these lines tell the compiler that ALIGN divides P and Q.
    P = decoded(P) // ALIGN * ALIGN
    Q = decoded(Q) // ALIGN * ALIGN
    tiles_p = tl.cdiv(P, BLOCK_P)
    tiles_q = tl.cdiv(Q, BLOCK_Q)
    tiles = tiles_p * tiles_q
    units = tiles * splits
    steps = tl.cdiv(tl.cdiv(M, BLOCK_M), splits) * BLOCK_M
    for unit in tl.range(start, units, tl.num_programs(0)):
        tile_p, tile_q = tile_position(unit % tiles, tiles_p, tiles_q)
        row = tile_p * BLOCK_P
        col = tile_q * BLOCK_Q
        first = unit // tiles * steps
        acc = accumulate(
            a, b, row, col, first, min(M, first + steps), P, Q, M,
            BLOCK_P, BLOCK_Q, BLOCK_M, A_IS_KM=True, B_IS_NK=False, TMA=TMA,
        )  # fmt: skip
        base = out + tl.cast(unit // tiles, tl.int64) * P * Q
        store_tile(base, acc, row, col, P, Q, BLOCK_P, BLOCK_Q, False)
    return start + tl.cdiv(max(units - start, 0), tl.num_programs(0)) * tl.num_programs(0) - units


@triton.jit(do_not_specialize=["M", "splits"])
def _weight_matmuls_kernel(
    a, b, a2, b2, a3, b3, a4, b4,  # [M, P] and [M, Q] of each matmul; None if absent
    out,  # output: fp32 [splits, P, Q] of each matmul; None if absent
    sizes,  # P and Q of each matmul, encoded (launch.py)
    M, splits,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, TMA: tl.constexpr,
    ALIGN: tl.constexpr,  # divides the widths of all operands
):  # fmt: skip
    start = tl.program_id(0)
    pairs = ((a, b), (a2, b2), (a3, b3), (a4, b4))
    for i in tl.static_range(4):
        if out[i] is not None:
            pair = (pairs[i][0], pairs[i][1], out[i], sizes[2 * i], sizes[2 * i + 1])
            start = _store_parts(pair, start, M, splits, BLOCK_P, BLOCK_Q, BLOCK_M, TMA, ALIGN)


Pair = tuple[Tensor, Tensor]


def weight_matmuls_launch(pairs: Sequence[Pair], out: Sequence[Tensor], config: MatmulConfig) -> Launch:
    """Returns the launch for one to four pairs of contiguous a [M, P] and b [M, Q].

    `block_m`, `block_n` and `block_k` of `config` are the tile sizes along P, Q and M.
    """
    (first, _), splits = pairs[0], out[0].shape[0]
    args: dict[str, Any] = {}
    for suffix, (a, b) in zip(("", "2", "3", "4"), [*pairs, *[(None, None)] * 3]):
        args[f"a{suffix}"] = tiled(a, config.block_k, config.block_m, config.tma)
        args[f"b{suffix}"] = tiled(b, config.block_k, config.block_n, config.tma)
    args |= {
        "out": (*out, *[None] * (4 - len(out))), "M": first.shape[0], "splits": splits,
        "sizes": tuple(unspecialized(size) for part in out for size in part.shape[1:]),
    }  # fmt: skip
    units = splits * sum(config.tiles(*part.shape[1:]) for part in out)
    constants = {
        "BLOCK_P": config.block_m, "BLOCK_Q": config.block_n, "BLOCK_M": config.block_k,
        "TMA": config.tma, "ALIGN": math.gcd(16, *(tensor.shape[1] for pair in pairs for tensor in pair)),
    }  # fmt: skip
    programs = min(units, gpu_of(first.device).sm_count * config.ctas_per_sm)
    return Launch(
        _weight_matmuls_kernel, programs, args, constants,
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.maxnreg,
        flop=2.0 * first.shape[0] * sum(part[0].numel() for part in out), units=units, device=first.device,
    )  # fmt: skip


def weight_matmuls(*pairs: Pair) -> list[Tensor]:
    """Returns the parts of a^T b, fp32 [splits, P, Q], for one to four pairs."""
    config, splits = matmuls_config(pairs)
    out = [torch.empty(splits, a.shape[1], b.shape[1], dtype=torch.float32, device=a.device) for a, b in pairs]
    weight_matmuls_launch(pairs, out, config).run()
    return out

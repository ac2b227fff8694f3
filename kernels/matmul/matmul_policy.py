"""Launch policy of matmuls: chooses a configuration from a table per architecture, number format and epilogue.

The policy takes the entry with the fewest predicted cycles, and times no kernels. The predictions are estimates from
data sheets and instruction counts of compiled kernels. Every entry compiles without spills for its architecture, which
`vit-fast kernels` checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from ..device import Gpu, generation, gpu_of, matmul_kind, reads_descriptors, starts_early
from ..launch import ceil_div, is_interpreted
from .matmul_launch import Matmul, MatmulConfig, fits_tma

_MAX_SPLITS = 16  # maximum parts of the sum over M of a weight gradient
_MAX_RESIDUAL_SPLITS = 8  # maximum parts of K of a "residual" matmul
_MIN_STEPS = 4  # minimum iterations of the main loop per part
NORMED_HEADS = (64, 128)  # head_dims that a "qk_norm" matmul can normalize

# Dense fp16 multiply-adds with fp32 sums, per multiprocessor and cycle, of A100, A10, L40S, H100, B200, B300, RTX 5090.
PRODUCTS = {
    "sm_80": 1024, "sm_86": 512, "sm_89": 512, "sm_90": 2048, "sm_100": 4096, "sm_103": 4096, "sm_120": 256,
}  # fmt: skip
_L2_BYTES = {"sm_86": 2048, "sm_89": 2048, "sm_120": 2048}  # L2 bandwidth in bytes per cycle, about an RTX 4090's
_L2_BYTES_HBM = 5120  # L2 bandwidth of other architectures, in bytes per cycle: the value of an A100
_L2_PORT = 64  # bytes per cycle from L2 to one multiprocessor
_L2_HOLDS = 2**25  # bytes of parts (split-K) that stay in L2 until the next kernel reads them
_SHARED_BYTES = 128  # bytes per cycle of shared memory, from which the warps read the operands of mma.sync
_LATENCY = 700  # cycles from issuing the loads of a tile of A and B to the arrival of the data
_ISSUE = 3.0  # instructions per cycle in an epilogue: 75 % of the peak of four schedulers
_DRAIN = 600  # cycles of exposed latency per epilogue: first loads and last stores
_OVERHEAD = 2500  # cycles from the end of a kernel to the arrival of the next kernel's first loads, in a CUDA graph
# Outside the loop over K, a warp executes _TILE_INSTRUCTIONS per tile, and `Epilogue.instructions` per element.
_TILE_INSTRUCTIONS = 250
_PARTIAL = 4  # `Epilogue.instructions` of "partial"


@dataclass(frozen=True)
class Problem:
    """Input of the launch policy."""

    gpu: Gpu
    kind: str  # of the operands, by `matmul_kind`: "half", "fp8" or "tf32"
    epilogue: str
    tma: bool  # TMA descriptors can describe the operands
    sizes: tuple[int, int, int]  # M, N, K
    itemsize: int  # of A and B
    instructions: int  # this and the following: as in `Epilogue`
    narrowest: int
    largest: int
    head: int

    def table(self, epilogue: str = "") -> tuple[MatmulConfig, ...]:
        return config_table(self.gpu.arch, self.kind, epilogue or self.epilogue, self.tma)

    def allows(self, config: MatmulConfig) -> bool:
        fits = config.block_n >= self.narrowest and config.block_m * config.block_n <= self.largest
        return fits and self.head in (0, config.sub_tile_width)

    def cycles(self, config: MatmulConfig, splits: int) -> float:
        """Returns the estimated cycles of a matmul. With split-K, includes the kernel that sums the parts."""
        M, N, K = self.sizes
        arch, sm_count = self.gpu.arch, self.gpu.sm_count
        units = config.tiles(M, N) * splits
        if units == 0:
            return 0.0
        tiles = ceil_div(units, sm_count)  # of the busiest multiprocessor
        area, border = config.block_m * config.block_n, config.block_m + config.block_n
        steps = ceil_div(ceil_div(K, config.block_k), splits)
        depth = config.block_k * self.itemsize
        product = steps * area * depth / 2 / PRODUCTS.get(arch, 1024)
        if generation(arch) == "ampere":
            product = max(product, steps * (32 * config.num_warps + area / 32 + border) * depth / _SHARED_BYTES)
        together, under_way = min(tiles, config.ctas_per_sm), max(1, config.num_stages - 1)
        wait = steps * _LATENCY / (under_way * together)
        # a flattened loop issues the first loads of the next tile before the epilogue
        early = under_way if config.flatten and splits == 1 else 0
        l2_bytes = _L2_BYTES.get(arch, _L2_BYTES_HBM)
        moved = max(0, steps - early) * border * depth
        whole, rest = divmod(units, sm_count)  # full waves, and tiles in a partial last wave
        waves = [(count, active) for count, active in ((whole, sm_count), (1, rest)) if count and active]
        loops = sum(count * max(product, moved / min(_L2_PORT, l2_bytes / active), wait) for count, active in waves)
        instructions = self.instructions if splits == 1 else _PARTIAL
        a_warp = _TILE_INSTRUCTIONS + instructions * area / (32 * config.num_warps)
        epilogue = a_warp * config.num_warps / _ISSUE + _DRAIN
        if config.ctas_per_sm > 1:  # all epilogues but the last ones overlap the main loops of other programs
            last = (tiles - 1) % together + 1
            total = max(loops, (tiles - last) * epilogue + loops * last / tiles) + last * epilogue
        else:  # only a flattened loop overlaps the epilogue of a tile with the first loads of the next tile
            total = loops + tiles * ((0 if early else _LATENCY) + epilogue)
        if splits > 1:  # the parts are written and read, the residual is read, the sum is written
            rate = l2_bytes / (1 if 4 * splits * M * N <= _L2_HOLDS else 4)  # DRAM has a quarter of the L2 bandwidth
            total += _OVERHEAD + (8 * splits + 2 * self.itemsize) * M * N / rate
        return _OVERHEAD + total


def _problem(matmul: Matmul) -> Problem:
    gpu, kind, epilogue = gpu_of(matmul.a.device), matmul_kind(matmul.a.dtype), matmul.epilogue
    if is_interpreted():
        gpu, kind = replace(gpu, arch="sm_90"), "fp8" if matmul.a.dtype == torch.float8_e4m3fn else "half"
    return Problem(
        gpu, kind, epilogue.name, fits_tma(matmul.tiled()), matmul.sizes, matmul.a.dtype.itemsize,
        epilogue.instructions, epilogue.narrowest, epilogue.largest, epilogue.head,
    )  # fmt: skip


def matmul_config(matmul: Matmul) -> MatmulConfig:
    """Returns the configuration for these operands on their device; in the interpreter, the largest usable tile."""
    problem = _problem(matmul)
    return _usable(problem)[0] if is_interpreted() else best(problem)[0]


def residual_config(matmul: Matmul) -> tuple[MatmulConfig, int]:
    """Returns the configuration of a "residual" matmul, and the number of parts of K; `split_k.py` adds the parts.

    Splitting K occupies more multiprocessors: at batch 1, fc2 of ViT-B has only 48 tiles of the smallest size.
    """
    problem = _problem(matmul)
    return (_usable(problem)[0], 1) if is_interpreted() else best(problem, _MAX_RESIDUAL_SPLITS)


def rows_in_whole_waves(matmul: Matmul) -> int:
    """Returns the number of rows for the first launch of a "residual" matmul; a second launch computes the rest.

    The tiles of the first launch fill whole waves as far as possible, because a partial wave often takes as long as a
    whole one. The second launch may use smaller tiles or split-K. Returns all rows if one launch is faster.
    """
    return matmul.sizes[0] if is_interpreted() else best_head(_problem(matmul))


def _usable(problem: Problem) -> list[MatmulConfig]:
    return [config for config in problem.table() if problem.allows(config)]


@lru_cache(4096)
def best(problem: Problem, most: int = 1) -> tuple[MatmulConfig, int]:
    """Returns the configuration and the number of parts of K, at most `most`, with the fewest predicted cycles."""
    candidates = [(config, 1) for config in _usable(problem)]
    for parts in range(2, most + 1):
        for config in problem.table("partial"):
            if ceil_div(problem.sizes[2], config.block_k) >= _MIN_STEPS * parts:
                candidates.append((config, parts))
    return min(candidates, key=lambda candidate: problem.cycles(*candidate))


@lru_cache(4096)
def best_head(problem: Problem) -> int:
    """Returns the number of rows of the first launch that minimizes the predicted cycles of both launches."""
    M, N, K = problem.sizes

    def cycles(rows: int) -> float:
        part = replace(problem, sizes=(rows, N, K))
        return part.cycles(*best(part, _MAX_RESIDUAL_SPLITS)) if rows else 0.0

    heads = [M]
    for config in problem.table("residual"):
        tiles = config.tiles(M, N) // problem.gpu.sm_count * problem.gpu.sm_count
        heads.append(tiles // ceil_div(N, config.block_n) * config.block_m)
    return min((head for head in heads if 0 < head <= M), key=lambda head: cycles(head) + cycles(M - head), default=M)


def matmuls_config(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[MatmulConfig, int]:
    """Returns the configuration of `weight_matmuls.py` for these pairs of operands, and the number of parts of M.

    Chooses the smallest number of parts with at least 90 % of the maximum utilization of multiprocessors.
    """
    first = pairs[0][0]
    gpu, M = gpu_of(first.device), first.shape[0]
    arch, kind = ("sm_90", "half") if is_interpreted() else (gpu.arch, matmul_kind(first.dtype))
    config = config_table(arch, kind, "weight_matmuls", fits_tma(tensor for pair in pairs for tensor in pair))[0]
    programs = gpu.sm_count * config.ctas_per_sm
    tiles = sum(config.tiles(a.shape[1], b.shape[1]) for a, b in pairs)
    most = max(1, min(_MAX_SPLITS, ceil_div(M, config.block_k) // _MIN_STEPS))

    def busy(splits: int) -> float:
        units = tiles * splits
        return units / (ceil_div(units, programs) * programs)

    best = max(busy(splits) for splits in range(1, most + 1))
    return config, next(splits for splits in range(1, most + 1) if busy(splits) >= 0.9 * best)


@cache
def config_table(arch: str, kind: str, epilogue: str, tma: bool) -> tuple[MatmulConfig, ...]:
    """Returns configurations from the largest tile to the smallest; `epilogue` may also be "weight_matmuls".

    From sm_90 on, small tiles with several programs per multiprocessor have `dependent=True` (`ptx.py`).
    """
    if epilogue == "qk_norm":
        table = _qk_norm_table(arch, kind, tma)
    elif tma and reads_descriptors(arch):
        tables = _TMA_TABLES[generation(arch), kind]
        table = tables.get(epilogue, tables["other"])
    else:
        table = _pointer_table(arch, kind, epilogue)
    if epilogue == "weight_matmuls":  # it splits the sum over M to fill the multiprocessors, and needs no small tiles
        table = table[:1]
    # on blackwell, tiles of more than 64 x 64 would spill: with `dependent`, the kernel has one more argument, `b_ptr`
    most = 64 * 64 if generation(arch) == "blackwell" else 128 * 128
    early = (c.ctas_per_sm > 1 and c.block_m * c.block_n <= most and starts_early(arch) for c in table)
    return tuple(replace(c, dependent=dependent) for c, dependent in zip(table, early))


_tma = partial(MatmulConfig, tma=True)
_WIDE = _tma(128, 256, 64, sub_tiles=4, num_warps=8, flatten=True)
_SQUARE = _tma(128, 128, 64, sub_tiles=2, num_warps=8)
_TWO_SQUARES = _tma(128, 128, 64, sub_tiles=4, ctas_per_sm=2)
_SMALL = _tma(64, 64, 64, num_stages=4, ctas_per_sm=2)
_FLAT_SQUARE = replace(_SQUARE, num_stages=4, flatten=True)
_HOPPER = (_FLAT_SQUARE, _tma(64, 128, 64, sub_tiles=2, num_stages=4, ctas_per_sm=2), _SMALL)
_FP8 = tuple(replace(config, block_k=128) for config in (_WIDE, *_HOPPER))  # 128 bytes per row, as in half precision
_SMALL_TF32 = _tma(64, 64, 32, ctas_per_sm=2)
# z and dz of "gated_grad" are twice as wide as acc, so even small tiles have two sub-tiles
_GATED_SMALL, _GATED_TF32 = _tma(64, 64, 64, sub_tiles=2, ctas_per_sm=2), replace(_SMALL_TF32, sub_tiles=2)
# Configurations with TMA, by generation and number format, then by epilogue.
_TMA_TABLES: dict[tuple[str, str], dict[str, tuple[MatmulConfig, ...]]] = {
    ("hopper", "half"): {
        "other": (_WIDE, *_HOPPER),
        # 184 and 232 registers suffice without spills; without maxnreg, ptxas uses up to 247
        "layer_norm": (replace(_WIDE, maxnreg=184), *_HOPPER),
        "gated": (replace(_WIDE, maxnreg=232), *_HOPPER),
        "gated_grad": (replace(_FLAT_SQUARE, sub_tiles=4, num_stages=3, maxnreg=232), _GATED_SMALL),
    },
    ("blackwell", "half"): {
        "other": (_WIDE, _TWO_SQUARES, _SMALL),
        # with LayerNorm statistics as input or output, these tiles and values of maxnreg avoid spills
        "layer_norm": (_WIDE, replace(_TWO_SQUARES, maxnreg=192), _SMALL),
        "residual": (replace(_WIDE, maxnreg=248), _SQUARE, _SMALL),
        "partial": (_SQUARE, replace(_SMALL, maxnreg=128)),  # tiles of 256 columns spill; 64 columns need maxnreg
        "activation_grad": (_SQUARE, _SMALL),
        "gated_grad": (_tma(128, 64, 64, sub_tiles=2, num_warps=8), _GATED_SMALL),  # tiles of 128 columns spill
        "weight_matmuls": (_SQUARE,),
    },
    ("hopper", "tf32"): {"other": (replace(_SQUARE, block_k=32), _SMALL_TF32), "gated_grad": (_GATED_TF32,)},
    ("blackwell", "tf32"): {
        "other": (_SMALL_TF32,),
        "partial": (replace(_SMALL_TF32, maxnreg=128),),
        **dict.fromkeys(("activation_grad", "gated_grad"), (_GATED_TF32,)),
        # with several matmuls in one launch, ptxas uses only 72 registers without maxnreg, and spills
        "weight_matmuls": (replace(_SMALL_TF32, maxnreg=128),),
    },
    ("hopper", "fp8"): {"other": _FP8},
    ("blackwell", "fp8"): {"other": _FP8, "partial": (*_FP8[1:3], replace(_FP8[3], maxnreg=128))},
}


def _qk_norm_table(arch: str, kind: str, tma: bool) -> tuple[MatmulConfig, ...]:
    """Returns the configurations of "rotary", with whole heads of 64 or 128 channels as sub-tiles; only for "half".

    Heads of 128 channels spill in tiles of 128 x 256, and in tiles of 128 x 128 with 4 warps.
    """
    if kind != "half":
        return ()
    table = config_table(arch, kind, "rotary", tma)
    # without maxnreg, ptxas uses 249 registers on sm_90, although the kernel does not spill with 232
    of_64 = [replace(c, sub_tiles=c.block_n // 64, maxnreg=232 if c.block_n == 256 else c.maxnreg) for c in table]
    of_128 = [replace(c, sub_tiles=1) for c in table if c.block_n == 128]
    eight = [replace(c, num_warps=8, ctas_per_sm=1) if c.block_m == 128 else c for c in of_128]
    return tuple(sorted((*of_64, *eight), key=lambda config: -config.block_m * config.block_n))


def _pointer_table(arch: str, kind: str, epilogue: str) -> tuple[MatmulConfig, ...]:
    """Returns configurations without TMA. Values without a comment avoid spills. sm_120 counts as "ampere"."""
    half, hopper, blackwell = kind == "half", generation(arch) == "hopper", generation(arch) == "blackwell"
    grad = epilogue == "activation_grad"
    if epilogue == "gated_grad":
        small = MatmulConfig(64, 64, 32, sub_tiles=2, num_warps=8, ctas_per_sm=2)
        return (MatmulConfig(128, 64, 32, sub_tiles=2, num_warps=8), small) if half else (small,)
    if kind == "fp8":
        limit = 144 if arch == "sm_120" else None  # without maxnreg, ptxas uses 96 registers and spills
        small = MatmulConfig(64, 64, 64, sub_tiles=2, ctas_per_sm=2, maxnreg=limit)
        return MatmulConfig(128, 128, 64, sub_tiles=2, num_warps=8), small
    if blackwell and not half:
        stages = 2 if epilogue == "layer_norm" else 3
        return (MatmulConfig(64, 64, 32, num_warps=8, num_stages=stages, ctas_per_sm=2),)
    quarters = half and (blackwell or (arch == "sm_120" and grad))
    halves = (blackwell or (grad and not hopper)) if half else arch == "sm_120"
    # without maxnreg, ptxas uses as few as 72 registers, and some kernels spill
    limit = 160 if blackwell and epilogue == "layer_norm" else None
    # an iteration takes 512 cycles on an A100: with 4 stages, loads may take 3 * 512 cycles, about twice _LATENCY
    stages = 4 if half and arch == "sm_80" else 3
    width, depth = 128 if half or hopper else 64, 64 if half and hopper else 32
    wide = MatmulConfig(128, width, depth, sub_tiles=4 if quarters else 2, num_warps=8, num_stages=stages)
    return wide, MatmulConfig(64, 64, 64 if half else 32, sub_tiles=2 if halves else 1, ctas_per_sm=2, maxnreg=limit)

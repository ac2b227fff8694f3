"""Estimates the time of a matmul on a GPU, in cycles, from data sheets and instruction counts of compiled kernels.

The estimates are not measured. `matmul_policy.py` orders configurations by them, and `device_model.py` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..device import Gpu, generation
from ..launch import ceil_div
from .matmul_launch import MatmulConfig, Operands

# Dense fp16 multiply-adds with fp32 sums, per multiprocessor and cycle: A100, A10, L40S, H100, B200, B300, RTX 5090.
PRODUCTS = {
    "sm_80": 1024, "sm_86": 512, "sm_89": 512, "sm_90": 2048, "sm_100": 4096, "sm_103": 4096, "sm_120": 256,
}  # fmt: skip
_L2_BYTES = {"sm_86": 2048, "sm_89": 2048, "sm_120": 2048}  # L2 bandwidth in bytes per cycle, about the RTX 4090's
_L2_BYTES_HBM = 5120  # L2 bandwidth of other architectures in bytes per cycle: the A100's
_L2_PORT = 64  # bytes per cycle from L2 to one multiprocessor
_L2_HOLDS = 2**25  # bytes
_SHARED_BYTES = 128  # bytes per cycle of shared memory, from which the warps read the operands of mma.sync
_LATENCY = 700  # cycles from issuing the loads of a tile of A and B to the arrival of the data
ISSUE = 3.0  # instructions per cycle in an epilogue: 75 % of four schedulers
DRAIN = 600  # cycles of exposed latency per epilogue: first loads and last stores
OVERHEAD = 2500  # cycles from the end of a kernel to the arrival of the next kernel's first loads, in a CUDA graph
# Instructions of a warp per tile outside the loop over K: a constant plus, per element of a thread, _INSTRUCTIONS.
_TILE_INSTRUCTIONS = 250
_INSTRUCTIONS = {
    "layer_norm": 7, "rotary": 18, "qk_norm": 29, "gated": 10, "residual": 2, "activation_grad": 35, "gated_grad": 54,
    "layer_norm_grad": 11, "partial": 4,
}  # fmt: skip
_ACTIVATION, _ADDEND, _STATISTICS, _SECOND = 10, 8, 7, 5  # added for GELU, residual, statistics, e4m3 output


def epilogue_instructions(operands: Operands, epilogue: str, activation: str = "identity") -> int:
    """Returns the instructions of an epilogue per element and thread, counted in SASS of sm_90."""
    count = _INSTRUCTIONS[epilogue]
    if epilogue == "layer_norm" and activation != "identity":
        count += _ACTIVATION
    if epilogue == "residual":
        extras = ((operands.residual, _ADDEND), (operands.out_part, _STATISTICS), (operands.out8, _SECOND))
        count += sum(cost for tensor, cost in extras if tensor is not None)
    return count


@dataclass(frozen=True)
class Cycles:
    """Cycles that the busiest multiprocessor spends on its tiles."""

    products: float  # MMA instructions
    loads: float  # of operands from L2
    latency: float  # that the loads in flight do not hide
    epilogues: float
    total: float  # the whole kernel with its launch overhead; overlapping work counts once


def launch_cycles(
    config: MatmulConfig, sizes: tuple[int, int, int], itemsize: int, gpu: Gpu, epilogue: float, splits: int = 1
) -> Cycles:
    """Returns the estimate of one launch for sizes M, N, K; `epilogue` is the cycles per epilogue of a tile."""
    M, N, K = sizes
    units = config.tiles(M, N) * splits
    if units == 0:
        return Cycles(0, 0, 0, 0, 0)
    tiles = ceil_div(units, gpu.sm_count)
    area, border = config.block_m * config.block_n, config.block_m + config.block_n
    steps = ceil_div(ceil_div(K, config.block_k), splits)
    depth = config.block_k * itemsize
    product = steps * area * depth / 2 / PRODUCTS.get(gpu.arch, 1024)
    if generation(gpu.arch) == "ampere":
        product = max(product, steps * (32 * config.num_warps + area / 32 + border) * depth / _SHARED_BYTES)
    together, under_way = min(tiles, config.ctas_per_sm), max(1, config.num_stages - 1)
    wait = steps * _LATENCY / (under_way * together)
    # a flattened loop issues the first loads of the next tile before the epilogue
    early = under_way if config.flatten and splits == 1 else 0
    whole, rest = divmod(units, gpu.sm_count)  # full waves, and tiles in a partial last wave
    waves = [(count, active) for count, active in ((whole, gpu.sm_count), (1, rest)) if count and active]
    moved = max(0, steps - early) * border * depth
    loads = [(count, moved / min(_L2_PORT, _l2_bytes(gpu) / active)) for count, active in waves]
    loops = sum(count * max(product, load, wait) for count, load in loads)
    if config.ctas_per_sm > 1:  # all but the last epilogues overlap the main loops of other programs
        last = (tiles - 1) % together + 1
        total = max(loops, (tiles - last) * epilogue + loops * last / tiles) + last * epilogue
    else:  # only the first loads of a flattened loop overlap the epilogue
        total = loops + tiles * ((0 if early else _LATENCY) + epilogue)
    loading = sum(count * load for count, load in loads)
    return Cycles(tiles * product, loading, tiles * wait, tiles * epilogue, OVERHEAD + total)


def _l2_bytes(gpu: Gpu) -> int:
    return _L2_BYTES.get(gpu.arch, _L2_BYTES_HBM)


def epilogue_cycles(config: MatmulConfig, instructions: int) -> float:
    """Returns the estimated cycles per epilogue of a tile, from `epilogue_instructions`."""
    a_warp = _TILE_INSTRUCTIONS + instructions * config.block_m * config.block_n / (32 * config.num_warps)
    return a_warp * config.num_warps / ISSUE + DRAIN


def predicted_cycles(
    config: MatmulConfig, sizes: tuple[int, int, int], itemsize: int, gpu: Gpu, instructions: int, splits: int = 1
) -> float:
    """Returns the estimated cycles of a matmul. With split-K, includes the kernel that sums the parts."""
    epilogue = epilogue_cycles(config, instructions if splits == 1 else _INSTRUCTIONS["partial"])
    cycles = launch_cycles(config, sizes, itemsize, gpu, epilogue, splits).total
    if splits > 1:  # the parts are written and read, the residual is read, the sum is written
        M, N, _ = sizes
        rate = _l2_bytes(gpu) / (1 if 4 * splits * M * N <= _L2_HOLDS else 4)  # DRAM: a quarter of L2 bandwidth
        cycles += OVERHEAD + (8 * splits + 2 * itemsize) * M * N / rate
    return cycles

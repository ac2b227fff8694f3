"""Estimates the device time of launches from their machine code and the launch policy, without measurements.

    with recorded() as launches:    # under the stand-in driver; nothing is launched
        model(images)
    rows = model_launches(launches, "sm_90")

Matmuls are modeled as in `matmul_model.py`, but with epilogue instructions counted in SASS. The time of other kernels
is estimated from instructions, waves and bytes; a loop without MMA counts as one iteration. No estimate is below
the DRAM time to read and write all tensors once. `floor_us` is the longer of compute and DRAM time, at sustained rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import Gpu, gpu_of
from ..launch import Launch, ceil_div, listening
from ..matmul.matmul_launch import MatmulConfig
from ..matmul.matmul_model import DRAIN, ISSUE, OVERHEAD, PRODUCTS, launch_cycles
from ..precompile import collect
from .offline import Stats, compile_launch, disassemble, read_stats
from .sass import Loops, count_loops

# Name, clock in GHz and DRAM bandwidth in GB/s, from data sheets.
GPUS = {
    "sm_80": ("A100 SXM", 1.41, 2039), "sm_86": ("A10", 1.695, 600), "sm_89": ("L40S", 2.52, 864),
    "sm_90": ("H100 SXM", 1.755, 3350), "sm_100": ("B200", 1.85, 8000), "sm_103": ("B300", 1.9, 8000),
    "sm_120": ("RTX 5090", 2.41, 1792),
}  # fmt: skip
_SUSTAINED = 0.832  # fraction of the tensor cores' peak: 790 of 949 TFLOP/s, bf16, H100
_STREAMED = 0.92  # sustained fraction of the DRAM bandwidth
_EARLY = 1750  # cycles of OVERHEAD that overlap with the previous kernel if DEPENDENT (ptx.py)

_ATTENTION_PRODUCTS = {"_attention_bwd_dq_kernel": 3, "_attention_bwd_dkdv_kernel": 4}


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Records the launches of this thread. The kernels are neither compiled nor launched."""
    found: list[Launch] = []
    with collect():
        outer, listening.listener = listening.listener, lambda launch, ready: found.append(launch)
        try:
            yield found
        finally:
            listening.listener = outer


def model_launches(launches: Sequence[Launch], arch: str) -> list[dict[str, Any]]:
    """Compiles the kernels, and returns the estimates of `model_launch` for each launch."""
    rows = []
    for launch in launches:
        compiled = compile_launch(launch, arch)
        loops = count_loops(disassemble(compiled)[1])
        rows.append(model_launch(launch, arch, loops, read_stats(compiled, arch, 0.0)))
    return rows


def model_launch(launch: Launch, arch: str, loops: Loops, stats: Stats) -> dict[str, Any]:
    clock, streamed = GPUS[arch][1] * 1e3, GPUS[arch][2] * 1e3 * _STREAMED  # cycles and bytes per microsecond
    gpu = gpu_of(launch.device)
    moved = _bytes(launch)
    product = _product(launch)
    flop, itemsize = (product.flop, product.itemsize) if product else (_attention_flop(launch), 2)
    sustained = 2 * PRODUCTS[arch] * gpu.sm_count * clock * _SUSTAINED * 2 / itemsize
    if product:
        tile, waves, issue, cycles = _matmul_cycles(product, loops, gpu)
    else:
        tile, issue, cycles = "", *_other_cycles(launch, loops, stats)
        waves = math.prod(launch.grid) / gpu.sm_count / stats.ctas_per_sm
    cycles["DRAM"] = moved / streamed * clock
    early = _EARLY if launch.constants.get("DEPENDENT") else 0
    us = (max(cycles.pop("total"), cycles["DRAM"] + OVERHEAD) - early) / clock
    return {
        "kernel": _name(launch), "tile": tile, "programs": math.prod(launch.grid), "waves": round(waves, 2),
        "MB": round(moved / 1e6, 2), "GFLOP": round(flop / 1e9, 3), "registers": stats.registers,
        "ctas_per_sm": stats.ctas_per_sm, "step_instructions": loops.step, "tile_instructions": loops.tile,
        "issue_us": round(issue / clock, 2), "floor_us": round(max(flop / sustained, moved / streamed), 2),
        "modelled_us": round(us, 2), "bottleneck": max(cycles, key=lambda name: cycles[name]),
    }  # fmt: skip


def _name(launch: Launch) -> str:
    constants = launch.constants
    activation = constants.get("ACTIVATION", "identity")
    parts = (constants.get("EPILOGUE"), activation if activation != "identity" else None)
    return ", ".join([launch.kernel.__name__.strip("_").removesuffix("_kernel"), *filter(None, parts)])


@dataclass(frozen=True)
class _Product:
    """The matmuls of a launch, modeled as one matmul of `sizes` (M, N, K)."""

    config: MatmulConfig
    sizes: tuple[int, int, int]
    splits: int
    flop: float
    itemsize: int


def _product(launch: Launch) -> _Product | None:
    c, args = launch.constants, launch.args
    if "EPILOGUE" in c:
        tile = (c["BLOCK_M"], c["BLOCK_N"], c["BLOCK_K"], c["SUB_TILES"])
    elif "BLOCK_P" in c:
        tile = (c["BLOCK_P"], c["BLOCK_Q"], c["BLOCK_M"], 1)
    else:
        return None
    config = MatmulConfig(
        *tile, launch.num_warps, launch.num_stages, tma=c["TMA"], flatten=c.get("FLATTEN", False),
        ctas_per_sm=ceil_div(math.prod(launch.grid), gpu_of(launch.device).sm_count),
    )  # fmt: skip
    if "EPILOGUE" in c:
        sizes = (args["M"], args["N"], args["K"])
        flop = 2.0 * math.prod(sizes)
    else:  # model all weight gradients as one matmul with the sum of their tiles
        pairs = [(args[f"P{suffix}"], args[f"Q{suffix}"]) for suffix in ("", "2", "3", "4")]
        sizes = (sum(config.tiles(P, Q) for P, Q in pairs) * config.block_m, config.block_n, args["M"])
        flop = 2.0 * args["M"] * sum(P * Q for P, Q in pairs)
    a = args["a"].base if isinstance(args["a"], TensorDescriptor) else args["a"]
    return _Product(config, sizes, args["splits"], flop, a.element_size())


def _matmul_cycles(product: _Product, loops: Loops, gpu: Gpu) -> tuple[str, float, float, dict[str, float]]:
    """Returns tile, waves, cycles to issue instructions, and cycles per resource."""
    config, sizes, splits = product.config, product.sizes, product.splits
    issued = loops.tile * config.num_warps / 4
    found = launch_cycles(config, sizes, product.itemsize, gpu, issued * 4 / ISSUE + DRAIN, splits)
    tiles = config.tiles(sizes[0], sizes[1]) * splits
    busiest = ceil_div(tiles, gpu.sm_count)
    words = f"{config.block_m}x{config.block_n}x{config.block_k}" + (f"/{splits}" if splits > 1 else "")
    cycles = {
        "tensor cores": found.products, "L2": found.loads, "latency": found.latency, "epilogue": found.epilogues,
        "total": found.total,
    }  # fmt: skip
    return words, tiles / gpu.sm_count, found.products + busiest * issued, cycles


def _other_cycles(launch: Launch, loops: Loops, stats: Stats) -> tuple[float, dict[str, float]]:
    """Returns cycles to issue instructions, and cycles per resource."""
    args, c = launch.args, launch.constants
    trips = c.get("TILES") or (ceil_div(args["n_kv"], c["BLOCK_N"]) if "BLOCK_N" in c else 1)
    programs = ceil_div(math.prod(launch.grid), gpu_of(launch.device).sm_count)
    issue = programs * stats.warps * (loops.once + trips * (loops.step + loops.tile)) / 4
    rounds = ceil_div(programs, stats.ctas_per_sm)
    return issue, {"issue": issue * 4 / ISSUE, "total": issue * 4 / ISSUE + rounds * DRAIN + OVERHEAD}


def _attention_flop(launch: Launch) -> float:
    args = launch.args
    if "n_kv" not in args:
        return 0.0
    batch_heads = args["lse_ptr"].numel() // args["n_q"]
    products = _ATTENTION_PRODUCTS.get(launch.kernel.__name__, 2)
    return 2.0 * products * batch_heads * args["n_q"] * args["n_kv"] * launch.constants["D"]


def _bytes(launch: Launch) -> int:
    return sum(dict(_tensors(launch)).values())


def _tensors(launch: Launch) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yields a key and the bytes of each tensor; views of the same elements have the same key."""
    for value in launch.args.values():
        tensor = value.base if isinstance(value, TensorDescriptor) else value
        if isinstance(tensor, Tensor):
            yield (tensor.data_ptr(), tensor.numel()), tensor.numel() * tensor.element_size()

"""Estimates the device time of launches from their machine code and the launch policy, without measurements.

Matmuls are modeled as in `matmul_policy.py`, but with epilogue instructions counted in SASS. The time of other kernels
is estimated from instructions, waves and bytes; a loop without MMA counts as one iteration. No estimate is below
the DRAM time to read and write all tensors once. `floor_us` is the longer of compute and DRAM time, at sustained rates.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch import Launch, ceil_div
from ..matmul.matmul_launch import MatmulConfig
from ..matmul.matmul_policy import DRAIN, ISSUE, OVERHEAD, PRODUCTS, launch_cycles
from . import offline
from .static_checks import Stats, disassemble, read_stats

_SUSTAINED = 0.832  # fraction of the tensor cores' peak: 790 of 949 TFLOP/s, bf16, H100
_STREAMED = 0.92  # sustained fraction of the DRAM bandwidth
_EARLY = 1750  # cycles of OVERHEAD that overlap with the previous kernel if DEPENDENT (ptx.py)
_ATTENTION_PRODUCTS = {"_attention_bwd_dq_kernel": 3, "_attention_bwd_dkdv_kernel": 4}

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA\b.*?0x([0-9a-f]+)")
_PRODUCT = re.compile(r"\b(?:[HQI]G?MMA|UTC\w*MMA)\b")


class Loops(NamedTuple):
    """Number of instructions per warp."""

    step: int  # per iteration of the innermost loop with MMA instructions (the K loop), excluding `tile`
    tile: int  # per iteration of the loop around it; if both are flattened into one: the epilogue
    once: int  # outside these loops


def count_loops(sass: str) -> Loops:
    """Returns the counts of a kernel. If no loop contains an MMA instruction, all instructions count as `once`.

    A backward branch over an MMA instruction is a loop. ptxas places the retry loops of some mbarrier waits out of
    line. They also branch backward, right after a TRYWAIT, and are not counted.
    """
    lines = [(int(m[1], 16), m[2]) for m in _LINE.finditer(sass)]
    index_of = {address: index for index, (address, _) in enumerate(lines)}
    branches = []
    for index, (_, text) in enumerate(lines):
        target = _BRANCH.search(text)
        waits = any("TRYWAIT" in line for _, line in lines[max(index - 2, 0) : index])
        if target is not None and int(target[1], 16) in index_of and not waits:
            branches.append((index, index_of[int(target[1], 16)]))
    products = [index for index, (_, text) in enumerate(lines) if _PRODUCT.search(text)]
    ends: dict[int, int] = {}
    for at, to in branches:
        if any(to <= product <= at for product in products):
            ends[to] = max(at, ends.get(to, 0))
    executed = sum("NOP" not in text for _, text in lines)
    if not ends:
        return Loops(0, 0, executed)
    (start, stop), *outer = sorted(ends.items(), key=lambda loop: loop[1] - loop[0])
    inner = stop - start + 1
    around = [end - begin + 1 for begin, end in outer if begin <= start and stop <= end]
    skipped = max((to - at for at, to in branches if start <= at < to <= stop + 1), default=0)
    # a forward branch over more than half of the loop is assumed to skip the epilogue
    tile = around[0] - inner if around else skipped if 2 * skipped > inner else 0
    return Loops(inner if around else inner - tile, tile, executed - max([inner, *around]))


def compile_and_model(launch: Launch, arch: str) -> dict[str, Any]:
    compiled = offline.compile_launch(launch, arch)
    return model_launch(launch, arch, count_loops(disassemble(compiled)), read_stats(compiled, arch))


def model_launch(launch: Launch, arch: str, loops: Loops, stats: Stats) -> dict[str, Any]:
    gpu = offline.architecture(arch)
    clock, streamed = gpu.clock * 1e3, gpu.dram * 1e3 * _STREAMED  # cycles and bytes per microsecond
    moved, programs = _bytes(launch), math.prod(launch.grid)
    if (product := _product(launch, gpu.sm_count)) is not None:
        flop, itemsize = product.flop, product.itemsize
        tile, waves, issue, cycles = _matmul_cycles(product, loops, arch)
    else:
        flop, itemsize, tile = _attention_flop(launch), 2, ""
        issue, cycles = _other_cycles(launch, loops, stats, gpu.sm_count)
        waves = programs / gpu.sm_count / stats["ctas_per_sm"]
    sustained = 2 * PRODUCTS[arch] * gpu.sm_count * clock * _SUSTAINED * 2 / itemsize
    cycles["DRAM"] = moved / streamed * clock
    early = _EARLY if launch.constants.get("DEPENDENT") else 0
    us = (max(cycles.pop("total"), cycles["DRAM"] + OVERHEAD) - early) / clock
    return {
        "kernel": _name(launch), "tile": tile, "programs": programs, "waves": round(waves, 2),
        "MB": round(moved / 1e6, 2), "GFLOP": round(flop / 1e9, 3), "registers": stats["registers"],
        "ctas_per_sm": stats["ctas_per_sm"], "step_instructions": loops.step, "tile_instructions": loops.tile,
        "issue_us": round(issue / clock, 2), "floor_us": round(max(flop / sustained, moved / streamed), 2),
        "modelled_us": round(us, 2), "bottleneck": max(cycles, key=lambda name: cycles[name]),
    }  # fmt: skip


def _name(launch: Launch) -> str:
    constants = launch.constants
    activation = constants.get("ACTIVATION", "identity")
    parts = (constants.get("EPILOGUE"), activation if activation != "identity" else None)
    return ", ".join([launch.kernel.__name__.strip("_").removesuffix("_kernel"), *filter(None, parts)])


class _Product(NamedTuple):
    """The matmuls of a launch, modeled as one matmul of `sizes` (M, N, K)."""

    config: MatmulConfig
    sizes: tuple[int, int, int]
    splits: int
    flop: float
    itemsize: int


def _product(launch: Launch, sm_count: int) -> _Product | None:
    c, args = launch.constants, launch.args
    if "EPILOGUE" in c:
        tile = (c["BLOCK_M"], c["BLOCK_N"], c["BLOCK_K"], c["SUB_TILES"])
    elif "BLOCK_P" in c:
        tile = (c["BLOCK_P"], c["BLOCK_Q"], c["BLOCK_M"], 1)
    else:
        return None
    config = MatmulConfig(
        *tile, launch.num_warps, launch.num_stages, tma=c["TMA"], flatten=c.get("FLATTEN", False),
        ctas_per_sm=ceil_div(math.prod(launch.grid), sm_count),
    )  # fmt: skip
    if "EPILOGUE" in c:
        sizes = (args["M"], args["N"], args["K"])
        flop = 2.0 * math.prod(sizes)
    else:  # model all weight gradients as one matmul with the sum of their tiles
        pairs = [(args[f"P{suffix}"], args[f"Q{suffix}"]) for suffix in ("", "2", "3", "4")]
        sizes = (sum(config.tiles(P, Q) for P, Q in pairs) * config.block_m, config.block_n, args["M"])
        flop = 2.0 * args["M"] * sum(P * Q for P, Q in pairs)
    return _Product(config, sizes, args["splits"], flop, _tensor(args["a"]).element_size())


def _matmul_cycles(product: _Product, loops: Loops, arch: str) -> tuple[str, float, float, dict[str, float]]:
    """Returns tile, waves, cycles to issue instructions, and cycles per resource."""
    config, sizes, splits = product.config, product.sizes, product.splits
    gpu = offline.gpu(arch)
    issued = loops.tile * config.num_warps / 4
    found = launch_cycles(config, sizes, product.itemsize, gpu, issued * 4 / ISSUE + DRAIN, splits)
    tiles = config.tiles(sizes[0], sizes[1]) * splits
    words = f"{config.block_m}x{config.block_n}x{config.block_k}" + (f"/{splits}" if splits > 1 else "")
    cycles = {
        "tensor cores": found.products, "L2": found.loads, "latency": found.latency, "epilogue": found.epilogues,
        "total": found.total,
    }  # fmt: skip
    return words, tiles / gpu.sm_count, found.products + ceil_div(tiles, gpu.sm_count) * issued, cycles


def _other_cycles(launch: Launch, loops: Loops, stats: Stats, sm_count: int) -> tuple[float, dict[str, float]]:
    """Returns cycles to issue instructions, and cycles per resource."""
    args, c = launch.args, launch.constants
    trips = c.get("TILES") or (ceil_div(args["n_kv"], c["BLOCK_N"]) if "BLOCK_N" in c else 1)
    programs = ceil_div(math.prod(launch.grid), sm_count)
    issue = programs * stats["warps"] * (loops.once + trips * (loops.step + loops.tile)) / 4
    rounds = ceil_div(programs, stats["ctas_per_sm"])
    return issue, {"issue": issue * 4 / ISSUE, "total": issue * 4 / ISSUE + rounds * DRAIN + OVERHEAD}


def _attention_flop(launch: Launch) -> float:
    args = launch.args
    if "n_kv" not in args:
        return 0.0
    batch_heads = args["lse_ptr"].numel() // args["n_q"]
    products = _ATTENTION_PRODUCTS.get(launch.kernel.__name__, 2)
    return 2.0 * products * batch_heads * args["n_q"] * args["n_kv"] * launch.constants["D"]


def _tensor(value: Any) -> Any:
    return value.base if isinstance(value, TensorDescriptor) else value


def _bytes(launch: Launch) -> int:
    """Returns the bytes of all tensors; views of the same elements count once."""
    tensors = [tensor for tensor in map(_tensor, launch.args.values()) if isinstance(tensor, Tensor)]
    return sum({(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors}.values())

"""Estimates the device time of launches from their FLOPs and bytes, without running them.

The estimate of a launch is the maximum of its compute time and the DRAM time to access each tensor once.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..launch import Launch
from ..matmul.matmul_policy import PRODUCTS
from . import offline
from .static_checks import compile_stats

_SUSTAINED = 0.832  # fraction of the tensor cores' peak: 790 of 949 TFLOP/s, bf16, H100
_STREAMED = 0.92  # sustained fraction of the DRAM bandwidth


def estimate(launch: Launch, arch: str) -> dict[str, Any]:
    """Compiles a launch for `arch`. Returns its tile, waves, megabytes, GFLOP, registers and estimated time in us."""
    gpu, stats = offline.architecture(arch), compile_stats(launch, arch)
    args = launch.args
    leaves = [getattr(leaf, "base", leaf) for leaf in tree_leaves(dict(args))]  # `base` of tensor descriptors
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # views of the same elements count once
    moved = sum({(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors}.values())
    waves = (launch.units or math.prod(launch.grid) / stats["ctas_per_sm"]) / gpu.sm_count
    tile = ""
    if launch.units:
        tile = f"{launch.tile}/{args['splits']}" if (args["splits"] or 1) > 1 else launch.tile
    # FLOP per microsecond; the first tensor is an operand of the matmuls
    peak = 2 * PRODUCTS[arch] * gpu.sm_count * gpu.clock * 1e3 * 2 / tensors[0].element_size()
    times = {"tensor cores": launch.flop / peak / _SUSTAINED, "DRAM": moved / gpu.dram / 1e3 / _STREAMED}
    return {
        "kernel": ", ".join((launch.name, *launch.details)),
        "tile": tile, "waves": round(waves, 2), "MB": round(moved / 1e6, 2), "GFLOP": round(launch.flop / 1e9, 3),
        "registers": stats["registers"], "ctas_per_sm": stats["ctas_per_sm"],
        "floor_us": round(max(times.values()), 2), "bottleneck": max(times, key=lambda name: times[name]),
    }  # fmt: skip

"""Estimates the device time of launches from their FLOPs and bytes, without running them.

The estimate of a launch is the maximum of its compute time and the DRAM time to access each tensor once.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..launch import Launch, ceil_div
from ..matmul.matmul_policy import PRODUCTS
from . import offline
from .static_checks import compile_stats

_SUSTAINED = 0.832  # fraction of the tensor cores' peak: 790 of 949 TFLOP/s, bf16, H100
_STREAMED = 0.92  # sustained fraction of the DRAM bandwidth
_ATTENTION_MATMULS = {
    "_attention_bwd_dq_kernel": 3, "_attention_bwd_dkdv_kernel": 4, "_attention_bias_bwd_dq_kernel": 3,
    "_attention_bias_bwd_dkdv_kernel": 4, "_attention_bias_bwd_tile_kernel": 2,
}  # fmt: skip


def estimate(launch: Launch, arch: str) -> dict[str, Any]:
    """Compiles a launch for `arch`. Returns its tile, waves, megabytes, GFLOP, registers and estimated time in us."""
    gpu, stats = offline.architecture(arch), compile_stats(launch, arch)
    c, args = launch.constants, launch.args
    leaves = [getattr(leaf, "base", leaf) for leaf in tree_leaves(dict(args))]  # `base` of tensor descriptors
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # views of the same elements count once
    moved = sum({(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors}.values())
    tile, itemsize, flop = "", 2, 0.0
    waves = math.prod(launch.grid) / gpu.sm_count / stats["ctas_per_sm"]
    if "EPILOGUE" in c or "BLOCK_P" in c:
        if "EPILOGUE" in c:
            outputs, blocks, depth = [(args["M"], args["N"])], (c["BLOCK_M"], c["BLOCK_N"], c["BLOCK_K"]), args["K"]
        else:  # the weight gradients of several linear layers
            outputs = [part.shape[1:] for part in args["out"] if part is not None]
            blocks, depth = (c["BLOCK_P"], c["BLOCK_Q"], c["BLOCK_M"]), args["M"]
        tiles = sum(ceil_div(rows, blocks[0]) * ceil_div(columns, blocks[1]) for rows, columns in outputs)
        waves = tiles * (args["splits"] or 1) / gpu.sm_count
        tile = "x".join(map(str, blocks)) + (f"/{args['splits']}" if (args["splits"] or 1) > 1 else "")
        flop, itemsize = (
            2.0 * depth * sum(map(math.prod, outputs)),
            getattr(args["a"], "base", args["a"]).element_size(),
        )
    elif "FORM" in c:  # attention; the tile kernel of whole windows also computes dq, dk and dv
        matmuls = _ATTENTION_MATMULS.get(launch.kernel.__name__, 2) + 3 * bool(c.get("WHOLE"))
        # encoded by `_launch` of bias_launch.py, and by `unspecialized`
        keys = (args["sizes"][3] >> 4) * c["TILE"][3] if "terms" in args else args["sizes"][2] >> 32
        flop = 2.0 * matmuls * args["lse_ptr"].numel() * keys * c["FORM"][0]
    peak = 2 * PRODUCTS[arch] * gpu.sm_count * gpu.clock * 1e3 * 2 / itemsize  # FLOP per microsecond
    times = {"tensor cores": flop / peak / _SUSTAINED, "DRAM": moved / gpu.dram / 1e3 / _STREAMED}
    return {
        "kernel": ", ".join((launch.kernel.__name__.strip("_").removesuffix("_kernel"), *launch.details)),
        "tile": tile, "waves": round(waves, 2), "MB": round(moved / 1e6, 2), "GFLOP": round(flop / 1e9, 3),
        "registers": stats["registers"], "ctas_per_sm": stats["ctas_per_sm"],
        "floor_us": round(max(times.values()), 2), "bottleneck": max(times, key=lambda name: times[name]),
    }  # fmt: skip

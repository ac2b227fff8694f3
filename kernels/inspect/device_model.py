"""Estimates the device time of launches from their FLOPs and bytes, without running them.

The estimate of a launch is the maximum of its compute time and the DRAM time to access each tensor once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..launch import Launch
from ..matmul.matmul_policy import PRODUCTS
from . import offline
from .static_checks import compile_stats

_SUSTAINED = 0.832  # fraction of the tensor cores' peak: 790 of 949 TFLOP/s, bf16, H100
_STREAMED = 0.92  # sustained fraction of the DRAM bandwidth


def estimate(launch: Launch, arch: str) -> dict[str, Any]:
    """Compiles a launch for `arch`. Returns its tile, waves, megabytes, GFLOP, registers and estimated time in us."""
    gpu, stats, args = offline.architecture(arch), compile_stats(launch, arch), launch.args
    tensors = _tensors(dict(args))
    moved = sum(_bytes(tensors).values())
    waves = (launch.units or launch.programs / stats["ctas_per_sm"]) / gpu.sm_count
    tile = ""
    if launch.units:
        tile = f"{launch.tile}/{args['splits']}" if (args["splits"] or 1) > 1 else launch.tile
    # the first tensor is an operand of the matmuls
    times = _microseconds(launch.flop, moved, arch, tensors[0].element_size())
    return {
        "kernel": ", ".join((launch.name, *launch.details)),
        "tile": tile, "waves": round(waves, 2), "MB": round(moved / 1e6, 2), "GFLOP": round(launch.flop / 1e9, 3),
        "registers": stats["registers"], "ctas_per_sm": stats["ctas_per_sm"],
        "floor_us": round(max(times.values()), 2), "bottleneck": max(times, key=lambda name: times[name]),
    }  # fmt: skip


def _microseconds(flop: float, moved: int, arch: str, itemsize: int) -> dict[str, float]:
    gpu = offline.architecture(arch)
    peak = 2 * PRODUCTS[arch] * gpu.sm_count * gpu.clock * 1e3 * 2 / itemsize  # FLOP per microsecond
    return {"tensor cores": flop / peak / _SUSTAINED, "DRAM": moved / gpu.dram / 1e3 / _STREAMED}


def _tensors(tree: Any) -> list[Tensor]:
    leaves = [getattr(leaf, "base", leaf) for leaf in tree_leaves(tree)]  # `base` of tensor descriptors
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _bytes(tensors: list[Tensor]) -> dict[Any, int]:
    """Returns the bytes of each tensor by place; repeated elements, and views of the same elements, count once."""
    sizes = [math.prod(size for size, stride in zip(t.shape, t.stride()) if stride) for t in tensors]
    places = [(t.untyped_storage()._cdata, t.storage_offset()) for t in tensors]
    return {(place, size): size * t.element_size() for place, size, t in zip(places, sizes, tensors)}


class _Recorder(TorchDispatchMode):
    """Lists the FLOPs, inputs and outputs of operators that launch kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[float, list[Tensor], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            flop = flop_registry.get(func._overloadpacket, lambda *_, **__: 0)(*args, **(kwargs or {}), out_val=out)
            self.found.append((flop, _tensors((args, kwargs)), _tensors(out)))
        return out


def estimate_by_torch(call: Callable[[], object], arch: str) -> list[dict[str, Any]]:
    """Estimates a call with meta tensors in bf16 by eager PyTorch, and a lower bound for torch.compile.

    The bound has one launch for all operators between two matmuls, and does not store what only this launch reads.
    """
    with _Recorder() as recorder:
        call()
    fused = [[*group] for _, group in groupby(recorder.found, key=lambda each: each[0] and id(each))]
    rows = []
    for name, kernels in (("eager", [[each] for each in recorder.found]), ("compile", fused)):
        flop = moved = us = 0.0
        for kernel in kernels:
            read, written = (_bytes([t for each in kernel for t in each[i]]) for i in (1, 2))
            others = _bytes([t for other in kernels for each in other for t in each[1] if other is not kernel])
            inside = (read.keys() & written.keys()) - others.keys()
            used = [size for place, size in (read | written).items() if place not in inside]
            work = sum(each[0] for each in kernel), sum(used)
            flop, moved = flop + work[0], moved + work[1]
            us += max(_microseconds(*work, arch, 2).values())
        row = {"MB": round(moved / 1e6, 2), "GFLOP": round(flop / 1e9, 3), "floor_us": round(us, 2)}
        rows.append({"kernel": f"PyTorch, {name}, {len(kernels)} launches", **row})
    return rows

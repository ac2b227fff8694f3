"""A packed vision tower with and without graphs, over a list of image sizes: calls to be timed.

    python -m vit_fast.benchmarks.towers        # device and host time, on a GPU

`vit-fast kernels --host` counts launches and measures host time without a GPU.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from vit_fast.fusion.freezing import freeze
from vit_fast.fusion.fuse import fuse
from vit_fast.run.budgets import budgets_for
from vit_fast.run.graph_runner import GraphRunner

# Frames after temporal merging, height and width in patches of 14 pixels.
SIZES = {
    "document": (1, 92, 66),
    "photo": (1, 54, 72),
    "thumbnail": (1, 16, 16),
    "16-frame video": (8, 24, 36),
}
NARROW = {"hidden_size": 64, "num_heads": 1, "intermediate_size": 128, "out_hidden_size": 64}
REPEATS = 20


def tower_calls(device: str, scale: int = 1, **changes: Any) -> dict[str, dict[str, Callable[[], object]]]:
    """Calls of Qwen2.5-VL's tower for each size: "eager", fused and frozen, and "graph", by a `GraphRunner`.

    Args:
        device: Device of the tower.
        scale: Divisor of height and width.
        changes: Fields of the tower's configuration to replace.
    Returns:
        By name of the size and of the candidate; empty without a transformers that has such towers.
    """
    if (
        importlib.util.find_spec("transformers") is None
        or importlib.util.find_spec("transformers.vision_utils") is None
    ):
        return {}
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel as Tower

    config = Qwen2_5_VLConfig(vision_config=changes).vision_config
    tower: nn.Module = Tower._from_config(config).to(device, torch.bfloat16).eval()
    fuse(tower, "triton")
    freeze(tower)
    merge = config.spatial_merge_size
    grids = {
        name: (frames, *(-(-side // scale // merge) * merge for side in sides))
        for name, (frames, *sides) in SIZES.items()
    }
    runner = GraphRunner(tower, budgets=budgets_for(list(grids.values())))
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    calls: dict[str, dict[str, Callable[[], object]]] = {}
    for name, grid in grids.items():
        tokens = grid[0] * grid[1] * grid[2]
        inputs = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device), torch.tensor([grid])
        run = torch.no_grad()(partial(tower, inputs[0], inputs[1].to(device)))
        calls[name] = {"eager": run, "graph": partial(runner, *inputs)}
    return calls


def milliseconds(call: Callable[[], object]) -> tuple[float, float]:
    """Median milliseconds of a call, until the device is done and on the host alone."""
    for _ in range(5):
        call()
    done, host = [], []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        done.append(time.perf_counter() - start)
    return statistics.median(done) * 1e3, statistics.median(host) * 1e3


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("towers need a CUDA device: run vit-fast kernels --host without one")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, one image per call")
    print(f"{'':18s} {'candidate':10s} {'ms':>8s} {'host ms':>8s}")
    for name, candidates in tower_calls("cuda").items():
        for candidate, call in candidates.items():
            done, host = milliseconds(call)
            print(f"{name:18s} {candidate:10s} {done:8.2f} {host:8.2f}")


if __name__ == "__main__":
    main()

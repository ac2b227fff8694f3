"""A packed vision tower with and without graphs, over a list of image sizes: calls to be timed.

`vit-fast kernels --host` counts their launches and measures host time without a GPU; `make bench-suite` measures device
time on one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

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


def tower_calls(device: str, scale: int = 1, **changes: int) -> dict[str, dict[str, Callable[[], object]]]:
    """Returns calls of Qwen2.5-VL's tower by size and candidate: "eager", fused and frozen, and "graph".

    `scale` divides height and width; `changes` replace fields of the tower's configuration. The result is empty
    without a transformers that has such towers.
    """
    if not all(map(importlib.util.find_spec, ("transformers", "transformers.vision_utils"))):
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
        patches = torch.zeros(grid[0] * grid[1] * grid[2], width, dtype=torch.bfloat16, device=device)
        run = torch.no_grad()(partial(tower, patches, torch.tensor([grid], device=device)))
        calls[name] = {"eager": run, "graph": partial(runner, patches, torch.tensor([grid]))}
    return calls

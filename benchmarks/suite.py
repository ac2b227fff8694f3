"""pytest-benchmark suite: `make bench-suite` times the default candidates of `vit-fast bench` and a vision tower.

An incorrect output of vit-fast fails, one of a peer is an expected failure. VIT_FAST_SUITE_MODEL selects another model.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import vit_fast
from vit_fast.apps.data import sample_image
from vit_fast.benchmarks.candidates import parse_candidate
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.models import Group
from vit_fast.benchmarks.preparation import Problem, make_problem, prepare
from vit_fast.measure.clock import synchronize
from vit_fast.variants import get_variant

DEFAULT = make_configuration()
NAME = os.environ.get("VIT_FAST_SUITE_MODEL", DEFAULT.models[0].name)
CONFIG = get_variant(NAME).config
MODELS = (
    f"attention:{CONFIG.seqlen}x{CONFIG.num_heads}x{CONFIG.head_dim}",
    f"mlp:{CONFIG.seqlen}x{CONFIG.embed_dim}x{CONFIG.hidden_dim}:gelu_tanh", f"block:{NAME}", NAME,
)  # fmt: skip
RUNS = [
    make_configuration(models=MODELS, dtypes=DEFAULT.dtypes[:1], batch_sizes=sizes, train=train)
    for sizes, train in ((DEFAULT.batch_sizes, False), (DEFAULT.batch_sizes[-1:], True))
]
CASES = [
    pytest.param(group, candidate.name, id=f"{group}-{candidate.name}")
    for made in RUNS
    for group in made.groups()
    for candidate in made.candidates[group.model.kind]
]


@functools.cache
def problem_of(group: Group) -> Problem:
    return make_problem(group, [sample_image()])


@pytest.mark.parametrize(("group", "name"), CASES)
def test_candidate(benchmark: Any, group: Group, name: str) -> None:
    """Times inference; for training, the backward of an operator or a block, and the whole step of a model."""
    candidate, numbers = parse_candidate(name), itertools.count()
    if missing := candidate.missing_packages():
        pytest.skip(f"not installed: {', '.join(missing)}")
    ready, row = prepare(candidate, group, problem_of(group))
    if row["status"] == "unsupported":
        pytest.skip(row["reason"])
    if row["status"] == "incorrect" and row["peer"]:
        pytest.xfail(row["reason"])
    assert ready is not None, row["reason"]
    call, benchmark.group = ready.call, str(group)

    def timed() -> None:
        call(next(numbers))
        synchronize(DEFAULT.device)

    benchmark(timed)


# Inputs of Qwen2.5-VL's tower: frames, height and width in patches.
GRIDS = {"document": (1, 92, 66), "photo": (1, 54, 72), "thumbnail": (1, 16, 16), "16-frame video": (8, 24, 36)}


@functools.cache
def tower_calls(device: torch.device) -> dict[tuple[str, str], Callable[[], object]]:
    """Returns calls of the fused and frozen tower, without and with CUDA graphs."""
    config = pytest.importorskip("transformers").Qwen2_5_VLConfig().vision_config
    module = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    tower = module.Qwen2_5_VisionTransformerPretrainedModel._from_config(config).to(device, torch.bfloat16).eval()
    vit_fast.fuse(tower, "triton")
    vit_fast.freeze(tower)
    runner = vit_fast.GraphRunner(tower, budgets=vit_fast.budgets_for(list(GRIDS.values())))
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for name, grid in GRIDS.items():
        patches = torch.randn(grid[0] * grid[1] * grid[2], width, dtype=torch.bfloat16, device=device)
        calls[name, "eager"] = torch.no_grad()(partial(tower, patches, torch.tensor([grid], device=device)))
        calls[name, "graph"] = partial(runner, patches, torch.tensor([grid]))
    return calls


@pytest.mark.skipif(DEFAULT.device.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("candidate", ["eager", "graph"])
@pytest.mark.parametrize("name", GRIDS)
def test_tower(benchmark: Any, name: str, candidate: str) -> None:
    """Times a call of Qwen2.5-VL's tower with an image or a video."""
    call = tower_calls(DEFAULT.device)[name, candidate]

    def timed() -> None:
        call()
        synchronize(DEFAULT.device)

    benchmark(timed)

"""pytest-benchmark suite: `make bench-suite` times the default candidates of `vit-fast bench` and a vision tower.

An incorrect output of vit-fast fails; of another library, it is an expected failure. VIT_FAST_SUITE_MODEL sets a model.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import vit_fast
from vit_fast.apps.data import sample_image
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.models import Group
from vit_fast.benchmarks.preparation import Problem, make_problem, prepare
from vit_fast.measure.candidate import Candidate
from vit_fast.measure.clock import synchronize
from vit_fast.variants import get_variant

DEFAULT = make_configuration()
NAME = os.environ.get("VIT_FAST_SUITE_MODEL", DEFAULT.models[0].name)
CONFIG = get_variant(NAME).config
MODELS = (
    f"attention:{CONFIG.seqlen}x{CONFIG.num_heads}x{CONFIG.head_dim}",
    f"mlp:{CONFIG.seqlen}x{CONFIG.embed_dim}x{CONFIG.hidden_dim}:gelu_tanh", f"block:{NAME}", NAME,
)  # fmt: skip
CASES = [
    pytest.param(group, candidate, id=f"{group}-{candidate.name}")
    for sizes, train in ((DEFAULT.batch_sizes, False), (DEFAULT.batch_sizes[-1:], True))
    for made in [make_configuration(models=MODELS, dtypes=DEFAULT.dtypes[:1], batch_sizes=sizes, train=train)]
    for group in made.groups()
    for candidate in made.candidates[group.model.kind]
]
# Inputs of Qwen2.5-VL's tower: numbers of patches along time, height and width. A patch covers two frames.
GRIDS = {"document": (1, 92, 66), "photo": (1, 54, 72), "thumbnail": (1, 16, 16), "16-frame video": (8, 24, 36)}


@functools.cache
def problem_of(group: Group) -> Problem:
    return make_problem(group, [sample_image()])


def measure(benchmark: Any, call: Callable[[], object]) -> None:
    def timed() -> None:
        call()
        synchronize(DEFAULT.device)

    benchmark(timed)


@pytest.mark.parametrize(("group", "candidate"), CASES)
def test_candidate(benchmark: Any, group: Group, candidate: Candidate) -> None:
    """Times inference; for training, the backward of an operator or a block, and the whole step of a model."""
    if missing := candidate.missing_packages():
        pytest.skip(f"not installed: {', '.join(missing)}")
    ready, row = prepare(candidate, group, problem_of(group))
    if row["status"] == "unsupported":
        pytest.skip(row["reason"])
    if row["status"] == "incorrect" and row["peer"]:
        pytest.xfail(row["reason"])
    assert ready is not None, row["reason"]
    call, numbers, benchmark.group = ready.call, itertools.count(), str(group)
    measure(benchmark, lambda: call(next(numbers)))


@functools.cache
def fused_tower() -> tuple[Any, int]:
    """Builds the fused and frozen tower; returns the tower and the number of values per patch."""
    module = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    config = module.Qwen2_5_VLVisionConfig()
    tower = module.Qwen2_5_VisionTransformerPretrainedModel._from_config(config)
    tower = tower.to(DEFAULT.device, torch.bfloat16).eval()
    vit_fast.fuse(tower, "triton")
    vit_fast.freeze(tower)
    return tower, config.in_channels * config.temporal_patch_size * config.patch_size**2


@pytest.mark.skipif(DEFAULT.device.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", GRIDS)
def test_tower(benchmark: Any, name: str, graphs: bool) -> None:
    """Times a call of Qwen2.5-VL's tower with an image or a video, without or with CUDA graphs."""
    (tower, width), grid = fused_tower(), torch.tensor([GRIDS[name]])
    patches = torch.randn(int(grid.prod()), width, dtype=torch.bfloat16, device=DEFAULT.device)
    if graphs:
        tower = vit_fast.GraphRunner(tower, budgets=vit_fast.budgets_for(list(GRIDS.values())))
    else:
        grid = grid.to(DEFAULT.device)
    measure(benchmark, torch.no_grad()(lambda: tower(patches, grid)))

"""pytest-benchmark suite: `make bench-suite` times the default candidates of `vit-fast bench`, and export.

An incorrect output of ours fails, one of a peer is an expected failure. On a GPU, the timer uses device events.
VIT_FAST_SUITE_MODEL selects another model.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest

import vit_fast
from vit_fast.apps.data import sample_image
from vit_fast.benchmarks.candidates import parse_candidate
from vit_fast.benchmarks.configuration import Configuration, Group, make_configuration
from vit_fast.benchmarks.operators import TOWER_SIZES, tower_calls
from vit_fast.benchmarks.preparation import Problem, make_problem, prepare
from vit_fast.measure.device_clock import Instant


def configured(training: bool) -> Configuration:
    """Returns the default configuration of a device, with operators and a block of the model."""
    default = make_configuration(train=training)
    name = os.environ.get("VIT_FAST_SUITE_MODEL", default.models[0].name)
    config = vit_fast.variants.get_variant(name).config
    words = (
        f"attention:{config.seqlen}x{config.num_heads}x{config.head_dim}",
        f"mlp:{config.seqlen}x{config.embed_dim}x{config.hidden_dim}:gelu_tanh",
        f"block:{name}",
        name,
    )
    sizes = default.batch_sizes[-1:] if training else default.batch_sizes
    return make_configuration(models=words, dtypes=default.dtypes[:1], batch_sizes=sizes, train=training)


PLANNED = {group: c.candidates[group.model.kind] for c in map(configured, (False, True)) for group in c.groups()}
CASES = [pytest.param(group, one.name, id=f"{group}-{one.name}") for group, found in PLANNED.items() for one in found]
ON_GPU = configured(False).device.type == "cuda"
pytestmark = pytest.mark.benchmark(timer=Instant if ON_GPU else time.perf_counter)


@functools.cache
def problem_of(group: Group) -> Problem:
    return make_problem(group, [sample_image()], configured(False).device)


@pytest.mark.parametrize(("group", "name"), CASES)
def test_candidate(benchmark: Any, group: Group, name: str) -> None:
    """Times inference; for training, the backward of an operator or a block, and the whole step of a model."""
    candidate = parse_candidate(name)
    if missing := candidate.missing_packages():
        pytest.skip(f"not installed: {', '.join(missing)}")
    ready, row = prepare(candidate, group, problem_of(group))
    if row["status"] == "unsupported":
        pytest.skip(row["reason"])
    if row["status"] == "incorrect" and row["peer"]:
        pytest.xfail(row["reason"])
    assert ready is not None, row["reason"]
    call, numbers = ready.call, itertools.count()
    benchmark.group = str(group)
    benchmark(lambda: call(next(numbers)))


tower_calls_on = functools.cache(tower_calls)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU; vit-fast kernels --host counts launches without one")
@pytest.mark.parametrize("candidate", ["eager", "graph"])
@pytest.mark.parametrize("size", TOWER_SIZES)
def test_tower(benchmark: Any, size: str, candidate: str) -> None:
    """Times a call of Qwen2.5-VL's tower with an image or a video."""
    pytest.importorskip("transformers.vision_utils")
    benchmark(tower_calls_on("cuda")[size][candidate])


@pytest.mark.benchmark(timer=time.perf_counter, warmup=False)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_export(benchmark: Any, precision: Any, tmp_path: Path) -> None:
    """Times an export to ONNX with its verification."""
    pytest.importorskip("onnxruntime")
    *_, group = PLANNED
    model = vit_fast.create_model(group.model.name, backend="sdpa").eval()
    images = [sample_image()] if precision == "int8" else None
    export = functools.partial(vit_fast.export.export_onnx, precision=precision, calibration=images)
    assert benchmark.pedantic(lambda: export(model, tmp_path / "m.onnx"), rounds=1).verified

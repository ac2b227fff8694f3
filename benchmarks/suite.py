"""pytest-benchmark suite of the candidates of `vit-fast bench`: `make bench-suite`.

Operators, blocks, models, training steps, export and cold start. An incorrect output of ours fails, one of a peer is an
expected failure. On a GPU, the timer uses device events, also for --benchmark-compare. VIT_FAST_SUITE_MODEL selects
another model.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import vit_fast
from vit_fast.apps.data import sample_image
from vit_fast.benchmarks.candidates import default_names, parse_candidate
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.models import resolve
from vit_fast.benchmarks.operators import TOWER_SIZES, tower_calls
from vit_fast.benchmarks.preparation import Problem, cold_start, make_problem, prepare
from vit_fast.benchmarks.rows import Group
from vit_fast.measure.device_clock import Instant
from vit_fast.work import total

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DEFAULT_MODEL, DTYPE, BATCH_SIZES = {
    "cpu": ("vit_tiny_patch16_224", "fp32", (1, 4)),
    "cuda": ("vit_base_patch16_224", "bf16", (1, 64)),
}[DEVICE.type]
NAME = os.environ.get("VIT_FAST_SUITE_MODEL", DEFAULT_MODEL)
CONFIG = vit_fast.variants.get_variant(NAME).config
MODELS = (
    f"attention:{CONFIG.seqlen}x{CONFIG.num_heads}x{CONFIG.head_dim}",
    f"mlp:{CONFIG.seqlen}x{CONFIG.embed_dim}x{CONFIG.hidden_dim}:gelu_tanh",
    f"block:{NAME}",
    NAME,
)
pytestmark = pytest.mark.benchmark(timer=Instant if DEVICE.type == "cuda" else time.perf_counter)
ON_THE_HOST = pytest.mark.benchmark(timer=time.perf_counter, warmup=False)


def _cases() -> list[Any]:
    cases = []
    for word, training in itertools.product(MODELS, (False, True)):
        (model,) = resolve(word)(None)
        for batch in BATCH_SIZES[-1:] if training or model.data is None else BATCH_SIZES:
            for label in default_names(DEVICE, model.kind, training):
                name = f"{word.partition(':')[0]}-{label}-{'training' if training else batch}"
                cases.append(pytest.param(word, training, batch, label, id=name))
    return cases


@functools.cache
def problem_of(word: str, training: bool, batch: int) -> tuple[Group, Problem]:
    (model,) = resolve(word)(None)
    group = Group(model, DTYPE, batch, batch, training)
    return group, make_problem(group, [sample_image()], DEVICE)


@pytest.mark.parametrize(("word", "training", "batch", "label"), _cases())
def test_candidate(benchmark: Any, word: str, training: bool, batch: int, label: str) -> None:
    """Times inference; for training, the backward of an operator or a block, and the whole step of a model."""
    candidate, (group, problem) = parse_candidate(label), problem_of(word, training, batch)
    if missing := candidate.missing_packages():
        pytest.skip(f"{label}: not installed: {', '.join(missing)}")
    ready, row = prepare(candidate, group, problem)
    if row["status"] == "unsupported":
        pytest.skip(row["reason"])
    if row["status"] == "incorrect" and row["peer"]:
        pytest.xfail(f"{label}: {row['reason']}")
    assert ready is not None, row["reason"]
    call, numbers = ready.call, itertools.count()
    benchmark.group = f"{group}, {DEVICE}"
    benchmark(lambda: call(next(numbers)))
    if benchmark.stats is not None:  # None under --benchmark-disable
        seconds = benchmark.stats.stats.median
        benchmark.extra_info["images_per_s"] = batch / seconds
        benchmark.extra_info["TFLOP_per_s"] = total(group.least().values()).flop / seconds / 1e12


tower_calls_on = functools.cache(tower_calls)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU; vit-fast kernels --host counts launches without one")
@pytest.mark.parametrize("candidate", ["eager", "graph"])
@pytest.mark.parametrize("size", TOWER_SIZES)
def test_tower(benchmark: Any, size: str, candidate: str) -> None:
    """Times a call of Qwen2.5-VL's tower with an image or a video."""
    pytest.importorskip("transformers.vision_utils")
    benchmark.group = f"tower of Qwen2.5-VL, bf16, {size}, {DEVICE}"
    benchmark(tower_calls_on("cuda")[size][candidate])


@ON_THE_HOST
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_export(benchmark: Any, precision: Any, tmp_path: Path) -> None:
    """Times an export to ONNX with its verification."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = vit_fast.create_model(NAME, backend="sdpa").eval()
    calibration = [sample_image()] if precision == "int8" else None
    benchmark.group = f"export of {NAME}"

    def export() -> Any:
        return vit_fast.export.export_onnx(model, tmp_path / "m.onnx", precision=precision, calibration=calibration)

    assert benchmark.pedantic(export, rounds=1).verified


@ON_THE_HOST
@pytest.mark.parametrize("label", ["eager", "sdpa", "triton", "onnxruntime"])
def test_cold_start(benchmark: Any, label: str) -> None:
    """Times a process from its start to the first correct output."""
    if label == "triton" and DEVICE.type == "cpu":
        pytest.skip("triton: needs a GPU")
    configuration = make_configuration(models=[NAME], batch_sizes=[1], dtypes=[DTYPE], device=str(DEVICE))
    benchmark.group = f"cold start of {NAME}"
    found = benchmark.pedantic(lambda: cold_start(configuration.request, configuration.groups()[0], label), rounds=1)
    assert found["cold_s"] > 0, found

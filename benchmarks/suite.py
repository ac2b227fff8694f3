"""pytest-benchmark suite over the tasks and candidates of `vit-fast bench`: `make bench-suite`.

Operators, blocks, models, training steps, export, cold start. A wrong answer of ours fails, one of a peer is an
expected failure with its reason; what cannot run here is skipped. On a GPU pytest-benchmark's own timer is one of
device events, so that its statistics, --benchmark-compare and --benchmark-compare-fail are about the device; calls are
timed on inputs that the cache has lost. VIT_FAST_SUITE_MODEL names another model. In turns, with their resolution:
`vit-fast bench`.
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
from vit_fast.apps.data import default_photograph
from vit_fast.benchmarks.candidates import default_labels, parse_label
from vit_fast.benchmarks.models import resolve
from vit_fast.benchmarks.plan import make_plan
from vit_fast.benchmarks.preparation import Posed, cold_start, pose, prepare
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
# Seconds by the device's own clock on a GPU.
pytestmark = pytest.mark.benchmark(timer=Instant if DEVICE.type == "cuda" else time.perf_counter)
ON_THE_HOST = pytest.mark.benchmark(timer=time.perf_counter, warmup=False)


def _cases() -> list[Any]:
    cases = []
    for word, training in itertools.product(MODELS, (False, True)):
        (model,) = resolve(word)(None)
        for batch in BATCH_SIZES[-1:] if training or model.data is None else BATCH_SIZES:
            for label in default_labels(DEVICE, model.kind, training):
                name = f"{word.partition(':')[0]}-{label}-{'training' if training else batch}"
                cases.append(pytest.param(word, training, batch, label, id=name))
    return cases


@functools.cache
def posed(word: str, training: bool, batch: int) -> tuple[Group, Posed]:
    (model,) = resolve(word)(None)
    group = Group(model, DTYPE, batch, batch, training)
    return group, pose(group, [default_photograph()], DEVICE)


@pytest.mark.parametrize(("word", "training", "batch", "label"), _cases())
def test_candidate(benchmark: Any, word: str, training: bool, batch: int, label: str) -> None:
    """Its backward alone of an operator or a block, a whole step of a model, where that is training."""
    selection, (group, asked) = parse_label(label), posed(word, training, batch)
    if missing := selection.missing_packages():
        pytest.skip(f"{label}: not installed: {', '.join(missing)}")
    ready, row = prepare(selection, group, asked)
    if row["status"] == "unsupported":
        pytest.skip(row["reason"])
    if row["status"] == "wrong" and row["peer"]:  # no defect of ours; its time would be that of another answer
        pytest.xfail(f"{label}: {row['reason']}")
    assert ready is not None, row["reason"]
    call, numbers = ready.call, itertools.count()
    benchmark.group = f"{group}, {DEVICE}"
    benchmark(lambda: call(next(numbers)))
    if benchmark.stats is not None:  # None under --benchmark-disable
        seconds = benchmark.stats.stats.median
        benchmark.extra_info["images_per_s"] = batch / seconds
        benchmark.extra_info["TFLOP_per_s"] = total(group.least().values()).flop / seconds / 1e12


@ON_THE_HOST
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_export(benchmark: Any, precision: Any, tmp_path: Path) -> None:
    """Exports to ONNX and compares with the model in ONNX Runtime and in fp64."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = vit_fast.create_model(NAME, backend="sdpa").eval()
    calibration = [default_photograph()] if precision == "int8" else None
    benchmark.group = f"export of {NAME}"

    def export() -> Any:
        return vit_fast.export.export_onnx(model, tmp_path / "m.onnx", precision=precision, calibration=calibration)

    assert benchmark.pedantic(export, rounds=1).verified


@ON_THE_HOST
@pytest.mark.parametrize("label", ["eager", "sdpa", "triton", "onnxruntime"])
def test_cold_start(benchmark: Any, label: str) -> None:
    """From the start of a process to its first right answer, compiling and exporting included."""
    if label == "triton" and DEVICE.type == "cpu":
        pytest.skip("triton: needs a GPU")
    plan = make_plan(models=[NAME], batch_sizes=[1], dtypes=[DTYPE], device=str(DEVICE))
    benchmark.group = f"cold start of {NAME}"
    found = benchmark.pedantic(lambda: cold_start(plan.request, plan.groups()[0], label), rounds=1)
    assert found["cold_s"] > 0, found

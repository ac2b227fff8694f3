"""pytest-benchmark suite: whole models, every subject that runs here (`make benchmark-suite`).

A subject is benchmarked only after its outputs passed the gate of vit_fast.benchmarks.correctness. The clock is
pytest-benchmark's, on the host, around a call and the wait for the device; for figures in turns, with cold inputs and
peers' ratios, use `vit-fast bench`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vit_fast.benchmarks.correctness import expect, judge
from vit_fast.benchmarks.inputs import image_views, random_weights, rounded
from vit_fast.benchmarks.models import find_models
from vit_fast.benchmarks.subjects import DEFAULT_LABELS, Task, compile_selection, parse_label
from vit_fast.benchmarks.timing import synchronise
from vit_fast.data import default_photograph
from vit_fast.errors import UnsupportedInputError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODEL, DTYPE, BATCH_SIZES = {
    "cpu": ("vit_tiny_patch16_224", torch.float32, (1, 4)),
    "cuda": ("vit_base_patch16_224", torch.bfloat16, (1, 64)),
}[DEVICE.type]


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize("label", DEFAULT_LABELS[DEVICE.type])
def test_model(benchmark: Any, label: str, batch_size: int) -> None:
    selection, (model,) = parse_label(label), find_models(MODEL, None)
    if missing := selection.subject.missing_packages():
        pytest.skip(f"{label}: not installed: {', '.join(missing)}")
    assert model.config is not None
    task = Task(model, rounded(random_weights(model.config), DTYPE), DTYPE, DEVICE, batch_size)
    images = image_views([default_photograph()], model, batch_size).to(DEVICE, DTYPE)
    try:
        function = compile_selection(selection, selection.subject.build(task))
    except UnsupportedInputError as refusal:
        pytest.skip(f"{label}: {refusal}")

    def run() -> torch.Tensor:
        with torch.inference_mode(), selection.subject.context():
            outputs = function(images)
        synchronise(DEVICE)
        return outputs

    verdict = judge(selection.subject, task, expect(task, images), run())
    assert verdict.passed, verdict.reason
    benchmark.group = f"{MODEL} batch {batch_size}"
    benchmark.extra_info.update(images=batch_size, dtype=str(DTYPE), device=str(DEVICE), max_error=verdict.max_error)
    benchmark(run)
    benchmark.extra_info["images_per_s"] = batch_size / benchmark.stats.stats.median

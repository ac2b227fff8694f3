"""ONNX Runtime as a subject of the benchmark, and the targets of the export's own check."""

from __future__ import annotations

import pytest
import torch

import vit_fast
from vit_fast.benchmarks import export_check
from vit_fast.benchmarks.correctness import expect, judge
from vit_fast.benchmarks.inputs import random_weights
from vit_fast.benchmarks.models import find_models
from vit_fast.benchmarks.subjects import Task, get_subject
from vit_fast.errors import UnsupportedInputError


def make_task(dtype: torch.dtype = torch.float32) -> Task:
    model = vit_fast.create_model("vit_test")
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(model.config).items()}  # type: ignore[arg-type]
    (described,) = find_models("vit_test", None)
    return Task(described, weights, dtype, torch.device("cpu"), batch_size=3)


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-int8"])
def test_subjects_pass_the_gate_and_a_wrong_one_does_not(name: str) -> None:
    task, subject = make_task(), get_subject(name)
    images = torch.randn(3, 3, 32, 32)
    expected = expect(task, images)
    outputs = subject.build(task)(images)
    assert judge(subject, task, expected, outputs).passed
    assert not judge(subject, task, expected, outputs.roll(1, dims=0)).passed


def test_what_onnx_runtime_cannot_run_is_refused() -> None:
    for name, dtype in (("onnxruntime", torch.bfloat16), ("onnxruntime-int8", torch.float16)):
        with pytest.raises(UnsupportedInputError, match="onnxruntime"):
            get_subject(name).build(make_task(dtype))


def test_targets_are_judged_by_the_rows() -> None:
    def row(subject: str, batch: int, ratio: float) -> dict[str, object]:
        return {"subject": subject, "batch": batch, "ratio_to_eager": ratio}

    rows = [row(export_check.OURS, 1, 0.8), row(export_check.OURS, 8, 1.1), row(export_check.OURS_INT8, 1, 0.4)]
    peer = export_check.PEER_FILES[0]
    rows += [row(peer, 1, 0.9), row(peer, 8, 1.0)]
    met = [target["met"] for target in export_check.judge(rows, {"seconds": 61.0, "peak_MiB": 3000.0})]
    assert met == [True, False, True, False, True, True, False, None]  # the last takes a GPU: not measured

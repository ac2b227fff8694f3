"""ONNX Runtime as a subject of the benchmark, and the targets of the export's own check."""

from __future__ import annotations

import pytest
import torch

import vit_fast
from vit_fast.benchmarks import export_check, machine
from vit_fast.benchmarks.correctness import expect, judge
from vit_fast.benchmarks.inputs import random_weights
from vit_fast.benchmarks.models import find_models
from vit_fast.benchmarks.subjects import Task, get_subject
from vit_fast.benchmarks.timing import Protocol
from vit_fast.errors import UnsupportedInputError


def make_task(dtype: torch.dtype = torch.float32) -> Task:
    model = vit_fast.create_model("vit_test")
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(model.config).items()}  # type: ignore[arg-type]
    (described,) = find_models("vit_test", None)
    return Task(described, weights, dtype, torch.device("cpu"), batch_size=3)


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-int8", "torch-onnx", "timm-onnx"])
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


def test_the_check_measures_our_files_beside_others_and_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole record at vit_test's size; what an export costs is a process of its own and stands apart."""
    monkeypatch.setitem(machine.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 2**16)
    monkeypatch.setattr(export_check, "export_cost", lambda _: {"seconds": 1.0, "peak_MiB": 1.0})
    monkeypatch.setattr(export_check, "PROTOCOL", Protocol(repeats=3, least_repeats=3, warmup_repeats=1))
    record = export_check.measure("vit_test")
    rows = {(row["subject"], row["batch"]): row for row in record["rows"]}
    subjects = ("sdpa", "onnxruntime", "onnxruntime-int8", "torch-onnx", "timm-onnx")
    assert set(rows) == {(subject, batch) for subject in subjects for batch in (1, 8)}
    for (_, batch), row in rows.items():
        assert row["ratio_to_eager"] == pytest.approx(row["ms"] / rows["sdpa", batch]["ms"])
    assert len(record["targets"]) == 5 + 2 * 2 + 1 and len(record["controls"]) == 2

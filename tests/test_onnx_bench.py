"""ONNX Runtime as a subject of the benchmark, and what it takes from a cold start."""

from __future__ import annotations

import pytest
import torch

import vit_fast
from vit_fast.benchmarks import machine, runner
from vit_fast.benchmarks.cold import cold_start
from vit_fast.benchmarks.correctness import expect, judge
from vit_fast.benchmarks.inputs import random_weights
from vit_fast.benchmarks.models import resolve
from vit_fast.benchmarks.plan import make_plan
from vit_fast.benchmarks.subjects import Task, get_subject
from vit_fast.errors import UnsupportedInputError
from vit_fast.measuring.timing import Protocol

QUICK = Protocol(repeats=3, least_repeats=3, warmup_repeats=1)


def make_task(dtype: torch.dtype = torch.float32) -> Task:
    model = vit_fast.create_model("vit_test")
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(model.config).items()}  # type: ignore[arg-type]
    (described,) = resolve("vit_test")(None)
    return Task(described, weights, dtype, torch.device("cpu"), batch_size=3)


@pytest.mark.fast_cases("onnxruntime")
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


@pytest.mark.slow
def test_a_cold_start_counts_the_export_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, whose answer is checked there; what cannot answer says why."""
    monkeypatch.setitem(machine.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 2**16)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    request = make_plan(models=["vit_test"], batch_sizes=[2], dtypes=["fp32"], device="cpu").request
    plan = make_plan(**request | {"subjects": ["onnxruntime"], "cold": True, "protocol": QUICK})
    (row,) = runner.run(plan)["rows"]
    assert row["status"] == "measured" and row["cold_s"] > row["first_call_s"] > 0
    assert 100 < row["cold_MiB"] < 20_000
    failed = cold_start(request, plan.groups()[0], "triton")
    assert set(failed) == {"cold_failed"} and "TRITON_INTERPRET" in failed["cold_failed"]

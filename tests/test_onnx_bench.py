"""ONNX Runtime as a candidate of the benchmark, and what it takes from a cold start."""

from __future__ import annotations

import pytest
import torch
from bench_support import QUICK, make_task

from vit_fast.benchmarks import candidates, machine, runner
from vit_fast.benchmarks.candidates import get_candidate, make
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.preparation import cold_start, expect, judge_outputs
from vit_fast.errors import UnsupportedInputError

FP32, BF16 = torch.float32, torch.bfloat16
CASES = [(name, FP32) for name in ("onnxruntime", "onnxruntime-int8", "openvino")]


@pytest.mark.fast_cases("onnxruntime-dtype0")
@pytest.mark.parametrize(("name", "dtype"), [*CASES, ("openvino", BF16)])
def test_candidates_pass_the_gate_and_a_wrong_one_does_not(name: str, dtype: torch.dtype) -> None:
    task, candidate = make_task("vit_test", dtype, batch=3), get_candidate(name)
    if missing := candidate.missing_packages():
        pytest.skip(f"not installed: {missing}")
    if dtype == BF16 and not machine.has_bf16():
        with pytest.raises(UnsupportedInputError, match="no bf16 matmuls"):
            make(candidate, task)
        return
    images = torch.randn(3, 3, 32, 32, dtype=dtype)
    expected = expect(task, images)
    outputs = make(candidate, task)(images)
    assert judge_outputs(candidate, task, expected, outputs).passed
    assert not judge_outputs(candidate, task, expected, outputs.roll(1, dims=0)).passed


def test_what_a_runtime_cannot_run_is_refused_before_it_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_exported", None)
    for name, dtype, reason in (
        ("onnxruntime", BF16, "no bf16 kernels for CPUs"),
        ("onnxruntime-int8", torch.float16, "must be fp32 for int8"),
        ("openvino", torch.float16, "must run on the CPU in fp32 or bf16, got torch.float16"),
    ):
        with pytest.raises(UnsupportedInputError, match=reason):
            make(get_candidate(name), make_task("vit_test", dtype))


@pytest.mark.slow
def test_a_cold_start_counts_the_export_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 2**16)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    request = make_configuration(models=["vit_test"], batch_sizes=[2], dtypes=["fp32"], device="cpu").request
    plan = make_configuration(**request | {"candidates": ["onnxruntime"], "cold": True, "protocol": QUICK})
    (row,) = runner.run(plan)["rows"]
    assert row["status"] == "measured" and row["cold_s"] > row["first_call_s"] > 0
    assert 100 < row["cold_MiB"] < 20_000
    failed = cold_start(request, plan.groups()[0], "triton")
    assert set(failed) == {"cold_failed"} and "TRITON_INTERPRET" in failed["cold_failed"]

"""The pytest-benchmark suite with the smallest model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_suite_times_operators_blocks_models_and_training(tmp_path):
    path = tmp_path / "record.json"
    quick = ("--benchmark-min-rounds=1", "--benchmark-max-time=0", "--benchmark-min-time=0", f"--benchmark-json={path}")
    options = ("-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-k", "not compile and not flex")
    environment = os.environ | {"VIT_FAST_SUITE_MODEL": "vit_test", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)  # nothing here is for the interpreter, which takes minutes
    environment.pop("PYTEST_XDIST_WORKER", None)  # pytest-benchmark would take it for one, and measure nothing
    command = [sys.executable, "-m", "pytest", "benchmarks/suite.py", "-q", *options, *quick]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-3000:]
    names = {run["name"] for run in json.loads(path.read_text())["benchmarks"]}
    for case in (
        "attention:17x2x32 fp32 batch 8-sdpa", "attention:17x2x32 fp32 batch 8 training-eager",
        "mlp:17x64x256:gelu_tanh fp32 batch 1-eager", "block:vit_test fp32 batch 8 training-timm+fused",
        "vit_test fp32 batch 1-timm", "vit_test fp32 batch 8 training-timm+fused",
    ):  # fmt: skip
        assert f"test_candidate[{case}]" in names, names
    assert not any("triton" in name for name in names), "nothing runs on a CPU what needs a GPU"

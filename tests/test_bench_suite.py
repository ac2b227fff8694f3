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
def test_the_suite_times_operators_blocks_models_and_training(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    options = ["-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-k", "not compile and not flex"]
    options += [f"--benchmark-{name}" for name in ("min-rounds=1", "max-time=0", "min-time=0", f"json={path}")]
    environment = os.environ | {"VIT_FAST_SUITE_MODEL": "vit_test", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    environment.pop("PYTEST_XDIST_WORKER", None)  # pytest-benchmark measures nothing in a worker
    command = [sys.executable, "-m", "pytest", "benchmarks/suite.py", "-q", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-3000:]
    names = {run["name"] for run in json.loads(path.read_text())["benchmarks"]}
    for case in (
        "attention:17x2x32 fp32 batch 8-sdpa", "attention:17x2x32 fp32 batch 8 training-eager",
        "mlp:17x64x256:gelu_tanh fp32 batch 1-eager", "block:vit_test fp32 batch 8 training-timm+fused",
        "vit_test fp32 batch 1-timm", "vit_test fp32 batch 8 training-timm+fused",
    ):  # fmt: skip
        assert f"test_candidate[{case}]" in names, names

"""The pytest-benchmark suite, whole, at the smallest model; and that a slower run is found by comparing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vit_fast.variants import get_variant
from vit_fast.work import total, work

ROOT = Path(__file__).resolve().parents[1]
# One round each; one of what torch.compile takes its time for.
QUICK = ("--benchmark-min-rounds=1", "--benchmark-max-time=0", "--benchmark-min-time=0")
NOT_SLOW = "not compile and not flex or mlp-eager+compile-training"


@pytest.mark.slow
def test_every_suite_runs_and_figures_follow_from_its_times(tmp_path):
    path = tmp_path / "record.json"
    options = ("-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", *QUICK, f"--benchmark-json={path}")
    environment = os.environ | {"VIT_FAST_SUITE_MODEL": "vit_test", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)  # nothing here is for the interpreter, which takes minutes
    environment.pop("PYTEST_XDIST_WORKER", None)  # pytest-benchmark would take it for one, and measure nothing
    command = [sys.executable, "-m", "pytest", "benchmarks/suite.py", "-q", "-k", NOT_SLOW, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-3000:]
    record = json.loads(path.read_text())
    names = {run["name"] for run in record["benchmarks"]}
    for expected in (
        "test_candidate[attention-sdpa-4]", "test_candidate[attention-eager-training]", "test_candidate[mlp-eager-4]",
        "test_candidate[mlp-eager+compile-training]", "test_candidate[block-timm+fused-training]",
        "test_candidate[block-sdpa-4]", "test_candidate[vit_test-sdpa-1]", "test_candidate[vit_test-timm-4]",
        "test_candidate[vit_test-timm+fused-training]", "test_export[fp32]", "test_export[int8]",
        "test_cold_start[sdpa]", "test_cold_start[onnxruntime]",
    ):  # fmt: skip
        assert expected in names
    assert not any("triton" in name for name in names), "nothing runs on a CPU what needs a GPU"

    runs = {run["name"]: run for run in record["benchmarks"]}
    run = runs["test_candidate[vit_test-sdpa-4]"]
    seconds = run["stats"]["median"]
    flops = total(work(get_variant("vit_test").config, 1).values()).flop
    assert run["extra_info"]["images_per_s"] == pytest.approx(4 / seconds)
    assert run["extra_info"]["TFLOP_per_s"] == pytest.approx(4 * flops / seconds / 1e12)
    assert run["group"] == "vit_test fp32 batch 4, cpu"


def test_a_peer_that_is_wrong_fails_nothing_and_ours_does(monkeypatch):
    """On a CPU, a compiled peer may violate the rule because the compiler sums in another order; its row says so."""
    monkeypatch.setenv("VIT_FAST_SUITE_MODEL", "vit_test")
    suite = importlib.import_module("vit_fast.benchmarks.suite")
    word = suite.MODELS[1]
    for peer, outcome in ((True, pytest.xfail.Exception), (False, AssertionError)):
        row = {"status": "incorrect", "reason": "off by 1", "peer": peer}
        monkeypatch.setattr(suite, "prepare", lambda *_, row=row: (None, row))
        with pytest.raises(outcome, match="off by 1"):
            suite.test_candidate(None, word, False, 1, "eager")

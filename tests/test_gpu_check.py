"""The gpu-check's frame: a part that fails, hangs or writes nonsense loses nothing of the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from vit_fast.benchmarks import gpu_check, gpu_check_attention
from vit_fast.benchmarks.gpu_check import Part

ROW = {
    "name": "attention", "correct": True, "ms": 0.1, "TFLOP_per_s": 300.0, "GB_per_s": 3000.0, "share_of_floor": 0.7,
    "ratio": 1.5, "best_peer": "cudnn",
}  # fmt: skip
WRITES = "import json, sys; json.dump({'rows': [ROW]}, open(sys.argv[1], 'w'))".replace("ROW", repr(ROW))


def _python(name: str, code: str, seconds: int = 60) -> Part:
    return Part(name, (sys.executable, "-c", code, "{out}"), seconds)


def test_every_part_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (
        _python("breaks", "raise SystemExit('out of memory')"),
        _python("hangs", "import time; time.sleep(60)", seconds=6),
        _python("writes_nonsense", "import sys; open(sys.argv[1], 'w').write('{')"),
        _python("works", WRITES),
        _python("breaks_after_a_row", WRITES + "; raise SystemExit(3)"),
    )
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    assert gpu_check.main(["--out", str(tmp_path / "records")]) == 4
    summary = json.loads((tmp_path / "records" / "summary.json").read_text())["parts"]
    assert [summary[part.name]["outcome"].split(":")[0] for part in parts] == [
        "failed", "failed", "failed", "passed", "failed",
    ]  # fmt: skip
    assert summary["works"]["rows"] == summary["breaks_after_a_row"]["rows"] == [ROW]
    printed = capsys.readouterr().out
    assert "out of memory" in printed and printed.count("1.50x cudnn") == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="the question is what happens without a GPU")
def test_without_a_gpu_nothing_is_claimed(tmp_path: Path) -> None:
    part = Part("tests", ("false",), 60, needs_gpu=True)
    result = gpu_check.run_part(part, tmp_path, 60)
    assert result == {"outcome": "not measured: no GPU", "seconds": 0.0, "rows": []}


def test_a_part_whose_packages_are_absent_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part("bench", ("false",), 60, packages=("torch", "no_such_package"))
    monkeypatch.setattr(gpu_check, "PARTS", (part,))
    assert gpu_check.main(["--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert summary["bench"]["outcome"] == "not measured: no_such_package is not installed"


def test_the_parts_fit_into_the_time() -> None:
    assert sum(part.seconds for part in gpu_check.PARTS) <= gpu_check.TOTAL_SECONDS


@pytest.mark.parametrize("backward", [False, True])
def test_attention_is_checked_at_the_batch_that_is_timed(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = gpu_check_attention.Shape("small", 5, 20, 2, 16)
    batches, factors = [], torch.ones(5, 1, 1, 1)

    def ours(qkv: torch.Tensor) -> torch.Tensor:
        batches.append(qkv.shape[0])
        return gpu_check_attention._eager(qkv) * factors.to(qkv.dtype)

    monkeypatch.setattr(gpu_check_attention, "_ours", ours)
    assert gpu_check_attention.check(shape, backward, torch.device("cpu"))["correct"]
    factors[-1] = 1.1  # the last image alone goes wrong
    assert not gpu_check_attention.check(shape, backward, torch.device("cpu"))["correct"]
    assert batches == [5, 5]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"name": "a", "error": "RuntimeError: x"}, "failed: RuntimeError"),
        ({"name": "a", "correct": False, "correctness": "error 1, allowed 0", "ms": 1.0}, "WRONG"),
        ({"name": "a", "correct": True}, "right, not measured"),
    ],
)
def test_a_speed_is_shown_only_for_what_is_right(row: dict[str, object], text: str) -> None:
    part = {"outcome": "passed", "seconds": 1.0, "rows": [row]}
    table = gpu_check.table({"machine": {"device": "a GPU"}, "parts": {"suite": part}})
    assert text in table and " ms " not in table

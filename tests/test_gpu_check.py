"""gpu-check: a job that fails, hangs or kills its process does not affect the others, and all end in time."""

from __future__ import annotations

import json
import re
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vit_fast.benchmarks import gpu_check, records
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.gpu_check import Found, Job

BENCH = {"models": ["mlp:5x16x32"], "candidates": ["eager"], "batch_sizes": [2], "dtypes": ["fp32"], "device": "cpu"}


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("print('printed')", "measured"),
        ("import os; os.abort()", "failed: exit status -6; see log.txt"),
        ("import time; time.sleep(900)", "failed: timed out after 1 s; see log.txt"),
    ],
)
def test_outcome_of_a_job(script: str, outcome: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Job, "command", lambda *_: [sys.executable, "-c", script])
    monkeypatch.setattr(gpu_check, "outcome_of", lambda rows: "measured")
    job, limit_s = Job("mlp", "m", 1.0, runs=(BENCH,)), 1.0 if "sleep" in script else 300.0
    assert gpu_check.perform(job, tmp_path / "job", limit_s) == {"outcome": outcome}


def test_a_process_that_ends_early_is_resumed_and_an_earlier_record_is_kept(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "job"
    script = (
        "import os, sys, pathlib; path = pathlib.Path(sys.argv[1], '0.partial', 'rows.jsonl')\n"
        "path.parent.mkdir(exist_ok=True); text = path.read_text() if path.exists() else ''\n"
        "path.write_text(text + 'row'); len(text) > 3 or os.abort()"
    )
    monkeypatch.setattr(Job, "command", lambda job, new, limit_s: [sys.executable, "-c", script, str(new)])
    monkeypatch.setattr(gpu_check, "read_record", lambda path: {"rows": []})
    monkeypatch.setattr(gpu_check, "markdown", lambda record: "")
    folder.mkdir()
    (folder / "record.json").write_text("earlier")
    for outcome in ("INCORRECT or failed: m c", "measured"):
        monkeypatch.setattr(gpu_check, "outcome_of", lambda rows, outcome=outcome: outcome)
        assert gpu_check.perform(Job("mlp", "m", 1.0, runs=(BENCH,)), folder, 300.0) == {"outcome": outcome}
        assert (folder / "record.json").exists() is (outcome != "measured")
    assert (folder / "0.partial" / "rows.jsonl").read_text() == "rowrowrow"


@pytest.mark.slow
def test_a_job_of_tests(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text("def test_a(): pass\ndef test_b(): assert 0\n")
    found = gpu_check.perform(Job("tests", "these", 300.0, (str(path),)), tmp_path / "job", 300.0)
    assert found["outcome"].startswith("failed: exit status 1") and found["tests"].startswith("1 failed, 1 passed")


@pytest.mark.usefixtures("small_ceilings")
def test_a_job_of_bench_leaves_a_record_of_each_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_check, "JOBS", [Job("mlp", "mlp", 60.0, runs=(BENCH, BENCH | {"train": True}))])
    gpu_check.measure("mlp", str(tmp_path), time.time() + 6000)
    rows = [json.loads((tmp_path / name / "record.json").read_bytes())["rows"][0] for name in "01"]
    assert [(row["status"], row["task"]) for row in rows] == [("measured", "inference"), ("measured", "training")]
    wrong = gpu_check.outcome_of([rows[0] | {"status": "incorrect"}])
    assert wrong == "INCORRECT or failed: mlp:5x16x32 eager"
    assert gpu_check.outcome_of([rows[0] | {"status": "skipped"}]) == "no time left"


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_jobs_run_in_order_and_end_in_time(share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def perform(job: Job, folder: Path, limit_s: float) -> Found:
        limits.append(limit_s)
        return {"outcome": "measured"}

    monkeypatch.setattr(gpu_check, "perform", perform)
    monkeypatch.setattr(gpu_check, "describe", lambda _: {"device": "a GPU"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: share * sum(limits))
    found = gpu_check.run_jobs(gpu_check.JOBS, tmp_path / "out")
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert archive.getnames() == ["out", "out/summary.json"]
    assert [row["name"] for row in found] == [job.name for job in gpu_check.JOBS]
    assert share * sum(limits) <= 60 * gpu_check.MINUTES == 600
    outcomes = [row["outcome"] for row in found]
    assert "no time left" not in outcomes[:5], "the important ones fit even if every one hangs"
    assert ("no time left" not in outcomes) == (share == 0.3)


def test_a_dry_run_and_a_machine_without_a_gpu_measure_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_check, "perform", lambda *_: pytest.fail("a job was started"))
    assert gpu_check.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{job.name:40s} {job.limit_s:4.0f} s" in printed for job in gpu_check.JOBS)
    assert gpu_check.main(["--out", str(tmp_path / "out"), "--parts", "mlp"]) == 0
    found = json.loads((tmp_path / "out" / "summary.json").read_text())["rows"]
    assert {row["outcome"] for row in found} == {"not measured: no GPU"}
    with pytest.raises(SystemExit):
        gpu_check.main(["--parts", "attention,nonsense"])
    assert "--parts must consist of tests, models, attention, mlp, got nonsense" in capsys.readouterr().err


def test_bench_accepts_every_run_and_the_selected_tests_exist() -> None:
    """Every alternative of an expression selects a test, and every file contains a selected one."""
    for job in gpu_check.JOBS:
        for request in job.runs:
            made = make_configuration(**request | {"device": "cpu", "batch_sizes": [1]})
            names = {candidate.name for chosen in made.candidates.values() for candidate in chosen}
            assert any(name.startswith("triton") or name.endswith("+fused") for name in names), job.name
        # the options of tests/conftest.py do not exist there: pytest runs with --noconftest
        assert bool(job.tests) != bool(job.runs) and not any(word.startswith("--") for word in job.tests), job.name
        if "-k" in job.tests:
            files = [(gpu_check.ROOT / word).read_text() for word in job.tests if word.startswith("tests/")]
            words = [part.strip("(").split()[0] for part in job.tests[job.tests.index("-k") + 1].split(" or ")]
            found = [[word for word in words if re.search(rf"^def \w*{word}", text, re.M)] for text in files]
            assert all(found) and {word for each in found for word in each} == set(words), job.name


def test_the_kernels_of_a_block_are_compared_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimated = [
        {"kernel": "matmul, BIAS", "tile": "64", "floor_us": 4.0},
        {"kernel": "attention_fwd", "tile": "", "floor_us": 8.0},
    ]
    block = [["_matmul_kernel", 5.0], ["_attention_fwd_kernel", 8.0]]
    launches = [["cublas", 9.0], ["_layer_norm_kernel", 1.0], *block, *block, ["_matmul_kernel", 1.0]]
    rows = [
        {
            "status": "measured",
            "model": "m",
            "dtype": "bf16",
            "precision": "bf16",
            "data": "device",
            "img_size": [224, 224],
            "candidate": "c",
            "batch": 8,
            "explained": {"launches": launches},
        }
    ]
    record = {"format": records.FORMAT, "machine": {"gpu": {"capability": "9.0"}}, "rows": rows}
    (tmp_path / "ViT-B_kernels" / "0").mkdir(parents=True)
    (tmp_path / "ViT-B_kernels" / "0" / "record.json").write_text(json.dumps(record))
    done = SimpleNamespace(stdout=json.dumps({"launches": estimated}))
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda command, **_: done)
    lines = gpu_check.compare_with_model(tmp_path, 1.0).splitlines()
    assert lines[0] == "m batch 8 sm_90: 2 blocks; measured, estimated us"
    assert [line.split()[:3] for line in lines[1:]] == [["5.00", "4.00", "1.25x"], ["8.00", "8.00", "1.00x"]]

"""gpu-check: a job that fails, hangs or kills its process does not affect the others, and all end in time."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _pytest.mark.expression import Expression

from vit_fast.benchmarks import gpu_check
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.gpu_check import Found, Job

BENCH = {"models": ["mlp:5x16x32"], "candidates": ["eager"], "batch_sizes": [2], "dtypes": ["fp32"], "device": "cpu"}
ENDINGS = {
    "works": ("print('printed')", "measured"),
    "raises": ("raise ValueError('no such kernel')", "failed: exit status 1; see log.txt; rows saved: 1"),
    "dies": ("import os; os.abort()", "failed: exit status -6; see log.txt; rows saved: 1"),
    "hangs": ("import time; time.sleep(900)", "failed: timed out after 1 s; rows saved: 1"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_an_outcome_says_how_a_job_ended_and_counts_the_saved_rows(name: str, tmp_path: Path, monkeypatch) -> None:
    script, outcome = ENDINGS[name]
    row = json.dumps({"kind": "row"})
    saved = f"open('0.partial/rows.jsonl', 'w').write({row!r})" if name != "works" else "0"
    script = f"import os; os.chdir({str(tmp_path / 'job')!r}); os.mkdir('0.partial'); {saved}; {script}"
    monkeypatch.setattr(Job, "command", lambda *_: [sys.executable, "-c", script])
    monkeypatch.setattr(gpu_check, "outcome_of", lambda rows: "measured")
    job = Job("mlp", name, 1.0, runs=(BENCH,))
    assert gpu_check.perform(job, tmp_path / "job", 1.0 if name == "hangs" else 300.0) == {"outcome": outcome}
    assert (tmp_path / "job" / "log.txt").is_file()


@pytest.mark.slow
def test_tests_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    found = gpu_check.perform(Job("tests", "these", 300.0, (str(path),)), tmp_path / "job", 300.0)
    assert found == {"outcome": "failed: exit status 1; see log.txt", "passed": 1, "failed": 1, "skipped": 1}
    first = next(job for job in gpu_check.JOBS if job.name == "tests, first")
    collected = replace(first, tests=("--collect-only", *first.tests))
    assert gpu_check.perform(collected, tmp_path / "job", 600.0)["outcome"] == "passed"


@pytest.mark.usefixtures("small_ceilings")
def test_a_job_of_bench_leaves_a_record_of_each_run(tmp_path: Path) -> None:
    gpu_check.measure(Job("mlp", "mlp", 60.0, runs=(BENCH, BENCH | {"train": True})), tmp_path, time.time())
    first, second = (json.loads((tmp_path / name / "record.json").read_bytes())["rows"][0] for name in "01")
    assert (first["status"], first["task"], second["status"], second["task"]) == (
        "measured", "inference", "measured", "training"
    )  # fmt: skip
    wrong = gpu_check.outcome_of([first | {"status": "incorrect"}])
    assert wrong == "INCORRECT or failed: mlp:5x16x32 eager"
    assert gpu_check.outcome_of([first | {"status": "skipped"}]) == "no time left"


def test_every_run_is_one_that_bench_accepts() -> None:
    for job in gpu_check.JOBS:
        assert bool(job.tests) != bool(job.runs)
        for request in job.runs:
            made = make_configuration(**request | {"device": "cpu", "batch_sizes": [1]})
            names = {candidate.name for chosen in made.candidates.values() for candidate in chosen}
            assert any(name.startswith("triton") or name.endswith("+fused") for name in names), job.name


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_jobs_run_in_order_and_end_in_time(share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes this share of its limit."""
    now = 0.0

    def perform(job: Job, folder: Path, limit_s: float) -> Found:
        nonlocal now
        now += share * limit_s
        return {"outcome": "measured"}

    monkeypatch.setattr(gpu_check, "perform", perform)
    monkeypatch.setattr(gpu_check, "describe", lambda _: {"device": "a GPU", "commit": None})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: now)
    found = gpu_check.run_jobs(gpu_check.JOBS, tmp_path)
    assert [row["name"] for row in found] == [job.name for job in gpu_check.JOBS]
    assert now <= gpu_check.TOTAL_SECONDS == 480
    outcomes = [row["outcome"] for row in found]
    assert "no time left" not in outcomes[:5], "the important ones fit even if every one hangs"
    assert ("no time left" not in outcomes) == (share == 0.3)


def test_without_a_gpu_nothing_is_claimed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path), "--parts", "mlp"]) == 0
    found = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert {row["outcome"] for row in found} == {"not measured: no GPU"}


def test_a_dry_run_prints_the_jobs_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{job.name:40s} {job.limit_s:4.0f} s" in printed for job in gpu_check.JOBS)
    with pytest.raises(SystemExit):
        gpu_check.main(["--dry-run", "--parts", "attention,nonsense"])
    assert "--parts must consist of tests, attention, mlp, models, got nonsense" in capsys.readouterr().err


def test_the_compiled_tests_are_there() -> None:
    """Every file exists, each expression selects tests of every file, and each of its alternatives selects some."""

    def selects(expression: str, cases: list[str]) -> bool:
        selected = Expression.compile(expression)
        return any(selected.evaluate(lambda word, case=case: word in case) for case in cases)

    for job in (job for job in gpu_check.JOBS if job.tests):
        # the options of tests/conftest.py do not exist there: pytest runs with --noconftest
        assert not [word for word in job.tests if word.startswith("--")], job.name
        cases: dict[str, list[str]] = {}
        for file in (word for word in job.tests if word.startswith("tests/")):
            lines = (gpu_check.ROOT / file).read_text().splitlines()
            names = [line[4:].partition("(")[0] for line in lines if line.startswith("def test_")]
            ids = ("17-192-264-LayerNorm-torch.bfloat16", "torch.float16", "")
            cases[file] = [f"{name}[{values}]" for name in names for values in ids]
        if "-k" in job.tests:
            expression = job.tests[job.tests.index("-k") + 1]
            assert [file for file in cases if not selects(expression, cases[file])] == [], job.name
            every = [case for names in cases.values() for case in names]
            assert [part for part in expression.split(" or ") if not selects(part, every)] == [], job.name

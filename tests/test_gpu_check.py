"""gpu-check: a job that fails, hangs or kills its process does not affect the others, and all end in time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_check_jobs import pretend

from vit_fast.benchmarks import gpu_check, machine
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.gpu_check import Found, Job, Worker

NOTHING = Job("tests", "a job", 2.0)


@pytest.mark.slow
def test_a_job_that_raises_dies_or_hangs_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process runs the jobs until one breaks it; a new process continues."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "perform", pretend)
    worker = Worker(tmp_path)
    try:
        found = [
            worker.run(Job("tests", name, 5 if name == "hangs" else 120))
            for name in ("works", "raises", "works", "dies", "works", "hangs", "works")
        ]
    finally:
        worker.stop()
    assert [row["outcome"] for row in found] == [
        "measured", "failed: ValueError: no such kernel", "measured",
        "failed: the process died; see log.txt; rows saved: 0", "measured",
        "failed: timed out after 5 s; rows saved: 3", "measured",
    ]  # fmt: skip
    assert found[0]["pid"] == found[2]["pid"] and len({found[place]["pid"] for place in (2, 4, 6)}) == 3
    assert "printed by a job" in (tmp_path / "log.txt").read_text()


def test_without_a_gpu_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert [row["name"] for row in found] == [job.name for job in gpu_check.JOBS]
    assert {row["outcome"] for row in found} == {"not measured: no GPU"}


def test_every_plan_is_one_that_bench_accepts() -> None:
    """Models, candidates and sizes exist; each has ours; frozen, graphs and the compiled MLP are among them."""
    seen = set()
    for job in gpu_check.JOBS:
        if job.request:
            made = make_configuration(**job.request | {"device": "cpu", "batch_sizes": [1]})
            labels = {selection.name for chosen in made.candidates.values() for selection in chosen}
            assert any(label.startswith("triton") or label.endswith("+fused") for label in labels), job.name
            seen |= {(model.kind, label, made.training) for model in made.models for label in labels}
    for wanted in (
        ("ours", "triton", False), ("ours", "triton-frozen", False), ("ours", "triton-graphs", False),
        ("mlp", "eager+compile", False), ("mlp", "eager+compile", True), ("mlp", "cublaslt", False),
        ("attention", "flex", False), ("attention", "sdpa-cudnn", True), ("matmul", "eager", False),
        ("ours", "timm+compile", True), ("ours", "timm+fused", False),
    ):  # fmt: skip
        assert wanted in seen


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0, 3.0])
def test_jobs_run_in_order_and_end_in_time(share: float) -> None:
    """Each takes this share of its limit; those that take longer are ended at it."""
    now = 0.0

    def run(job: Job) -> Found:
        nonlocal now
        now += min(share, 1) * job.limit_s
        return {"outcome": "measured" if share <= 1 else "failed: too long"}

    found = gpu_check.run_jobs(gpu_check.JOBS, run, lambda: now, lambda rows, running: None)
    assert [row["name"] for row in found] == [job.name for job in gpu_check.JOBS]
    assert now <= gpu_check.TOTAL_SECONDS == 480
    outcomes = [row["outcome"] for row in found]
    assert gpu_check.NO_TIME not in outcomes[:7], "the important ones fit even if every one hangs"
    assert (gpu_check.NO_TIME not in outcomes) == (share == 0.3)


def test_a_dry_run_prints_the_jobs_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{job.name:40s} {job.limit_s:4.0f} s" in printed for job in gpu_check.JOBS)
    assert gpu_check.main(["--dry-run", "--parts", "mlp"]) == 0
    assert "attention" not in capsys.readouterr().out


def test_the_compiled_tests_are_there() -> None:
    """Every file exists, each expression selects tests of every file, and each of its alternatives selects some."""
    from _pytest.mark.expression import Expression

    commands = {job.name: job.tests for job in gpu_check.JOBS if job.tests}
    files = {name: [word for word in command if word.startswith("tests/")] for name, command in commands.items()}
    root = gpu_check.ROOT
    assert all((root / file).is_file() for names in files.values() for file in names)
    assert set(gpu_check._MLP_FILES) == set(files["tests of the MLP, compiled"])
    # the options of tests/conftest.py do not exist there: the worker runs pytest with --noconftest
    assert not [word for command in commands.values() for word in command if word.startswith("--")]
    for name in files.keys() - {"tests that need a GPU"}:
        expression = commands[name][commands[name].index("-k") + 1]
        cases = {}
        for file in files[name]:
            defined = [line for line in (root / file).read_text().splitlines() if line.startswith("def test_")]
            ids = ("197-torch.bfloat16", "torch.float16", "bf16", "")
            cases[file] = [f"{line[4:].partition('(')[0]}[{values}]" for line in defined for values in ids]

        def selects(expression: str, cases: list[str]) -> bool:
            selected = Expression.compile(expression)
            return any(selected.evaluate(lambda word, case=case: word in case) for case in cases)

        assert [file for file in files[name] if not selects(expression, cases[file])] == [], name
        every = [case for names in cases.values() for case in names]
        assert [part for part in expression.split(" or ") if not selects(part, every)] == [], name


@pytest.mark.slow
def test_the_worker_collects_the_first_tests() -> None:
    first = next(job for job in gpu_check.JOBS if job.name == "tests, first")
    assert gpu_check.run_tests(["--collect-only", *first.tests], 600.0)["outcome"] == "passed"


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--dry-run", "--parts", "attention,nonsense"])
    assert "--parts must consist of tests, attention, mlp, models, got nonsense" in capsys.readouterr().err


def test_plans_of_other_parts_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gpu_check, "JOBS", tuple(replace(NOTHING, part=part, name=part) for part in ("attention", "mlp"))
    )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def names(part: str) -> list[str]:
        gpu_check.main(["--out", str(tmp_path), "--parts", part])
        return [row["name"] for row in json.loads((tmp_path / "summary.json").read_text())["rows"]]

    assert names("attention") == ["attention"]
    assert names("mlp") == ["attention", "mlp"]
    monkeypatch.setattr(gpu_check, "describe", lambda _: {"device": "another", "commit": None})
    assert names("mlp") == ["mlp"]


@pytest.mark.slow
def test_a_job_of_bench_leaves_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 2**16)
    request = {"models": ["mlp:5x16x32"], "candidates": ["eager"], "batch_sizes": [2], "dtypes": ["fp32"]}
    request["device"] = "cpu"
    assert gpu_check.run_bench(request, tmp_path / "mlp", 60.0)["outcome"] == "measured"
    rows = json.loads((tmp_path / "mlp" / "record.json").read_bytes())["rows"]
    ours = rows[0] | {"candidate": "triton", "best_peer": "eager", "ratio_to_best_peer": 1.5, "verdict": "faster"}
    assert "1.50x eager (faster)" in gpu_check.figures([ours])["mlp:5x16x32 B2 triton"]
    wrong = gpu_check.figures([ours | {"status": "incorrect"}])
    assert wrong == {"outcome": "INCORRECT or failed: mlp:5x16x32 triton"}
    assert gpu_check.figures([ours | {"status": "skipped"}]) == {"outcome": "no time left"}


@pytest.mark.slow
def test_tests_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    found = gpu_check.run_tests([str(path)], 300.0)
    assert found == {"outcome": "failed: exit status 1", "passed": 1, "failed": 1, "skipped": 1}

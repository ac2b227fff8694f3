"""gpu-check: a job that fails, hangs or kills its process does not affect the others, and all end in time."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import children
import pretend_gpu
import pytest
import torch
from bench_support import shortened
from kernel_execution import INTERPRETED
from pretend_cuda import write_python
from pretend_gpu import Machine

from vit_fast.benchmarks import gpu_check, preparation, records, runner
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.gpu_check import Job
from vit_fast.benchmarks.records import Journal
from vit_fast.measure import clock
from vit_fast.measure.clock import Protocol
from vit_fast.ops.backends import triton_unavailable_reasons

BENCH = {"models": ["mlp:5x16x32"], "candidates": ["eager"], "batch_sizes": [2], "dtypes": ["fp32"], "device": "cpu"}
JOURNAL = "import os, sys, pathlib, time; path = pathlib.Path(sys.argv[1], '0', 'rows.jsonl')\n"
RESUMED = """path.parent.mkdir(exist_ok=True); path.open('a').write('{"kind": "resumed"}'); os._exit(9)"""  # no header


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("print('printed')", "measured"),
        ("os.abort()", "failed: exit status -6; see job/log.txt"),
        ("time.sleep(900)", "failed: timed out after 1 s; see job/log.txt"),
        (RESUMED, "failed: exit status 9; see job/log.txt"),
    ],
)
def test_outcome_of_a_job(script: str, outcome: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Job, "command", lambda job, folder, _: [sys.executable, "-c", JOURNAL + script, str(folder)])
    monkeypatch.setattr(gpu_check, "outcome_of", lambda rows: "measured")
    job, limit_s = Job("mlp", "m", 1.0, runs=(BENCH,)), 1.0 if "sleep" in script else 300.0
    assert gpu_check.perform(job, tmp_path / "job", limit_s) == outcome


def test_a_process_that_ends_early_is_resumed_and_an_earlier_record_is_kept(tmp_path: Path, monkeypatch) -> None:
    row = '{"kind": "row"}'
    script = (
        f"{JOURNAL}path.parent.mkdir(exist_ok=True); text = path.read_text() if path.exists() else ''\n"
        f"path.write_text(text + '{row}'); len(text) > 20 or os.abort()"
    )
    monkeypatch.setattr(Job, "command", lambda job, new, limit_s: [sys.executable, "-c", script, str(new)])
    monkeypatch.setattr(gpu_check, "read_record", lambda path: {"rows": []})
    monkeypatch.setattr(gpu_check, "markdown", lambda record: "")
    monkeypatch.setattr(gpu_check, "outcome_of", lambda rows: "measured")
    for folder in ("job", "job.1", "job.2"):
        found = gpu_check.perform(Job("mlp", "m", 1.0, runs=(BENCH,)), tmp_path / "job", 300.0)
        assert found == "measured" and len([*tmp_path.iterdir()]) == int(folder[4:] or 0) + 1
        assert (tmp_path / folder / "0" / "rows.jsonl").read_text() == 3 * row


def test_a_process_that_cannot_be_killed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in a call of a driver may never end."""
    killed, waited = [], []

    def wait(seconds: float) -> int:
        waited.append(seconds)
        raise subprocess.TimeoutExpired("job", seconds)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", lambda *_, **__: SimpleNamespace(pid=7, wait=wait))
    monkeypatch.setattr(gpu_check.os, "killpg", lambda *given: killed.append(given))
    job = Job("mlp", "m", 1.0, runs=(BENCH,))
    assert gpu_check._run(job, tmp_path, 3.0) == f"failed: timed out after 3 s; see {tmp_path.name}/log.txt"
    assert (killed, waited) == ([(7, signal.SIGKILL)], [3.0, gpu_check.END_S])


@pytest.mark.slow
def test_a_job_of_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "test_it.py"
    path.write_text("def test_a(): pass\ndef test_b(): assert 0\n")
    found = gpu_check.perform(Job("tests", "these", 300.0, (str(path),)), tmp_path / "job", 300.0)
    assert found.startswith("failed: exit status 1; see job/log.txt (1 failed, 1 passed")
    assert "test_it.py::test_b\n" in capsys.readouterr().out


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

    def perform(job: Job, folder: Path, limit_s: float) -> str:
        limits.append(limit_s)
        return "measured"

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


def test_a_full_disk_fails_the_jobs_but_not_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device", "records"))
    for name in ("perform", "file_aside"):
        monkeypatch.setattr(gpu_check, name, full)
    monkeypatch.setattr(gpu_check, "describe", lambda _: {"device": "a GPU"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_check.main(["--out", str(tmp_path), "--parts", "mlp"]) == full.call_count / 2 > 1
    assert "mlp compiled: failed: [Errno 28] No space left on device: 'records'\n" in capsys.readouterr().out


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
    floors = {"matmul, BIAS": 4.0, "attention_fwd": 8.0}
    estimated = [{"kernel": name, "tile": "64", "floor_us": us} for name, us in floors.items()]
    block = [["_matmul_kernel", 5.0], ["_attention_fwd_kernel", 8.0]]
    launches = [["cublas", 9.0], ["_layer_norm_kernel", 1.0], *block, *block, ["_matmul_kernel", 1.0]]
    row = {
        "status": "measured", "model": "m", "dtype": "bf16", "precision": "bf16", "data": "device", "candidate": "c",
        "img_size": [224, 224], "batch": 8, "explained": {"launches": launches},
    }  # fmt: skip
    record = {"format": records.FORMAT, "machine": {"gpu": {"capability": "9.0"}}, "rows": [row]}
    (tmp_path / "ViT-B_kernels" / "0").mkdir(parents=True)
    (tmp_path / "ViT-B_kernels" / "0" / "record.json").write_text(json.dumps(record))
    done = Mock(stdout=json.dumps({"gpu": "H100", "launches": estimated}), stderr="no such GPU\n", returncode=1)
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda command, **_: done)
    lines = gpu_check.compare_with_model(tmp_path, 1.0).splitlines()
    assert lines[1] == "m, batch 8, sm_90: median of 2 blocks, estimate for H100"
    figures = [re.findall(r"[\d.]+", line)[:3] for line in lines[3:]]
    assert figures == [["5.00", "4.00", "1.25"], ["8.00", "8.00", "1.00"], ["13.00", "12.00", "1.08"]]
    done.stdout = ""
    assert gpu_check.compare_with_model(tmp_path, 1.0).endswith("m, batch 8, sm_90: no estimate: no such GPU\n")


# --- in forked processes on a pretend GPU -----------------------------------------------------------------------------


class Forked:
    """A fork of this process, which need not import anything; replaces subprocess.Popen."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setsid()
                torch.set_num_threads(1)  # threads do not survive a fork
                status = int(run() or 0)  # type: ignore[call-overload]  # an exit status
            except SystemExit as ended:
                status = int(ended.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)

    def wait(self, seconds: float | None = None) -> int:
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Forked]]:
    """Starts a gpu-check of small models on a pretend GPU.

    Writes each finished row to the file `rows`, once it is in the journal. The process of a job takes a number from the
    file `kills`, and is killed after so many CUDA calls; before a negative number, gpu-check is killed, too.
    """
    if not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    add, quick = Journal.add, Protocol(repeats=3, seconds=0.0, least_repeats=3, warmup_repeats=1)
    (tmp_path / "rows").touch()

    def add_and_tell(journal: Journal, kind: str, value: Any) -> None:
        add(journal, kind, value)
        if kind in ("alone", "row") and is_finished(value):
            with (tmp_path / "rows").open("a") as file:
                file.write(json.dumps(key_of(value)) + "\n")

    def perform(command: list[str], cwd: Path, env: dict[str, str], stdout: Any) -> None:
        os.chdir(cwd)
        if command[1] == "-m":  # pytest
            os.dup2(stdout.fileno(), 1)
            os.dup2(1, 2)
            os.execve(write_python(tmp_path), command, env | {"PRETEND_GPU": "{}"})
        (tmp_path / "pid").write_text(str(os.getpid()))
        if kills := (tmp_path / "kills").read_text().split():
            (tmp_path / "kills").write_text("\n".join(kills[1:]))
            victims = [os.getppid(), os.getpid()][int(kills[0]) > 0 :]
            kill = SimpleNamespace(getpid=os.getpid, kill=lambda _, number: [os.kill(pid, number) for pid in victims])
            monkeypatch.setattr(pretend_gpu, "os", kill)
            machine.counts.clear()
            machine.kill_after = abs(int(kills[0]))
        exec(command[2], {})

    def start(*names: str, kills: Sequence[int] = ()) -> Forked:
        monkeypatch.setattr(gpu_check, "JOBS", tuple(shortened(job) for job in jobs if job.name in names))
        (tmp_path / "kills").write_text("\n".join(map(str, kills)))
        return Forked(lambda: gpu_check.main(["--out", "out", "--minutes", "600"]))

    def popen(command: list[str], cwd: Path, env: dict[str, str], stdout: Any, **_: object) -> Forked:
        return Forked(partial(perform, command, cwd, env, stdout))

    jobs = gpu_check.JOBS
    monkeypatch.chdir(tmp_path)
    plain = partial(subprocess.run, env=children.environment())  # vit-fast kernels --model, which needs no GPU
    processes = SimpleNamespace(Popen=popen, run=plain, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(gpu_check, "subprocess", processes)
    monkeypatch.setattr(gpu_check, "cold_start", lambda *_: None)
    monkeypatch.setattr(gpu_check, "PROTOCOL", quick)
    monkeypatch.setattr(preparation, "ALONE", quick)
    monkeypatch.setattr(clock, "MIN_FLUSH_BYTES", 2**10)
    monkeypatch.setattr(clock, "RESAMPLES", 200)
    monkeypatch.setattr(Journal, "add", add_and_tell)
    for sizes in (runner.MATMUL_SIZE, runner.COPY_BYTES):
        monkeypatch.setitem(sizes, "cuda", 2**6)
    with Machine(L2_cache_size=2**9).installed() as machine:
        assert not triton_unavailable_reasons(torch.device("cuda", 0))  # once, not in every process
        yield start


def is_finished(row: records.Row) -> bool:
    return row["status"] not in ("skipped", "interrupted")


def key_of(row: records.Row) -> str:
    return str([row["model"], row["batch"], row["task"], row["candidate"]])


def rows_in(out: Path, job: str = "*") -> dict[str, str]:
    """Returns the statuses of the finished rows of all records, also of unfinished ones."""
    found: dict[str, str] = {}
    for path in out.glob(f"{job}/*/"):
        with contextlib.suppress(OSError, ValueError):  # killed before the first row
            found |= {key_of(row): row["status"] for row in records.read_record(path)["rows"] if is_finished(row)}
    return found


def unpacked(out: Path) -> Path:
    with tarfile.open(f"{out}.tar.gz") as archive:
        archive.extractall(out.parent / "unpacked", filter="data")
    return out.parent / "unpacked" / out.name


def rows_written(folder: Path) -> set[str]:
    return {json.loads(line) for line in (folder / "rows").read_text().splitlines()}


@pytest.mark.slow
def test_rows_survive_ten_kills_at_random_times(check: Callable[..., Forked], tmp_path: Path) -> None:
    """Kills the process of a job, sometimes with gpu-check. Every run writes into the same folder."""
    generator, out, status, survived = random.Random(0), tmp_path / "out", 1, set[str]()
    left = [generator.choice((1, -1)) * round(300 * 20 ** generator.random()) for _ in range(10)]
    while status:
        before, status = left, check("mlp", "attention", kills=left).wait()
        left = [*map(int, (tmp_path / "kills").read_text().split())]
        assert rows_written(tmp_path) <= rows_in(out).keys() and (status == 0 or left != before)
        survived |= rows_written(tmp_path) if left else set()
    assert survived
    found = rows_in(out)
    assert not left and len(found) == 12 and {*found.values()} <= {"measured", "unsupported"}
    assert rows_in(unpacked(out)) == found


@pytest.mark.slow(minutes=True)
@pytest.mark.timeout(0)
def test_every_job_runs_on_a_pretend_gpu(check: Callable[..., Forked], tmp_path: Path) -> None:
    assert check(*(job.name for job in gpu_check.JOBS)).wait() == 0
    out = tmp_path / "out"
    found = {row["name"]: row["outcome"] for row in json.loads((out / "summary.json").read_text())["rows"]}
    for job in gpu_check.JOBS:
        assert re.fullmatch(r"passed \(\d+ passed[^f]*\)" if job.tests else "measured", found[job.name]), found
        rows = rows_in(out, gpu_check._folder_name(job.name))
        assert {*rows.values()} <= {"measured", "unsupported", "not installed"}, job.name
        wanted = {one for run in job.runs for one in run["candidates"]}
        assert not {one for one in wanted if not any(f"'{one}'" in key for key in rows)}, job.name
    assert "median of 2 blocks, estimate for H100 SXM" in (out / "model.txt").read_text()
    assert {path.name for path in unpacked(out).rglob("*")} == {path.name for path in out.rglob("*")}


@pytest.mark.slow
def test_a_terminated_check_ends_the_process_of_its_job(check: Callable[..., Forked], tmp_path: Path) -> None:
    started = check("mlp")
    while not rows_written(tmp_path):
        time.sleep(0.05)
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    for out in (tmp_path / "out", unpacked(tmp_path / "out")):
        assert set() < rows_written(tmp_path) <= rows_in(out).keys()
        (row,) = json.loads((out / "summary.json").read_text())["rows"]
        assert (row["name"], row["outcome"]) == ("mlp", "interrupted")

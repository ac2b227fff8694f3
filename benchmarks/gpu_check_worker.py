"""The process that runs the jobs of gpu_check.py and keeps its compiled kernels, until a job breaks it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from vit_fast.measure.clock import Protocol

from .machine import describe
from .plan import make_plan
from .records import JOURNAL_NAME, PARTIAL, RECORD_NAME, Journal, to_json
from .rows import Row, measured
from .runner import run

ROOT = Path(__file__).resolve().parent.parent
NO_TIME, NOT_MEASURED = "no time left", "not measured: "
SPARE_S = 5.0  # of a job's limit, for what it has begun when its own time budget ends
PROTOCOL = Protocol(repeats=50, seconds=0.3, least_repeats=10, warmup_repeats=3, warmup_seconds=0.1)
Found = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Tests or a run configuration of `vit-fast bench`.

    Attributes:
        part: For --parts.
        name: Unique; also names its folder.
        limit_s: Seconds after which it is ended.
        request: Arguments of plan.make_plan.
        tests: Or arguments of pytest.
    """

    part: str
    name: str
    limit_s: float
    request: dict[str, Any] = field(default_factory=dict)
    tests: tuple[str, ...] = ()


class Worker:
    """Runs one job at a time in a process that keeps its imports and compiled kernels, until a job breaks it.

    Args:
        out: The folder of the records; what processes print goes to log.txt there.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self._process: multiprocessing.process.BaseProcess | None = None

    def run(self, job: Job) -> Found:
        """Runs a job within its time limit; nothing that a job does raises."""
        if not torch.cuda.is_available():
            return {"outcome": f"{NOT_MEASURED}no GPU"}
        folder = self.out / re.sub(r"[^\w-]+", "_", job.name)
        for path in (folder, folder.with_name(folder.name + PARTIAL)):  # of an earlier run, finished or ended
            shutil.rmtree(path, ignore_errors=True)
        end = time.monotonic() + job.limit_s
        if self._process is None:
            self._start()
        try:
            self._channel.send((job, folder))
            if self._channel.poll(max(end - time.monotonic(), 0)):
                found, sound = self._channel.recv()
                if not sound:
                    self.stop()
                return dict(found)
            problem = f"more than {job.limit_s:.0f} s"
        except (EOFError, OSError):
            problem = "the process died; see log.txt"
        self.stop()
        return {"outcome": f"failed: {problem}; rows kept: {rows_kept(folder)}"}

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a CUDA context cannot be forked
        self._channel, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self.out / "log.txt", perform))
        self._process.start()
        theirs.close()

    def stop(self) -> None:
        """Ends the process and its children; the next job gets a new one."""
        if self._process is not None and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()  # before it has its own group
            self._process.join()
            self._channel.close()
            self._process = None


def serve(channel: Connection, log: Path, perform: Callable[[Job, Path], Found]) -> None:
    """Runs jobs in the child process, and sends what each gave and whether the GPU still works."""
    os.setsid()
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    while True:
        job, folder = channel.recv()
        try:
            found = perform(job, folder)
        except Exception as error:  # a job that fails is a result, and the others go on
            found = {"outcome": f"failed: {type(error).__name__}: {str(error).strip()[:300]}"}
        sound = True
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except RuntimeError:  # a kernel has broken the device's context, for every job after it too
                sound = False
        channel.send((found, sound))


def perform(job: Job, folder: Path) -> Found:
    seconds = job.limit_s - SPARE_S
    return run_tests(job.tests, seconds) if job.tests else run_bench(job.request, folder, seconds)


def run_tests(arguments: Sequence[str], seconds: float) -> Found:
    """Runs tests in a process of their own; returns the outcome and how many passed, failed and were skipped."""
    command = (
        sys.executable, "-m", "pytest", "-v", "-rf", "-o", "addopts=--import-mode=importlib", "-o", "pythonpath=tests",
        "-p", "no:cacheprovider", "--noconftest", *arguments,
    )  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=seconds)
        output, outcome = done.stdout, f"failed: exit status {done.returncode}" if done.returncode else "passed"
    except subprocess.TimeoutExpired as ended:
        output = ended.stdout.decode(errors="replace") if ended.stdout else ""
        outcome = f"failed: more than {seconds:.0f} s"
    print(output, flush=True)
    lines = [line for line in output.splitlines() if "%]" in line]
    counts = {word.lower(): sum(word in line for line in lines) for word in ("PASSED", "FAILED", "SKIPPED")}
    return {"outcome": outcome} | counts


def run_bench(request: dict[str, Any], folder: Path, seconds: float) -> Found:
    """Measures, and writes the record into the folder."""
    plan = make_plan(**request, protocol=PROTOCOL, time_budget_s=max(seconds, 1.0))
    journal = Journal.begin(folder, plan.request, describe(plan.device))
    record = run(plan, None, journal)
    journal.finish({RECORD_NAME: to_json(record)}, keep=False)
    return figures(record["rows"])


def figures(rows: Sequence[Row]) -> Found:
    """Returns a finished job's outcome, and each row of ours beside the best peer."""
    wrong = [f"{row['model']} {row['subject']}" for row in rows if row["status"] in ("wrong", "failed")]
    late = all(row["status"] in ("skipped", "interrupted") for row in rows)
    found: Found = {"outcome": f"WRONG or failed: {', '.join(wrong)}" if wrong else NO_TIME if late else "measured"}
    for row in measured(rows):
        if row["subject"].startswith("triton"):
            ratio = row["ratio_to_best_peer"]
            peer = "no peer" if ratio is None else f"{ratio:.2f}x {row['best_peer']} ({row['verdict']})"
            host = "" if row["host_ms"] is None else f", host {row['host_ms']:.3f}"
            name = f"{row['model']} B{row['batch']} {row['subject']}"
            found[name] = f"{row['ms']:.3f} ms{host}, {row['TFLOP_per_s']:.3g} TFLOP/s, {peer}"
    return found


def rows_kept(folder: Path) -> int:
    """Counts the rows that a job wrote before it was ended."""
    path = folder.with_name(folder.name + PARTIAL) / JOURNAL_NAME
    return path.read_text().count('{"kind": "row"') if path.is_file() else 0

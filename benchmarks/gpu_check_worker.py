"""The process that runs the jobs of gpu_check.py; it keeps what it has compiled, until a job breaks it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
WORKER = ("-m", __name__)
SPARE_S = 5.0  # of a job's limit, for what it has begun when its own time budget ends
PROTOCOL = Protocol(repeats=50, seconds=0.3, least_repeats=10, warmup_repeats=3, warmup_seconds=0.1)
Found = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One thing to find out, by tests or by a plan of `vit-fast bench`.

    Attributes:
        part: What it belongs to, for --parts.
        name: Unique; that of its folder.
        compile_s: Assumed seconds until everything is compiled; run_s: of checking and timing. A stand-in until they
            are measured: the sum over all jobs is made of these.
        request: What plan.make_plan is asked for; tests: or pytest's arguments.
        important: Whether later jobs give way to it.
    """

    part: str
    name: str
    compile_s: float
    run_s: float
    request: dict[str, Any] = field(default_factory=dict)
    tests: tuple[str, ...] = ()
    important: bool = False

    @property
    def seconds(self) -> float:
        return self.compile_s + self.run_s


class Worker:
    """Runs one job at a time in a process that keeps what it has imported and compiled, until a job breaks it.

    Args:
        out: The folder of the records; what processes print goes to log.txt there.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self._process: subprocess.Popen[str] | None = None

    def run(self, job: Job, seconds: float) -> Found:
        """Runs a job in at most so many seconds; nothing that a job does raises."""
        if not torch.cuda.is_available():
            return {"outcome": f"{NOT_MEASURED}no GPU"}
        folder = self.out / re.sub(r"[^\w-]+", "_", job.name)
        for path in (folder, folder.with_name(folder.name + PARTIAL)):  # of an earlier run, finished or ended
            shutil.rmtree(path, ignore_errors=True)
        return self.ask(job, folder, seconds)

    def ask(self, job: Job, folder: Path, seconds: float) -> Found:
        """Lets the process run a job; where it does not answer in time, or dies, another takes its place."""
        end = time.monotonic() + seconds
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([job.request, job.tests, str(folder), seconds - SPARE_S]) + "\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], max(end - time.monotonic(), 0))[0]:
                problem = f"more than {seconds:.0f} s"
            elif line := process.stdout.readline():
                found: Found = json.loads(line)
                if not found.pop("sound"):
                    self.stop()
                return found
            else:
                problem = "the process died; see log.txt"
        except OSError as error:
            problem = str(error)
        self.stop()
        return {"outcome": f"failed: {problem}; rows kept: {rows_kept(folder)}"}

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        with (self.out / "log.txt").open("a") as log:
            return subprocess.Popen(
                [sys.executable, *WORKER],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def stop(self) -> None:
        """Ends the process and what it has started; the next job gets a new one."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None


def serve() -> None:
    """In the process: runs a job for each line that comes, and answers with a line; prints go to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request, arguments, folder, seconds = json.loads(line)
        try:
            found = run_tests(arguments, seconds) if arguments else run_bench(request, Path(folder), seconds)
        except Exception as error:  # a job that fails is a result, and the others go on
            found = {"outcome": f"failed: {type(error).__name__}: {str(error).strip()[:300]}"}
        found["sound"] = True
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except RuntimeError:  # a kernel has broken the device's context, for every job after it too
                found["sound"] = False
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def run_tests(arguments: Sequence[str], seconds: float) -> Found:
    """Tests in a process of their own: outcome and how many passed, failed and were skipped."""
    command = (
        sys.executable, "-m", "pytest", "-v", "-rf", "-o", "addopts=--import-mode=importlib", "-o", "pythonpath=tests",
        "-p", "no:cacheprovider", "--noconftest", *arguments,
    )  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=seconds)
        output, outcome = done.stdout, f"failed: exit status {done.returncode}" if done.returncode else "passed"
    except subprocess.TimeoutExpired as ended:
        output = ended.stdout.decode(errors="replace") if ended.stdout else ""
        outcome = f"failed: more than {seconds:.0f} s"
    print(output, flush=True)
    lines = [line for line in output.splitlines() if "%]" in line]
    counts = {word.lower(): sum(word in line for line in lines) for word in ("PASSED", "FAILED", "SKIPPED")}
    return {"outcome": outcome} | counts


def run_bench(request: dict[str, Any], folder: Path, seconds: float) -> Found:
    """A plan of `vit-fast bench`; its record lies in the folder when it is through."""
    plan = make_plan(**request, protocol=PROTOCOL, time_budget_s=max(seconds, 1.0))
    journal = Journal.begin(folder, plan.request, describe(plan.device))
    record = run(plan, None, journal)
    journal.finish({RECORD_NAME: to_json(record)}, keep=False)
    return figures(record["rows"])


def figures(rows: Sequence[Row]) -> Found:
    """A finished job's outcome, and what each row of ours says beside the best peer."""
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


if __name__ == "__main__":
    serve()

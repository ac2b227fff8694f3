"""`make gpu-check`: everything worth measuring on a machine with a GPU and no network, in eight minutes.

    python -m vit_fast.benchmarks.gpu_check --out DIR [--parts attention,models]
    python -m vit_fast.benchmarks.gpu_check --dry-run

Needs torch, triton, numpy, pillow and pytest; libraries that are not installed are named. The jobs are tests
and run configurations of `vit-fast bench`, in a fixed order, the most important ones first. Each has a time limit and
is skipped if less time is left. A job that fails, hangs or loses the GPU does not affect the others: its process is
ended, and its rows stay in the journal. Compiled kernels are shared between the jobs. DIR/summary.json is written after
each job; DIR/JOB contains its record, and `vit-fast report DIR/*/` shows them. Results of other parts in DIR stay
if they are of the same device and commit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vit_fast.files import file_aside
from vit_fast.measure.clock import Protocol

from .configuration import make_configuration
from .machine import describe
from .records import JOURNAL_NAME, PARTIAL, RECORD_NAME, Journal, to_json
from .rows import Row, measured
from .runner import run

TOTAL_SECONDS = 480
ROOT = Path(__file__).resolve().parent.parent
NO_TIME, NOT_MEASURED = "no time left", "not measured: "
SPARE_S = 5.0  # part of a job's limit, reserved to finish what runs when its time budget ends
PROTOCOL = Protocol(repeats=50, seconds=0.3, least_repeats=10, warmup_repeats=3, warmup_seconds=0.1)
Found = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Arguments of make_configuration (`request`) or of pytest (`tests`), with a unique name and a time limit."""

    part: str
    name: str
    limit_s: float
    request: dict[str, Any] = field(default_factory=dict)
    tests: tuple[str, ...] = ()


class Worker:
    """Runs one job at a time in a process that keeps its imports and compiled kernels until a job breaks it.

    Output of the jobs goes to log.txt in the folder of the records.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self._pool: ProcessPoolExecutor | None = None

    def run(self, job: Job) -> Found:
        """Runs a job within its time limit; never raises."""
        if not torch.cuda.is_available():
            return {"outcome": f"{NOT_MEASURED}no GPU"}
        folder = self.out / re.sub(r"[^\w-]+", "_", job.name)
        for path in (folder, folder.with_name(folder.name + PARTIAL)):  # of an earlier run, finished or ended
            shutil.rmtree(path, ignore_errors=True)
        if self._pool is None:
            context = multiprocessing.get_context("spawn")  # a CUDA context cannot be forked
            self._pool = ProcessPoolExecutor(1, context, _begin, (self.out / "log.txt",))
        try:
            found, sound = self._pool.submit(_outcome, perform, job, folder).result(job.limit_s)
        except TimeoutError:
            problem = f"timed out after {job.limit_s:.0f} s"
        except BrokenProcessPool:
            problem = "the process died; see log.txt"
        else:
            if not sound:
                self.stop()
            return found
        self.stop()
        journal = folder.with_name(folder.name + PARTIAL) / JOURNAL_NAME
        rows = journal.read_text().count('{"kind": "row"') if journal.is_file() else 0
        return {"outcome": f"failed: {problem}; rows saved: {rows}"}

    def stop(self) -> None:
        """Ends the process and its children; the next job gets a new one."""
        if self._pool is not None:
            for process in multiprocessing.active_children():
                assert process.pid is not None  # it was started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()  # before it has its own group
            self._pool.shutdown()
            self._pool = None


def _begin(log: Path) -> None:
    os.setsid()
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _outcome(perform: Callable[[Job, Path], Found], job: Job, folder: Path) -> tuple[Found, bool]:
    """Returns the result of a job, and whether the GPU still works."""
    try:
        found = perform(job, folder)
    except Exception as error:  # a job that fails is a result, and the others go on
        found = {"outcome": f"failed: {type(error).__name__}: {str(error).strip()[:300]}"}
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:  # a kernel has broken the device's context, for every job after it too
        return found, False
    return found, True


def perform(job: Job, folder: Path) -> Found:
    seconds = job.limit_s - SPARE_S
    return run_tests(job.tests, seconds) if job.tests else run_bench(job.request, folder, seconds)


def run_tests(arguments: Sequence[str], seconds: float) -> Found:
    """Runs tests in a separate process; returns the outcome and the numbers of passed, failed and skipped tests."""
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
        outcome = f"failed: timed out after {seconds:.0f} s"
    print(output, flush=True)
    lines = [line for line in output.splitlines() if "%]" in line]
    counts = {word.lower(): sum(word in line for line in lines) for word in ("PASSED", "FAILED", "SKIPPED")}
    return {"outcome": outcome} | counts


def run_bench(request: dict[str, Any], folder: Path, seconds: float) -> Found:
    """Measures, and writes the record into the folder."""
    configuration = make_configuration(**request, protocol=PROTOCOL, time_budget_s=max(seconds, 1.0))
    journal = Journal.begin(folder, configuration.request, describe(configuration.device))
    record = run(configuration, None, journal)
    journal.finish({RECORD_NAME: to_json(record)}, keep=False)
    return figures(record["rows"])


def figures(rows: Sequence[Row]) -> Found:
    """Returns the outcome of a job, and each of our rows relative to the best peer."""
    failed = [f"{row['model']} {row['candidate']}" for row in rows if row["status"] in ("incorrect", "failed")]
    late = all(row["status"] in ("skipped", "interrupted") for row in rows)
    outcome = f"INCORRECT or failed: {', '.join(failed)}" if failed else NO_TIME if late else "measured"
    found: Found = {"outcome": outcome}
    for row in measured(rows):
        if row["candidate"].startswith("triton"):
            ratio = row["ratio_to_best_peer"]
            peer = "no peer" if ratio is None else f"{ratio:.2f}x {row['best_peer']} ({row['verdict']})"
            host = "" if row["host_ms"] is None else f", host {row['host_ms']:.3f}"
            name = f"{row['model']} B{row['batch']} {row['candidate']}"
            found[name] = f"{row['ms']:.3f} ms{host}, {row['TFLOP_per_s']:.3g} TFLOP/s, {peer}"
    return found


def tests(name: str, limit_s: float, *arguments: str, parallel: bool = True) -> Job:
    """Returns a job that runs tests on the GPU."""
    processes = ("-n", "8") if parallel and importlib.util.find_spec("xdist") else ()
    return Job("tests", name, limit_s, tests=(*processes, *arguments))


def bench(
    part: str, name: str, limit_s: float, models: Sequence[str], candidates: str, *batches: int, train: bool = False
) -> Job:
    """Returns a job that measures in bf16."""
    request = {"models": list(models), "candidates": candidates.split(), "batch_sizes": list(batches)}
    return Job(part, name, limit_s, request | {"dtypes": ["bf16"], "train": train})


# Some of the tests that usually run in Triton's interpreter; compiling all of them would take too long.
_FIRST = "nan_stays or test_row_counts[197-torch.bfloat16]"
_ATTENTION_TESTS = "every_forward_path or every_layout or far_below or nan_stays or (every_shape and torch.float16)"
_MLP_TESTS = (
    "(row_counts and not float32) or (activations and bfloat16)"
    " or absent_parameters or layouts or passed_statistics or no_rows or nan_stays"
    " or (model_against_fp64 and bfloat16)"
    " or kernels_round or (a_block_matches_the_reference and bf16) or passed_to_the_next_block or losses_of_the_kernels"
)
_MLP_FILES = (
    *(f"tests/test_mlp_{name}.py" for name in ("kernels", "operator")), "tests/test_fp8_block.py",
    "tests/test_trainer.py",
)  # fmt: skip


def _gpu_test_files() -> list[str]:
    marked = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    return [str(path.relative_to(ROOT)) for path in marked] or ["tests"]


_VIT_S, _VIT_B, _VIT_L = (f"vit_{size}_patch16_224" for size in ("small", "base", "large"))
_ATTENTION, _MLP = "attention:197x12x64", "mlp:197x768x3072"
# The most important first: ViT-L/16-384, ViT-H/14, So400m/14-384, B/16-512, SigLIP-B/16, ViT-S/16.
_LARGER = ("attention:577x16x64", "attention:257x16x80", "attention:729x16x72", "attention:1025x12x64")
_OTHERS = ("attention:196x12x64", "attention:197x6x64", "attention:197x16x64", "mlp:197x1024x4096", "mlp:197x384x1536")
_RIVALS = "triton sdpa-cudnn sdpa-flash sdpa-efficient"
_OURS = "triton triton-frozen triton-graphs sdpa timm"

# The most important first.
JOBS: tuple[Job, ...] = (
    tests("tests, first", 60, "-k", _FIRST, "tests/test_attention_kernel.py", "tests/test_mlp_kernels.py",
          parallel=False),
    bench("attention", "attention", 40, [_ATTENTION], _RIVALS, 256),
    bench("attention", "attention backward", 30, [_ATTENTION], _RIVALS, 256, train=True),
    bench("mlp", "mlp", 30, [_MLP], "triton eager", 256),
    bench("mlp", "mlp backward", 30, [_MLP], "triton eager", 256, train=True),
    bench("models", "ViT-B", 90, [_VIT_B], _OURS, 256, 1),
    bench("models", "ViT-B training", 45, [_VIT_B], "triton sdpa timm", 128, train=True),
    bench("models", "ViT-B compiled", 100, [_VIT_B], "triton timm+compile:reduce-overhead", 256, 1),
    bench("models", "ViT-B training compiled", 100, [_VIT_B], "triton timm+compile", 128, train=True),
    bench("mlp", "mlp compiled", 45, [_MLP, f"{_MLP}:gelu_tanh"], "triton eager+compile cublaslt transformer-engine",
          256),
    bench("mlp", "mlp backward compiled", 30, [_MLP], "triton eager+compile", 256, train=True),
    bench("mlp", "matmul alone", 30, ["matmul:197x768x3072"], "triton eager", 256),
    bench("models", "ViT-S", 30, [_VIT_S], "triton-frozen sdpa timm", 128),
    bench("models", "ViT-L, also in FP8", 50, [_VIT_L], "triton-frozen triton-fp8 torchao-fp8+compile sdpa timm", 128),
    tests("tests that need a GPU", 80, "-m", "gpu", *_gpu_test_files()),
    tests("tests of the MLP, compiled", 80, "-k", _MLP_TESTS, *_MLP_FILES),
    tests("tests of attention, compiled", 60, "-k", _ATTENTION_TESTS, "tests/test_attention_kernel.py"),
    bench("models", "fused models", 40, [_VIT_B], "timm timm+fused transformers transformers+fused", 256),
    bench("attention", "FlexAttention", 40, [_ATTENTION, _LARGER[0]], "triton flex flash-attn xformers", 256),
    bench("attention", "larger attention", 40, _LARGER, _RIVALS, 32),
    bench("attention", "larger attention backward", 40, _LARGER, _RIVALS, 32, train=True),
    bench("attention", "other operators", 35, _OTHERS, "triton eager", 64),
    bench("attention", "other operators backward", 40, _OTHERS, "triton eager", 64, train=True),
    bench("attention", "small batches", 40, [_ATTENTION, _MLP], "triton sdpa eager", 1, 32),
    bench("attention", "small batches backward", 40, [_ATTENTION, _MLP], "triton eager", 1, 32, train=True),
    bench("attention", "long", 30, ["attention:4096x12x64"], _RIVALS, 4),
    bench("attention", "long backward", 30, ["attention:4096x12x64"], _RIVALS, 4, train=True),
)  # fmt: skip
PARTS = tuple(dict.fromkeys(job.part for job in JOBS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the jobs; returns the number of those that failed or gave an incorrect output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the records")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of these, separated by commas: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="only print the jobs and their time limits")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--parts must consist of {', '.join(PARTS)}, got {', '.join(unknown)}")
    chosen = [job for job in JOBS if job.part in parts]
    if options.dry_run:
        print(f"{'job':40s} limit", *(f"{job.name:40s} {job.limit_s:4.0f} s" for job in chosen), sep="\n")
        print(f"ends after {TOTAL_SECONDS} s; a job whose limit is longer than the time left is skipped")
        return 0
    if options.out is None:
        parser.error("--out must be a folder, got nothing")
    return _record(chosen, options.out)


def _record(jobs: Sequence[Job], out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "summary.json"
    machine = describe("cuda" if torch.cuda.is_available() else "cpu")
    record: dict[str, Any] = {"machine": machine, "total_seconds": TOTAL_SECONDS}
    names, saved = {job.name for job in jobs}, []
    with contextlib.suppress(OSError, ValueError, LookupError):
        before = json.loads(path.read_text())
        if all(before["machine"].get(name) == machine.get(name) for name in ("device", "commit")):
            saved = [row for row in before["rows"] if row["name"] not in names]
    worker = Worker(out)

    def note(found: list[Found], running: str | None) -> None:
        with file_aside(path) as aside:
            aside.write_text(json.dumps(record | {"running": running, "rows": [*saved, *found]}, indent=1) + "\n")
        print(f"{running} ..." if running else _line(found[-1]), flush=True)

    try:
        found = run_jobs(jobs, worker.run, time.monotonic, note)
    finally:
        worker.stop()
    return sum(row["outcome"].startswith(("failed", "INCORRECT")) for row in found)


def run_jobs(
    jobs: Sequence[Job],
    run: Callable[[Job], Found],
    now: Callable[[], float],
    note: Callable[[list[Found], str | None], None],
) -> list[Found]:
    """Runs the jobs in order, as long as their time limits fit; returns part, name, outcome and seconds of each.

    `note` is called with the results so far and the name of the job that begins, and after each job with None.
    """
    end = now() + TOTAL_SECONDS
    found: list[Found] = []
    for job in jobs:
        start = now()
        result: Found = {"part": job.part, "name": job.name, "outcome": NO_TIME}
        if end - start >= job.limit_s:
            note(found, job.name)
            result |= run(job)
            result["seconds"] = round(now() - start, 1)
        found.append(result)
        note(found, None)
    return found


def _line(row: Found) -> str:
    others = [f"{name} {value}" for name, value in row.items() if name not in ("part", "name", "outcome", "seconds")]
    return "\n    ".join([f"{row['name']}: {row['outcome']}", *others])


if __name__ == "__main__":
    sys.exit(main())

"""`make gpu-check`: the most important tests and measurements on a GPU, without network, within eight minutes.

    python -m vit_fast.benchmarks.gpu_check --out DIR [--parts attention,models]
    python -m vit_fast.benchmarks.gpu_check --dry-run

Requires torch, triton, numpy, pillow, matplotlib, pytest and hypothesis. Skips candidates of other missing libraries.

A job runs pytest, or some run configurations of `vit-fast bench`, in a separate process. The most important jobs come
first. A job is skipped if its time limit exceeds the time left. DIR/summary.json contains the outcome of each job, and
DIR/JOB the records. Run `vit-fast report DIR/*/*/` to write an HTML page of the records.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vit_fast.files import file_aside
from vit_fast.measure.clock import Protocol
from vit_fast.version import describe

from .configuration import make_configuration
from .records import RECORD_NAME, Journal, Row, read_record, to_json
from .report import markdown
from .runner import run

TOTAL_SECONDS = 480
ROOT = Path(__file__).resolve().parent.parent
SPARE_S = 5.0  # part of a job's limit, reserved to finish the last measurement
PROTOCOL = Protocol(repeats=50, seconds=0.3, least_repeats=10, warmup_repeats=3, warmup_seconds=0.1)
Found = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Arguments of one pytest run (`tests`), or of make_configuration (`runs`); the name is unique."""

    part: str
    name: str
    limit_s: float
    tests: tuple[str, ...] = ()
    runs: tuple[dict[str, Any], ...] = ()

    def command(self, folder: Path) -> list[str]:
        if not self.tests:
            code = f"from {__spec__.name} import measure; measure({self.name!r}, {str(folder)!r}, {time.time()})"
            return [sys.executable, "-c", code]
        # kernel_execution skips tests of exact fp32 matmuls
        options = ["-v", "-rf", "-o", "addopts=--import-mode=importlib", "--noconftest", "-p", "no:cacheprovider"]
        return [sys.executable, "-m", "pytest", *options, "-p", "kernel_execution", *self.tests]


def perform(job: Job, folder: Path, limit_s: float) -> Found:
    """Runs a job in a process, and prints its tables; returns the outcome. The output goes to log.txt in the folder."""
    shutil.rmtree(folder, ignore_errors=True)  # removes an earlier run
    folder.mkdir(parents=True)
    log, problem = folder / "log.txt", None
    folders = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    with log.open("wb") as file:
        child = subprocess.Popen(
            job.command(folder), cwd=ROOT, env=os.environ | {"PYTHONPATH": folders}, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            if status := child.wait(limit_s):
                problem = f"failed: exit status {status}; see {log.name}"
        except subprocess.TimeoutExpired:
            problem = f"failed: timed out after {limit_s:.0f} s; see {log.name}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # also ends its child processes
            child.wait()
    if job.tests:
        *_, last = ["", *log.read_text(errors="replace").splitlines()]
        return {"outcome": problem or "passed", "tests": last.strip("= ")}
    records = [read_record(path) for path in sorted(folder.glob("*/" + RECORD_NAME))]
    print(*map(markdown, records), sep="\n")
    return {"outcome": problem or outcome_of([row for record in records for row in record["rows"]])}


def outcome_of(rows: Sequence[Row]) -> str:
    if failed := [f"{row['model']} {row['candidate']}" for row in rows if row["status"] in ("incorrect", "failed")]:
        return f"INCORRECT or failed: {', '.join(failed)}"
    return "no time left" if all(row["status"] in ("skipped", "interrupted") for row in rows) else "measured"


def measure(name: str, folder: str, start: float) -> None:
    """Measures the runs of a job that began at time.time() = `start`, and writes their records into `folder`."""
    job = next(job for job in JOBS if job.name == name)
    for number, request in enumerate(job.runs):
        left_s = job.limit_s - SPARE_S - (time.time() - start)  # imports take seconds
        configuration = make_configuration(**request, protocol=PROTOCOL, time_budget_s=max(left_s, 1.0))
        journal = Journal.begin(Path(folder, str(number)), configuration.request, describe(configuration.device))
        journal.finish({RECORD_NAME: to_json(run(configuration, journal=journal))}, keep=False)


def bench(
    part: str, name: str, limit_s: float, models: Sequence[str], candidates: str, *batches: int, train: str = ""
) -> Job:
    """Returns a job that measures inference with `candidates` and training with `train`, in bf16."""
    request = {"models": list(models), "batch_sizes": list(batches), "dtypes": ["bf16"]}
    each = [(candidates, False), (train, True)]
    return Job(part, name, limit_s, (), tuple(request | {"candidates": c.split(), "train": t} for c, t in each if c))


_PARALLEL = ("-n", "8") if importlib.util.find_spec("xdist") else ()
# Some of the tests that usually run in Triton's interpreter; compiling all of them would take too long.
_FIRST = "nan_stays or (test_sizes and 17-192-264-LayerNorm-torch.bfloat16)"
_ATTENTION_TESTS = "every_layout or far_below or nan_stays or (every_shape and torch.float16)"
_MLP_TESTS = (
    "(test_sizes and LayerNorm and not float32) or (activations and bfloat16)"
    " or absent_parameters or layouts or statistics_of_input or empty or nan_stays"
    " or round_like_torch or a_block_matches_the_reference or passed_to_the_next_block or losses_of_32_steps"
)
_MLP_FILES = ("test_mlp_kernels.py", "test_mlp_operator.py", "test_fp8_block.py", "test_train.py")
_GPU_FILES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py") if "pytest.mark.gpu" in path.read_text()
)

_VIT_S, _VIT_B, _VIT_L = (f"vit_{size}_patch16_224" for size in ("small", "base", "large"))
_ATTENTION, _MLP = "attention:197x12x64", "mlp:197x768x3072"
# The most important first: ViT-L/16-384, ViT-H/14, So400m/14-384, B/16-512, SigLIP-B/16, ViT-S/16.
_LARGER = ("attention:577x16x64", "attention:257x16x80", "attention:729x16x72", "attention:1025x12x64")
_OTHERS = ("attention:196x12x64", "attention:197x6x64", "attention:197x16x64", "mlp:197x1024x4096", "mlp:197x384x1536")
_RIVALS = "triton sdpa-cudnn sdpa-flash sdpa-efficient"

# The most important first.
JOBS: tuple[Job, ...] = (
    Job("tests", "tests, first", 60, ("-k", _FIRST, "tests/test_attention_kernel.py", "tests/test_mlp_kernels.py")),
    bench("attention", "attention", 75, [_ATTENTION], _RIVALS, 256, train=_RIVALS),
    bench("mlp", "mlp", 65, [_MLP], "triton eager", 256, train="triton eager"),
    bench("models", "ViT-B", 95, [_VIT_B], "triton triton-frozen triton-graphs sdpa timm", 256, 1),
    bench("models", "ViT-B training", 50, [_VIT_B], "", 128, train="triton sdpa timm"),
    bench("models", "ViT-B compiled", 100, [_VIT_B], "triton timm+compile:reduce-overhead", 256, 1),
    bench("models", "ViT-B training compiled", 100, [_VIT_B], "", 128, train="triton timm+compile"),
    bench("mlp", "mlp compiled", 80, [_MLP, f"{_MLP}:gelu_tanh"], "triton eager+compile cublaslt",
          256, train="triton eager+compile"),
    bench("models", "ViT-S", 35, [_VIT_S], "triton-frozen sdpa timm", 128),
    bench("models", "ViT-L, also in FP8", 55, [_VIT_L], "triton-frozen triton-fp8 torchao-fp8+compile sdpa timm", 128),
    Job("tests", "tests that need a GPU", 80, (*_PARALLEL, "-m", "gpu", *(_GPU_FILES or ["tests"]))),
    Job("tests", "tests of the MLP, compiled", 80, (*_PARALLEL, "-k", _MLP_TESTS, *map("tests/{}".format, _MLP_FILES))),
    Job("tests", "tests of attention, compiled", 60,
        (*_PARALLEL, "-k", _ATTENTION_TESTS, "tests/test_attention_kernel.py")),
    bench("models", "fused models", 45, [_VIT_B], "timm timm+fused transformers transformers+fused", 256),
    bench("attention", "FlexAttention", 45, [_ATTENTION, _LARGER[0]], "triton flex flash-attn", 256),
    bench("attention", "larger attention", 75, _LARGER, _RIVALS, 32, train=_RIVALS),
    bench("attention", "other operators", 75, _OTHERS, "triton eager", 64, train="triton eager"),
    bench("attention", "small batches", 75, [_ATTENTION, _MLP], "triton sdpa eager", 1, 32, train="triton eager"),
    bench("attention", "long", 60, ["attention:4096x12x64"], _RIVALS, 4, train=_RIVALS),
)  # fmt: skip
PARTS = tuple(dict.fromkeys(job.part for job in JOBS))


def run_jobs(jobs: Sequence[Job], out: Path) -> list[Found]:
    """Runs the jobs whose time limits fit, in order; returns part, name, outcome and seconds of each job."""
    out.mkdir(parents=True, exist_ok=True)
    path, found, end = out / "summary.json", [], time.monotonic() + TOTAL_SECONDS
    machine = describe("cuda" if torch.cuda.is_available() else "cpu")
    for job in jobs:
        start = time.monotonic()
        result: Found = {"part": job.part, "name": job.name, "outcome": "no time left"}
        if not torch.cuda.is_available():
            result["outcome"] = "not measured: no GPU"
        elif end - start >= job.limit_s:
            print(f"{job.name} ...", flush=True)
            result |= perform(job, out / re.sub(r"[^\w-]+", "_", job.name), job.limit_s)
            result["seconds"] = round(time.monotonic() - start, 1)
        found.append(result)
        with file_aside(path) as aside:
            record = {"machine": machine, "total_seconds": TOTAL_SECONDS, "rows": found}
            aside.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{job.name}: {result['outcome']} {result.get('tests', '')}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the jobs; returns the number of jobs that failed or gave an incorrect output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the records")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, comma-separated (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="only print the jobs and their time limits")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--parts must consist of {', '.join(PARTS)}, got {', '.join(unknown)}")
    chosen = [job for job in JOBS if job.part in parts]
    if options.dry_run:
        print(f"{'job':40s} limit", *(f"{job.name:40s} {job.limit_s:4.0f} s" for job in chosen), sep="\n")
        print(f"ends after {TOTAL_SECONDS} s; a job is skipped if its limit exceeds the time left")
        return 0
    if options.out is None:
        parser.error("--out FOLDER must be given")
    return sum(row["outcome"].startswith(("failed", "INCORRECT")) for row in run_jobs(chosen, options.out))


if __name__ == "__main__":
    sys.exit(main())

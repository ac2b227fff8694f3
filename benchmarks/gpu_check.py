"""`make gpu-check`: everything worth measuring on a machine with a GPU and no network, in eight minutes.

    python -m vit_fast.benchmarks.gpu_check --out DIR [--parts attention,models]
    python -m vit_fast.benchmarks.gpu_check --dry-run

Needs torch, triton, numpy, pillow and pytest; libraries that are not installed are named. The jobs, tests and run
configurations of `vit-fast bench`, run in a fixed order, the most important ones first. Each has a time limit and is
skipped if less time is left. A job that fails, hangs or loses the GPU does not affect the others: its process is
ended, and the journal keeps its rows. Compiled kernels are shared between the jobs. DIR/summary.json is written after
each job; DIR/JOB holds its record, and `vit-fast report DIR/*/` shows them. Jobs of other parts that DIR holds already,
of this device and commit, stay.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vit_fast.files import file_aside

from .gpu_check_worker import NO_TIME, ROOT, Found, Job, Worker
from .machine import describe

TOTAL_SECONDS = 480


def tests(name: str, limit_s: float, *arguments: str, parallel: bool = True) -> Job:
    """Returns a job that runs tests on the GPU."""
    processes = ("-n", "8") if parallel and importlib.util.find_spec("xdist") else ()
    return Job("tests", name, limit_s, tests=(*processes, *arguments))


def bench(
    part: str, name: str, limit_s: float, models: Sequence[str], subjects: str, *batches: int, train: bool = False
) -> Job:
    """Returns a job that measures in bf16."""
    request = {"models": list(models), "subjects": subjects.split(), "batch_sizes": list(batches), "dtypes": ["bf16"]}
    return Job(part, name, limit_s, request | {"train": train})


# A part of the interpreter's tests: all of them would spend the time on compiling.
_FIRST = "nan_stays or test_row_counts[197-torch.bfloat16]"
_ATTENTION_TESTS = (
    "every_forward_path or every_layout or far_below or nan_stays or empty_batch or different_number"
    " or (every_head_size and float16)"
)
_MLP_TESTS = (
    "(row_counts and not float32) or (activations and bfloat16) or (residual_and_layer_scale and float16)"
    " or absent_parameters or layouts or handed_in or no_rows or nan_stays"
    " or (model_against_fp64 and bfloat16) or (test_training_follows_eager and bf16)"
    " or kernels_round or (a_block_is_its_definition and bfloat16) or what_a_block_hands_on or kernels_take_the_same"
)
_MLP_FILES = (
    *(f"tests/test_mlp_{name}.py" for name in ("kernels", "operator", "block")), "tests/test_fp8_block.py",
    "tests/test_train.py",
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
        parser.error(f"--parts has {', '.join(unknown)}: expected {', '.join(PARTS)}")
    chosen = [job for job in JOBS if job.part in parts]
    if options.dry_run:
        print(job_table(chosen))
        return 0
    if options.out is None:
        parser.error("--out is missing: expected a folder")
    return _record(chosen, options.out)


def _record(jobs: Sequence[Job], out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "summary.json"
    machine = describe("cuda" if torch.cuda.is_available() else "cpu")
    record: dict[str, Any] = {"machine": machine, "total_seconds": TOTAL_SECONDS}
    names = {job.name for job in jobs}
    kept = [row for row in _rows_before(path, machine) if row["name"] not in names]
    worker = Worker(out)

    def note(found: list[Found], running: str | None) -> None:
        with file_aside(path) as aside:
            aside.write_text(json.dumps(record | {"running": running, "rows": [*kept, *found]}, indent=1) + "\n")
        print(f"{running} ..." if running else _line(found[-1]), flush=True)

    try:
        found = run_jobs(jobs, worker.run, time.monotonic, note)
    finally:
        worker.stop()
    return sum(row["outcome"].startswith(("failed", "WRONG")) for row in found)


def _rows_before(path: Path, machine: dict[str, Any]) -> list[Found]:
    """Reads the rows of an earlier run of this commit on this device, if there is one."""
    try:
        record = json.loads(path.read_text())
        same = all(record["machine"].get(name) == machine.get(name) for name in ("device", "commit"))
        return list(record["rows"]) if same else []
    except (OSError, ValueError, LookupError):
        return []


def run_jobs(
    jobs: Sequence[Job],
    run: Callable[[Job], Found],
    now: Callable[[], float],
    note: Callable[[list[Found], str | None], None],
) -> list[Found]:
    """Runs the jobs in order, as long as their time limits fit.

    Args:
        jobs: In order.
        run: Runs one; returns its "outcome" and figures.
        now: Returns the time in seconds.
        note: Called with the results so far and the name of the job that begins, and after each job with None.
    Returns:
        The results, with part, name, outcome and seconds.
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


def job_table(jobs: Sequence[Job]) -> str:
    """Returns the jobs in their order, with their time limits."""
    lines = [f"{job.name:40s} {job.limit_s:4.0f} s" for job in jobs]
    total = f"ends after {TOTAL_SECONDS} s; a job whose limit is longer than the time left is skipped"
    return "\n".join([f"{'job':40s} limit", *lines, total])


def _line(row: Found) -> str:
    others = [f"{name} {value}" for name, value in row.items() if name not in ("part", "name", "outcome", "seconds")]
    return "\n    ".join([f"{row['name']}: {row['outcome']}", *others])


if __name__ == "__main__":
    sys.exit(main())

"""`make gpu-check`: everything worth measuring on a machine with a GPU and no network, in eight minutes.

    python -m vit_fast.benchmarks.gpu_check --out DIR [--parts attention,models]
    python -m vit_fast.benchmarks.gpu_check --dry-run

Needs torch, triton, numpy, pillow and pytest; libraries that are not installed are named. One list of plans of
`vit-fast bench` and of tests, the important ones first. Each has a deadline of its own and runs in a process that can
be ended: one that fails, hangs or loses the GPU costs the others nothing, and what a job had found by then stays in
its journal. DIR/summary.json is written after each; DIR/JOB holds a job's record, and `vit-fast report DIR/*/` shows
them. Jobs of other parts that DIR holds already, of this device and commit, stay.
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
# A job may take this many times what is assumed of it, where that leaves the important ones their time.
PATIENCE = 3
LEAST_LIMIT_S = 30  # what was assumed to find everything compiled may have to start a process and compile
START_S = 8.0  # assumed: a process with torch and a CUDA context
# Assumed, from offline compilation on two cores (0.5 to 2 s a kernel): seconds to compile one Triton kernel.
KERNEL_S = 1.0
# Compiling takes nearly all of the time of small cases, and has as many processes as there are.
_PROCESSES = 8 if importlib.util.find_spec("xdist") else 1


def tests(name: str, arguments: Sequence[str], kernels: int, run_s: float, *, important: bool = False) -> Job:
    """Tests that elsewhere the interpreter runs, or nobody; `kernels` are theirs, counted from their launches."""
    parallel = () if important else ("-n", str(_PROCESSES)) if _PROCESSES > 1 else ()
    compile_s = START_S + kernels * KERNEL_S / (1 if important else _PROCESSES)
    return Job("tests", name, compile_s, run_s, tests=(*parallel, *arguments), important=important)


def bench(
    part: str, name: str, models: Sequence[str], subjects: str, batch: int | Sequence[int], *, compile_s: float,
    train: bool = False, important: bool = False, call_s: float = 0.25, check_s: float = 0.3,
) -> Job:  # fmt: skip
    """A plan of `vit-fast bench` in bf16.

    Of every contest 0.7 s go to its ceilings and its definition in fp64, and to every subject check_s and
    call_s, the second twice to the best of them; of whole models another half to its energy.
    """
    batches = [batch] if isinstance(batch, int) else list(batch)
    labels = subjects.split()
    contests = len(models) * len(batches)
    energy_s = 0.5 if part == "models" else 0.0
    run_s = contests * (0.7 + len(labels) * (call_s + check_s + energy_s) + call_s)
    request = {"models": list(models), "subjects": labels, "batch_sizes": batches, "dtypes": ["bf16"], "train": train}
    return Job(part, name, compile_s, run_s, request, important=important)


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
    """Those that hold a test which needs a GPU."""
    marked = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    return [str(path.relative_to(ROOT)) for path in marked] or ["tests"]


_VIT_S, _VIT_B, _VIT_L = (f"vit_{size}_patch16_224" for size in ("small", "base", "large"))
_ATTENTION, _MLP = "attention:197x12x64", "mlp:197x768x3072"
# By how much each is worth should time run out: ViT-L/16-384, ViT-H/14, So400m/14-384, B/16-512, SigLIP-B/16, ViT-S/16.
_LARGER = ("attention:577x16x64", "attention:257x16x80", "attention:729x16x72", "attention:1025x12x64")
_OTHERS = ("attention:196x12x64", "attention:197x6x64", "attention:197x16x64", "mlp:197x1024x4096", "mlp:197x384x1536")
_RIVALS = "triton sdpa-cudnn sdpa-flash sdpa-efficient"
_OURS = "triton triton-frozen triton-graphs sdpa timm"

JOBS: tuple[Job, ...] = (
    tests("tests, first", ("-k", _FIRST, "tests/test_attention_kernel.py", "tests/test_mlp_kernels.py"), 13, 2.0,
          important=True),
    bench("attention", "attention", [_ATTENTION], _RIVALS, 256, compile_s=START_S + 1, important=True),
    bench("attention", "attention backward", [_ATTENTION], _RIVALS, 256, compile_s=2, train=True, important=True),
    bench("mlp", "mlp", [_MLP], "triton eager", 256, compile_s=4, important=True),
    bench("mlp", "mlp backward", [_MLP], "triton eager", 256, compile_s=6, train=True, important=True),
    bench("models", "ViT-B", [_VIT_B], _OURS, (256, 1), compile_s=9, call_s=0.6, check_s=1.0, important=True),
    bench("models", "ViT-B training", [_VIT_B], "triton sdpa timm", 128, compile_s=4, train=True, call_s=1.5,
          check_s=1.0, important=True),
    bench("models", "ViT-B compiled", [_VIT_B], "triton timm+compile:reduce-overhead", (256, 1),
          compile_s=36, call_s=0.6, check_s=1.0),
    bench("models", "ViT-B training compiled", [_VIT_B], "triton timm+compile", 128, compile_s=40, train=True,
          call_s=1.5, check_s=1.0),
    bench("mlp", "mlp compiled", [_MLP, f"{_MLP}:gelu_tanh"], "triton eager+compile cublaslt transformer-engine", 256,
          compile_s=9),
    bench("mlp", "mlp backward compiled", [_MLP], "triton eager+compile", 256, compile_s=4, train=True),
    bench("mlp", "matmul alone", ["matmul:197x768x3072"], "triton eager", 256, compile_s=1),
    bench("models", "ViT-S", [_VIT_S], "triton-frozen sdpa timm", 128, compile_s=3, call_s=0.6, check_s=1.0),
    bench("models", "ViT-L, also in FP8", [_VIT_L], "triton-frozen triton-fp8 torchao-fp8+compile sdpa timm", 128,
          compile_s=5, call_s=0.6, check_s=1.0),
    tests("tests that need a GPU", ("-m", "gpu", *_gpu_test_files()), 24, 20.0),
    tests("tests of the MLP, compiled", ("-k", _MLP_TESTS, *_MLP_FILES), 187, 5.0),
    tests("tests of attention, compiled", ("-k", _ATTENTION_TESTS, "tests/test_attention_kernel.py"), 110, 5.0),
    bench("models", "fused models", [_VIT_B], "timm timm+fused transformers transformers+fused", 256, compile_s=5,
          call_s=0.6, check_s=1.0),
    bench("attention", "FlexAttention", [_ATTENTION, _LARGER[0]], "triton flex flash-attn xformers", 256, compile_s=8),
    bench("attention", "larger attention", _LARGER, _RIVALS, 32, compile_s=4),
    bench("attention", "larger attention backward", _LARGER, _RIVALS, 32, compile_s=6, train=True),
    bench("attention", "other operators", _OTHERS, "triton eager", 64, compile_s=2),
    bench("attention", "other operators backward", _OTHERS, "triton eager", 64, compile_s=8, train=True),
    bench("attention", "small batches", [_ATTENTION, _MLP], "triton sdpa eager", (1, 32), compile_s=8),
    bench("attention", "small batches backward", [_ATTENTION, _MLP], "triton eager", (1, 32), compile_s=6, train=True),
    bench("attention", "long", ["attention:4096x12x64"], _RIVALS, 4, compile_s=1),
    bench("attention", "long backward", ["attention:4096x12x64"], _RIVALS, 4, compile_s=2, train=True),
)  # fmt: skip
PARTS = tuple(dict.fromkeys(job.part for job in JOBS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all jobs; the exit status is the number of those that failed or hold a wrong answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the records")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of these, separated by commas: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="only print the jobs and what is assumed of each")
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
    """The rows of an earlier run of this commit on this device; none where there was none or it cannot be read."""
    try:
        record = json.loads(path.read_text())
        same = all(record["machine"].get(name) == machine.get(name) for name in ("device", "commit"))
        return list(record["rows"]) if same else []
    except (OSError, ValueError, LookupError):
        return []


def run_jobs(
    jobs: Sequence[Job],
    run: Callable[[Job, float], Found],
    now: Callable[[], float],
    note: Callable[[list[Found], str | None], None],
) -> list[Found]:
    """Every job in its turn, or why not.

    Args:
        jobs: In order.
        run: Runs one in at most so many seconds; gives its "outcome" and what else was found.
        now: The time in seconds.
        note: Told what was found so far and the name of the job that begins, and after each with None.
    Returns:
        What was found of each job, with its name, part, outcome and seconds.
    """
    end = now() + TOTAL_SECONDS
    found: list[Found] = []
    for number, job in enumerate(jobs):
        kept_back = sum(later.seconds for later in jobs[number + 1 :] if later.important)
        start = now()
        limit = min(max(PATIENCE * job.seconds, LEAST_LIMIT_S), end - start - kept_back)
        result: Found = {"part": job.part, "name": job.name, "outcome": NO_TIME}
        if limit >= job.seconds:
            note(found, job.name)
            result |= run(job, limit)
            result["seconds"] = round(now() - start, 1)
        found.append(result)
        note(found, None)
    return found


def job_table(jobs: Sequence[Job]) -> str:
    """Returns a table of the jobs: assumed seconds, when each begins, and the sum."""
    lines = [f"{'job (* important)':40s} {'begins':>6s} {'compile':>7s} {'run':>6s}  s, assumed"]
    begins = 0.0
    for job in jobs:
        name = f"{'*' if job.important else ' '} {job.name}"
        lines.append(f"{name:40s} {begins:6.0f} {job.compile_s:7.1f} {job.run_s:6.1f}")
        begins += job.seconds
    return "\n".join([*lines, f"sum {begins:.0f} s of {TOTAL_SECONDS} s"])


def _line(row: Found) -> str:
    """A job's outcome, and its figures below."""
    others = [f"{name} {value}" for name, value in row.items() if name not in ("part", "name", "outcome", "seconds")]
    return "\n    ".join([f"{row['name']}: {row['outcome']}", *others])


if __name__ == "__main__":
    sys.exit(main())

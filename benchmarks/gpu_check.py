"""`make gpu-check`: everything worth measuring on a machine with a GPU and no network, in under eight minutes.

    python -m vit_fast.benchmarks.gpu_check --out DIR

Needs torch, triton and pytest, nothing else. Every part runs in a process of its own with a time limit and writes its
rows as it gets them, so a part that fails, hangs or loses the GPU costs the others nothing. DIR then holds one JSON and
one log for each part and `summary.json`; a short table is printed last. Without a GPU the parts do what a CPU can and
say "not measured" for the rest.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .machine import describe

TOTAL_SECONDS = 450
NOT_MEASURED = "not measured: "
NO_GPU = NOT_MEASURED + "no GPU"
ROOT = Path(__file__).resolve().parent.parent
_PYTEST = (
    sys.executable, "-m", "pytest", "-q", "-rf", "-o", "addopts=--import-mode=importlib", "-o", "pythonpath=tests",
    "-p", "no:cacheprovider", "--noconftest",
)  # fmt: skip
_GPU_TESTS = tuple(f"tests/test_{name}.py" for name in ("attention_kernel", "mlp_memory", "weight_changes", "runtime"))
# A part of the interpreter's tests, compiled: all of them would spend the time on compiling.
_COMPILED = (
    "every_forward_path or every_layout or far_below or nan_stays or empty_batch or different_number"
    " or (every_head_size and float16)"
)


@dataclass(frozen=True)
class Part:
    """One part of the check.

    Args:
        name: What its files are called.
        command: What runs; {out} stands for its JSON file, {folder} for a new folder, {seconds} for its time.
        seconds: Its time limit; what earlier parts did not use is not added.
        needs_gpu: Whether a machine without one has nothing to run here.
        packages: What it imports beyond torch, triton and pytest; without one of them it is not run.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    needs_gpu: bool = False
    packages: tuple[str, ...] = ()

    def filled(self, out: Path, seconds: float) -> list[str]:
        values = {"{out}": str(out), "{folder}": str(out.with_suffix("")), "{seconds}": str(int(seconds))}
        return [values.get(word, word) for word in self.command]


def suite(module: str, seconds: int) -> Part:
    """A suite of this package: `python -m vit_fast.benchmarks.MODULE --out FILE --seconds S`."""
    command = (sys.executable, "-m", f"vit_fast.benchmarks.{module}", "--out", "{out}", "--seconds", "{seconds}")
    return Part(module.removeprefix("gpu_check_"), command, seconds)


# The drop-in: other libraries' models before and after vit_fast.fuse; the record is in the form of `vit-fast bench`.
_FUSED_MODELS = (
    sys.executable, "-m", "vit_fast.cli", "bench", "--models", "vit_base_patch16_224", "--batch-sizes", "256",
    "--dtypes", "bf16", "--subjects", "timm,timm+compile,timm+fused,transformers,transformers+fused",
    "--time-budget", "{seconds}", "--out", "{folder}",
)  # fmt: skip
_BENCH_PACKAGES = ("typer", "rich", "numpy", "PIL", "matplotlib", "timm", "transformers")

PARTS: tuple[Part, ...] = (
    Part("gpu_tests", (*_PYTEST, "-m", "gpu", *_GPU_TESTS), 95, needs_gpu=True),
    suite("gpu_check_attention", 100),
    suite("gpu_check_mlp", 120),
    Part("compiled_tests", (*_PYTEST, "-k", _COMPILED, "tests/test_attention_kernel.py"), 75, needs_gpu=True),
    Part("fused_models", _FUSED_MODELS, 60, needs_gpu=True, packages=_BENCH_PACKAGES),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; the exit status is the number of parts that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the records")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + TOTAL_SECONDS
    summary: dict[str, Any] = {"machine": _describe(), "parts": {}}
    for part in PARTS:
        left = min(part.seconds, end - time.monotonic())
        summary["parts"][part.name] = run_part(part, out, left)
        write_json(out / "summary.json", summary)
        print(f"{part.name}: {summary['parts'][part.name]['outcome']}", flush=True)
    print(table(summary))
    outcomes = [result["outcome"] for result in summary["parts"].values()]
    return sum(outcome != "passed" and not outcome.startswith(NOT_MEASURED) for outcome in outcomes)


def _describe() -> dict[str, Any]:
    try:
        return describe("cuda" if torch.cuda.is_available() else "cpu")
    except Exception as error:  # the description is not worth the measurements
        return {"device": "unknown", "error": f"{type(error).__name__}: {error}"}


def run_part(part: Part, out: Path, seconds: float) -> dict[str, Any]:
    """Run one part in its own process and read what it wrote; never raises for what the part does."""
    if part.needs_gpu and not torch.cuda.is_available():
        return {"outcome": NO_GPU, "seconds": 0.0, "rows": []}
    absent = [package for package in part.packages if importlib.util.find_spec(package) is None]
    if absent:
        reason = f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed"
        return {"outcome": NOT_MEASURED + reason, "seconds": 0.0, "rows": []}
    if seconds <= 5:
        return {"outcome": "failed: no time left", "seconds": 0.0, "rows": []}
    record, log = out / f"{part.name}.json", out / f"{part.name}.log"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    start = time.monotonic()
    with log.open("w") as stream:
        try:
            # a suite ends itself; the limit is for one that hangs
            run = subprocess.run(
                part.filled(record, max(seconds - 15, 5)),
                stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, timeout=seconds, check=False,
            )  # fmt: skip
            outcome = "passed" if run.returncode == 0 else f"failed: exit status {run.returncode}"
        except subprocess.TimeoutExpired:
            outcome = f"failed: more than {seconds:.0f} s"
        except OSError as error:
            outcome = f"failed: {error}"
    result: dict[str, Any] = {"outcome": outcome, "seconds": round(time.monotonic() - start, 1), "rows": []}
    try:
        result |= json.loads(record.read_text())
    except FileNotFoundError:
        result["last_line"] = _last_line(log)
    except ValueError as error:
        result["outcome"] = f"failed: {record.name} cannot be read: {error}"
    return result


def write_json(path: Path, value: object) -> None:
    """Write beside and rename: a reader never sees half a file."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(value, indent=1) + "\n")
    beside.replace(path)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-200:] if lines else ""


def table(summary: dict[str, Any]) -> str:
    """The short table: one line a row of a suite, one line a part that has none."""
    lines = ["", f"device: {summary['machine'].get('device')}"]
    for name, part in summary["parts"].items():
        ceilings = part.get("ceilings")
        lines.append(f"{name}: {part['outcome']} ({part['seconds']} s) {part.get('last_line', '')}".rstrip())
        if ceilings:
            matmul = ", ".join(f"{dtype} {value:.0f}" for dtype, value in ceilings["matmul_TFLOP_per_s"].items())
            lines.append(f"  copy {ceilings['copy_GB_per_s']:.0f} GB/s, matmul {matmul} TFLOP/s")
        lines += [f"  {_row_line(row)}" for row in part["rows"]]
    return "\n".join(lines)


def _row_line(row: dict[str, Any]) -> str:
    head = f"{row['name']:44s}"
    if row.get("error"):
        return f"{head} failed: {row['error'][:90]}"
    if not row.get("correct"):
        return f"{head} WRONG: {row.get('correctness', '')}"
    if row.get("ms") is None:
        return f"{head} right, not measured"
    peer = f"{row['ratio']:.2f}x {row['best_peer']}" if row.get("ratio") else "no peer"
    return (
        f"{head} {row['ms']:.3f} ms {row['TFLOP_per_s']:6.0f} TFLOP/s {row['GB_per_s']:6.0f} GB/s "
        f"{100 * row['share_of_floor']:3.0f} % of floor, {peer}"
    )


if __name__ == "__main__":
    sys.exit(main())

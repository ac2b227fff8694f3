"""`make gpu-check`: everything worth measuring on a machine with a GPU and no network, in eight minutes.

    python -m vit_fast.benchmarks.gpu_check --out DIR [--parts attention,models]
    python -m vit_fast.benchmarks.gpu_check --dry-run

Needs torch, triton and pytest, nothing else. One list of rows, the important ones first: ceilings, tests of the
compiled kernels, the kernels and whole models against their peers. Each row has a deadline of its own and is run in a
process that can be ended, so one that fails, hangs or loses the GPU costs the others nothing; the record
DIR/summary.json is written after each, and names every row: what did not fit says "no time left". Rows of other parts
that DIR holds already, of this device and commit, stay. Without a GPU the kernels run in Triton's interpreter on small
shapes, and the rest says "not measured".
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import gpu_check_models as models
from . import gpu_check_operators as operators
from .gpu_check_rows import KERNEL_S, NO_TIME, Cost, Found, Row, ceilings
from .gpu_check_worker import Worker
from .machine import describe

TOTAL_SECONDS = 480
# A row may take this many times what is assumed of it, where that leaves the important ones their time.
PATIENCE = 3
LEAST_LIMIT_S = 30  # a row that was assumed to find everything compiled may have to start a process and compile
NOT_MEASURED = "not measured: "
ROOT = Path(__file__).resolve().parent.parent
_PYTEST = (
    sys.executable, "-m", "pytest", "-v", "-rf", "-o", "addopts=--import-mode=importlib", "-o", "pythonpath=tests",
    "-p", "no:cacheprovider", "--noconftest",
)  # fmt: skip
# Compiling takes nearly all of the time of small cases, and has as many processes as there are.
_PROCESSES = 8 if importlib.util.find_spec("xdist") else 1
_START_S = 8.0  # assumed: a process with torch and a CUDA context


def tests(name: str, arguments: Sequence[str], kernels: int, run_s: float, processes: int = 1) -> Row:
    """Tests that elsewhere the interpreter runs, or nobody; `kernels` are theirs, counted from their launches."""
    cost = Cost(_START_S + kernels * KERNEL_S / processes, run_s, 0.0)
    parallel = ("-n", str(processes)) if processes > 1 else ()
    return Row("tests", name, cost, command=(*_PYTEST, *parallel, *arguments), important=name == "tests, first")


_FIRST = "nan_stays or test_row_counts[197-torch.bfloat16]"
# A part of the interpreter's tests: all of them would spend the time on compiling.
_ATTENTION = (
    "every_forward_path or every_layout or far_below or nan_stays or empty_batch or different_number"
    " or (every_head_size and float16)"
)
_MLP = (
    "(row_counts and not float32) or (activations and bfloat16) or (residual_and_layer_scale and float16)"
    " or absent_parameters or linear_layers or layouts or handed_in or no_rows or nan_stays"
    " or (model_against_fp64 and bfloat16) or (test_training_follows_eager and bf16)"
)
_MLP_FILES = tuple(f"tests/test_mlp_{name}.py" for name in ("kernels", "operator", "block"))


def _gpu_test_files() -> list[str]:
    """Those that hold a test which needs a GPU."""
    marked = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    return [str(path.relative_to(ROOT)) for path in marked] or ["tests"]


# The drop-in: other libraries' models before and after vit_fast.fuse; the record is in the form of `vit-fast bench`.
_FUSED_MODELS = (
    sys.executable, "-m", "vit_fast.cli", "bench", "--models", "vit_base_patch16_224", "--batch-sizes", "256",
    "--dtypes", "bf16", "--subjects", "timm,timm+fused,transformers,transformers+fused",
    "--time-budget", "{seconds}", "--out", "{folder}",
)  # fmt: skip
_BENCH_PACKAGES = ("typer", "rich", "numpy", "PIL", "matplotlib", "timm", "transformers")
_VIT_S, _VIT_B, _VIT_L = (f"vit_{size}_patch16_224" for size in ("small", "base", "large"))

ROWS: tuple[Row, ...] = (
    Row("machine", "ceilings", Cost(_START_S, 0.0, 3.0), ceilings, important=True),
    tests("tests, first", ("-k", _FIRST, "tests/test_attention_kernel.py", "tests/test_mlp_kernels.py"), 13, 2.0),
    *operators.rows(operators.ATTENTION, 1, 2, important=True),
    *operators.rows(operators.MLP, 4, 6, important=True),
    models.row(_VIT_B, 256, kernels=3, important=True),
    models.row(_VIT_B, 1, kernels=6, important=True),
    models.row(_VIT_B, 128, kernels=4, training=True, important=True),
    models.row(_VIT_B, 256, kernels=0, compiled=True),
    models.row(_VIT_B, 1, kernels=0, compiled=True),
    models.row(_VIT_B, 128, kernels=0, training=True, compiled=True),
    *operators.rows(operators.MLP, compiled=True),
    operators.matmul_row(operators.MLP),
    models.row(_VIT_S, 256, kernels=3),
    models.row(_VIT_L, 128, kernels=2),
    tests("tests that need a GPU", ("-m", "gpu", *_gpu_test_files()), 24, 20.0),
    tests("tests of the MLP, compiled", ("-k", _MLP, *_MLP_FILES), 157, 5.0, _PROCESSES),
    tests("tests of attention, compiled", ("-k", _ATTENTION, "tests/test_attention_kernel.py"), 110, 5.0, _PROCESSES),
    Row("models", "fused models", Cost(20.0, 10.0, 10.0), command=_FUSED_MODELS, packages=_BENCH_PACKAGES),
    *operators.rows(operators.LARGE_ATTENTION, 1, 2),
    *operators.rows(operators.ATTENTION, compiled=True),
    *(row for task, forward, backward in operators.OTHERS for row in operators.rows(task, forward, backward)),
    *operators.rows(operators.LARGE_ATTENTION, compiled=True),
    *(row for task in operators.SMALL for row in operators.rows(task, on_gpu=False)),
)
PARTS = tuple(dict.fromkeys(row.part for row in ROWS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all rows; the exit status is the number of those that failed or are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the records")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of these, separated by commas: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="only print the rows and what is assumed of each")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--parts has {', '.join(unknown)}: accepted are {', '.join(PARTS)}")
    chosen = [row for row in ROWS if row.part in (*parts, "machine")]
    if options.dry_run:
        print(plan_table([row for row in chosen if row.on_gpu]))
        return 0
    if options.out is None:
        parser.error("--out is missing: accepted is a folder")
    return _record(chosen, options.out)


def _record(rows: Sequence[Row], out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "summary.json"
    record: dict[str, Any] = {"machine": _describe(), "total_seconds": TOTAL_SECONDS}
    names = {row.name for row in rows}
    kept = [row for row in _rows_before(path, record["machine"]) if row["name"] not in names]
    runner = Runner(out)

    def note(found: list[Found], running: str | None) -> None:
        write_json(path, record | {"ceilings": runner.ceilings, "running": running, "rows": [*kept, *found]})
        print(f"{running} ..." if running else f"{found[-1]['name']}: {found[-1]['outcome']}", flush=True)

    try:
        found = run_rows(rows, runner.run, time.monotonic, note)
    finally:
        runner.worker.stop()
    print(table(json.loads(path.read_text())))
    return sum(row["outcome"].startswith(("failed", "WRONG")) for row in found)


def _describe() -> dict[str, Any]:
    try:
        return describe("cuda" if torch.cuda.is_available() else "cpu")
    except Exception as error:  # the description is not worth the measurements
        return {"device": "unknown", "error": f"{type(error).__name__}: {error}"}


def _rows_before(path: Path, machine: dict[str, Any]) -> list[Found]:
    """The rows of an earlier run of this commit on this device; none where there was none or it cannot be read."""
    try:
        record = json.loads(path.read_text())
        same = all(record["machine"].get(name) == machine.get(name) for name in ("device", "commit"))
        return list(record["rows"]) if same else []
    except (OSError, ValueError, LookupError):
        return []


def run_rows(
    rows: Sequence[Row],
    run: Callable[[Row, float], Found],
    now: Callable[[], float],
    note: Callable[[list[Found], str | None], None],
) -> list[Found]:
    """Every row in its turn, or why not.

    Args:
        rows: In order.
        run: Runs one in at most so many seconds; gives what was found, its "error", or a finished "outcome".
        now: The time in seconds.
        note: Told the rows so far and the name of the one that begins, and after each with None.
    Returns:
        What was found of each row, with its name, part, outcome and seconds.
    """
    end = now() + TOTAL_SECONDS
    found: list[Found] = []
    for number, row in enumerate(rows):
        kept_back = sum(later.cost.total for later in rows[number + 1 :] if later.important)
        patience, start = max(PATIENCE * row.cost.total, LEAST_LIMIT_S), now()
        limit = min(patience, end - start - kept_back)
        result: Found = {"part": row.part, "name": row.name, "outcome": NO_TIME}
        if limit >= row.cost.total:
            note(found, row.name)
            result |= run(row, limit)
            seconds = now() - start
            if result["outcome"] == NO_TIME:
                cut = limit < patience and seconds >= limit
                result["outcome"] = f"{NO_TIME}: ended after {seconds:.0f} s" if cut else _outcome(result)
            result["seconds"] = round(seconds, 1)
        found.append(result)
        note(found, None)
    return found


def _outcome(row: Found) -> str:
    if row.get("error"):
        return f"failed: {row['error']}"
    if not row.get("correct"):
        return f"WRONG: {row.get('correctness')}"
    return "measured" if row.get("ms") is not None else "right, not measured"


class Runner:
    """Runs one row: in the process that fills rows, or its command; nothing that the row does raises.

    Args:
        out: The folder of the records; rows leave their logs there.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.worker = Worker(out / "rows.log")
        self.ceilings: dict[str, Any] | None = None

    def run(self, row: Row, seconds: float) -> Found:
        if row.on_gpu != torch.cuda.is_available():
            return {"outcome": NOT_MEASURED + ("no GPU" if row.on_gpu else "for machines without a GPU")}
        if absent := [package for package in row.packages if importlib.util.find_spec(package) is None]:
            return {"outcome": f"{NOT_MEASURED}{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed"}
        if row.fill is None:
            return self._command(row, seconds)
        found = self.worker.fill(row, self.ceilings, seconds)
        self.ceilings = found.pop("ceilings", None) or self.ceilings
        return found

    def _command(self, row: Row, seconds: float) -> Found:
        name = row.name.replace(",", "").replace(" ", "_")
        log = self.out / f"{name}.log"
        for folder in (self.out / name, self.out / f"{name}.partial"):  # of an earlier run, finished or ended
            shutil.rmtree(folder, ignore_errors=True)
        # a command that knows its time ends itself; the limit is for one that hangs
        values = {"{folder}": str(self.out / name), "{seconds}": str(int(max(seconds - 15, 5)))}
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        with log.open("w") as stream:
            try:
                process = subprocess.Popen(
                    [values.get(word, word) for word in row.command],
                    stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                return {"error": str(error)}
            try:
                status = process.wait(seconds)
                found: Found = {"error": f"exit status {status}"} if status else {"outcome": "passed"}
            except subprocess.TimeoutExpired:
                found = {"error": f"more than {seconds:.0f} s"}
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and what it has started
                process.wait()
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        found["last_line"] = lines[-1][-200:] if lines else ""
        if row.part == "tests":
            ended = [line for line in lines if "%]" in line]
            found["tests"] = {word: sum(word in line for line in ended) for word in ("PASSED", "FAILED", "SKIPPED")}
        return found


def write_json(path: Path, value: object) -> None:
    """Write beside and rename: a reader never sees half a file."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(value, indent=1) + "\n")
    beside.replace(path)


def plan_table(rows: Sequence[Row]) -> str:
    """The plan: what is assumed of each row, when it would begin, and the sum."""
    lines = [f"{'row (* important)':62s} {'begins':>6s} {'compile':>7s} {'check':>6s} {'timing':>6s}  s, assumed"]
    begins = 0.0
    for row in rows:
        name, cost = f"{'*' if row.important else ' '} {row.name}", row.cost
        lines.append(f"{name:62s} {begins:6.0f} {cost.compile:7.1f} {cost.check:6.1f} {cost.timing:6.1f}")
        begins += cost.total
    return "\n".join([*lines, f"sum {begins:.0f} s of {TOTAL_SECONDS} s"])


def table(record: dict[str, Any]) -> str:
    """The short table: one line a row."""
    lines = ["", f"device: {record['machine'].get('device')}"]
    if reached := record.get("ceilings"):
        matmul = ", ".join(f"{dtype} {value:.0f}" for dtype, value in reached["matmul_TFLOP_per_s"].items())
        lines.append(f"copy {reached['copy_GB_per_s']:.0f} GB/s, matmul {matmul} TFLOP/s")
    return "\n".join([*lines, *(_row_line(row) for row in record["rows"])])


def _row_line(row: Found) -> str:
    head = f"{row['name']:60s}"
    if row["outcome"] != "measured":
        seen = ", ".join(f"{count} {word.lower()}" for word, count in row.get("tests", {}).items() if count)
        return f"{head} {row['outcome'][:100]}{': ' + seen if seen else ''}"
    peer = f"{row['ratio']:.2f}x {row['best_peer']}" if row["ratio"] else "no peer"
    floor = f"{100 * row['share_of_floor']:3.0f} % of floor, " if row["share_of_floor"] else ""
    return (
        f"{head} {row['ms']:.3f} ms (host {row['host_ms']:.3f}{', host-bound' if row['host_bound'] else ''}) "
        f"{row['TFLOP_per_s']:4.0f} TFLOP/s {row['GB_per_s']:5.0f} GB/s {floor}{peer}"
    )


if __name__ == "__main__":
    sys.exit(main())

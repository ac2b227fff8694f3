"""`make gpu-check`: the most important tests and measurements on a GPU, without network, within a given time.

    python -m vit_fast.benchmarks.gpu_check --out DIR [--minutes 10] [--parts attention,models]
    python -m vit_fast.benchmarks.gpu_check --dry-run

Requires torch, triton, numpy, pillow, matplotlib, pytest and hypothesis. Skips candidates of other missing libraries.

A job runs pytest, or some run configurations of `vit-fast bench`, in a separate process. Each job first compiles in
parallel processes. The most important jobs come first. Every row is written when it is measured. If a process of a
benchmark ends early, e.g. because a kernel broke its CUDA context, another process resumes it.

DIR/summary.json contains the outcome of each job, DIR/JOB the records, and DIR.tar.gz all files. Another run into DIR
writes to summary.json.1, JOB.1, .2 and so on, and removes nothing. At the end, DIR/model.txt compares the kernels of a
block with the estimates of `vit-fast kernels --model`. Run `vit-fast report DIR/*/*/` to write an HTML page of the
records, also of unfinished ones.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vit_fast.files import file_aside
from vit_fast.measure.clock import Protocol
from vit_fast.measure.limits import at_most, patient_interrupt
from vit_fast.ops.backends import compile_launches, interpreter_is_active, triton_unavailable_reasons
from vit_fast.version import describe

from .configuration import Configuration, make_configuration
from .preparation import callers, cold_start
from .records import JOURNAL_NAME, RECORD_NAME, Journal, Record, Row, read_record, to_json, unused
from .report import markdown
from .runner import header_of, reopen, run

MINUTES = 10.0  # default, and the sum that the time limits of the important jobs are planned for
LEAST_S = 20.0  # no job starts with less time left
PASSES = 3  # of calls that failed: a calibration fails while the kernels before it do not run
END_S = 10.0  # time limit for a killed process to end
RESERVED_S = 30.0  # for the comparison at the end
COMPILE_SHARE = 0.5  # of the time that is left to a job: to compile first
ROOT = Path(__file__).resolve().parent.parent
LOG, MODEL_JOB = "log.txt", "ViT-B kernels"
LOG_TAIL = 12  # lines of the log to print if a process fails
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

    def command(self, folder: Path, limit_s: float) -> list[str]:
        if not self.tests:
            arguments = self.name, str(folder), time.time() + limit_s - SPARE_S
            return [sys.executable, "-c", f"from {__spec__.name} import measure; measure(*{arguments!r})"]
        # kernel_execution skips tests of exact fp32 matmuls
        options = ["-v", "-rf", "-o", "addopts=--import-mode=importlib", "--noconftest", "-p", "no:cacheprovider"]
        return [sys.executable, "-m", "pytest", *options, "-p", "kernel_execution", *self.tests]


def perform(job: Job, folder: Path, limit_s: float) -> str:
    """Runs a job in processes, and prints its tables; returns the outcome. Output goes to log.txt in a new folder."""
    end, problem, progress, folder = time.monotonic() + limit_s, "", (-1, 0), unused(folder)
    folder.mkdir(parents=True)
    while progress != (progress := _progress(folder)):  # resume as long as the processes that end early get further
        problem = _run(job, folder, end - time.monotonic())
        if job.tests or not problem or "timed out" in problem:
            break
    log = ["", *(folder / LOG).read_text(errors="replace").splitlines()]
    if problem:
        print(*log[-LOG_TAIL:], sep="\n")
    if job.tests:
        return f"{problem or 'passed'} ({log[-1].strip('= ')})"
    records = [*_records(folder, "*/")]
    print(*map(markdown, records), sep="\n")
    return problem or outcome_of([row for record in records for row in record["rows"]])


def _records(folder: Path, pattern: str) -> Iterator[Record]:
    for path in sorted(folder.glob(pattern)):
        with contextlib.suppress(OSError, ValueError):  # of a process that was killed before its first row
            yield read_record(path)


def _folder_name(job: str) -> str:
    return re.sub(r"[^\w-]+", "_", job)


def _progress(folder: Path) -> tuple[int, int]:
    """Returns the number of finished runs, and how many candidates other runs began or finished."""
    journals = (path.read_text() for path in folder.glob(f"*/{JOURNAL_NAME}"))
    begun = sum(len(re.findall('"kind": "(?:begun|row)"', text)) for text in journals)
    return len([*folder.glob(f"*/{RECORD_NAME}")]), begun


def _run(job: Job, folder: Path, limit_s: float) -> str:
    """Runs a process of a job, which ends with this process; returns why it failed, or an empty text."""
    folders = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    with (folder / LOG).open("ab") as file:
        child = subprocess.Popen(
            job.command(folder, limit_s), cwd=ROOT, env=os.environ | {"PYTHONPATH": folders}, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = child.wait(max(limit_s, 0.0))
            return f"failed: exit status {status}; see {folder.name}/{LOG}" if status else ""
        except subprocess.TimeoutExpired:
            return f"failed: timed out after {limit_s:.0f} s; see {folder.name}/{LOG}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # also ends its child processes
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process in a driver call may never end
                child.wait(END_S)


def outcome_of(rows: Sequence[Row]) -> str:
    if failed := [f"{row['model']} {row['candidate']}" for row in rows if row["status"] in ("incorrect", "failed")]:
        return f"INCORRECT or failed: {', '.join(failed)}"
    return "no time left" if all(row["status"] in ("skipped", "interrupted") for row in rows) else "measured"


def measure(name: str, folder: str, end: float) -> None:
    """Measures the runs of a job until time.time() = `end`, and writes their records into `folder`.

    Resumes the runs of an earlier process. Exits with 1 if CUDA failed, so that another process can resume.
    """
    job = next(job for job in JOBS if job.name == name)
    for number, request in enumerate(job.runs):
        path = Path(folder, str(number))
        if (path / RECORD_NAME).exists():  # finished by an earlier process
            continue
        configuration = make_configuration(**request)
        compile_ahead(configuration, COMPILE_SHARE * (end - time.time()))
        if (path / JOURNAL_NAME).exists():
            _, journal = reopen(path)
        else:
            journal = Journal.begin(path, header_of(configuration))
        limited = dataclasses.replace(configuration, protocol=PROTOCOL, time_budget_s=max(end - time.time(), 1.0))
        record = run(limited, journal=journal)
        if record["gpu_failed"]:
            sys.exit(1)
        journal.finish({RECORD_NAME: to_json(record)}, keep=False)


def compile_ahead(configuration: Configuration, seconds: float) -> None:
    """Compiles in parallel processes, into caches on disk: kernels (kernels/precompile.py) and torch.compile's graphs.

    Each graph is compiled by a process of its own, which calls the candidate once. After `seconds`, the run compiles
    the rest: candidates that need less are measured even if some take too long.
    """

    pairs = [(group, one) for group in configuration.groups() for one in configuration.candidates[group.model.kind]]
    waiting = [(group, one) for group, one in pairs if one.compile_mode == "none" and not one.peer]

    def call_each() -> None:
        for group, candidate in [*waiting]:
            images = torch.zeros(group.batch_size, *group.model.shape, dtype=group.dtype, device=group.device)
            with contextlib.suppress(Exception):  # the next pass calls it again; the run reports it
                _, call, gradients = callers(candidate, group, [images])
                call(0)
                if gradients is not None:
                    gradients()
                waiting.remove((group, candidate))

    with ThreadPoolExecutor(len(pairs)) as threads:
        for group, candidate in pairs:
            if candidate.compile_mode != "none":
                threads.submit(cold_start, configuration.request, group, candidate.name, seconds)
        with torch.autograd.set_multithreading_enabled(False):  # run backward in this thread, which collects kernels
            if not triton_unavailable_reasons(configuration.device) and not interpreter_is_active():
                # a kernel does not compile, or takes too long: the run reports it
                with contextlib.suppress(RuntimeError, TimeoutError), at_most(seconds):
                    for _ in range(PASSES):
                        compile_launches(call_each, None)


def bench(
    part: str, name: str, limit_s: float, models: Sequence[str], candidates: str, *batches: int, train: str = "",
    explain: bool = False,
) -> Job:  # fmt: skip
    """Returns a job that measures inference with `candidates` and training with `train`, in bf16."""
    request = {"models": list(models), "batch_sizes": list(batches), "dtypes": ["bf16"], "explain": explain}
    each = [(candidates, False), (train, True)]
    return Job(part, name, limit_s, (), tuple(request | {"candidates": c.split(), "train": t} for c, t in each if c))


def tests(expression: str, names: str) -> tuple[str, ...]:
    return "-k", expression, *(f"tests/test_{name}.py" for name in names.split())


_PARALLEL = ("-n", "8") if importlib.util.find_spec("xdist") else ()
# Some of the tests that usually run in Triton's interpreter; compiling all of them would take too long.
_FIRST = (
    "nan_stays or (test_sizes and 264-LayerNorm-torch.bfloat16) or (test_sizes and 264-norm and bfloat16)"
    " or (far_below and 261) or (split_k and TMA-3-torch.bfloat16-stream) or (tokens_that_fp16 and tiny-torch.bfloat16)"
    " or (heads_norms and dtype1-True-layer_norm-head-half-64) or a_block_with_every_term"
)
_ATTENTION_TESTS = "every_layout or far_below or nan_stays or (every_shape and torch.float16)"
_MLP_TESTS = (
    "(test_sizes and LayerNorm and not float32) or (activations and bfloat16)"
    " or absent_parameters or layouts or statistics_of_input or empty or nan_stays"
    " or round_like_torch or a_block_matches_the_reference or passed_to_the_next_block"
)
_GPU_FILES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py") if "pytest.mark.gpu" in path.read_text()
)

_VIT_S, _VIT_B, _VIT_L = (f"vit_{size}_patch16_224" for size in ("small", "base", "large"))
_ATTENTION, _MLP = "attention:197x12x64", "mlp:197x768x3072"
# The most important first: ViT-L/16-384, ViT-H/14, So400m/14-384, B/16-512, SigLIP-B/16, ViT-S/16.
_LARGER = ("attention:577x16x64", "attention:257x16x80", "attention:729x16x72", "attention:1025x12x64")
_OTHERS = ("attention:196x12x64", "attention:197x6x64", "attention:197x16x64", "mlp:197x1024x4096", "mlp:197x384x1536")
_RIVALS = "triton sdpa-cudnn sdpa-flash sdpa-efficient"

_OURS = "triton triton-frozen triton-graphs"
# The most important first.
JOBS: tuple[Job, ...] = (
    Job("tests", "one test per kernel", 80,
        tests(_FIRST, "attention_kernel attention_bias_kernel matmul_kernel mlp_kernels rotary_kernel transforms")),
    Job("tests", "graphs", 50, tests("captured_graphs or follow_the_weights", "runtime")),
    bench("models", "ViT-B", 150, [_VIT_B], f"timm {_OURS} timm+compile", 256, 8, 1),
    bench("attention", "attention", 60, [_ATTENTION], _RIVALS, 256, train=_RIVALS),
    bench("models", "block", 40, [f"block:{_VIT_B}"], "triton eager timm", 256, train="triton timm"),
    bench("mlp", "mlp", 50, [_MLP], "triton eager", 256, train="triton eager"),
    bench("models", "ViT-B training", 100, [_VIT_B], "", 128, train="triton sdpa timm timm+compile"),
    bench("models", "ViT-L, also in FP8", 70, [_VIT_L], "triton-frozen triton-fp8 timm torchao-fp8+compile", 128),
    bench("models", MODEL_JOB, 40, [_VIT_B], "triton-frozen", 256, 8, 1, explain=True),
    Job("tests", "tests that need a GPU", 80, (*_PARALLEL, "-m", "gpu", *(_GPU_FILES or ["tests"]))),
    bench("mlp", "mlp compiled", 80, [_MLP, f"{_MLP}:gelu_tanh"], "triton eager+compile cublaslt",
          256, train="triton eager+compile"),
    bench("models", "ViT-S", 35, [_VIT_S], "triton-frozen sdpa timm", 128),
    Job("tests", "tests of attention, compiled", 60, (*_PARALLEL, *tests(_ATTENTION_TESTS, "attention_kernel"))),
    Job("tests", "tests of the MLP, compiled", 80,
        (*_PARALLEL, *tests(_MLP_TESTS, "mlp_kernels mlp_operator fp8_block"))),
    bench("models", "fused models", 45, [_VIT_B], "timm timm+fused transformers transformers+fused", 256),
    bench("attention", "FlexAttention", 45, [_ATTENTION, _LARGER[0]], "triton flex flash-attn", 256),
    bench("attention", "larger attention", 75, _LARGER, _RIVALS, 32, train=_RIVALS),
    bench("attention", "other operators", 75, _OTHERS, "triton eager", 64, train="triton eager"),
    bench("attention", "small batches", 75, [_ATTENTION, _MLP], "triton sdpa eager", 1, 32, train="triton eager"),
    bench("attention", "long", 60, ["attention:4096x12x64"], _RIVALS, 4, train=_RIVALS),
)  # fmt: skip
PARTS = tuple(dict.fromkeys(job.part for job in JOBS))


def compare_with_model(out: Path, limit_s: float) -> str:
    """Compares the kernels of a block in the records of MODEL_JOB with estimates of `vit-fast kernels --model`."""

    def compare(row: Row, arch: str) -> list[str]:
        title = f"{row['model']}, batch {row['batch']}, {arch}: "
        options = ["--model", row["model"], "--batch-sizes", str(row["batch"]), "--arch", arch, "--json"]
        command = [sys.executable, "-c", "from vit_fast.cli import main; main()", "kernels", *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, cwd=ROOT)
            found = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            return [f"{title}the estimate took more than {limit_s:.0f} s"]
        except ValueError:
            *_, why = f"exit status {done.returncode}", *done.stderr.strip().splitlines()
            return [f"{title}no estimate: {why}"]
        estimated = found["launches"]
        names = [launch["kernel"].partition(",")[0] for launch in estimated]
        launches = [(name.strip("_").removesuffix("_kernel"), us) for name, us in row["explained"]["launches"]]
        own = [launch for launch in launches if launch[0] in names]
        starts = [i for i in range(len(own)) if [name for name, _ in own[i : i + len(names)]] == names]
        if not starts:
            ran = ", ".join(dict.fromkeys(name for name, _ in launches))
            return [f"{title}no block runs the estimated kernels ({', '.join(names)}), but {ran}"]
        measured = [statistics.median(own[i + number][1] for i in starts) for number in range(len(names))]
        floors = [launch["floor_us"] for launch in estimated]
        kernels = [f"{launch['kernel']} {launch['tile']}" for launch in estimated]
        table = [*zip(measured, floors, kernels), (sum(measured), sum(floors), "block")]
        lines = [f"{title}median of {len(starts)} blocks, estimate for {found['gpu']}", " measured  estimated    ratio"]
        lines += [f"{us:6.2f} us {floor:7.2f} us {us / max(floor, 1e-3):7.2f}x  {name}" for us, floor, name in table]
        return lines

    with ThreadPoolExecutor() as threads:
        waiting = [
            threads.submit(compare, row, "sm_" + record["machine"]["gpu"]["capability"].replace(".", ""))
            for record in _records(out, f"{_folder_name(MODEL_JOB)}*/*/")
            for row in record["rows"]
            if row["status"] == "measured"
        ]
    text = "".join(f"\n{line}" for one in waiting for line in one.result())
    return text and f"Kernels of a frozen block, measured and estimated by vit-fast kernels --model{text}\n"


def run_jobs(jobs: Sequence[Job], out: Path, minutes: float = MINUTES) -> list[Found]:
    """Runs the jobs in order until the time is over; returns part, name, outcome and seconds of each job.

    Time limits of jobs grow or shrink with `minutes`. The last job that starts may get less than its limit.
    """
    out.mkdir(parents=True, exist_ok=True)
    summary, model = (unused(out / name) for name in ("summary.json", "model.txt"))
    found, began = list[Found](), time.monotonic()
    missing, end = "" if torch.cuda.is_available() else "not measured: no GPU", began + 60 * minutes
    machine = describe("cpu" if missing else "cuda")
    print(f"{len(jobs)} jobs on {machine['device']} in {minutes:g} minutes; records: {out}, and packed {out}.tar.gz")
    for job in jobs:
        start = time.monotonic()
        result: Found = {"part": job.part, "name": job.name, "outcome": "interrupted"}
        limit_s = min(job.limit_s * max(minutes / MINUTES, 0.5), end - start - RESERVED_S)
        try:
            if missing or limit_s < LEAST_S:
                result["outcome"] = missing or "no time left"
            else:
                print(f"\n{job.name}: started after {start - began:.0f} s, takes at most {limit_s:.0f} s", flush=True)
                result["outcome"] = perform(job, out / _folder_name(job.name), limit_s)
        except OSError as error:  # e.g. the disk is full
            result["outcome"] = f"failed: {error}"
        finally:  # also after Ctrl-C
            result["seconds"] = round(time.monotonic() - start, 1)
            found.append(result)
            record = {"machine": machine, "total_seconds": 60 * minutes, "rows": found}
            _save(summary, json.dumps(record, indent=1) + "\n")
            print(_line(result), flush=True)
    if comparison := compare_with_model(out, max(end - time.monotonic(), END_S)):
        print("", comparison, sep="\n")
        _save(model, comparison)
    print("\nAll jobs:", *map(_line, found), f"To write an HTML page: vit-fast report {out}/*/*/", sep="\n")
    return found


def _line(found: Found) -> str:
    return f"{found['name']}: {found['outcome']}" + (f", {found['seconds']:.0f} s" if found["seconds"] else "")


def _save(path: Path, text: str) -> None:
    """Writes a file, and packs its folder. If the disk is full, prints so, because a later job may still write rows."""
    try:
        with file_aside(path) as aside:
            aside.write_text(text)
        out = path.parent
        with file_aside(out.with_name(out.name + ".tar.gz")) as aside, tarfile.open(aside, "w:gz") as archive:
            archive.add(out, out.name)
    except OSError as error:
        print(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the jobs; returns the number of jobs that failed or gave an incorrect output; 130 after an interrupt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the records")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, comma-separated (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit (default: %(default)g)")
    parser.add_argument("--dry-run", action="store_true", help="only print the jobs and their time limits")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--parts must consist of {', '.join(PARTS)}, got {', '.join(unknown)}")
    chosen = [job for job in JOBS if job.part in parts]
    if options.dry_run:
        print(f"{'job':40s} limit", *(f"{job.name:40s} {job.limit_s:4.0f} s" for job in chosen), sep="\n")
        print(f"limits for --minutes {MINUTES:g}; the jobs that do not fit are skipped")
        return 0
    if options.out is None:
        parser.error("--out FOLDER must be given")
    try:
        with patient_interrupt(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            found = run_jobs(chosen, options.out.resolve(), options.minutes)  # child processes run in another folder
    except KeyboardInterrupt:
        print(f"Interrupted. The records so far: {options.out}")
        return 130
    return sum(row["outcome"].startswith(("failed", "INCORRECT")) for row in found)


if __name__ == "__main__":
    sys.exit(main())

"""A run: its record, its time budget, and that a failing candidate does not affect the others."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_support import NoisyClock, assert_no_speed, breaking, build, plan, rows_by_candidate, with_weights

from vit_fast.apps.data import sample_image
from vit_fast.benchmarks import runner
from vit_fast.benchmarks.candidates import CANDIDATES
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.models import Group
from vit_fast.benchmarks.preparation import CANDIDATE_SECONDS, make_problem, prepare
from vit_fast.benchmarks.records import make_row
from vit_fast.errors import UnsupportedInputError
from vit_fast.measure.candidate import Candidate

pytestmark = pytest.mark.usefixtures("small_ceilings")
ROOT = Path(__file__).resolve().parents[1]


def test_the_figures_of_a_record_agree() -> None:
    names = ("eager", "sdpa", "timm", "transformers")
    record = runner.run(plan(*names, batch_sizes=(1, 4)))
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    rows = record["rows"]
    assert [(row["batch"], row["candidate"]) for row in rows] == list(itertools.product((1, 4), names))
    ceiling = record["ceilings"]["matmul_TFLOP_per_s"]["fp32"]
    flops = 2 * 2 * 17 * (4 * 64 * 64 + 2 * 64 * 256) + 2 * 4 * 17 * 17 * 64 + 2 * 16 * 3 * 64 * 64 + 2 * 64 * 10
    for row in rows:
        assert row["status"] == "measured", row
        assert row["ms_p20"] <= row["ms"] <= row["ms_p80"] and row["repeats"] == len(row["samples_ms"]) == 4
        assert row["images_per_s"] == pytest.approx(row["batch"] / row["ms"] * 1000)
        assert row["TFLOP_per_s"] == pytest.approx(row["images_per_s"] * flops / 1e12)
        assert row["defect"] or row["ceiling_share"] == pytest.approx(row["TFLOP_per_s"] / ceiling)
        assert row["max_error"] <= row["allowed_error"] < 1e-3
        assert 0.3 < row["peak_MiB"] < 20 and row["agreement"] == 1.0
        best = max((r for r in rows if r["peer"] and r["batch"] == row["batch"]), key=lambda r: r["images_per_s"])
        assert row["best_peer"] == best["candidate"] in names[2:]
        ratios = [peer_ms / own for peer_ms, own in zip(best["samples_ms"], row["samples_ms"], strict=True)]
        assert row["ratio_to_best_peer"] == pytest.approx(statistics.median(ratios))
        low, high = row["ratio_interval"] or (0, 0)
        assert low <= high and (row is best or row["verdict"])
    assert not record["interrupted"]
    assert [(control["batch"], len(control["ms"])) for control in record["controls"]] == [(1, 2), (4, 2)]
    assert all(one["resolution"] >= 0 and one["conditions"]["busy"] is not None for one in record["controls"])
    assert record["ceilings"]["taken"] == 3  # before, between and after


def test_agreement_counts_eight_images_although_calls_reuse_memory(add: Callable[..., None]) -> None:
    def partly(group: Group) -> object:
        model, memory, calls = build("sdpa", group), torch.empty(1, 10), itertools.count(1)

        def call(images: torch.Tensor) -> torch.Tensor:
            memory.copy_(model(images))
            if next(calls) == 5:  # after three calls of the check
                memory[:, memory.argmax(-1)] = -1e3
            return memory

        return call

    add("partly", partly, precision="int8", tolerance=1e9)
    rows = rows_by_candidate(runner.run(plan("sdpa", "partly", batch_sizes=(1,))))
    assert (rows["sdpa"]["agreement"], rows["partly"]["agreement"]) == (1.0, 7 / 8)


def run_out() -> None:
    """Memory runs out, and a compiler wraps the error."""
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
    except torch.OutOfMemoryError as error:
        raise RuntimeError("backend failed") from error


def hang() -> None:
    """Lets the alarm of the limit ring at once."""
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    time.sleep(600)


def stale(group: Group) -> object:
    """Simulates a graph that replays stale inputs: correct at first, then the same output for every input."""
    model, outputs = build("sdpa", group), []
    return lambda images: outputs.append(model(images)) or outputs[min(len(outputs) - 1, 1)]


def refuse(group: Group) -> object:
    raise UnsupportedInputError("this library", ["one reason", "another reason"])


def fail(group: Group | None = None) -> object:
    raise RuntimeError("it broke\nin two lines")


def test_a_failing_candidate_gets_a_row_with_the_reason_and_the_others_are_timed(add) -> None:
    bad = {
        "incorrect": (
            lambda group: build("sdpa", with_weights(group, {"head.bias": torch.zeros(10)})),
            "incorrect",
            "error must be at most",
        ),
        "stale": (stale, "incorrect", ""),
        "missing": (build, "not installed", "pip install a_package_that_is_not_there"),
        "refused": (refuse, "unsupported", "one reason; another reason"),
        "broken": (fail, "failed", "RuntimeError: it broke in two lines"),
        "later": (breaking(fail), "failed", "it broke in two lines"),  # while it is timed
        "large": (breaking(run_out, after=0), "out of memory", "RuntimeError: backend failed"),
        "larger": (breaking(run_out), "out of memory", "during timing: RuntimeError: backend failed"),
        "hanging": (breaking(hang, after=0), "failed", "TimeoutError: took more than 900 s"),
        "hanging later": (breaking(hang), "failed", "TimeoutError: took more than 900 s"),
    }
    for name, (make, _, _) in bad.items():
        add(name, make, packages=("a_package_that_is_not_there",) if name == "missing" else ())
    rows = rows_by_candidate(runner.run(plan(*bad, "eager")))
    for name, (_, status, reason) in bad.items():
        assert rows[name]["status"] == status and reason in rows[name]["reason"], name
        assert_no_speed(rows[name])
    assert rows["incorrect"]["max_error"] > rows["incorrect"]["allowed_error"]
    assert rows["eager"]["status"] == "measured" and rows["eager"]["ratio_to_best_peer"] is None


def test_a_failing_reference_and_a_spent_budget_start_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "make_problem", lambda *_: fail())
    for budget_s, status, reason in ((0, "failed", "in the reference: Runtime"), (1e-6, "skipped", "out of time:")):
        rows = runner.run(plan("eager", "sdpa", batch_sizes=(1, 2), time_budget_s=budget_s))["rows"]
        assert [row["status"] for row in rows] == [status] * 4
        assert all(row["reason"].startswith(reason) for row in rows)


def test_a_row_above_its_ceiling_is_a_defect_without_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    low = {"copy_GB_per_s": 1.0, "copy_bytes": 1, "matmul_TFLOP_per_s": {"fp32": 1e-9}, "matmul_size": 1}
    monkeypatch.setattr(runner, "measure_ceilings", lambda *_: low)
    row = runner.run(plan("sdpa"))["rows"][0]
    assert row["ceiling_share"] is None and row["defect"].endswith("x the matmul ceiling of this run")


def test_control_and_best_peer_compute_in_full_precision(add) -> None:
    """A candidate in lower precision may be faster and noisier."""
    add("quick", lambda group: lambda images: torch.zeros(len(images), 10), precision="int8", tolerance=1e9, peer=True)
    record = runner.run(plan("quick", "timm"))
    assert {row["status"] for row in record["rows"]} == {"measured"}
    assert [control["candidate"] for control in record["controls"]] == ["timm"]
    assert [row["best_peer"] for row in record["rows"]] == ["quick", "timm"]
    (control,) = runner.run(plan("quick"))["controls"]
    assert control["candidate"] == "quick"


# Seconds of a call at batch sizes 1 and 8, and of preparing it there, by `vit-fast bench` on two Zen 3 cores, 2026-11.
ZEN_3 = {
    "timm": (0.045, 0.257, 1.2, 1.0), "timm+fused+frozen": (0.041, 0.240, 0.8, 1.1),
    "onnxruntime": (0.031, 0.198, 14.4, 0.8), "openvino": (0.030, 0.196, 14.0, 1.1),
    "onnxruntime-int8": (0.017, 0.125, 4.5, 0.7), "onnxruntime-int8-dynamic": (0.020, 0.141, 2.2, 0.7),
    "timm+compile": (0.044, 0.250, 37.0, 17.5), "timm+compile:freezing": (0.041, 0.235, 30.0, 25.0),
}  # fmt: skip
START_S, WRITING_S, CEILINGS_S, REFERENCE_S = 2.6, 3.0, 2.5, 3.5


def unsupported(name: str, dtype: str) -> bool:
    return dtype == "bf16" and name.startswith("onnxruntime")


def run_simulated(machine: NoisyClock, monkeypatch: pytest.MonkeyPatch, **fields: object) -> dict:
    """Runs a configuration on a simulated machine that is `slowness` times slower than two Zen 3 cores."""
    built = set()
    ceilings = {"copy_GB_per_s": 30.0, "matmul_TFLOP_per_s": {"fp32": 0.6, "bf16": 1.1}}

    def simulate(
        candidate: Candidate, group: Group, problem: object, *, explained: bool, seconds: float
    ) -> tuple[SimpleNamespace | None, dict]:
        if unsupported(candidate.base, group.dtype_name):
            return None, make_row(group, candidate, "unsupported", "no bf16 kernels")
        *calls_s, first_s, again_s = (machine.slowness * seconds for seconds in ZEN_3[candidate.name])
        needed_s = again_s if (candidate.name, group.dtype_name) in built else first_s
        machine.sleep(min(needed_s, seconds))
        if needed_s > seconds:
            return None, make_row(group, candidate, "skipped", runner.OUT_OF_TIME)
        built.add((candidate.name, group.dtype_name))
        call_s = calls_s[group.batch_size > 1]
        times = {"call_s": call_s, "build_s": needed_s - call_s if candidate.runs_file else 0.0}
        call = partial(machine.spend, call_s / machine.slowness)
        row = make_row(group, candidate, "measured")
        return SimpleNamespace(candidate=candidate, call=lambda _: call(), row=row, **times), row

    for place, replacement in {
        "vit_fast.measure.candidate.Candidate.missing_packages": lambda _: [],
        "vit_fast.measure.clock.SETTLE_MS": 40.0,
        "vit_fast.measure.clock.time": machine,
        "vit_fast.benchmarks.runner.time": machine,
        "vit_fast.benchmarks.runner.measure_ceilings": lambda *_: (machine.spend(CEILINGS_S), ceilings)[1],
        "vit_fast.benchmarks.runner.make_problem": lambda *_: machine.spend(REFERENCE_S),
        "vit_fast.benchmarks.runner.prepare": simulate,
    }.items():
        monkeypatch.setattr(place, replacement)
    return runner.run(make_configuration(device="cpu", **fields))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("slowness", "noise"), [(0.27, 0.01), (0.27, 0.04), (1.0, 0.01), (1.0, 0.04), (4.0, 0.03)])
def test_a_default_run_ranks_its_candidates_within_three_minutes(slowness, noise, bf16, monkeypatch) -> None:
    """On a simulated Zen 5, a Zen 3, which is about four times slower, and a machine four times slower than that."""
    monkeypatch.setattr("vit_fast.benchmarks.configuration.matmul_slowdown", lambda dtype: 1.5 - bf16)
    record = run_simulated(NoisyClock(noise=noise, slowness=slowness), monkeypatch)
    assert record["seconds"] + slowness * (START_S + WRITING_S) <= 180
    dtypes = ("fp32", "bf16") if bf16 and slowness < 1 else ("fp32",)
    tables = {(dtype, batch): dict[str, dict]() for dtype in dtypes for batch in (1, 8)}
    for row in record["rows"]:
        tables[row["dtype"], row["batch"]][row["candidate"]] = row
    for (dtype, _), rows in tables.items():
        measured = {name for name, row in rows.items() if row["status"] == "measured"}
        modes = {"timm+compile:freezing" if slowness < 1 else "timm+compile"}  # the second costs too much time
        if slowness <= 1:
            assert (
                measured == {name for name in ZEN_3 if "compile" not in name and not unsupported(name, dtype)} | modes
            )
            assert {rows[name]["reason"] for name in rows.keys() - measured} <= {"no bf16 kernels"}
        else:
            assert measured >= {"timm", "timm+fused+frozen", "onnxruntime"}
            assert {rows[name]["reason"] for name in rows.keys() - measured} == {runner.OUT_OF_TIME}
        for name in measured:
            verdict, is_best = rows[name]["verdict"], rows[name]["best_peer"] == name
            assert is_best or verdict in ("faster", "slower", "no difference"), name


def test_only_a_given_time_limit_skips_named_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    named = ["timm", "timm+compile"]
    record = run_simulated(NoisyClock(), monkeypatch, candidates=named)
    assert [row["status"] for row in record["rows"]] == ["measured"] * 4
    record = run_simulated(NoisyClock(), monkeypatch, candidates=named, time_budget_s=20)
    assert [row["status"] for row in record["rows"]] == ["measured"] + ["skipped"] * 3


def test_a_preparation_ends_when_later_steps_need_the_time(add) -> None:
    add("hanging", breaking(hang, after=0))
    (group,) = plan("hanging").groups()
    for limit_s, status in ((5.0, "skipped"), (CANDIDATE_SECONDS, "failed")):
        problem = make_problem(group, [sample_image()])
        ready, row = prepare(CANDIDATES["hanging"], group, problem, seconds=limit_s)
        assert ready is None and row["status"] == status and (row["reason"] == runner.OUT_OF_TIME) == (limit_s == 5.0)


def test_runs_with_a_time_limit_plan_few_candidates() -> None:
    few, training, everything = (
        [candidate.name for candidate in make_configuration(device="cpu", **fields).candidates["vit-fast"]]
        for fields in ({}, {"train": True}, {"time_budget_s": 0})
    )
    assert few == [*ZEN_3] and training == ["timm", "timm+fused", "timm+compile"]
    assert {*few, "timm+fused", "timm+fused+compile:freezing", "eager"} < {*everything}


@pytest.mark.slow
def test_the_pytest_benchmark_suite_times_operators_blocks_models_and_training(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    options = ["-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-k", "not compile and not flex"]
    options += [f"--benchmark-{name}" for name in ("min-rounds=1", "max-time=0", "min-time=0", f"json={path}")]
    environment = os.environ | {"VIT_FAST_SUITE_MODEL": "vit_test", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    environment.pop("PYTEST_XDIST_WORKER", None)  # pytest-benchmark measures nothing in a worker
    command = [sys.executable, "-m", "pytest", "benchmarks/suite.py", "-q", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-3000:]
    names = {run["name"] for run in json.loads(path.read_text())["benchmarks"]}
    for case in (
        "attention:17x2x32 fp32 batch 8-sdpa", "mlp:17x64x256:gelu_tanh fp32 batch 8 training-eager",
        "block:vit_test fp32 batch 8 training-timm+fused", "vit_test fp32 batch 1-timm",
    ):  # fmt: skip
        assert f"test_candidate[{case}]" in names, names

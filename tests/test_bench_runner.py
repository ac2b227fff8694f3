"""A run: its record, its time budget, and that a candidate that fails, hangs or ends it does not affect the others."""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bench_support import QUICK, assert_no_speed, breaking, build, plan, rows_by_candidate, with_weights

from vit_fast.benchmarks import preparation, records, runner
from vit_fast.benchmarks.configuration import Configuration, make_configuration
from vit_fast.benchmarks.models import Group
from vit_fast.benchmarks.records import make_row
from vit_fast.errors import UnsupportedInputError
from vit_fast.version import describe

pytestmark = pytest.mark.usefixtures("small_ceilings")


def test_a_record_holds_every_figure_and_they_agree() -> None:
    record = runner.run(plan("eager", "sdpa", "timm", "transformers", batch_sizes=(1, 4)))
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert [(row["candidate"], row["batch"]) for row in record["rows"]] == [
        (candidate, batch) for batch in (1, 4) for candidate in ("eager", "sdpa", "timm", "transformers")
    ]
    ceiling = record["ceilings"]["matmul_TFLOP_per_s"]["fp32"]
    flops = 2 * 2 * 17 * (4 * 64 * 64 + 2 * 64 * 256) + 2 * 4 * 17 * 17 * 64 + 2 * 16 * 3 * 64 * 64 + 2 * 64 * 10
    for row in record["rows"]:
        assert row["status"] == "measured", row
        assert row["ms_p20"] <= row["ms"] <= row["ms_p80"]
        assert row["repeats"] == 4
        assert row["images_per_s"] == pytest.approx(row["batch"] / row["ms"] * 1000)
        assert row["TFLOP_per_s"] == pytest.approx(row["images_per_s"] * flops / 1e12)
        if row["TFLOP_per_s"] <= ceiling:
            assert row["ceiling_share"] == pytest.approx(row["TFLOP_per_s"] / ceiling)
        assert row["max_error"] <= row["allowed_error"] < 1e-3
        assert 0.3 < row["peak_MiB"] < 20 and row["agreement"] == 1.0
        peers = [each for each in record["rows"] if each["candidate"] in ("timm", "transformers")]
        rivals = [each for each in peers if each["batch"] == row["batch"]]
        best = max(rivals, key=lambda rival: rival["images_per_s"])
        assert row["best_peer"] == best["candidate"]
        assert len(row["samples_ms"]) == 4
        if row is not best:
            low, high = row["ratio_interval"]
            assert low <= high and row["verdict"] in ("faster", "slower", "no difference", "cannot be ranked")
        turns = [peer_ms / own for peer_ms, own in zip(best["samples_ms"], row["samples_ms"], strict=True)]
        assert row["ratio_to_best_peer"] == pytest.approx(statistics.median(turns))
    assert not record["interrupted"]
    assert [(control["batch"], len(control["ms"])) for control in record["controls"]] == [(1, 2), (4, 2)]
    for control in record["controls"]:
        assert control["resolution"] >= 0 and control["conditions"]["busy"] is not None
    assert record["ceilings"]["taken"] == 3  # before, between and after


def test_agreement_is_of_eight_images_in_calls_that_reuse_memory(add: Callable[..., None]) -> None:
    def partly(task: Group) -> Callable[[torch.Tensor], torch.Tensor]:
        model, memory, calls = build("sdpa", task), torch.empty(1, 10), itertools.count(1)

        def answer(images: torch.Tensor) -> torch.Tensor:
            memory.copy_(model(images))
            if next(calls) == 5:  # after three calls of the check
                memory[:, memory.argmax(-1)] = -1e3
            return memory

        return answer

    add("partly", partly, precision="int8", tolerance=1e9)
    rows = rows_by_candidate(runner.run(plan("sdpa", "partly", batch_sizes=(1,))))
    assert (rows["sdpa"]["agreement"], rows["partly"]["agreement"]) == (1.0, 7 / 8)


def run_out() -> None:
    """Memory runs out, wrapped, as a compiler does it."""
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
    except torch.OutOfMemoryError as error:
        raise RuntimeError("backend failed") from error


def press() -> None:
    raise KeyboardInterrupt


def hang() -> None:
    """The limit is long, and never waited for: the hanging one lets the clock strike itself."""
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    time.sleep(600)


def zero_bias(task: Group) -> object:
    return build("sdpa", with_weights(task, {"head.bias": torch.zeros(10)}))


def stale(task: Group) -> object:
    """Simulates a graph that replays stale inputs: right at first, then the same output for every input."""
    model, kept = build("sdpa", task), []

    def answer(images: torch.Tensor) -> torch.Tensor:
        kept.append(model(images))
        return kept[0] if len(kept) == 1 else kept[1]

    return answer


def refuse(task: Group) -> object:
    raise UnsupportedInputError("this library", ["one reason", "another reason"])


def break_down(task: Group | None = None) -> object:
    raise RuntimeError("it broke\nin two lines")


def test_what_is_wrong_with_one_candidate_is_said_in_its_row_and_the_others_are_timed(add) -> None:
    bad = {
        "incorrect": (zero_bias, "incorrect", "error must be at most"),
        "stale": (stale, "incorrect", ""),
        "missing": (build, "not installed", "pip install a_package_that_is_not_there"),
        "refused": (refuse, "unsupported", "one reason; another reason"),
        "broken": (break_down, "failed", "RuntimeError: it broke in two lines"),
        "later": (breaking(break_down), "failed", "it broke in two lines"),  # while it is timed
        "hanging": (breaking(hang, after=0), "failed", "TimeoutError: more than 900 s"),
        "hanging later": (breaking(hang), "failed", "TimeoutError: more than 900 s"),
    }
    for name, (make, _, _) in bad.items():
        add(name, make, packages=("a_package_that_is_not_there",) if name == "missing" else ())
    rows = rows_by_candidate(runner.run(plan(*bad, "eager")))
    for name, (_, status, reason) in bad.items():
        assert rows[name]["status"] == status and reason in rows[name]["reason"], name
        assert_no_speed(rows[name])
    assert rows["incorrect"]["max_error"] > rows["incorrect"]["allowed_error"]
    assert rows["eager"]["status"] == "measured" and rows["eager"]["ratio_to_best_peer"] is None


@pytest.mark.slow
def test_a_definition_that_cannot_run_fails_its_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expect = preparation.expect

    def only_batch_1(task: Group, *rest: object) -> object:
        if task.batch_size > 1:
            raise RuntimeError("not implemented for this")
        return expect(task, *rest)

    monkeypatch.setattr(preparation, "expect", only_batch_1)
    record = runner.run(plan("eager", batch_sizes=(1, 2)))
    assert [row["status"] for row in record["rows"]] == ["measured", "failed"]
    assert "reference: RuntimeError: not implemented" in record["rows"][1]["reason"]


def test_a_spent_time_budget_starts_nothing_new_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "make_problem", lambda *_: pytest.fail("the reference takes time"))
    record = runner.run(plan("eager", "sdpa", batch_sizes=(1, 2), time_budget_s=1e-6))
    assert [row["status"] for row in record["rows"]] == ["skipped"] * 4
    assert all(row["reason"] == "out of time" for row in record["rows"])


def test_a_row_above_its_ceiling_is_a_named_defect_and_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    low = {"copy_GB_per_s": 1.0, "copy_bytes": 1, "matmul_TFLOP_per_s": {"fp32": 1e-9}, "matmul_size": 1}
    monkeypatch.setattr(runner, "measure_ceilings", lambda *_: low)
    row = runner.run(plan("sdpa"))["rows"][0]
    assert row["ceiling_share"] is None and row["defect"].endswith("x the matmul ceiling of this run")


def test_the_control_is_the_best_at_full_precision(add) -> None:
    """A candidate in lower precision may be faster and noisier."""

    def quick(task: Group) -> object:
        return lambda images: torch.zeros(len(images), 10)

    add("quick", quick, precision="int8", tolerance=1e9, peer=True)
    record = runner.run(plan("quick", "timm"))
    assert {row["status"] for row in record["rows"]} == {"measured"}
    assert [control["candidate"] for control in record["controls"]] == ["timm"]
    assert [row["best_peer"] for row in record["rows"]] == ["timm", "timm"], "no peer in fewer bits is the yardstick"
    (control,) = runner.run(plan("quick"))["controls"]
    assert control["candidate"] == "quick"


def test_out_of_memory_halves_the_batch_says_so_and_loses_nobody_else(add) -> None:
    add("greedy", breaking(run_out, after=0, above=2))
    add("hopeless", breaking(run_out, after=0))
    add("later", breaking(run_out, after=6, above=2))  # while it is timed: four calls are before that
    told: list[str] = []
    chosen = plan("greedy", "hopeless", "later", "timm", batch_sizes=(4,))
    rows = rows_by_candidate(runner.run(chosen, told.append))
    for name in ("greedy", "later"):
        assert (rows[name]["batch"], rows[name]["requested_batch"], rows[name]["status"]) == (2, 4, "measured"), name
    assert rows["greedy"]["best_peer"] == "timm"
    assert (rows["timm"]["batch"], rows["timm"]["status"]) == (4, "measured")
    assert rows["hopeless"]["status"] == "out of memory"
    assert_no_speed(rows["hopeless"])
    assert [text[-7:] for text in told if "retrying" in text] == ["batch 2", "batch 1"]


def test_ctrl_c_keeps_what_was_measured(add) -> None:
    add("pressed", breaking(press, above=1))
    record = runner.run(plan("eager", "pressed", batch_sizes=(1, 2, 4)))
    assert record["interrupted"]
    assert [(row["batch"], row["candidate"]) for row in record["rows"]] == [
        (batch, candidate) for batch in (1, 2, 4) for candidate in ("eager", "pressed")
    ]
    assert [row["status"] for row in record["rows"]] == ["measured"] * 2 + ["interrupted"] * 4
    for row in record["rows"][2:]:
        assert_no_speed(row)


KILLED = """
import os, sys
from pathlib import Path
from vit_fast.benchmarks import candidates, configuration, records, runner
from vit_fast.version import describe
from vit_fast.measure.candidate import Candidate
from vit_fast.measure.clock import Protocol
from vit_fast.version import describe

runner.MATMUL_SIZE["cpu"], runner.COPY_BYTES["cpu"] = 64, 2**16

def deadly(candidate, task):
    if task.batch_size == 2:
        os.kill(os.getpid(), 9)
    return candidates.build(candidates.CANDIDATES["sdpa"], task)

candidates.CANDIDATES["deadly"] = Candidate(base="deadly", builder=deadly)
chosen = configuration.make_configuration(models=["vit_test"], batch_sizes=[1, 2], dtypes=["fp32"],
    candidates=["eager", "deadly"], device="cpu",
    protocol=Protocol(repeats=4, seconds=60.0, least_repeats=3, warmup_repeats=1))
folder = Path(sys.argv[1])
resumed = folder.with_name("run.partial").exists()
about = () if resumed else (chosen.request, describe("cpu"))
runner.run(chosen, journal=(records.Journal.resume if resumed else records.Journal.begin)(folder, *about))
"""


@pytest.mark.slow
def test_kill_9_keeps_the_rows_and_what_ends_the_process_twice_is_failed(add, tmp_path: Path) -> None:
    folder, journal_file = tmp_path / "run", tmp_path / "run.partial" / "rows.jsonl"
    for status in (-signal.SIGKILL, -signal.SIGKILL, 0):
        ended = subprocess.run([sys.executable, "-c", KILLED, str(folder)], capture_output=True, text=True)
        assert ended.returncode == status, ended.stderr
        assert not folder.exists()
        with pytest.raises(ValueError, match=r"run\.partial contains an unfinished run: pass --resume"):
            records.check_folder(folder)
        with journal_file.open("a") as file:
            file.write('{"kind": "row", "val')  # cut in the middle of a line
    add("deadly", lambda task: build("sdpa", task))
    again = records.Journal.resume(folder)
    assert {(row["candidate"], row["batch"]): row["status"] for row in again.found("row")} == {
        ("eager", 1): "measured", ("deadly", 1): "measured", ("eager", 2): "measured", ("deadly", 2): "failed"
    }  # fmt: skip
    assert any("the process ended twice" in (row["reason"] or "") for row in again.found("row"))
    record = runner.run(
        dataclasses.replace(make_configuration(**again.header["request"]), protocol=QUICK), journal=again
    )
    assert sorted(map(str, record["rows"])) != [] and len(again.found("row")) == len(record["rows"]) == 4
    again.finish({"record.json": records.to_json(record)}, keep=False)
    assert records.read_record(folder)["rows"] == record["rows"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_is_not_gone_on_with_on_another_machine(tmp_path: Path) -> None:
    begun = records.Journal.begin(tmp_path / "run", {}, describe("cpu"))
    begun.check_machine(describe("cpu"))
    with pytest.raises(ValueError, match=r"commit must be .* got another"):
        begun.check_machine(describe("cpu") | {"commit": "another"})


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> Configuration:
    """The configuration without arguments, on two cores with bf16 and with every peer installed."""
    monkeypatch.setattr("vit_fast.benchmarks.configuration.has_bf16", lambda: True)
    monkeypatch.setattr("vit_fast.measure.candidate.Candidate.missing_packages", lambda _: [])
    return make_configuration(device="cpu")


def test_the_last_candidates_of_a_dtype_are_skipped_if_they_do_not_fit(default: Configuration) -> None:
    def plan_of(seconds: float) -> tuple[list[list[str]], set[str]]:
        planned, skipped = dataclasses.replace(default, time_budget_s=seconds).plan()
        return [[candidate.name for candidate in found] for found in planned.values()], set(skipped)

    (everything, none), (some, skipped), (few, _) = map(plan_of, (float("inf"), default.time_budget_s, 1.0))
    first = ["timm", "timm+fused+frozen", "openvino", "onnxruntime", "timm+compile:freezing"]
    assert not none and len(everything) == 4 and everything[0][:5] == some[0][:5] == some[1][:5] == first
    for chosen, every, group in zip(some, everything, default.groups(), strict=True):
        assert chosen == [name for name in every if f"{name} ({group.dtype_name})" not in skipped]
    assert "timm+fused+frozen" in some[2] and "timm+compile (bf16)" in skipped
    assert few == [first[:2]] * 4
    named = make_configuration(models=["vit_test"], candidates=["eager", "timm+compile"], time_budget_s=1, device="cpu")
    assert named.plan()[1] == [], "named candidates are all planned"


class Machine:
    """A clock that simulated calls and preparations advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slowness: float, noise: float) -> None:
        self.now_s, self.slowness, self.noise = 0.0, slowness, noise
        self.random, self.built = np.random.default_rng(0), set()
        ceilings = {"copy_GB_per_s": 30.0, "copy_bytes": 1, "matmul_size": 1}
        ceilings |= {"matmul_TFLOP_per_s": {"fp32": 0.6, "bf16": 1.1}}
        monkeypatch.setattr(runner.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr("vit_fast.measure.clock.time.perf_counter_ns", lambda: int(self.now_s * 1e9))
        monkeypatch.setattr(runner, "measure_ceilings", lambda *_: self.spend(1.0) or ceilings)
        monkeypatch.setattr(runner, "make_problem", lambda *_: self.spend(1.0))
        monkeypatch.setattr(runner, "prepare", self.prepare)

    def spend(self, seconds: float) -> None:
        self.now_s += seconds * self.slowness * float(np.exp(self.random.normal(0, self.noise)))

    def prepare(self, candidate: object, group: Group, *_: object, **__: object) -> tuple[SimpleNamespace, dict]:
        key = candidate.name, group.dtype_name  # an exported file serves every batch size
        compiling_s = {"none": 0.0, "default": 25.0, "freezing": 10.0}[candidate.compile_mode]
        self.spend(compiling_s + (0.2 if key in self.built else candidate.build_s))
        self.built.add(key)
        seconds = 0.014 * group.batch_size * (0.8 if "frozen" in candidate.name else 1.0)
        row = make_row(group, candidate, "measured") | {"max_error": 1e-6, "allowed_error": 1e-5, "agreement": 1.0}
        ready = SimpleNamespace(candidate=candidate, call=lambda _: self.spend(seconds), row=row, call_s=seconds)
        return ready, row


@pytest.mark.fast_cases("1.0-0.03")
@pytest.mark.parametrize(("slowness", "noise"), [(0.7, 0.01), (1.0, 0.03), (1.3, 0.05)])
def test_the_default_run_measures_and_ranks_all_that_it_planned_in_time(slowness, noise, default, monkeypatch) -> None:
    Machine(monkeypatch, slowness, noise)
    record = runner.run(default)
    assert record["seconds"] <= default.time_budget_s + 10, "and starting and writing take the rest of 180"
    assert {row["status"] for row in record["rows"]} == {"measured"}
    assert len({(row["dtype"], row["batch"]) for row in record["rows"]}) == 4
    verdicts = {row["verdict"] for row in record["rows"] if noise < 0.05 or row["candidate"] == "timm+fused+frozen"}
    assert verdicts <= {None, "faster", "slower", "no difference"} and "faster" in verdicts


def test_a_slow_machine_measures_the_first_candidates_of_every_group(default, monkeypatch) -> None:
    Machine(monkeypatch, 3.0, 0.03)
    record = runner.run(default)
    assert record["seconds"] <= default.time_budget_s + 20
    first = {(row["dtype"], row["batch"]) for row in record["rows"] if row["candidate"] == "timm" and row["ms"]}
    assert len(first) == 4
    assert {row["reason"] for row in record["rows"] if row["status"] == "skipped"} == {"out of time"}

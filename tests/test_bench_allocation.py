"""The time of a run: what is planned, when each timing ends, and what noise does to both, by simulated clocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from bench_support import Notes

from vit_fast.benchmarks import configuration, records, runner
from vit_fast.benchmarks.candidates import parse_candidate
from vit_fast.benchmarks.configuration import Allocation, Configuration, make_configuration
from vit_fast.benchmarks.preparation import Prepared
from vit_fast.benchmarks.rows import Group, make_row
from vit_fast.benchmarks.runner import AGAIN, Watch
from vit_fast.measure.candidate import Candidate
from vit_fast.measure.clock import Protocol, time_interleaved

pytestmark = pytest.mark.usefixtures("small_ceilings")
CPU, FREEZING = torch.device("cpu"), "timm+compile:freezing"
BUDGET_S = configuration.DEFAULT_TIME_BUDGET_S["cpu"]
TWO_CORES = {"copy_GB_per_s": 30.0, "copy_bytes": 1, "matmul_size": 1}
TWO_CORES |= {"matmul_TFLOP_per_s": {"fp32": 0.2, "bf16": 0.45}}


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> Configuration:
    """Returns the configuration without arguments, on two cores with bf16 and with every peer installed."""
    monkeypatch.setattr("vit_fast.benchmarks.configuration.has_bf16", lambda: True)
    monkeypatch.setattr("vit_fast.measure.candidate.Candidate.missing_packages", lambda _: [])
    return make_configuration(device="cpu")


def allocated(plan: Configuration, budget_s: float, speed: float = 1.0, **fields: object) -> Allocation:
    reached = {name: speed * value for name, value in TWO_CORES["matmul_TFLOP_per_s"].items()}
    groups = {group: plan.candidates_of(group) for group in plan.groups()}
    return Allocation(groups, budget_s, TWO_CORES | {"matmul_TFLOP_per_s": reached}, **fields)


def labels(allocation: Allocation) -> list[list[str]]:
    return [[candidate.name for candidate in found] for found in allocation.planned.values()]


def test_what_does_not_fit_is_skipped_of_a_dtype_the_last_first(default: Configuration) -> None:
    everything, some, few = (allocated(default, seconds) for seconds in (math.inf, BUDGET_S, 1.0))
    assert not everything.skipped and len(labels(everything)) == 4
    first = {f"{label} (fp32)" for label in ("timm", "timm+fused+frozen", "openvino", "onnxruntime", FREEZING)}
    assert some.skipped and not first & set(some.skipped) and "eager (bf16)" in some.skipped
    for chosen, every, group in zip(labels(some), labels(everything), some.planned, strict=True):
        assert chosen == [label for label in every if f"{label} ({group.dtype_name})" not in some.skipped]
    assert [len(found) for found in labels(few)] == [configuration.ALWAYS] * 4
    slow = allocated(default, BUDGET_S, speed=0.2)
    assert set(some.skipped) < set(slow.skipped)
    resumed = allocated(default, 1.0, skipped=some.skipped)
    assert labels(resumed) == labels(some) and resumed.skipped == some.skipped


class Machine:
    """A clock that simulated calls and preparations advance."""

    def __init__(self, slowness: float = 1.0, noise: float = 0.0) -> None:
        self.now_s, self.slowness, self.noise = 0.0, slowness, noise
        self.random = np.random.default_rng(0)

    def spend(self, seconds: float) -> None:
        self.now_s += seconds * self.slowness * float(np.exp(self.random.normal(0, self.noise)))

    def prepared(self, candidate: Candidate, group: Group, seconds: float) -> Prepared:
        row = make_row(group, candidate, "measured") | {"max_error": 1e-6, "allowed_error": 1e-5, "agreement": 1.0}
        return Prepared(candidate, lambda _: self.spend(seconds), row, seconds)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Simulates a machine: clock, ceilings, and preparations that take the estimated time."""
        monkeypatch.setattr(runner.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr("vit_fast.measure.clock.time.perf_counter_ns", lambda: int(self.now_s * 1e9))

        built: set[tuple[str, str]] = set()  # an exported file serves every batch size

        def ceilings(*_: object) -> dict:
            self.spend(1.5)
            return TWO_CORES

        def prepare(candidate: Candidate, group: Group, *_: object, **__: object) -> tuple[Prepared, dict]:
            building_s = 0.2 if (key := (candidate.name, group.dtype_name)) in built else candidate.build_s
            built.add(key)
            self.spend(building_s + configuration.COMPILING_S[candidate.compile_mode])
            seconds = (0.02 if group.dtype_name == "fp32" else 0.014) * group.batch_size
            ready = self.prepared(candidate, group, seconds * (0.8 if "frozen" in candidate.name else 1.0))
            return ready, ready.row

        monkeypatch.setattr(runner, "measure_ceilings", ceilings)
        monkeypatch.setattr(runner, "make_problem", lambda *_: self.spend(1.0))
        monkeypatch.setattr(runner, "prepare", prepare)


@pytest.mark.fast_cases("1.0-0.03")
@pytest.mark.parametrize(("slowness", "noise"), [(0.7, 0.01), (1.0, 0.03), (1.25, 0.05)])
def test_the_default_run_measures_and_ranks_all_that_it_planned_in_time(slowness, noise, default, monkeypatch) -> None:
    Machine(slowness, noise).install(monkeypatch)
    record = runner.run(default, notes := Notes())
    assert record["seconds"] <= BUDGET_S + 10, "and starting and writing take the rest of 180"
    assert {row["status"] for row in record["rows"]} == {"measured"}
    assert len({(row["dtype"], row["batch"]) for row in record["rows"]}) == 4
    told = [row["verdict"] for row in record["rows"] if noise < 0.05 or row["candidate"] == "timm+fused+frozen"]
    assert set(told) <= {None, "faster", "slower", "no difference"} and "faster" in told
    assert notes.steps == pytest.approx(notes.total)
    if slowness == 1.0:
        assert record["seconds"] > configuration.PLANNED_SHARE * BUDGET_S * 0.6, "the time is used"


def follow(
    machine: Machine, end_s: float, monkeypatch: pytest.MonkeyPatch, *, allocated: bool = True
) -> tuple[dict[str, int], list[str]]:
    """Returns the number of calls of each of four candidates until a timing ends, and the printed messages."""
    monkeypatch.setattr("vit_fast.measure.clock.time.perf_counter_ns", lambda: int(machine.now_s * 1e9))
    (group,) = make_configuration(models=["vit_test"], batch_sizes=[8], dtypes=["fp32"], device="cpu").groups()
    names = {"timm": 0.1, "timm+fused+frozen": 0.09, "eager": 0.12, "openvino": 0.11}
    prepared = {name: machine.prepared(parse_candidate(name), group, seconds) for name, seconds in names.items()}
    protocol, notes = Protocol(repeats=80, seconds=4.0, least_repeats=5, warmup_repeats=1, warmup_seconds=0.0), Notes()
    watch = Watch(prepared, protocol, notes, lambda: machine.now_s, end_s, allocated)
    assert watch.best == "timm+fused+frozen"
    timings = time_interleaved(watch.calls, CPU, protocol, on_round=watch)
    return {name: timing.repeats for name, timing in timings.items()}, notes.said


def test_a_quiet_machine_times_all_candidates_as_long_as_the_protocol_says(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(noise=0.01)
    repeats, said = follow(machine, 120.0, monkeypatch)
    assert len(set(repeats.values())) == 1 and min(repeats.values()) * 0.09 >= 4.0 and not said
    assert machine.now_s < 60, "no longer than that"


def test_noise_leaves_the_best_of_ours_and_of_the_peers_until_they_can_be_ranked(monkeypatch) -> None:
    machine = Machine(noise=0.35)
    repeats, said = follow(machine, 300.0, monkeypatch)
    assert repeats["timm"] == repeats["timm+fused+frozen"] == repeats[AGAIN] > 1.3 * repeats["eager"]
    assert repeats["eager"] == repeats["openvino"]
    assert said == ["noisy machine: continuing with timm, timm+fused+frozen"]
    assert machine.now_s < 300


def test_noise_without_end_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(noise=1.5)
    repeats, said = follow(machine, 40.0, monkeypatch)
    assert 40 <= machine.now_s < 60 and said and repeats["timm"] > repeats["eager"] > 5


def test_time_that_is_not_its_own_is_left_to_other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(noise=0.35)
    repeats, said = follow(machine, 300.0, monkeypatch, allocated=False)
    assert len(set(repeats.values())) == 1 and not said and machine.now_s < 60


def test_named_candidates_are_all_planned_and_without_a_limit() -> None:
    named = make_configuration(models=["vit_test"], candidates=["eager", "timm+compile"], device="cpu")
    assert named.time_budget_s == math.inf and not named.is_default
    limited = make_configuration(models=["vit_test"], candidates=["eager"], time_budget_s=5, device="cpu")
    assert limited.time_budget_s == 5 and not limited.is_default
    assert make_configuration(models=["vit_test"], device="cpu").time_budget_s == BUDGET_S


def test_a_resumed_run_leaves_out_what_the_first_did(default: Configuration, tmp_path, monkeypatch) -> None:
    Machine().install(monkeypatch)
    first = runner.run(default, None, journal := records.Journal.begin(tmp_path / "run", {}, {}))
    monkeypatch.setattr(runner, "measure_ceilings", lambda *_: TWO_CORES | {"matmul_TFLOP_per_s": {"fp32": 100.0}})
    again = runner.run(default, None, records.Journal.resume(journal.folder))
    assert again["skipped"] == first["skipped"] and len(again["rows"]) == len(first["rows"])

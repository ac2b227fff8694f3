"""Resolution of a run on simulated machines: a clock with drift, bursts and outliers, and a quiet one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vit_fast.benchmarks import runner
from vit_fast.benchmarks.runner import Conditions
from vit_fast.measure import clock
from vit_fast.measure.clock import Protocol, time_interleaved

CPU = torch.device("cpu")


class Machine:
    """A clock that calls advance by what they would take here, and what else happens on this machine."""

    def __init__(self, seed: int, *, noisy: bool) -> None:
        self.random, self.noisy = np.random.default_rng(seed), noisy
        self.now_ms = self.burst_ends_ms = 0.0
        self.drift, self.period_ms, self.burst = 0.0, self.random.uniform(5e3, 6e4), 1.0
        if noisy:
            self.drift = self.random.uniform(0, 0.5)

    def spend(self, ms: float) -> None:
        ms *= float(np.exp(self.random.normal(0, 0.05 if self.noisy else 0.01)))
        if self.noisy:
            ms *= 1 + self.drift * np.sin(2 * np.pi * self.now_ms / self.period_ms) ** 2
            if self.now_ms > self.burst_ends_ms and self.random.random() < 0.02:
                self.burst_ends_ms = self.now_ms + self.random.exponential(300)
                self.burst = self.random.uniform(1.2, 3)
            ms *= self.burst if self.now_ms < self.burst_ends_ms else 1.0
            ms += self.random.exponential(30) if self.random.random() < 0.03 else 0.0
        self.now_ms += ms


Samples = dict[str, tuple[float, ...]]


def measure(machine: Machine, times_ms: dict[str, float]) -> Samples:
    """The candidates' samples as time_interleaved takes them by that machine's clock."""
    calls = {name: (lambda _, ms=ms: machine.spend(ms)) for name, ms in times_ms.items()}
    protocol = Protocol(repeats=50, seconds=1e9, warmup_repeats=1, warmup_seconds=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vit_fast.measure.clock.time.perf_counter_ns", lambda: int(machine.now_ms * 1e6))
        return {name: tuple(taken) for name, taken in time_interleaved(calls, CPU, protocol).items()}


SAME = dict.fromkeys(("first", "again", "a", "b"), 10.0)


@pytest.fixture(scope="module")
def noisy() -> list[Samples]:
    """Twenty noisy machines, on which identical code and code that takes 30 % longer were timed."""
    return [measure(Machine(seed, noisy=True), SAME | {"longer": 13.0}) for seed in range(20)]


def verdict(samples: Samples, base: str, other: str) -> str:
    within = clock.control(samples["first"], samples["again"])["resolution"]
    rows = {
        name: {"samples_ms": taken, "images_per_s": 1 / np.median(taken), "batch": 1} for name, taken in samples.items()
    }
    return str(clock.compare_rows(rows[base], rows[other], within, paired=True)["verdict"])


def test_identical_candidates_are_never_told_apart_on_noisy_machines(noisy: list[Samples]) -> None:
    assert [verdict(samples, "a", "b") for samples in noisy] == 20 * ["no difference"]


def test_noise_that_moves_medians_does_not_hide_a_large_difference(noisy: list[Samples]) -> None:
    """Each turn is its own yardstick: on machines whose medians of identical code differ by half, 30 % are found."""
    intervals = [clock.ratio_interval(samples["first"], samples["again"], paired=False) for samples in noisy]
    assert max(high for _, high in intervals) > 1.1
    assert [verdict(samples, "longer", "a") for samples in noisy].count("faster") >= 19


def test_a_ratio_is_of_turns_only_where_they_were_shared() -> None:
    slow_then_fast, other = [20.0, 20.0, 20.0, 10.0, 10.0], [10.0, 10.0, 10.0, 5.0, 5.0]
    assert clock.ratio(slow_then_fast, other[::-1], paired=False) == pytest.approx(2.0)
    assert clock.ratio(slow_then_fast, other, paired=True) == pytest.approx(2.0)
    assert clock.ratio([10.0, 30.0, 20.0], [10.0, 10.0, 10.0], paired=True) == pytest.approx(2.0)
    assert clock.ratio([10.0, 12.0, 30.0], [10.0, 6.0, 6.0], paired=True) == pytest.approx(2.0)  # medians: also 2
    assert clock.ratio([10.0, 12.0, 30.0], [5.0, 12.0, 10.0], paired=True) == pytest.approx(2.0)  # medians: 1.2
    assert clock.ratio([10.0, 12.0, 30.0], [5.0, 12.0, 10.0], paired=False) == pytest.approx(1.2)
    assert clock.ratio([1.0, 2.0, 8.0], [1.0, 1.0, 2.0], paired=True, share=1.0) == pytest.approx(4.0)


def test_a_quiet_machine_finds_five_per_cent_and_the_duration() -> None:
    times = SAME | {"longer": 10.5, "thrice": 30.0}
    quiet = [measure(Machine(seed, noisy=False), times) for seed in range(20)]
    assert [verdict(samples, "longer", "a") for samples in quiet].count("faster") >= 19
    assert [verdict(samples, "a", "longer") for samples in quiet].count("slower") >= 19
    assert np.median(quiet[0]["a"]) == pytest.approx(10.0, rel=0.01)
    low, high = clock.ratio_interval(quiet[0]["thrice"], quiet[0]["a"], paired=True)
    assert low < 3.0 < high < low * 1.02


def test_the_resolution_is_the_far_end_of_what_identical_code_did() -> None:
    found = clock.control([10.0] * 10, [12.0] * 10)
    assert found["ratio"] == pytest.approx(10 / 12) and found["resolution"] == pytest.approx(0.2)
    assert clock.verdict(1.19, (1.1, 1.3), 0.2) == "cannot be ranked"
    assert clock.verdict(1.05, (1.02, 1.08), 0.06) == "no difference"
    assert clock.verdict(1.05, (0.99, 1.1), 0.01) == "no difference"
    assert clock.verdict(1.05, (0.99, 1.3), 0.01) == clock.verdict(1.0, (0.7, 1.05), 0.01) == "cannot be ranked"
    assert clock.verdict(1.05, (1.02, 1.08), 0.04) == "faster"
    assert clock.verdict(0.95, (0.93, 0.97), 0.04) == "slower"


def test_what_others_take_is_told_from_what_we_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors for ten seconds: we work 8 of the 20 seconds, others 6, and the quota stops us for one."""
    own = iter([(1.0, 0, 0, 0), (9.0, 0, 0, 0)])
    fields = ("user", "system", "children_user", "children_system")
    monkeypatch.setattr(runner, "_busy_seconds", iter([(100.0, 2), (114.0, 2)]).__next__)
    monkeypatch.setattr(runner, "_throttled_seconds", iter([3.0, 4.0]).__next__)
    monkeypatch.setattr(runner.time, "perf_counter", iter([50.0, 60.0]).__next__)
    monkeypatch.setattr(runner.os, "times", lambda: SimpleNamespace(**dict(zip(fields, next(own), strict=True))))
    found = Conditions(CPU)
    with found.watch():
        pass
    told = found.summary()
    assert (told["others_share"], told["throttled_share"]) == (0.3, 0.1)
    assert [share in reason for reason, share in zip(told["busy"], ("30%", "10%"), strict=True)] == [True, True]
    assert Conditions(CPU).summary()["busy"] == []

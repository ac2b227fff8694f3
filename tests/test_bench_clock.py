"""The clock: rounds, cold inputs, memory, the resolution of noisy machines, and device time on a pretend GPU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bench_support import NoisyClock
from kernel_execution import PRETENDED
from pretend_gpu import HOST_MS, Machine

from vit_fast.benchmarks import runner
from vit_fast.measure import clock
from vit_fast.measure.clock import Protocol, time_interleaved

CPU = torch.device("cpu")
SIX = Protocol(repeats=6, seconds=0.0, least_repeats=6, warmup_repeats=2, warmup_seconds=10.0)
QUICK = Protocol(repeats=9, seconds=0.0, least_repeats=9, warmup_repeats=1, launch="hidden")
COUNTED = dataclasses.replace(QUICK, launch="counted")


def test_calls_are_interleaved_in_a_new_order_each_round() -> None:
    order: list[tuple[str, int]] = []
    calls = {name: (lambda number, name=name: order.append((name, number))) for name in "abc"}
    timings = time_interleaved(calls, CPU, SIX)
    assert {len(timing) for timing in timings.values()} == {6}
    names = "".join(name for name, _ in order)
    assert names[:6] == "aabbcc", "warm-up"
    assert all(sorted(names[i : i + 3]) == list("abc") for i in range(6, 24, 3))
    followers = {names[i : i + 2] for i in range(6, 23)}
    assert {"ab", "ba", "bc", "cb", "ac", "ca"} <= followers, "no call always follows the same call"
    assert [number for _, number in order[6:]] == [number for number in range(6) for _ in range(3)]


def test_untimed_calls_outlast_the_threads_of_the_previous_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated CPU, a call is twice as slow for 35 ms after the end of another candidate's call."""
    now_ms, ended_ms, returned_ms, last, order = 0.0, -1e9, -1e9, "", ""

    def run(name: str, ms: float) -> None:
        nonlocal now_ms, ended_ms, returned_ms, last, order
        order += name
        if name != last:
            ended_ms, last = returned_ms, name
        now_ms = returned_ms = now_ms + (2 * ms if now_ms < ended_ms + 35 else ms)

    monkeypatch.setattr("vit_fast.measure.clock.time.perf_counter_ns", lambda: int(now_ms * 1e6))
    calls = {name: (lambda _, name=name, ms=ms: run(name, ms)) for name, ms in (("a", 10.0), ("b", 7.0))}
    assert time_interleaved(calls, CPU, SIX)["a"].ms == 20
    monkeypatch.setattr(clock, "SETTLE_MS", 40.0)
    timings = time_interleaved(calls, CPU, SIX)
    assert (timings["a"].ms, timings["b"].ms) == (10, 7)
    before = now_ms
    time_interleaved({"a": calls["a"]}, CPU, SIX)
    assert now_ms - before <= (SIX.warmup_repeats + SIX.repeats + 4) * 10  # none for a call alone

    def sleep(seconds: float) -> None:
        nonlocal now_ms
        now_ms += 1e3 * seconds

    monkeypatch.setattr("vit_fast.measure.clock.time.sleep", sleep)
    calls |= {"b": lambda _: run("b", 100.0), "c": lambda _: run("c", 300.0)}
    order = ""
    timings = time_interleaved(calls, CPU, SIX)
    assert (timings["a"].ms, timings["b"].ms, timings["c"].ms) == (10, 100, 300)
    assert order.count("b") == order.count("c") == 2 + 1 + 6, "one untimed call, then an idle wait"


def measure(noisy: bool, **others_ms: float) -> list[dict[str, list[float]]]:
    """Samples on twenty simulated machines, of identical code under four names and of others."""
    times_ms = dict.fromkeys(("first", "again", "a", "b"), 10.0) | others_ms
    how = {"noise": 0.05, "drift": 0.3, "bursts": 0.005} if noisy else {}
    found = []
    for machine in (NoisyClock(seed, **how) for seed in range(20)):
        calls = {name: (lambda _, ms=ms, on=machine: on.spend(ms / 1e3)) for name, ms in times_ms.items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock, "SETTLE_MS", 40.0)  # as outside of tests, where it separates samples
            patch.setattr("vit_fast.measure.clock.time.perf_counter_ns", lambda on=machine: int(on.now_s * 1e9))
            found.append(time_interleaved(calls, CPU, Protocol(repeats=50, seconds=1e9, warmup_repeats=1)))
    return found


def verdicts(machines: list[dict[str, list[float]]], base: str, other: str) -> list[str]:
    found = []
    for samples in machines:
        resolution = clock.control(samples["first"], samples["again"])["resolution"]
        rows = [{"samples_ms": samples[name], "batch": 1} for name in (base, other)]
        found.append(clock.compare_rows(*rows, resolution, paired=True)["verdict"])
    return found


def test_noisy_machines_rank_large_differences_but_not_identical_code() -> None:
    noisy = measure(True, longer=13.0)
    intervals = [clock.ratio_interval(samples["first"], samples["again"], paired=False) for samples in noisy]
    assert max(high for _, high in intervals) > 1.1, "medians of identical code differ"
    assert not {"faster", "slower"} & {*verdicts(noisy, "a", "b")}, "identical code"
    assert verdicts(noisy, "longer", "a").count("faster") >= 19


def test_quiet_machines_rank_five_per_cent_and_measure_the_duration() -> None:
    quiet = measure(False, longer=10.5, thrice=30.0)
    assert verdicts(quiet, "longer", "a").count("faster") >= 19
    assert verdicts(quiet, "a", "longer").count("slower") >= 19
    assert np.median(quiet[0]["a"]) == pytest.approx(10.0, rel=0.01)
    low, high = clock.ratio_interval(quiet[0]["thrice"], quiet[0]["a"], paired=True)
    assert low < 3.0 < high < low * 1.02


def test_verdicts_follow_from_ratio_interval_and_resolution() -> None:
    base, other = [10.0, 12.0, 30.0], [5.0, 12.0, 10.0]
    assert clock.ratio(base, other, paired=True) == pytest.approx(2.0), "the median of ratios"
    assert clock.ratio(base, other, paired=False) == pytest.approx(1.2), "the ratio of medians"
    found = clock.control([10.0] * 10, [12.0] * 10)
    assert found["ratio"] == pytest.approx(10 / 12) and found["resolution"] == pytest.approx(0.2)
    for ratio, interval, resolution, verdict in (
        (1.19, (1.1, 1.3), 0.2, "cannot be ranked"),
        (1.05, (1.02, 1.08), 0.06, "no difference"),
        (1.05, (0.99, 1.1), 0.01, "no difference"),
        (1.05, (0.99, 1.3), 0.01, "cannot be ranked"),
        (1.0, (0.7, 1.05), 0.01, "cannot be ranked"),
        (1.05, (1.02, 1.08), 0.04, "faster"),
        (0.95, (0.93, 0.97), 0.04, "slower"),
    ):
        assert clock.verdict(ratio, interval, resolution) == verdict


def test_other_processes_and_the_quota_make_a_machine_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors for ten seconds: this process works 8 of the 20 s, others 6, and the quota withholds one."""
    own = iter([(1.0, 0, 0, 0), (9.0, 0, 0, 0)])
    fields = ("user", "system", "children_user", "children_system")
    monkeypatch.setattr(runner, "_busy_seconds", iter([(100.0, 2), (114.0, 2)]).__next__)
    monkeypatch.setattr(runner, "_throttled_seconds", iter([3.0, 4.0]).__next__)
    monkeypatch.setattr(runner.time, "perf_counter", iter([50.0, 60.0]).__next__)
    monkeypatch.setattr(runner.os, "times", lambda: SimpleNamespace(**dict(zip(fields, next(own), strict=True))))
    found = runner.Conditions(CPU)
    told = found.summary()
    assert (told["others_share"], told["throttled_share"]) == (0.3, 0.1)
    assert [share in reason for reason, share in zip(told["busy"], ("30%", "10%"), strict=True)] == [True, True]


def call(gpus: Machine, host_ms: float, device_ms: float, waits: bool = False) -> Callable[[int], None]:
    """A call of ten launches that together take these times; one that waits reads a result at its end."""

    def run(_: int) -> None:
        for _ in range(10):
            gpus.host_ms += host_ms / 10 - HOST_MS
            gpus.work(0, device_ms / 10, "launch")
        if waits:
            torch.cuda.synchronize()

    return run


@pytest.mark.parametrize(("host_ms", "device_ms"), [(0.02, 5.0), (0.7, 0.1), (43.0, 60.0)])
def test_hidden_launches_leave_the_devices_time(gpus: Machine, host_ms: float, device_ms: float) -> None:
    """Neither the flush nor the sleep is counted, also if the host needs many times longer than the device."""
    run = call(gpus, host_ms, device_ms)
    found, again = time_interleaved({"a": run, "again": run}, "cuda", QUICK).values()
    assert found.ms == again.ms == pytest.approx(device_ms, rel=1e-9)
    assert found.hosts_ms[0] == pytest.approx(host_ms, rel=1e-9)
    assert not found.host_bound and gpus.counts["aten::zero_"] >= 2 * len(found)


def test_counted_launches_are_the_slower_of_host_and_device(gpus: Machine) -> None:
    found = time_interleaved({"host": call(gpus, 11.0, 1.0), "device": call(gpus, 0.1, 5.0)}, "cuda", COUNTED)
    assert (found["host"].ms, found["device"].ms) == pytest.approx((11.0 + 0.1, 5.0 + 0.01), rel=1e-6)
    assert found["host"].hosts_ms[0] == pytest.approx(11.0) and not found["host"].host_bound
    assert not gpus.counts["aten::zero_"]


def test_calls_that_wait_for_the_device_are_host_bound_and_do_not_affect_others(gpus: Machine) -> None:
    found = time_interleaved({"waits": call(gpus, 0.7, 0.1, waits=True), "a": call(gpus, 0.7, 0.1)}, "cuda", QUICK)
    assert found["waits"].host_bound and not found["a"].host_bound
    assert found["waits"].ms == pytest.approx(found["waits"].hosts_ms[-1]) == pytest.approx(0.71)
    assert found["a"].ms == pytest.approx(0.1)


def test_a_delay_of_the_host_is_hidden_by_a_longer_sleep(gpus: Machine) -> None:
    plain, delays_ms = call(gpus, 0.5, 0.1), iter([0.0] * 7 + [1.2] * 2)

    def delayed(number: int) -> None:
        plain(number)
        gpus.host_ms += next(delays_ms, 0.0)

    found = time_interleaved({"a": delayed}, "cuda", QUICK)["a"]
    assert not found.host_bound and found == pytest.approx([0.1] * len(found))


@pytest.mark.gpu
@pytest.mark.skipif(PRETENDED, reason="the clock of a pretend GPU does not count how long the host sleeps")
def test_a_real_device_sleeps_while_the_host_is_slow() -> None:
    """The device sleeps for about 1 ms behind a host that needs 4; the same behind a wait is host-bound."""
    device = torch.device("cuda")

    def call(_: int) -> None:
        time.sleep(4e-3)
        torch.cuda._sleep(int(clock.cycles_per_ms(device)))

    def waits(_: int) -> None:
        call(_)
        torch.cuda.synchronize()

    found = time_interleaved({"a": call, "waits": waits}, device, QUICK)
    assert min(found["a"].hosts_ms) > 4 > found["a"].ms > 0.25  # clocks may change between calibration and call
    assert not found["a"].host_bound and found["waits"].host_bound

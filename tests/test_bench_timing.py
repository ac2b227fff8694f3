"""The clock: turns, repeats, percentiles, cold inputs, memory. Nothing here depends on how fast the machine is."""

from __future__ import annotations

import os

import pytest
import torch

from vit_fast.benchmarks import machine
from vit_fast.measure.clock import (
    CPU_CACHE_BYTES,
    Protocol,
    Timing,
    cold_copies,
    peak_memory_of_call,
    percentile,
    time_interleaved,
    without_profiler_chatter,
)

CPU = torch.device("cpu")
QUICK = Protocol(repeats=6, seconds=0.0, least_repeats=6, warmup_repeats=2, warmup_seconds=10.0)


def test_percentiles_interpolate_as_numpy_does() -> None:
    import numpy as np

    samples = [5.0, 1.0, 4.0, 2.0, 8.0, 7.0]
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        assert percentile(samples, share) == pytest.approx(np.quantile(samples, share))
    timing = Timing.from_samples(samples)
    assert (timing.ms, timing.repeats) == (4.5, 6)
    assert timing.ms_p20 < timing.ms < timing.ms_p80


def test_what_the_profiler_says_of_itself_is_kept_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    lines = "USDT: profiler started", "[W] CPUAllocator.cpp:245] allocated before the profiling started", "a warning"
    with without_profiler_chatter():
        for line in lines:
            os.write(2, f"{line}\n".encode())
    assert capfd.readouterr().err == "a warning\n"


def test_candidates_take_turns_in_a_new_order_each_round() -> None:
    order: list[tuple[str, int]] = []
    calls = {name: (lambda number, name=name: order.append((name, number))) for name in "abc"}
    timings = time_interleaved(calls, CPU, QUICK)
    assert {timing.repeats for timing in timings.values()} == {6}
    warm_up, timed = order[:6], order[6:]
    assert [name for name, _ in warm_up] == list("aabbcc")
    rounds = ["".join(name for name, _ in timed[i : i + 3]) for i in range(0, 18, 3)]
    assert all(sorted(names) == list("abc") for names in rounds)
    names = "".join(rounds)
    followers = {names[i : i + 2] for i in range(len(names) - 1)}
    assert {"ab", "ba", "bc", "cb", "ac", "ca"} <= followers  # nobody always behind the same neighbour
    assert [number for _, number in timed] == [number for number in range(6) for _ in range(3)]


def test_a_measurement_lasts_for_repeats_or_seconds_but_never_below_the_least() -> None:
    protocol = Protocol(repeats=50, seconds=0.2, least_repeats=7)
    assert protocol.share_of([1e-3] * 50) == 1
    assert protocol.share_of([1.0] * 49) < 1
    assert protocol.share_of([100.0] * 7) == 1
    assert protocol.share_of([1000.0] * 6) < 1
    with pytest.raises(ValueError, match="repeats must be"):
        Protocol(repeats=0)
    with pytest.raises(ValueError, match="seconds must be"):
        Protocol(seconds=-1)


def test_a_listener_can_end_the_measurement_and_an_exception_goes_through() -> None:
    timings = time_interleaved(
        {"a": lambda _: None}, CPU, QUICK, on_round=lambda number, taken: taken if number < 2 else ()
    )
    assert timings["a"].repeats == 2

    def broken(_: int) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        time_interleaved({"a": broken}, CPU, QUICK)


def test_inputs_rotate_through_more_memory_than_the_cache() -> None:
    for nbytes in (1000, 2**20, 2**30):
        copies = cold_copies(nbytes, CPU)
        assert copies >= 2
        assert copies * nbytes >= 2 * CPU_CACHE_BYTES


def test_peak_memory_counts_what_is_alive_at_once() -> None:
    x = torch.randn(512, 512)  # 1 MiB
    assert peak_memory_of_call(lambda: (x + 1).sum(), CPU) == pytest.approx(2**20, rel=0.01)
    three = peak_memory_of_call(lambda: [x + 1, x + 2, x + 3], CPU)
    in_turn = peak_memory_of_call(lambda: [(x + i).sum() for i in range(3)], CPU)
    assert three == pytest.approx(3 * 2**20, rel=0.01)
    assert in_turn == pytest.approx(2**20, rel=0.01)


@pytest.mark.usefixtures("small_ceilings")
def test_the_machine_says_what_it_is_and_its_ceilings_name_their_sizes() -> None:
    facts = machine.describe(CPU)
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["gpu"] is None
    assert facts["commit"] is None or len(facts["commit"].removesuffix("-dirty")) == 12
    ceilings = machine.measure_ceilings(CPU, ["fp32"])
    assert ceilings["matmul_size"] == machine.MATMUL_SIZE["cpu"]
    assert ceilings["copy_bytes"] == machine.COPY_BYTES["cpu"]
    assert set(ceilings["matmul_TFLOP_per_s"]) == {"fp32"}
    assert ceilings["copy_GB_per_s"] > 0

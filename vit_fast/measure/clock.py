"""Times calls interleaved, after warm-up, on inputs that are not in the last-level cache; compares the timings.

    timings = time_interleaved({"eager": call_eager, "sdpa": call_sdpa}, device)
    timings["sdpa"].ms, timings["sdpa"].ms_p20, timings["sdpa"].ms_p80

On CUDA, events around each call measure it (device_clock.py), and the host's time to enqueue it is recorded. On a CPU,
the host's monotonic clock measures it. The calls are interleaved, so that clock drift, heat and other processes affect
all of them. On a CPU, untimed calls precede each timed one (see SETTLE_MS), as in a program that runs only this call.

As an A/A control, one candidate is timed twice, interleaved in the same rounds. The resolution (noise floor) is the
largest deviation from 1 that the ratio of the two, or its confidence interval, reaches. A candidate is faster or slower
only if its interval excludes 1 and its ratio differs from 1 by more than the resolution.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from .device_clock import DeviceClock, open_queue

Call = Callable[[int], object]

# Larger than the last-level cache of most processors.
CPU_CACHE_BYTES = 64 * 2**20
# Duration of the untimed calls. After a call, threads of torch spin for about 10 ms, those of ONNX Runtime for 35. So
# the next call would share the cores with them. After an idle wait, the timed call would first wake its own threads.
SETTLE_MS = 40.0
RESAMPLES, CONFIDENCE = 1000, 0.99
# Candidates are not ranked if the resolution exceeds this.
UNRANKABLE = 0.10
SAME, FASTER, SLOWER, UNKNOWN = "no difference", "faster", "slower", "cannot be ranked"
QUIET_RUN = "to reduce noise, stop other processes, fix the clocks, or pin the run to unused cores (taskset -c)"


@dataclass(frozen=True)
class Protocol:
    """The length of a measurement.

    A call is timed until it has `repeats` samples, or `least_repeats` samples and `seconds` (with untimed calls),
    whichever is first. Before, it is called up to `warmup_repeats` times or for `warmup_seconds`, at least once.

    On CUDA, `launch` "counted" includes the host's time to launch the call, as in a latency-bound program; "hidden"
    queues the call behind other work, so that only device time counts.
    """

    repeats: int = 50
    seconds: float = 0.5
    least_repeats: int = 7
    warmup_repeats: int = 5
    warmup_seconds: float = 0.5
    launch: Literal["counted", "hidden"] = "counted"

    def lasting(self, seconds: float | None) -> Protocol:
        """Returns a protocol that times each call for these seconds; None returns this one."""
        if seconds is None:
            return self
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be a number of seconds >= 0, got {seconds}")
        return dataclasses.replace(self, repeats=sys.maxsize, seconds=seconds)

    def share_of(self, samples: Samples) -> float:
        """Returns the progress of a measurement from 0 to 1."""
        count, seconds = len(samples), (sum(samples) + samples.untimed_ms) / 1e3
        in_time = min(count / self.least_repeats, seconds / self.seconds if self.seconds else 1.0)
        return min(max(count / self.repeats, in_time), 1.0)

    def is_satisfied(self, samples: Mapping[str, Samples]) -> bool:
        return all(self.share_of(taken) == 1 for taken in samples.values())


@dataclass(frozen=True)
class Timing:
    """The durations of one call in milliseconds: median, percentiles, and all calls in the order of their rounds.

    `host_ms` is the median of the host's time to enqueue a call, None on a CPU. `host_bound`: launches were to be
    hidden but could not be, so ms includes host time.
    """

    ms: float
    ms_p20: float
    ms_p80: float
    repeats: int
    host_ms: float | None = None
    host_bound: bool = False
    samples_ms: tuple[float, ...] = ()

    @classmethod
    def from_samples(
        cls, samples_ms: Sequence[float], host_ms: Sequence[float] = (), host_bound: bool = False
    ) -> Timing:
        p20, median, p80 = (percentile(samples_ms, share) for share in (0.2, 0.5, 0.8))
        host = percentile(host_ms, 0.5) if host_ms else None
        return cls(median, p20, p80, len(samples_ms), host, host_bound, tuple(samples_ms))


def percentile(samples: Sequence[float], share: float) -> float:
    return float(np.quantile(samples, share))


class Samples(list[float]):
    """The durations of one call so far, in ms; `untimed_ms` is the duration of the untimed calls on a CPU."""

    def __init__(self, call: Call, device: torch.device, protocol: Protocol, *, alone: bool = False) -> None:
        super().__init__()
        self.untimed_ms, self._settle_ms = 0.0, 0.0 if alone else SETTLE_MS
        self._clock: DeviceClock | None = None
        if device.type == "cuda":
            self._clock = DeviceClock(open_queue(device), call, hide=protocol.launch == "hidden")
        self._call = call

    def take(self, number: int) -> None:
        """Times one more call, in round `number`."""
        if self._clock is not None:
            self.append(self._clock(number))
            return
        untimed_ms = 0.0
        while untimed_ms < self._settle_ms:
            untimed_ms += self._run(number)
        self.untimed_ms += untimed_ms
        self.append(self._run(number))

    def _run(self, number: int) -> float:
        start = time.perf_counter_ns()
        self._call(number)
        return (time.perf_counter_ns() - start) / 1e6

    def timing(self) -> Timing:
        """Summarizes at least one sample."""
        if self._clock is None:
            return Timing.from_samples(self)
        return Timing.from_samples(self, self._clock.host_ms, self._clock.host_bound)


def time_interleaved(
    calls: Mapping[str, Call],
    device: torch.device | str,
    protocol: Protocol | None = None,
    *,
    on_round: Callable[[int, Mapping[str, Samples]], Collection[str]] | None = None,
) -> dict[str, Timing]:
    """Times several calls, functions of the round's number, interleaved until each satisfies the protocol.

    `on_round` is called after every round with its number and the samples so far; it returns the names to continue
    with. Exceptions of a call are not caught.
    """
    device = torch.device(device)
    protocol = Protocol() if protocol is None else protocol
    with open_queue(device).current() if device.type == "cuda" else contextlib.nullcontext():
        for call in calls.values():
            end = time.perf_counter() + protocol.warmup_seconds
            for number in range(protocol.warmup_repeats):
                call(number)
                synchronize(device)
                if time.perf_counter() >= end:
                    break
        samples = {name: Samples(call, device, protocol, alone=len(calls) == 1) for name, call in calls.items()}
        names = list(calls)
        number = 0
        while names:
            # A random order in each round, the same in each run: the state that a call leaves behind (spinning threads,
            # a warm cache) affects all other calls equally.
            for name in random.Random(number).sample(names, len(names)):
                samples[name].take(number)
            number += 1
            if on_round is not None:
                going_on = on_round(number, samples)
                names = [name for name in names if name in going_on]
            elif protocol.is_satisfied(samples):
                break
    return {name: taken.timing() for name, taken in samples.items() if taken}


def time_call(call: Call, device: torch.device | str, protocol: Protocol | None = None) -> Timing:
    """Times one call alone; see time_interleaved."""
    return time_interleaved({"call": call}, device, protocol)["call"]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        open_queue(device).synchronize()


def cold_copies(nbytes: int, device: torch.device | str) -> int:
    """Returns the number of copies of an input, at least two, that are together twice as large as the cache."""
    on_gpu = torch.device(device).type == "cuda"
    cache = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else CPU_CACHE_BYTES
    return max(2, math.ceil(2 * cache / max(nbytes, 1)))


def peak_memory_of_call(call: Callable[[], object], device: torch.device) -> int:
    """Returns the peak of the bytes that one call allocates; on a CPU without allocations of other libraries."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with without_profiler_chatter(), torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max([0, *itertools.accumulate(changes)])


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def without_profiler_chatter() -> Iterator[None]:
    """Removes the lines that torch's profiler writes about itself from stderr."""
    chatter = b"USDT:", b"before the profiling started"
    saved = os.dup(2)
    with tempfile.TemporaryFile() as written:
        sys.stderr.flush()
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            written.seek(0)
            for line in written:
                if not any(sign in line for sign in chatter):
                    os.write(2, line)


def ratio(base_ms: Sequence[float], other_ms: Sequence[float], *, paired: bool, share: float = 0.5) -> float:
    """Returns the speedup of `other` over `base`: the ratio of their quantiles `share`, base time / other time.

    If samples with the same index are from the same round (`paired`), the median is that of the ratios per round, in
    which machine drift cancels.
    """
    return float(_ratios(np.asarray(base_ms)[None], np.asarray(other_ms)[None], paired, share)[0])


def ratio_interval(
    base_ms: Sequence[float], other_ms: Sequence[float], *, paired: bool, share: float = 0.5
) -> tuple[float, float]:
    """Returns the 99 % confidence interval of `ratio`, by a circular block bootstrap.

    Blocks, because consecutive samples are correlated (bursts, drift).
    """
    generator = np.random.default_rng(0)
    base, other = np.asarray(base_ms), np.asarray(other_ms)
    rows = _blocks(len(base), generator)
    others = rows if paired and len(base) == len(other) else _blocks(len(other), generator)
    ratios = _ratios(base[rows], other[others], paired, share)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _ratios(base: np.ndarray, other: np.ndarray, paired: bool, share: float) -> np.ndarray:
    """Returns one `ratio` per row of base and other, two arrays [rows, count]."""
    if paired and share == 0.5 and base.shape == other.shape:
        return np.median(base / other, axis=1)
    return np.quantile(base, share, axis=1) / np.quantile(other, share, axis=1)


def _blocks(count: int, generator: np.random.Generator) -> np.ndarray:
    """Returns sample indices [RESAMPLES, count]: random circular blocks of about sqrt(count) consecutive samples."""
    length = max(1, round(math.sqrt(count)))
    starts = generator.integers(0, count, (RESAMPLES, math.ceil(count / length), 1))
    return ((starts + np.arange(length)) % count).reshape(RESAMPLES, -1)[:, :count]


def control(first_ms: Sequence[float], again_ms: Sequence[float], *, share: float = 0.5) -> dict[str, Any]:
    """Compares two timings of identical code in the same rounds.

    Returns `resolution` for ratios within these rounds and `between_runs` for ratios to another run (0.02 means 2 %).
    """
    low, high = ratio_interval(first_ms, again_ms, paired=True, share=share)
    found = ratio(first_ms, again_ms, paired=True, share=share)
    apart = ratio_interval(first_ms, again_ms, paired=False, share=share)
    within = max(high, 1 / low, found, 1 / found) - 1
    between = max(within, apart[1] - 1, 1 / apart[0] - 1)
    return {"ratio": found, "interval": [low, high], "resolution": within, "between_runs": between}


def verdict(found: float, interval: Sequence[float], resolution: float) -> str:
    """Returns FASTER, SLOWER or SAME; UNKNOWN if the resolution exceeds 10 % or an interval around 1 is too wide."""
    low, high = interval
    if resolution > UNRANKABLE:
        return UNKNOWN
    if low <= 1 <= high:
        return UNKNOWN if max(high, 1 / low) > 1 + UNRANKABLE else SAME
    if max(found, 1 / found) - 1 <= resolution:
        return SAME
    return FASTER if found > 1 else SLOWER


def compare_rows(
    base: Mapping[str, Any], other: Mapping[str, Any], resolution: float, *, paired: bool
) -> dict[str, Any]:
    """Returns the throughput ratio of row `other` to row `base`, its interval and verdict; see `ratio` for `paired`."""
    scale = other["batch"] / base["batch"]
    count = min(len(base["samples_ms"]), len(other["samples_ms"])) if paired else None
    samples = base["samples_ms"][:count], other["samples_ms"][:count]
    interval = [scale * end for end in ratio_interval(*samples, paired=paired)]
    found = scale * ratio(*samples, paired=paired)
    return {"ratio": found, "interval": interval, "verdict": verdict(found, interval, resolution)}


def format_number(value: float, digits: int = 3) -> str:
    """Rounds to `digits` significant digits (0.012, 4.56), and values >= 10^(digits - 1) to integers (1,235)."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"

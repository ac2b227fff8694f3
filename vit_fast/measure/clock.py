"""Times calls interleaved, after warm-up, and compares the timings.

The calls are interleaved, so that clock drift, heat and other processes affect all calls. On a CPU, the host's
monotonic clock measures a call. Untimed calls or a wait precede the timed call (see SETTLE_MS).

On CUDA, two events measure a call, and the host's time to queue the call is recorded. To measure device time alone, the
call is queued while the device sleeps for longer than the host needs. The event before the call must still be pending
when the call has been queued. Otherwise the call is timed again with a longer sleep. A call that waits for the device,
or that fills the driver's queue, is marked host-bound.

As an A/A control, one candidate is timed twice per round. The ratio of its two timings should be 1. The resolution
(noise floor) is the largest deviation from 1 of this ratio and its confidence interval. Another candidate is faster or
slower only if its interval excludes 1 and its ratio differs from 1 by more than the resolution.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

Call = Callable[[int], object]
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise torch's profiler writes its progress to stderr

# Duration of the untimed calls. After a call, threads of torch spin for about 10 ms, and threads of ONNX Runtime for
# 35 ms, which would slow down the next call. An idle wait would let the threads of the next call fall asleep. Calls of
# at least LONG_MS hide this delay, so an idle wait precedes them, which is shorter than an untimed call. On two Zen 3
# cores (2026-11), the medians of calls of 140 to 210 ms differed by at most 3 %, which is the noise.
SETTLE_MS, LONG_MS = 40.0, 100.0
RESAMPLES, CONFIDENCE = 1000, 0.99
UNRANKABLE = 0.10  # candidates are not ranked if the resolution exceeds this
SAME, FASTER, SLOWER, UNKNOWN = "no difference", "faster", "slower", "cannot be ranked"
QUIET_RUN = "to reduce noise, stop other processes, lock the clock rates, or pin the run to unused cores (taskset -c)"
# The device sleeps for MARGIN times the host's time plus SLACK_MS.
MARGIN, SLACK_MS = 1.5, 0.05
# Each attempt sleeps twice as long as the previous attempt.
ATTEMPTS, PROBES = 4, 3
SHORT_CYCLES, LONG_CYCLES = 200_000, 4_000_000
MIN_FLUSH_BYTES = 256 * 2**20


@functools.cache
def cycles_per_ms(device: torch.device) -> float:
    """Returns the cycles of torch.cuda._sleep per ms: the largest slope between a short and a long sleep."""

    def milliseconds(cycles: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    milliseconds(LONG_CYCLES)  # wakes a device whose clocks are low
    slopes = [milliseconds(LONG_CYCLES) - milliseconds(SHORT_CYCLES) for _ in range(PROBES)]
    return (LONG_CYCLES - SHORT_CYCLES) / max(min(slopes), 1e-3)


def host_ms() -> float:
    return time.perf_counter_ns() / 1e6


def current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@dataclass(frozen=True)
class Protocol:
    """The length of a measurement.

    A call is timed `repeats` times, or fewer after `seconds`, but at least `least_repeats` times. The seconds include
    untimed calls, and on CUDA all host time. Before that, the call runs `warmup_repeats` times, or fewer after
    `warmup_seconds`.

    On CUDA, `launch` "counted" includes the host's time to launch the call on an idle device, as in a latency-bound
    program. "hidden" flushes the L2 cache and queues the call behind a sleep, so that only device time counts.
    """

    repeats: int = 50
    seconds: float = 0.5
    least_repeats: int = 7
    warmup_repeats: int = 5
    warmup_seconds: float = 0.5
    launch: Literal["counted", "hidden"] = "counted"

    def is_satisfied(self, samples: Mapping[str, Samples]) -> bool:
        return all(
            len(taken) >= min(self.least_repeats, self.repeats)
            and (len(taken) >= self.repeats or sum(taken) + taken.untimed_ms >= 1e3 * self.seconds)
            for taken in samples.values()
        )


def percentile(samples: Sequence[float], share: float) -> float:
    return float(np.quantile(samples, share))


class Samples(list[float]):
    """The durations of one call in ms, in the order of its rounds."""

    def __init__(self, call: Call, device: torch.device, protocol: Protocol, *, alone: bool = False) -> None:
        super().__init__()
        self.call, self._device = call, device
        self.untimed_ms, self._settle_ms = 0.0, 0.0 if alone else SETTLE_MS
        self._hide, self._sleep_ms = protocol.launch == "hidden", 0.0
        self.hosts_ms: list[float] = []  # host time to queue each call on CUDA
        self.host_bound = False  # the launch could not be hidden, so host time is included

    @property
    def ms(self) -> float:
        return percentile(self, 0.5)

    def figures(self) -> dict[str, Any]:
        """Returns the median, percentiles and all samples, for a row of a benchmark record."""
        return {
            "ms": self.ms, "ms_p20": percentile(self, 0.2), "ms_p80": percentile(self, 0.8), "repeats": len(self),
            "host_ms": percentile(self.hosts_ms, 0.5) if self.hosts_ms else None, "host_bound": self.host_bound,
            "samples_ms": [float(f"{sample:.6g}") for sample in self],
        }  # fmt: skip

    def take(self, number: int) -> None:
        """Times one more call, in round `number`."""
        if self._device.type == "cuda":
            with current_device(self._device):
                start = host_ms()
                self.append(self._on_device(number))
                self.untimed_ms += max(host_ms() - start - self[-1], 0.0)
            return
        untimed_ms = 0.0
        if self and self[-1] >= LONG_MS:
            untimed_ms = self._settle_ms
            time.sleep(untimed_ms / 1e3)
        while untimed_ms < self._settle_ms:
            untimed_ms += self._on_host(number)
        self.untimed_ms += untimed_ms
        self.append(self._on_host(number))

    def _on_host(self, number: int) -> float:
        begin(self.call, number)
        start = host_ms()
        self.call(number)
        return host_ms() - start

    def _on_device(self, number: int) -> float:
        if self._hide and not self.host_bound:
            if not self._sleep_ms:
                queued_ms = statistics.median(self._queued(number)[1] for _ in range(PROBES))
                self._sleep_ms = MARGIN * queued_ms + SLACK_MS
            for _ in range(ATTEMPTS):
                device_ms, queued_ms, hidden = self._queued(number, self._sleep_ms)
                if hidden:
                    break
                self._sleep_ms *= 2
            self.host_bound = not hidden
        if not self._hide or self.host_bound:
            device_ms, queued_ms, _ = self._queued(number)
        self.hosts_ms.append(queued_ms)
        return device_ms

    def _queued(self, number: int, sleep_ms: float = 0.0) -> tuple[float, float, bool]:
        """Returns device ms, host ms, and True if the device still slept when the call had been queued."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin(self.call, number)
        if self._hide:  # write more bytes than the last-level cache holds
            cache = int(torch.cuda.get_device_properties(self._device).L2_cache_size)
            torch.empty(max(2 * cache, MIN_FLUSH_BYTES), dtype=torch.int8, device=self._device).zero_()
        synchronize(self._device)
        if sleep_ms:
            torch.cuda._sleep(int(sleep_ms * cycles_per_ms(self._device)))
        start.record()
        began = host_ms()
        self.call(number)
        queued_ms = host_ms() - began
        end.record()
        hidden = not start.query()
        end.synchronize()
        return start.elapsed_time(end), queued_ms, hidden


class Interleaved(dict[str, Samples]):
    """The samples of several calls by name. `running` is the name of the call that ran last."""

    def __init__(self, calls: Mapping[str, Call], device: torch.device, protocol: Protocol) -> None:
        alone = len(calls) == 1
        super().__init__({name: Samples(call, device, protocol, alone=alone) for name, call in calls.items()})
        self.device, self.protocol, self.running = device, protocol, ""

    def rounds(self) -> Iterator[int]:
        """Warms up. Then yields after every round the number of rounds. Each call gets the number of the round."""
        for name, taken in self.items():
            self.running, end = name, time.perf_counter() + self.protocol.warmup_seconds
            with current_device(self.device):
                for number in range(self.protocol.warmup_repeats):
                    taken.call(number)
                    synchronize(self.device)
                    if time.perf_counter() >= end:
                        break
        for number in itertools.count():
            # Random order, so that the effects of a call (spinning threads, a warm cache) are shared equally.
            for name in random.Random(number).sample([*self], len(self)):
                self.running = name
                self[name].take(number)
            yield number + 1


def time_interleaved(calls: Mapping[str, Call], device: torch.device | str, protocol: Protocol) -> Interleaved:
    """Times several calls interleaved until each satisfies the protocol."""
    timed = Interleaved(calls, torch.device(device), protocol)
    any(protocol.is_satisfied(timed) for _ in timed.rounds())
    return timed


def begin(call: Call, number: int) -> None:
    """Runs the part of a call that is not timed, e.g. the forward before a backward, if the call has one."""
    if (untimed := getattr(call, "begin", None)) is not None:
        untimed(number)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_of_call(call: Callable[[], object], device: torch.device) -> int:
    """Returns the peak memory of one call in bytes. On a CPU, only torch's allocations count."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max([0, *itertools.accumulate(changes)])


def memory_in_use(device: torch.device) -> int:
    """Returns the bytes in use on a GPU, or the resident memory of this process.

    On a GPU, memory of all libraries and whole pools of CUDA graphs count, but not the free memory that torch caches.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if torch.cuda.get_allocator_backend() == "native":  # cudaMallocAsync has no snapshots
            index = torch.cuda.current_device() if device.index is None else device.index
            pools = [s for s in torch.cuda.memory_snapshot() if s["device"] == index and any(s["segment_pool_id"])]
            cached -= sum(segment["total_size"] - segment["allocated_size"] for segment in pools)
        return int(total - free - cached)
    fields = Path("/proc/self/statm")
    return int(fields.read_text().split()[1]) * 4096 if fields.exists() else 0


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def ratio(base_ms: Sequence[float], other_ms: Sequence[float], *, paired: bool, share: float = 0.5) -> float:
    """Returns the speedup of `other` over `base`: quantile `share` of base_ms / quantile `share` of other_ms.

    With `paired`, samples with the same index are from the same round. Instead of the ratio of the medians, the result
    is then the median of the ratios per round, in which drift cancels.
    """
    return float(_ratios(np.asarray(base_ms)[None], np.asarray(other_ms)[None], paired, share)[0])


def ratio_interval(
    base_ms: Sequence[float], other_ms: Sequence[float], *, paired: bool, share: float = 0.5
) -> tuple[float, float]:
    """Returns the 99 % confidence interval of `ratio`, by a circular block bootstrap."""
    generator = np.random.default_rng(0)
    base, other = np.asarray(base_ms), np.asarray(other_ms)
    rows = _blocks(len(base), generator)
    others = rows if paired and len(base) == len(other) else _blocks(len(other), generator)
    ratios = _ratios(base[rows], other[others], paired, share)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _ratios(base: np.ndarray, other: np.ndarray, paired: bool, share: float) -> np.ndarray:
    """Returns one ratio per row of two arrays [rows, count]; see `ratio`."""
    if paired and share == 0.5 and base.shape == other.shape:
        return np.median(base / other, axis=1)
    return np.quantile(base, share, axis=1) / np.quantile(other, share, axis=1)


def _blocks(count: int, generator: np.random.Generator) -> np.ndarray:
    """Returns sample indices [RESAMPLES, count], in blocks because consecutive samples are correlated."""
    length = max(1, round(math.sqrt(count)))
    starts = generator.integers(0, count, (RESAMPLES, math.ceil(count / length), 1))
    return ((starts + np.arange(length)) % count).reshape(RESAMPLES, -1)[:, :count]


def control(first_ms: Sequence[float], again_ms: Sequence[float], *, share: float = 0.5) -> dict[str, Any]:
    """Returns `resolution` for ratios within these rounds, and `between_runs` for ratios to another run (0.02: 2 %)."""
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
    """Returns the speedup of row `other` over row `base`, its interval and verdict; see `ratio` for `paired`."""
    count = min(len(base["samples_ms"]), len(other["samples_ms"])) if paired else None
    samples = base["samples_ms"][:count], other["samples_ms"][:count]
    found, interval = ratio(*samples, paired=paired), [*ratio_interval(*samples, paired=paired)]
    return {"ratio": found, "interval": interval, "verdict": verdict(found, interval, resolution)}


def format_number(value: float, digits: int = 3) -> str:
    """Formats with `digits` significant digits (0.012, 4.56), and values >= 10^(digits - 1) to integers (1,235)."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"

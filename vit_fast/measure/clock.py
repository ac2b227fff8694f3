"""The clock: times several calls interleaved, after warm-up, on inputs that are not in the last-level cache.

    timings = time_interleaved({"eager": call_eager, "sdpa": call_sdpa}, device)
    timings["sdpa"].ms, timings["sdpa"].ms_p20, timings["sdpa"].ms_p80

On CUDA, events around each call measure it (device_clock.py), and the host's time to enqueue it is recorded. On a CPU,
the host's monotonic clock measures it. The calls are interleaved, so that clock drift, heat and other processes affect
all of them. On a CPU, untimed calls precede each timed one (see SETTLE_MS), as in a program that runs only this call.
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
from typing import Literal

import numpy as np
import torch

from .device_clock import DeviceClock, open_queue

Call = Callable[[int], object]

# Larger than the last-level cache of most processors.
CPU_CACHE_BYTES = 64 * 2**20
# Duration of the untimed calls. After a call, threads of torch spin for about 10 ms, those of ONNX Runtime for 35. So
# the next call would share the cores with them. After an idle wait, the timed call would first wake its own threads.
SETTLE_MS = 40.0


@dataclass(frozen=True)
class Protocol:
    """The length of a measurement.

    A call is timed until it has `repeats` samples, or `least_repeats` samples and `seconds` (with untimed calls),
    whichever is first. Before, it is called up to `warmup_repeats` times or for `warmup_seconds`, at least once.

    Attributes:
        launch: On CUDA, "counted" includes the host's time to launch the call, as in a latency-bound program; "hidden"
            queues the call behind other work, so that only device time counts.
    """

    repeats: int = 50
    seconds: float = 0.5
    least_repeats: int = 7
    warmup_repeats: int = 5
    warmup_seconds: float = 0.5
    launch: Literal["counted", "hidden"] = "counted"

    def __post_init__(self) -> None:
        for name in ("repeats", "least_repeats", "warmup_repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {getattr(self, name)}")
        for name in ("seconds", "warmup_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of seconds >= 0, got {getattr(self, name)}")

    def lasting(self, seconds: float | None) -> Protocol:
        """Returns a protocol that times each call for these seconds; None returns this one."""
        return self if seconds is None else dataclasses.replace(self, repeats=sys.maxsize, seconds=seconds)

    def share_of(self, samples: Samples) -> float:
        """Returns the progress of a measurement from 0 to 1."""
        count, seconds = len(samples), (sum(samples) + samples.untimed_ms) / 1e3
        in_time = min(count / self.least_repeats, seconds / self.seconds if self.seconds else 1.0)
        return min(max(count / self.repeats, in_time), 1.0)

    def is_satisfied(self, samples: Mapping[str, Samples]) -> bool:
        """True if every measurement is long enough."""
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
        """Summarizes at least one sample."""
        p20, median, p80 = (percentile(samples_ms, share) for share in (0.2, 0.5, 0.8))
        host = percentile(host_ms, 0.5) if host_ms else None
        return cls(median, p20, p80, len(samples_ms), host, host_bound, tuple(samples_ms))


def percentile(samples: Sequence[float], share: float) -> float:
    """Returns a quantile of the samples, with linear interpolation."""
    return float(np.quantile(samples, share))


class Samples(list[float]):
    """The durations of one call so far, in ms.

    Attributes:
        untimed_ms: The duration of the untimed calls on a CPU.
    """

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
    """Times several calls interleaved until each satisfies the protocol; exceptions of a call are not caught.

    Args:
        calls: Functions of the round's number, which selects their inputs.
        on_round: Called after every round with its number and the samples so far; returns the names to continue with.
    """
    device = torch.device(device)
    protocol = Protocol() if protocol is None else protocol
    with open_queue(device).current() if device.type == "cuda" else contextlib.nullcontext():
        for call in calls.values():
            _warm_up(call, device, protocol)
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


def _warm_up(call: Call, device: torch.device, protocol: Protocol) -> None:
    end = time.perf_counter() + protocol.warmup_seconds
    for number in range(protocol.warmup_repeats):
        call(number)
        synchronise(device)
        if time.perf_counter() >= end:
            break


def synchronise(device: torch.device) -> None:
    """Waits until the device has finished all queued work."""
    if device.type == "cuda":
        open_queue(device).synchronise()


def cold_copies(nbytes: int, device: torch.device | str) -> int:
    """Returns the number of copies of an input, at least two, that are together twice as large as the cache."""
    on_gpu = torch.device(device).type == "cuda"
    cache = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else CPU_CACHE_BYTES
    return max(2, math.ceil(2 * cache / max(nbytes, 1)))


def peak_memory_of_call(call: Callable[[], object], device: torch.device) -> int:
    """Returns the peak of the bytes that one call allocates.

    On CUDA, the caching allocator reports it. On a CPU, torch's profiler does, without allocations of other libraries.
    """
    if device.type == "cuda":
        synchronise(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronise(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    with (
        without_profiler_chatter(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max([0, *itertools.accumulate(changes)])


def free_memory(device: torch.device) -> None:
    """Runs Python's garbage collector, and empties the cache of the CUDA allocator."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# Messages of torch's profiler at start and stop, and about memory allocated before.
_CHATTER = (b"USDT:", b"before the profiling started")


@contextlib.contextmanager
def without_profiler_chatter() -> Iterator[None]:
    """Removes the lines that torch's profiler writes about itself from stderr."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            written.seek(0)
            for line in written:
                if not any(sign in line for sign in _CHATTER):
                    os.write(2, line)

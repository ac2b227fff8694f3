"""The clock: several calls interleaved, warmed up, on inputs that the last-level cache has lost.

    timings = time_interleaved({"eager": call_eager, "sdpa": call_sdpa}, device)
    timings["sdpa"].ms, timings["sdpa"].ms_p20, timings["sdpa"].ms_p80

On CUDA the clock is a pair of device events around each call (device_clock.py), with the host's time to queue it
beside; on a CPU it is the host's monotonic clock. The calls of the candidates are interleaved, so that drift of the
clock, heat and other processes affect all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from .device_clock import DeviceClock, open_queue

Call = Callable[[int], object]

# Larger than any processor's last level of cache that a rotation is meant to empty.
CPU_CACHE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Protocol:
    """Length of a measurement, and what it counts.

    A candidate is done after `repeats` timed calls, or after `seconds` of them and no fewer than `least_repeats`; the
    defaults therefore always reach the rule of 50 repeats or 200 ms.

    Attributes:
        repeats: Timed calls that suffice.
        seconds: Timed seconds that suffice, once there are least_repeats.
        least_repeats: Timed calls below which no percentile is given.
        warmup_repeats: Untimed calls before, at most.
        warmup_seconds: Untimed seconds before, at most; one call is always made.
        launch: On CUDA, "counted": the device waits for the call, as in a latency-bound program, so what the host
            needs to launch it counts; "hidden": the call is queued behind other work, so only device time counts.
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
                raise ValueError(f"{name}={getattr(self, name)}: expected an integer >= 1")
        for name in ("seconds", "warmup_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: expected a number of seconds >= 0")

    def lasting(self, seconds: float | None) -> Protocol:
        """The same, of so many timed seconds, however many calls fit into them; None leaves it as it is."""
        return self if seconds is None else dataclasses.replace(self, repeats=sys.maxsize, seconds=seconds)

    def share_of(self, samples_ms: Sequence[float]) -> float:
        """Returns the progress of a measurement: 1 when the samples suffice."""
        count, seconds = len(samples_ms), sum(samples_ms) / 1e3
        in_time = min(count / self.least_repeats, seconds / self.seconds if self.seconds else 1.0)
        return min(max(count / self.repeats, in_time), 1.0)

    def is_satisfied(self, samples: Mapping[str, Sequence[float]]) -> bool:
        """True if every measurement is long enough."""
        return all(self.share_of(taken) == 1 for taken in samples.values())


@dataclass(frozen=True)
class Timing:
    """The durations of one call, in milliseconds.

    Attributes:
        ms: Median; ms_p20 and ms_p80 are the percentiles around it.
        repeats: Timed calls.
        host_ms: What the host needs to queue a call, median; None where the host itself computes.
        host_bound: Whether launches were to be hidden and could not be: then ms holds time of the host.
        samples_ms: The calls one by one, in the order of their rounds.
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
        """Median, 20th and 80th percentile of at least one sample."""
        if not samples_ms:
            raise ValueError("samples_ms is empty: expected at least one sample")
        p20, median, p80 = (percentile(samples_ms, share) for share in (0.2, 0.5, 0.8))
        host = percentile(host_ms, 0.5) if host_ms else None
        return cls(median, p20, p80, len(samples_ms), host, host_bound, tuple(samples_ms))


def percentile(samples: Sequence[float], share: float) -> float:
    """The value below which this share of the samples lies, interpolated linearly between neighbours."""
    ordered = sorted(samples)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


class Samples(list[float]):
    """The durations of one call so far, in ms, taken by its clock."""

    def __init__(self, call: Call, device: torch.device, protocol: Protocol) -> None:
        super().__init__()
        self._clock: DeviceClock | None = None
        if device.type == "cuda":
            self._clock = DeviceClock(open_queue(device), call, hide=protocol.launch == "hidden")
        self._call = call

    def take(self, number: int) -> None:
        """Times one more call, that of round `number`."""
        self.append(_host_clock(self._call, number) if self._clock is None else self._clock(number))

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
    """Times several calls in turns until each satisfies the protocol.

    Args:
        calls: By name; each is called with the round's number, by which it chooses its rotated inputs.
        device: Where they compute.
        protocol: None means Protocol().
        on_round: Called after every round with its number and the samples so far; returns the names to go on with,
            none to end the measurement. None goes on until the protocol is satisfied.
    Returns:
        A Timing for each call that was timed at all.
    Raises:
        Whatever a call raises; nothing is swallowed.
    """
    device = torch.device(device)
    protocol = Protocol() if protocol is None else protocol
    with _current(device):
        for call in calls.values():
            _warm_up(call, device, protocol)
        samples = {name: Samples(call, device, protocol) for name, call in calls.items()}
        names = list(calls)
        number = 0
        while names:
            # A new order each round, the same in each run: what a call leaves behind (idle threads that spin, a warm
            # cache) meets every other call, not always the same one.
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
    """Waits until the device has done all that was asked of it."""
    if device.type == "cuda":
        open_queue(device).synchronise()


def _current(device: torch.device) -> AbstractContextManager[object]:
    return open_queue(device).current() if device.type == "cuda" else contextlib.nullcontext()


def cold_copies(nbytes: int, device: torch.device | str) -> int:
    """Returns the number of copies of inputs to rotate so that a copy has left the cache when it is next.

    At least two; together they are at least twice as large as the cache.
    """
    return max(2, math.ceil(2 * cache_bytes(torch.device(device)) / max(nbytes, 1)))


def cache_bytes(device: torch.device) -> int:
    """Size of the cache before memory, in bytes: the L2 of a GPU, a generous stand-in for that of a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return CPU_CACHE_BYTES


def peak_memory_of_call(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that one call allocates at its highest beyond what is allocated before it.

    On CUDA by the caching allocator's own peak; on a CPU by the profiler's record of torch's allocator, which does not
    see what a library allocates by itself. Not to be called while timing.
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
    return _peak_of_profile(profiler)


# Of its start and stop, and that memory was allocated before it started.
_CHATTER = (b"USDT:", b"before the profiling started")


@contextlib.contextmanager
def without_profiler_chatter() -> Iterator[None]:
    """Keeps the lines that torch's profiler writes about itself from the process's standard error."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            written.seek(0)
            for line in written:
                if not any(sign in line for sign in _CHATTER):
                    os.write(2, line)


def _peak_of_profile(profiler: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    allocated = peak = 0
    for _, change in changes:
        allocated += change
        peak = max(peak, allocated)
    return peak


def _host_clock(call: Call, number: int) -> float:
    start = time.perf_counter_ns()
    call(number)
    return (time.perf_counter_ns() - start) / 1e6

"""A device's time without the host's: a call is queued while the device sleeps, and that it was is verified.

A GPU runs what the host has queued. Between two events around a call lies the device's own time only while the host is
ahead, so the device is put to sleep for longer than the host needs, and the event before the call must still be pending
when the call has been queued. Where it is not, the sleep was too short and the call is timed again behind a longer one.
A call that waits for the device, or that fills the driver's queue, cannot be hidden and is marked host-bound.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

MIN_FLUSH_BYTES = 256 * 2**20
# A sleep is this many times the host's own time, and some more for what little the host needs beside the call.
MARGIN, SLACK_MS = 1.5, 0.05
# Each attempt sleeps twice as long as the one before; a hiccup of the host is outslept, a waiting call never is.
ATTEMPTS = 4
_PROBES = 3
_SHORT_CYCLES, _LONG_CYCLES = 200_000, 4_000_000


class Event(Protocol):
    """A point in the device's queue; see torch.cuda.Event."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any, /) -> float: ...


def calibrate(queue: CudaQueue) -> float:
    """Cycles of `sleep` a millisecond: the slope from a short one to a long one, the steepest of a few readings."""

    def milliseconds(cycles: int) -> float:
        start = queue.mark()
        queue.sleep(cycles)
        end = queue.mark()
        end.synchronize()
        return start.elapsed_time(end)

    milliseconds(_LONG_CYCLES)  # wakes a device whose clocks are low
    slopes = [milliseconds(_LONG_CYCLES) - milliseconds(_SHORT_CYCLES) for _ in range(_PROBES)]
    return (_LONG_CYCLES - _SHORT_CYCLES) / max(min(slopes), 1e-3)


class CudaQueue:
    """The current stream of a CUDA device, and the host beside it: all that the clock needs of both."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    cycles_per_ms = functools.cached_property[float](calibrate)

    def current(self) -> AbstractContextManager[object]:
        """Makes this the device that calls go to."""
        return torch.cuda.device(self.device)

    def now_ms(self) -> float:
        """The host's clock."""
        return time.perf_counter_ns() / 1e6

    def mark(self) -> Event:
        """An event that passes when everything queued before it is done."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def sleep(self, cycles: int) -> None:
        """Queues nothing but waiting."""
        torch.cuda._sleep(cycles)

    def flush(self) -> None:
        """Queues what empties the last-level cache."""
        cache = int(torch.cuda.get_device_properties(self.device).L2_cache_size)
        torch.empty(max(2 * cache, MIN_FLUSH_BYTES), dtype=torch.int8, device=self.device).zero_()

    def synchronise(self) -> None:
        """Waits until the device has done all that was asked of it."""
        torch.cuda.synchronize(self.device)


@functools.cache
def open_queue(device: torch.device) -> CudaQueue:
    """The queue of a CUDA device; one for the life of the process, so that its sleep is calibrated once."""
    return CudaQueue(device)


class Instant:
    """A moment in the device's queue, from a timer without arguments; the difference of two is seconds of the device.

    For harnesses with loops of their own, such as pytest-benchmark's: where they call without waiting, only a host that
    is slower than the device shows.

    Args:
        queue: The device; None means the current one.
    """

    def __init__(self, queue: CudaQueue | None = None) -> None:
        self.event = (open_queue(torch.device("cuda")) if queue is None else queue).mark()

    def __sub__(self, earlier: Instant) -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


class DeviceClock:
    """Times one call by device events.

    Args:
        queue: The device.
        call: What is timed; takes the round's number.
        hide: Whether the host's time is hidden and the cache is emptied first, so that only the device's own time
            counts; otherwise the device is idle when the call begins, and what the host needs to launch it counts.
    """

    def __init__(self, queue: CudaQueue, call: Callable[[int], object], *, hide: bool) -> None:
        self.queue, self.call, self.hide = queue, call, hide
        self.host_ms: list[float] = []
        self.host_bound = False
        self._sleep_ms: float | None = None

    def __call__(self, number: int) -> float:
        """The duration in ms; what the host needed to queue the call is added to host_ms."""
        if self.hide and not self.host_bound:
            if self._sleep_ms is None:
                host_ms = statistics.median(self._run(number, None)[1] for _ in range(_PROBES))
                self._sleep_ms = MARGIN * host_ms + SLACK_MS
            for _ in range(ATTEMPTS):
                device_ms, host_ms, hidden = self._run(number, self._sleep_ms)
                if hidden:
                    self.host_ms.append(host_ms)
                    return device_ms
                self._sleep_ms *= 2
            self.host_bound = True
        device_ms, host_ms, _ = self._run(number, None)
        self.host_ms.append(host_ms)
        return device_ms

    def _run(self, number: int, sleep_ms: float | None) -> tuple[float, float, bool]:
        """One call behind a sleep, or on an idle device: its time, the host's, and whether the first is all its own."""
        queue = self.queue
        if self.hide:
            queue.flush()
        queue.synchronise()
        if sleep_ms is not None:
            queue.sleep(int(sleep_ms * queue.cycles_per_ms))
        start = queue.mark()
        began = queue.now_ms()
        self.call(number)
        host_ms = queue.now_ms() - began
        end = queue.mark()
        hidden = not start.query()
        end.synchronize()
        return start.elapsed_time(end), host_ms, hidden

"""Device time without host time: a call is queued while the device sleeps.

The device sleeps for longer than the host needs, and the event before the call must still be pending when the call has
been queued. Otherwise the call is timed again with a longer sleep. A call that waits for the device, or that fills the
driver's queue, is marked host-bound.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

# The sleep in units of the host's time, and an additional constant.
MARGIN, SLACK_MS = 1.5, 0.05
# Each attempt sleeps twice as long as the one before: enough for a delay of the host, never for a call that waits.
ATTEMPTS = 4
PROBES = 3
SHORT_CYCLES, LONG_CYCLES = 200_000, 4_000_000
MIN_FLUSH_BYTES = 256 * 2**20


class CudaQueue:
    """The current stream of a CUDA device, and the clock of the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @functools.cached_property
    def cycles_per_ms(self) -> float:
        """The cycles of `sleep` per millisecond: the largest of a few slopes from a short to a long sleep."""

        def milliseconds(cycles: int) -> float:
            start = self.mark()
            self.sleep(cycles)
            end = self.mark()
            end.synchronize()
            return float(start.elapsed_time(end))

        milliseconds(LONG_CYCLES)  # wakes a device whose clocks are low
        slopes = [milliseconds(LONG_CYCLES) - milliseconds(SHORT_CYCLES) for _ in range(PROBES)]
        return (LONG_CYCLES - SHORT_CYCLES) / max(min(slopes), 1e-3)

    def current(self) -> AbstractContextManager[object]:
        """Makes this the current device."""
        return torch.cuda.device(self.device)

    def now_ms(self) -> float:
        return time.perf_counter_ns() / 1e6

    def mark(self) -> Any:
        """Records an event, a torch.cuda.Event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def sleep(self, cycles: int) -> None:
        torch.cuda._sleep(cycles)

    def flush(self) -> None:
        """Queues a write that evicts everything from the last-level cache."""
        cache = int(torch.cuda.get_device_properties(self.device).L2_cache_size)
        torch.empty(max(2 * cache, MIN_FLUSH_BYTES), dtype=torch.int8, device=self.device).zero_()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


open_queue = functools.cache(CudaQueue)  # calibrated once per process and device


class DeviceClock:
    """Times one call, a function of the round's number, by CUDA events.

    `hide` hides the host's time and empties the cache first, so that only device time counts. Otherwise the call starts
    on an idle device, so that the host's time to launch it counts.
    """

    def __init__(self, queue: CudaQueue, call: Callable[[int], object], *, hide: bool) -> None:
        self.queue, self.call, self.hide = queue, call, hide
        self.host_ms: list[float] = []
        self.host_bound = False
        self._sleep_ms: float | None = None

    def __call__(self, number: int) -> float:
        """Returns the duration in ms, and appends the host's time to enqueue the call to host_ms."""
        if self.hide and not self.host_bound:
            if self._sleep_ms is None:
                host_ms = statistics.median(self._run(number, None)[1] for _ in range(PROBES))
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
        """Returns the time of a call, the host's time, and True if the device was still asleep when it was queued."""
        queue = self.queue
        if self.hide:
            queue.flush()
        queue.synchronize()
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

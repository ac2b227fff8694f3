"""The machine's state while candidates are timed: other processes, throttling, clocks; and joules."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from vit_fast.measure.clock import Call, synchronise

from .machine import bus_id, output

# Of the processors' time while candidates were timed: taken by others, and withheld by the cgroup's quota.
BUSY_SHARE, THROTTLED_SHARE = 0.10, 0.01
# Bits of NVML's clock event reasons that mean heat or power delivery, not the power cap or an idle device.
GPU_SLOWDOWNS = 0x8 | 0x20 | 0x40 | 0x80
# For counting joules: NVML counts anew some ten to fifty times a second.
ENERGY_SECONDS = 0.5


class Conditions:
    """The machine's state while something is timed.

    Args:
        device: Where it computes; of a GPU, clocks and slow-downs are read too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.elapsed_s = self.others_s = self.throttled_s = 0.0
        self.processors = 0
        self.load: list[float] = []
        self.clock_MHz: list[float] = []
        self.gpu_slowed = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Around what is timed, once or several times."""
        before, start = self._read(), time.perf_counter()
        try:
            yield
        finally:
            busy_s, own_s, throttled_s = (now - then for now, then in zip(self._read(), before, strict=True))
            self.elapsed_s += time.perf_counter() - start
            self.throttled_s += throttled_s
            self.others_s += max(busy_s - own_s, 0.0) if self.processors else 0.0

    def _read(self) -> tuple[float, float, float]:
        """Seconds since boot or start that the processors worked, that we did, and that the quota stopped us."""
        on_gpu = self._device.type == "cuda"
        with contextlib.suppress(OSError):
            self.load.append(os.getloadavg()[0])
        self.clock_MHz += _gpu_clock(self._device) if on_gpu else _cpu_clock()
        self.gpu_slowed |= on_gpu and _gpu_slowed(self._device)
        busy_s, self.processors = _busy_seconds()
        times = os.times()
        return busy_s, times.user + times.system + times.children_user + times.children_system, _throttled_seconds()

    def summary(self) -> dict[str, Any]:
        """Plain data for the record; `busy` names what makes the figures doubtful, and is empty where it was quiet."""
        capacity_s = max(self.elapsed_s * self.processors, 1e-9)
        others, throttled = self.others_s / capacity_s, self.throttled_s / max(self.elapsed_s, 1e-9)
        busy = []
        if others > BUSY_SHARE:
            busy.append(f"other processes took {others:.0%} of the processors")
        if throttled > THROTTLED_SHARE:
            busy.append(f"the cgroup's quota stopped this one for {throttled:.0%} of the time")
        if self.gpu_slowed:
            busy.append("the GPU slowed itself down")
        return {
            "others_share": round(others, 4),
            "throttled_share": round(throttled, 4),
            "load_average": [round(end(self.load), 2) for end in (min, max)] if self.load else None,
            "clock_MHz": [round(end(self.clock_MHz)) for end in (min, max)] if self.clock_MHz else None,
            "busy": busy,
        }


def _busy_seconds() -> tuple[float, int]:
    try:
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        busy = [
            sum(float(ticks) for place, ticks in enumerate(fields[1:9]) if place not in (3, 4))  # idle, iowait
            for fields in lines
            if fields and fields[0] in allowed
        ]
        return sum(busy) / os.sysconf("SC_CLK_TCK"), len(busy)
    except (OSError, AttributeError, ValueError):
        return 0.0, 0


def _throttled_seconds() -> float:
    try:
        fields = dict(line.split() for line in Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines())
        return float(fields.get("throttled_usec", 0)) / 1e6
    except (OSError, ValueError):
        return 0.0


def _cpu_clock() -> list[float]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]


def _gpu_query(device: torch.device, field: str) -> str:
    selected = f"--id={bus_id(torch.cuda.get_device_properties(device))}"
    return output(["nvidia-smi", selected, "--format=csv,noheader,nounits", f"--query-gpu={field}"]) or ""


def _gpu_clock(device: torch.device) -> list[float]:
    found = _gpu_query(device, "clocks.sm")
    return [float(found)] if found.isdigit() else []


def _gpu_slowed(device: torch.device) -> bool:
    found = _gpu_query(device, "clocks_event_reasons.active")
    return found.startswith("0x") and bool(int(found, 16) & GPU_SLOWDOWNS)


def joules_of(call: Call, ms: float, device: torch.device) -> float | None:
    """Joules a call by NVML's own counter of the whole board, of calls without a pause, idle power included.

    Args:
        call: What is done; warm.
        ms: How long it takes, roughly.
        device: Where it computes.
    Returns:
        None on a CPU, without the package nvidia-ml-py, and where the GPU has no such counter.
    """
    counter = _energy_counter(device) if device.type == "cuda" else None
    if counter is None:
        return None
    calls = math.ceil(max(ENERGY_SECONDS * 1e3 / ms, 1.0))
    synchronise(device)
    before = counter()
    for number in range(calls):
        call(number)
    synchronise(device)
    return (counter() - before) / calls


def _energy_counter(device: torch.device) -> Callable[[], float] | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id(torch.cuda.get_device_properties(device)).encode())
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # not installed, no driver, or a GPU without the counter: each by an exception of its own
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3

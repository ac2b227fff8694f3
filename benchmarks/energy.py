"""What a call costs in energy, by NVML's own counter of the whole board; nothing where there is no GPU or no NVML."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from vit_fast.measuring.timing import Call, synchronise

from .machine import bus_id

# NVML counts anew some ten to fifty times a second.
SECONDS = 0.5


def joules_of(call: Call, ms: float, device: torch.device) -> float | None:
    """Joules a call, of calls without a pause, idle power included.

    Args:
        call: What is done; warm.
        ms: How long it takes, roughly.
        device: Where it computes.
    Returns:
        None on a CPU, without the package nvidia-ml-py, and where the GPU has no such counter.
    """
    counter = _counter(device) if device.type == "cuda" else None
    if counter is None:
        return None
    calls = math.ceil(max(SECONDS * 1e3 / ms, 1.0))
    synchronise(device)
    before = counter()
    for number in range(calls):
        call(number)
    synchronise(device)
    return (counter() - before) / calls


def _counter(device: torch.device) -> Callable[[], float] | None:
    """Joules since the driver was loaded."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id(torch.cuda.get_device_properties(device)).encode())
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # not installed, no driver, or a GPU without the counter: each by an exception of its own
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3

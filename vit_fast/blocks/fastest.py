"""Selects the fastest implementation of a frozen layer on this CPU by measurement, and caches the result.

The file ~/.cache/vit_fast/answers/cpu/HASH.json contains all results for a CPU model, torch version, number of threads
and limits of the instruction sets. A file that cannot be read or written only causes another measurement.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ..files import cache_folder, file_aside
from ..ops.registration import in_transform
from ..version import __version__, cpu_model

Call = Callable[[], object]

MARGIN = 1.05  # the first implementation is selected unless another one is faster by this factor
NOISE = 1.25  # factor between the best even and odd rounds, above which the result is not stored in the file
MIN_ROUNDS, MAX_ROUNDS = 4, 16  # timed calls of each implementation
SECONDS = 0.02  # target for the timed calls of each implementation
MAX_SECONDS = 0.6  # limit for a layer, which only a busy machine or a very large layer reaches
CACHE_BYTES = 2**22  # read before each timed call, because weights are not in the L2 cache when a model runs
SETTINGS = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_", "OMP_", "KMP_", "GOMP_")  # prefixes of environment variables

_LOCK = threading.Lock()


def fastest(layer: str, names: Sequence[str], build: Callable[[str], Sequence[Call]]) -> str:
    """Returns the name of the fastest implementation of `layer`, from the cache or by a measurement.

    Args:
        layer: Key in the cache: operator, dtype and sizes.
        names: Names of the implementations. The first one is selected if nothing can be measured.
        build: Returns calls of an implementation, the same number for each; no calls if it is not supported.
    """
    if len(names) == 1 or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return names[0]
    if torch._C._len_torch_dispatch_stack() or in_transform():  # e.g. FakeTensorMode
        return names[0]
    with _LOCK:
        machine = describe_machine()
        selected = _selected(machine)
        if selected.get(layer) not in names:
            with torch.inference_mode():
                calls = {name: built for name in names if (built := build(name))}
                selected[layer], is_certain = _measure(calls) if len(calls) > 1 else (next(iter(calls)), True)
            if is_certain:
                _store(machine, layer, selected[layer])
        return selected[layer]


def _measure(calls: Mapping[str, Sequence[Call]]) -> tuple[str, bool]:
    """Returns the fastest implementation, and False if other programs disturbed the measurement too much."""
    evicted, order = torch.ones(CACHE_BYTES // 4, dtype=torch.float32, device="cpu"), list(calls)
    # per implementation: for even and odd rounds, the durations of each call
    taken: dict[str, list[list[list[float]]]] = {name: [[[] for _ in calls[name]] for _ in range(2)] for name in order}
    began, is_quiet = perf_counter(), False
    for number in range(1 + MAX_ROUNDS):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            for call, times in zip(calls[name], taken[name][number % 2], strict=True):
                evicted.sum()
                start = perf_counter()
                call()
                if number:  # the first call may allocate, compile and start threads
                    times.append(perf_counter() - start)
        elapsed = perf_counter() - began
        if number >= MIN_ROUNDS:
            halves = {name: [math.prod(map(min, half)) ** (1 / len(half)) for half in taken[name]] for name in order}
            is_quiet = all(max(pair) <= NOISE * min(pair) for pair in halves.values())
        if elapsed > MAX_SECONDS or (is_quiet and elapsed > SECONDS * len(order)):
            break
    if not is_quiet:
        return order[0], False
    best = {name: min(pair) for name, pair in halves.items()}
    name = min(best, key=best.__getitem__)
    return (name if best[order[0]] > MARGIN * best[name] else order[0]), True


def describe_machine() -> str:
    """Returns everything that the results depend on, as JSON."""
    fields: dict[str, Any] = {
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "vit_fast": __version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "fp32": torch.get_float32_matmul_precision(),
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)},
    }
    return json.dumps(fields)


def _path(machine: str) -> Path:
    return cache_folder() / "cpu" / f"{hashlib.sha256(machine.encode()).hexdigest()[:24]}.json"


@functools.cache
def _selected(machine: str) -> dict[str, str]:
    """Returns the results of this process, which start with the results in the file."""
    return _read(machine)


def _read(machine: str) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        if (path := _path(machine)).is_file():
            return {str(layer): str(name) for layer, name in json.loads(path.read_text())["selected"].items()}
    return {}


def _store(machine: str, layer: str, name: str) -> None:
    with contextlib.suppress(OSError), file_aside(_path(machine)) as aside:
        fields = {"machine": json.loads(machine), "selected": _read(machine) | {layer: name}}
        aside.write_text(json.dumps(fields, indent=1))

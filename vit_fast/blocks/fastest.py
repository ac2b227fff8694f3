"""Selects the fastest implementations of frozen layers on this CPU by measurement, and caches the result.

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

Layers = Mapping[str, Sequence[str]]  # names of implementations per layer; the first is the default
Timed = Callable[[str, Callable[..., Any]], Callable[..., Any]]  # wraps the function of a layer, to measure its calls
Build = Callable[[Mapping[str, str], Timed], Callable[[], object]]

MARGIN = 1.05  # the default is selected unless another implementation is faster by this factor
NOISE = 1.25  # factor between the best even and odd rounds, above which a result is not stored in the file
MIN_ROUNDS, MAX_ROUNDS = 4, 16
SECONDS = 0.1  # target for all rounds
MAX_SECONDS = 3.0  # limit, which only a busy machine or a very large layer reaches
SETTINGS = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_", "OMP_", "KMP_", "GOMP_")  # prefixes of environment variables

_LOCK = threading.Lock()


def fastest(layers: Layers, build: Build) -> dict[str, str]:
    """Returns the fastest implementation of each layer, from the cache or by a measurement.

    Args:
        layers: The keys describe operator, dtype and sizes of each layer.
        build: Returns a function that runs all layers once. Gets the implementation of each layer, and `Timed`.
    """
    selected = {layer: names[0] for layer, names in layers.items()}
    if is_traced():
        return selected
    with _LOCK:
        machine = json.dumps(describe_cpu())
        known = _known(machine)
        missing = {layer: names for layer, names in layers.items() if len(names) > 1 and known.get(layer) not in names}
        if missing:
            with torch.inference_mode():
                certain = {layer: name for layer, name in _measure(layers, build).items() if layer in missing}
            if certain:
                _store(machine, certain)
            known |= {layer: selected[layer] for layer in missing} | certain
        return selected | {layer: known[layer] for layer, names in layers.items() if len(names) > 1}


def is_traced() -> bool:
    """True under a tracer, a transform or a dispatch mode such as FakeTensor, which do not support packed weights."""
    tracing = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    return tracing or torch._C._len_torch_dispatch_stack() > 0 or in_transform()


def _measure(layers: Layers, build: Build) -> dict[str, str]:
    """Returns the fastest implementations, without layers whose measurement was disturbed too much."""
    # the shortest durations in even and in odd rounds
    taken = {layer: {name: [math.inf, math.inf] for name in names} for layer, names in layers.items()}
    found: dict[str, str] = {}
    number = 0

    def timed(best: Mapping[str, list[float]], layer: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = perf_counter()
            output = call(*args)
            if number:  # the first round may allocate, compile and start threads
                best[layer][number % 2] = min(best[layer][number % 2], perf_counter() - start)
            return output

        return run

    runs = []  # by the first implementation of every layer, by the second, and so on
    for index in range(max(map(len, layers.values()))):
        by = {layer: names[index % len(names)] for layer, names in layers.items()}
        best = {layer: taken[layer][name] for layer, name in by.items()}
        runs.append(build(by, functools.partial(timed, best)))
    began = perf_counter()
    for number in range(1 + MAX_ROUNDS):
        for index in range(len(runs)):
            runs[(index + number) % len(runs)]()
        elapsed = perf_counter() - began
        if number >= MIN_ROUNDS:
            found = {layer: _choose(times) for layer, times in taken.items() if _is_quiet(times)}
        if elapsed > MAX_SECONDS or (len(found) == len(layers) and elapsed > SECONDS):
            break
    return found


def _is_quiet(times: Mapping[str, Sequence[float]]) -> bool:
    return all(max(pair) <= NOISE * min(pair) for pair in times.values())


def _choose(times: Mapping[str, Sequence[float]]) -> str:
    default, name = next(iter(times)), min(times, key=lambda name: min(times[name]))
    return name if min(times[default]) > MARGIN * min(times[name]) else default


def describe_cpu() -> dict[str, Any]:
    """Returns what the speed of torch depends on: CPU, threads, version, and settings."""
    return {
        "cpu": cpu_model(), "threads": torch.get_num_threads(), "torch": torch.__version__, "vit_fast": __version__,
        "capability": torch.backends.cpu.get_cpu_capability(), "fp32": torch.get_float32_matmul_precision(),
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)},
    }  # fmt: skip


def _path(machine: str) -> Path:
    return cache_folder() / "cpu" / f"{hashlib.sha256(machine.encode()).hexdigest()[:24]}.json"


def _read(machine: str) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        if (path := _path(machine)).is_file():
            return {str(layer): str(name) for layer, name in json.loads(path.read_text())["selected"].items()}
    return {}


_known = functools.cache(_read)  # results of this process, which start with the results in the file


def _store(machine: str, found: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError), file_aside(_path(machine)) as aside:
        fields = {"machine": json.loads(machine), "selected": _read(machine) | {**found}}
        aside.write_text(json.dumps(fields, indent=1))

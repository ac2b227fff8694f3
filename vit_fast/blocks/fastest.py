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
import operator
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..files import cache_folder, file_aside
from ..ops.registration import in_transform
from ..version import __version__, cpu_model

Layers = Mapping[str, Sequence[str]]  # names of implementations per layer; the first is the default
Timed = Callable[[str, Callable[..., Any]], Callable[..., Any]]  # wraps the function of a layer, to measure its calls
Times = dict[int, list[float]]  # by size of the input: the shortest durations in even and in odd rounds
Build = Callable[[Mapping[str, str], Timed], Callable[[], object]]

IMAGES = (1, 4)  # on an AMD EPYC (Zen 3), oneDNN is often faster than MKL for one image, and slower for four and more
MARGIN = 1.02  # an implementation must be faster than the default by this factor, and for no input slower by it
NOISE = 1.1  # factor by which even or odd rounds must contradict a result, so that it is not stored in the file
MIN_ROUNDS, MAX_ROUNDS = 4, 40
SECONDS = 0.1  # target for all rounds
MAX_SECONDS = 2.0  # limit after two rounds, which only a busy machine or a large layer reaches
SETTINGS = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_", "OMP_", "KMP_", "GOMP_")  # prefixes of environment variables

_LOCK = threading.Lock()


def fastest(layers: Layers, build: Build) -> dict[str, str]:
    """Returns the fastest implementation of each layer, from the cache or by a measurement.

    Args:
        layers: The keys describe operator, dtype and sizes of each layer. The default runs the layer as before
            `freeze`. Another implementation is selected only if it is not slower for any of the measured inputs.
        build: Returns a function that runs all layers once for each input. Gets the implementation of each layer, and
            `Timed`. The first argument of a layer is a tensor.
    """
    selected = {layer: names[0] for layer, names in layers.items()}
    if is_traced():
        return selected
    with _LOCK:
        machine = json.dumps(describe_cpu() | {"images": IMAGES})
        known = _known(machine)
        missing = {layer: names for layer, names in layers.items() if len(names) > 1 and known.get(layer) not in names}
        if missing:
            with torch.inference_mode():
                certain = {layer: name for layer, name in _measure(layers, build).items() if layer in missing}
            if certain:
                _store(machine, certain)
            known |= {layer: selected[layer] for layer in missing} | certain
        return selected | {layer: known[layer] for layer, names in layers.items() if len(names) > 1}


def on_images(shape: tuple[int, ...], dtype: torch.dtype, run: Callable[[Tensor], Tensor]) -> Callable[[], object]:
    """Returns a function that calls `run` on random tensors [images, *shape] for each number of images."""
    x = torch.randn(max(IMAGES), *shape, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32)
    x = x.to(dtype)
    return lambda: [run(x[:images]) for images in IMAGES]


def is_traced() -> bool:
    """True under a tracer, a transform or a dispatch mode such as FakeTensor, which do not support packed weights."""
    tracing = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    return tracing or torch._C._len_torch_dispatch_stack() > 0 or in_transform()


def _measure(layers: Layers, build: Build) -> dict[str, str]:
    """Returns the fastest implementations, without layers whose measurement was disturbed too much."""
    taken: dict[str, dict[str, Times]] = {layer: {name: {} for name in names} for layer, names in layers.items()}
    found: dict[str, str] = {}
    number = 0

    def timed(best: Mapping[str, Times], layer: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = perf_counter()
            output = call(*args)
            elapsed = perf_counter() - start
            if number:  # the first round may allocate, compile and start threads
                pair = best[layer].setdefault(args[0].numel(), [math.inf, math.inf])
                pair[number % 2] = min(pair[number % 2], elapsed)
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
        late = number > 1 and elapsed > MAX_SECONDS
        if late or number >= MIN_ROUNDS:
            found = {layer: name for layer, times in taken.items() if (name := _certain(times)) is not None}
        if late or (len(found) == len(layers) and elapsed > SECONDS):
            break
    return found


def _certain(times: Mapping[str, Times]) -> str | None:
    """Returns the fastest implementation that is not slower for any input; None if even or odd rounds contradict it."""
    before = next(iter(times.values()))

    def relative(shortest: Callable[[list[float]], float]) -> dict[str, list[float]]:
        return {name: [shortest(now[size]) / shortest(before[size]) for size in before] for name, now in times.items()}

    name = _choose(relative(min))
    for ratios in (relative(operator.itemgetter(half)) for half in (0, 1)):
        if max(ratios[name]) > NOISE or fmean(ratios[name]) > NOISE * fmean(ratios[_choose(ratios)]):
            return None
    return name


def _choose(relative: Mapping[str, Sequence[float]]) -> str:
    default = next(iter(relative))
    name = min((each for each in relative if max(relative[each]) <= MARGIN), key=lambda each: fmean(relative[each]))
    return name if MARGIN * fmean(relative[name]) <= 1 else default


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

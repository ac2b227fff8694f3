"""Candidates of `optimize` for a model: enumerates, builds, checks and times them."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..accuracy import Measure, error_of, size_of
from ..apps.data import spread
from ..errors import UnsupportedInputError
from ..fusion.fuse import unfuse
from ..ops.backends import triton_unavailable_reasons
from ..version import installed, matmul_slowdown
from .build import Optimized, arguments, build, call, with_inputs
from .candidate import (
    AS_FILE,
    DTYPES,
    ORIGINAL,
    PRECISIONS,
    Candidate,
    Engine,
    Precision,
    Reference,
    describe_error,
    errors_of,
    leaves_of,
    limits_of,
    prepare,
    tensors_in,
    why_failed,
)
from .clock import Call, Protocol, Samples, format_number, free_memory
from .limits import at_most
from .runtimes import OnnxFile, file_name, open_reference
from .search import HOPELESS, OutOfTime, Refused

# Typical seconds to build a candidate, without its calls (two cores of a Zen 3); `Trials.seconds` scales them.
ENGINE_S = {
    "torch": 1.0, "default": 40.0, "freezing": 40.0, "reduce-overhead": 45.0, "max-autotune": 150.0, "onnxruntime": 0.5,
    "openvino": 1.5, "tensorrt": 60.0,
}  # fmt: skip
EXPORT_S, QUANTIZE_S = 13.0, 12.0
CALLS = 6  # of a preparation
LONG_S = 0.25  # shorter calls are never refused during the check, because other load might explain them
# Assumed speedup by lower precision, to order the candidates by gain per second. int8 comes after fp32 in ONNX Runtime,
# because int8 needs the file in fp32 anyway.
PRECISION_GAIN = 1.8
# Maximum number of images in the fp64 reference, if each output depends only on its own image.
MOST_IN_FP64 = 8
# Assumed rounding error of an fp32 ONNX file, relative to its outputs. An ONNX file cannot run in fp64.
FILE_ROUNDING = 2e-5


def candidates(device: torch.device, allowed: Collection[Precision]) -> list[Candidate]:
    """Returns the initial candidates for a device, in the order to try; `allowed` adds lower precisions."""
    on_cuda = device.type == "cuda"
    backends = ("triton", "sdpa") if on_cuda and not triton_unavailable_reasons(device) else ("sdpa",)
    found: list[Candidate] = []
    precisions: tuple[Precision | None, ...] = None, "bf16", "fp16"
    for precision in (each for each in precisions if each is None or each in allowed):
        for attention, mlp in itertools.product(backends, repeat=2):
            fused = Candidate(attention=attention, mlp=mlp, precision=precision)
            graphed = replace(fused, graphs=True, frozen=attention == mlp == "triton")
            found += [fused, graphed] if on_cuda else [replace(fused, frozen=True), fused]
        # on a CPU, freezing packs weights for its matmuls; on CUDA, fused kernels join the compiled graph
        engine: Engine = "default" if on_cuda else "freezing"
        fused = Candidate(engine, backends[0], backends[0], precision)
        other = replace(fused, engine="max-autotune") if on_cuda else Candidate("freezing", precision=precision)
        found += [fused, Candidate("default", precision=precision), other]
    if "fp8" in allowed:  # if fp8 is unavailable, the table contains the reason
        eight_bit = Candidate(attention="triton", mlp="triton", precision="fp8")
        found += [eight_bit, replace(eight_bit, graphs=True)] if on_cuda else [eight_bit]
    found += _runtimes(device, allowed)
    return sorted(found, key=lambda one: _build_s(one) / (PRECISION_GAIN if one.precision else 1.0))


def candidates_of_file(device: torch.device, allowed: Collection[Precision]) -> list[Candidate]:
    """Returns the initial candidates for an ONNX file; the original runs in ONNX Runtime."""
    return [each for each in _runtimes(device, allowed) if each != AS_FILE and each.precision != "fp16"]


def _build_s(candidate: Candidate, files: Collection[str] = ()) -> float:
    """Returns typical seconds to build a candidate, given the names of the ONNX files that exist."""
    needed_s, name = ENGINE_S[candidate.engine], file_name(candidate)
    if not candidate.runs_file or name in files:
        return needed_s
    if candidate.precision == "int8":
        needed_s, name = needed_s + QUANTIZE_S, file_name(replace(candidate, precision=None))
    return needed_s if name in files else needed_s + EXPORT_S


def slow_precisions(device: torch.device, allowed: Collection[Precision]) -> dict[Precision, str]:
    """Returns the precisions that the CPU computes more slowly than fp32, with the reason to skip them.

    If only one precision is allowed, the user asks for it, and nothing is skipped.
    """
    if device.type != "cpu" or len(allowed) < 2:
        return {}
    found: dict[Precision, str] = {}
    for name in PRECISIONS[:2]:
        if name in allowed and (factor := matmul_slowdown(DTYPES[name])) > 1:
            reason = f"this CPU's {name} matmuls are {factor:.1f}x slower than fp32: to try {name}, allow nothing else"
            found[name] = f"not tried: {reason}"
    return found


def _runtimes(device: torch.device, allowed: Collection[Precision]) -> Iterator[Candidate]:
    on_cuda, ort = device.type == "cuda", installed("onnxruntime") or installed("onnxruntime-gpu")
    found = [AS_FILE] if ort else []
    if on_cuda and ort:
        found += [Candidate("onnxruntime", graphs=True), Candidate("tensorrt")]
    elif not on_cuda and installed("openvino"):
        found.append(Candidate("openvino"))
    for candidate in found:
        yield candidate
        lower: Precision = "bf16" if candidate.engine == "openvino" else "fp16" if on_cuda else "int8"
        if lower in allowed:
            yield replace(candidate, precision=lower)


def variations(candidate: Candidate, device: torch.device, batch: int) -> list[Candidate]:
    """Returns variations of a candidate with one change each."""
    pieces = [size for size in (batch // 2, batch // 4, 1) if 0 < size < batch]
    changes: list[dict[str, Any]] = [{"split": size} for size in dict.fromkeys(pieces)]
    if device.type == "cpu":
        used, there = torch.get_num_threads(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        changes += [{"threads": count} for count in dict.fromkeys((used // 2, there)) if count not in (0, used)]
    return [replace(candidate, **change) for change in changes]


def expect(model: nn.Module, example: Any, others: Sequence[Any] = ()) -> tuple[Any, Reference]:
    """Returns a model's output for an example, and the reference; `others` are more batches to measure agreement.

    Raises ValueError if the model modifies its input, buffers or parameters, is nondeterministic, or returns NaN,
    infinity or no floating-point tensor. Raises UnsupportedInputError if the model fails in fp64.
    """
    with torch.no_grad():
        _check_untouched(model, *pytree.tree_map_only(Tensor, torch.clone, arguments(example)))
        output = call(model, example)
        leaves, again = leaves_of(output), leaves_of(call(model, example))
        if not leaves:
            raise ValueError(
                f"the model must return floating-point tensors, got {getattr(output, 'dtype', type(output).__name__)}"
            )
        if not all(bool(leaf.isfinite().all()) for leaf in leaves):
            raise ValueError("the model must return finite outputs, got NaN or infinity for the example")
        if not _are_same(leaves, again):
            raise ValueError("the model must be deterministic, got different outputs for the same input")
        # run a few images in fp64, or all if outputs depend on the rest of the batch
        batch, (exact_model, rounding) = first_batch(example), _exact(model)
        rows, checked = spread(batch, MOST_IN_FP64), leaves

        def cut(value: Tensor) -> Tensor:
            return value[rows] if value.dim() and value.shape[0] == batch else value

        if len(rows) < batch:
            some = pytree.tree_map_only(Tensor, cut, example)
            alone = leaves_of(call(model, some))
            if _are_same([cut(leaf) for leaf in leaves], alone):
                example, checked = some, alone
        exact = leaves_of(call(exact_model, example))
        errors: list[dict[Measure, float]] = [
            {m: max(error, rounding * size_of(right, m)) for m, error in errors_of(leaf, right).items()}
            for leaf, right in zip(checked, exact, strict=True)
        ]
        outputs = [leaves[0], *(leaves_of(call(model, other))[0] for other in others)]
    limits = [limits_of(error, right, leaf.dtype) for error, right, leaf in zip(errors, exact, leaves, strict=True)]
    shapes, names = [tuple(leaf.shape) for leaf in leaves], [""] * len(leaves)
    return output, Reference(exact, limits, shapes, names, rows, outputs, type(output))


def _are_same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Returns True if the shapes match, and the values match up to rounding errors."""
    return len(ones) == len(others) and all(
        one.shape == other.shape and error_of(one, other) <= torch.finfo(one.dtype).eps ** 0.5 * size_of(one)
        for one, other in zip(ones, others)
    )


def first_batch(example: Any) -> int:
    """Returns the batch size of an example: the first axis of its first tensor."""
    return int(tensors_in(example)[0].shape[0])


def _check_untouched(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ValueError if the model writes into its input, buffers or parameters. This call may change them."""
    watched = [("its input", tensor) for tensor in tensors_in((args, kwargs))]
    watched += [*model.named_buffers(), *(("its parameters", tensor) for tensor in model.parameters())]
    counted = [(name, tensor) for name, tensor in watched if not tensor.is_inference()]  # torch counts no writes
    before = [tensor._version for _, tensor in counted]
    model(*args, **kwargs)
    written = [name for (name, tensor), version in zip(counted, before) if tensor._version != version]
    if written:
        raise ValueError(f"forward must not modify {', '.join([*dict.fromkeys(written)][:3])} in place")


def _exact(model: nn.Module) -> tuple[Callable[..., Any], float]:
    """Returns a function that computes the reference, and the rounding error of the reference."""
    if isinstance(model, OnnxFile):
        return open_reference(model.path, model.image_hw), FILE_ROUNDING

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            exact = copy.deepcopy(model)
            unfuse(exact)
            return with_inputs(exact.double(), Tensor.double)(*args, **kwargs)
        except Exception as error:  # the model may raise any type
            failure = describe_error(error)[:200]
            reason = f"candidates are compared with the model in fp64, but the model fails in fp64: {failure}"
            raise UnsupportedInputError("optimizing this model", [reason]) from None

    return run, 0.0


@dataclass(frozen=True)
class Checked:
    """Error, allowed error (None at lower precision), agreement (see same_class), time and memory of a candidate."""

    error: float
    allowed: float | None
    agreement: float
    first_call_s: float  # building and first call, including compilation
    peak_bytes: int  # peak of a call, and what building added (weights)


class Trials:
    """Builds, checks and times candidates for a model. Each build or timed call first calls `check_interrupt`."""

    def __init__(
        self, model: nn.Module, example: Any, others: Sequence[Any] = (), image_files: Sequence[str | Path] = (),
        min_agreement: float = 0.99, memory_limit: int | None = None, *, start: float | None = None,
        progress: Callable[[str, float], None] | None = None, check_interrupt: Callable[[], None] = lambda: None,
        skipped: Mapping[Any, str] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.example, self.image_files = model, example, image_files
        self.min_agreement, self.memory_limit, self.skipped = min_agreement, memory_limit, skipped or {}
        self.start = time.perf_counter() if start is None else start
        self.progress, self.check_interrupt = progress or (lambda what, seconds: None), check_interrupt
        self.device = device_of_example(example)
        self.tell("the reference in fp64")
        self.batches = [example, *others]
        self.output, self.reference = expect(model, example, others)
        self.checked: dict[Candidate, Checked] = {}
        self.original_s = 0.0  # seconds for as many calls of the original as a preparation needs
        self.built_s, self.typical_s = 0.0, 0.0  # actual and typical seconds of all exports and compilations
        self._files = tempfile.TemporaryDirectory()  # one ONNX file for all candidates that run it
        self.prepared: dict[Candidate, tuple[Optimized, Samples]] = {}

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    def seconds(self, candidate: Candidate) -> float:
        """Estimates the preparation time: typical seconds at the pace so far, and the original's time for calls."""
        pace = self.built_s / self.typical_s if self.typical_s else 1.0
        return pace * _build_s(candidate, self._exported()) + self.original_s

    def _exported(self) -> list[str]:
        given = [AS_FILE, Candidate("openvino")] if isinstance(self.model, OnnxFile) else []
        return [*(path.name for path in Path(self._files.name).iterdir()), *map(file_name, given)]

    def prepare(self, candidate: Candidate, seconds: float, most_ms: float = math.inf) -> list[float]:
        """Builds and checks a candidate; returns the ms of its calls except the first.

        Raises Refused, also if each call takes longer than `most_ms`, or OutOfTime after `seconds`. If the outputs are
        correct, but the agreement is too low or the memory too large, the error contains the durations.
        """
        self.check_interrupt()
        if (reason := self.skipped.get(candidate.precision)) is not None:
            raise Refused(reason)
        self.tell(candidate.name)
        is_original, lossy, begun = candidate == ORIGINAL, candidate.precision is not None, time.perf_counter()
        typical_s = _build_s(candidate, self._exported())
        # only in lower precision, the agreement on more batches matters
        reference = self.reference if lossy else replace(self.reference, outputs=self.reference.outputs[:1])

        def start() -> tuple[Optimized, Call, None]:
            what = self.model, self.example, self.output, self.image_files
            optimized = build(candidate, *what, self.min_agreement, Path(self._files.name))
            return optimized, lambda number: call(optimized, self.batches[number % len(self.batches)]), None

        def watch(calls_s: Sequence[float]) -> None:
            slowdown = HOPELESS * 1e3 * min(calls_s) / most_ms
            if min(calls_s) > LONG_S and slowdown > HOPELESS * (2 if len(calls_s) == 1 else 1):
                raise Refused(f"{slowdown:.1f}x slower than the fastest")

        try:
            with contextlib.nullcontext() if is_original else at_most(max(seconds, 1.0)):
                ready = prepare(candidate, start, reference, self.device, math.inf if lossy else None, watch)
        except Exception as error:  # a candidate may raise any type; the search continues
            free_memory(self.device)
            if is_original or isinstance(error, Refused):
                raise
            if isinstance(error, TimeoutError):
                self._learn(typical_s, max(typical_s, time.perf_counter() - begun))
                raise OutOfTime(f"not tried: preparation {error}") from None
            raise Refused(_in_words(error)) from None
        verdict, agreement = ready.verdict, 1.0 if ready.agreement is None else ready.agreement
        peak, limit, reason = ready.own_bytes + (ready.call_bytes or 0), self.memory_limit, verdict.reason
        allowed, first_call_s = None if lossy else verdict.allowed_error, ready.build_s + ready.first_call_s
        self._learn(typical_s, first_call_s - ready.call_s)
        calls_ms = []
        if reason is None or is_original:
            self.checked[candidate] = Checked(verdict.max_error, allowed, agreement, first_call_s, peak)
            calls_ms = [1e3 * seconds for seconds in ready.calls_s]
        if reason is None and lossy and agreement < self.min_agreement:
            reason = f"the agreement with the model must be at least {self.min_agreement:.1%}, got {agreement:.1%}"
        if reason is None and limit is not None and peak > limit:
            reason = f"needs {format_number(peak / 2**20)} MiB, memory_limit is {format_number(limit / 2**20)} MiB"
        if reason is not None and not is_original:
            del ready
            free_memory(self.device)
            raise Refused(reason, calls_ms)
        optimized: Optimized = ready.function
        samples = Samples(lambda number: call(optimized, self.example), self.device, Protocol())
        self.prepared[candidate] = optimized, samples
        if is_original:
            self.original_s = CALLS * ready.call_s
        return calls_ms

    def _learn(self, typical_s: float, built_s: float) -> None:
        if typical_s >= QUANTIZE_S:
            self.built_s, self.typical_s = self.built_s + built_s, self.typical_s + typical_s

    def call_ms(self, candidate: Candidate, number: int) -> float:
        """Returns the duration in ms of one call in round `number`; raises Refused if the call fails."""
        self.check_interrupt()
        samples = self.prepared[candidate][1]
        try:
            samples.take(number)
        except Exception as error:
            if candidate == ORIGINAL:
                raise
            raise Refused(_in_words(error)) from None
        return samples[-1]

    def tell(self, what: str) -> None:
        self.progress(what, self.elapsed_s())

    def release(self, candidate: Candidate) -> None:
        self.prepared.pop(candidate, None)
        free_memory(self.device)

    def variations(self, candidate: Candidate) -> Sequence[Candidate]:
        base = AS_FILE if isinstance(self.model, OnnxFile) and candidate == ORIGINAL else candidate
        return variations(base, self.device, first_batch(self.example))


def device_of_example(example: Any) -> torch.device:
    """Returns the device of the example's tensors; raises ValueError for no tensor, or several devices."""
    tensors = tensors_in(example)
    if not tensors or any(not tensor.numel() for tensor in tensors) or not tensors[0].dim():
        raise ValueError(
            "example must contain tensors with at least one element, and the first tensor must have a batch axis, got "
            f"{type(example).__name__} with shapes {[tuple(tensor.shape) for tensor in tensors]}"
        )
    device, *others = dict.fromkeys(tensor.device for tensor in tensors)
    if others or device.type == "meta":
        raise ValueError(f"example must be on one device, not on meta, got {[str(each) for each in (device, *others)]}")
    return device


def _in_words(error: Exception) -> str:
    status, reason = why_failed(error)
    return status if status == "out of memory" else reason

"""Candidates: ways to run a model. Builds and checks a candidate.

Before a candidate is timed, its outputs are compared with an fp64 reference, by the rule of vit_fast.accuracy.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..accuracy import FORWARD_FACTOR, Measure, allowed_error, error_of, size_of
from ..errors import UnsupportedInputError
from . import clock
from .clock import Call, begin, memory_in_use, peak_memory_of_call, synchronize

CompileMode = Literal["default", "freezing", "reduce-overhead", "max-autotune"]
Engine = Literal["torch", CompileMode, "onnxruntime", "tensorrt", "openvino"]
# Modes of torch.compile; "freezing" is Inductor's option (weights as constants).
COMPILE_MODES: tuple[CompileMode, ...] = get_args(CompileMode)
GRAPH_MODES = COMPILE_MODES[2:]  # capture CUDA graphs
Precision = Literal["bf16", "fp16", "int8", "fp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# Dtype of the model at each precision. With fp8, only the operands of linear layers are fp8.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
# Runtimes that load a file.
RUNTIMES = {"onnxruntime": "ONNX Runtime", "tensorrt": "ONNX Runtime with TensorRT", "openvino": "OpenVINO"}
CONFIGURATION = ("engine", "attention", "mlp", "precision", "frozen", "graphs", "threads", "split")
MEASURES: tuple[Measure, ...] = ("largest", "rms")
Status = Literal[
    "measured", "not installed", "unsupported", "incorrect", "failed", "out of memory", "skipped", "interrupted"
]
# Minimum cosine similarity at which outputs other than logits agree.
SAME_DIRECTION = 0.99


@dataclass(frozen=True)
class Candidate:
    """A way to run a model. The default is the model itself.

    `optimize` varies the fields in CONFIGURATION. The other fields describe candidates of `vit-fast bench`.
    """

    engine: Engine = "torch"
    attention: str | None = None  # backend of vit_fast.fuse; None does not fuse
    mlp: str | None = None
    precision: Precision | None = None  # None: the model's
    frozen: bool = False
    graphs: bool = False
    threads: int | None = None
    split: int | None = None  # images per call
    base: str = ""
    builder: Callable[[Any, Any], Callable[[Any], Any]] | None = None  # takes the candidate and a models.Group
    packages: tuple[str, ...] = ()
    peer: bool = False  # another project's implementation
    compilable: bool = True
    trainable: bool = True
    fullgraph: bool = False
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    tolerance: float | None = None  # allowed error in lower precision, as a share of the largest output

    @property
    def changes(self) -> int:
        """The number of changes to the model; a compiler or another runtime counts twice."""
        one_fuse = self.attention is not None and self.mlp is not None
        return len(self.to_dict()) + (self.engine != "torch") - one_fuse

    @property
    def compile_mode(self) -> str:
        """The mode of torch.compile, or "none"."""
        return self.engine if self.engine in COMPILE_MODES else "none"

    @property
    def runs_file(self) -> bool:
        """True if a runtime loads a file that contains the weights."""
        return self.engine in RUNTIMES

    @property
    def name(self) -> str:
        """The name in tables, such as "fused triton, torch.compile, bf16" or "timm+compile:freezing"."""
        mode = self.compile_mode
        if self.base:
            return self.base + {"none": "", "default": "+compile"}.get(mode, f"+compile:{mode}")
        words = [
            "" if self.attention != self.mlp or self.mlp is None else f"fused {self.mlp}",
            "" if self.attention in (None, self.mlp) else f"attention {self.attention}",
            "" if self.mlp in (None, self.attention) else f"MLP {self.mlp}",
            {"none": "", "default": "torch.compile"}.get(mode, f"torch.compile {mode}"),
            RUNTIMES.get(self.engine, ""),
            self.precision or "",
            "frozen" if self.frozen else "",
            "graphs" if self.graphs else "",
            f"{self.threads} threads" if self.threads else "",
            f"{self.split} images per call" if self.split else "",
        ]
        return ", ".join(filter(None, words)) or "original"

    def missing_packages(self) -> list[str]:
        return [package for package in self.packages if importlib.util.find_spec(package) is None]

    def compiled(self, function: Any, *, fullgraph: bool) -> Callable[..., Any]:
        """Compiles a module in the candidate's mode, separately for each shape."""
        mode: Any = self.compile_mode
        if mode == "none":
            return function
        from ..run.runtime import compile, compile_frozen  # imports torch's compiler

        if mode == "freezing":
            return compile_frozen(function, fullgraph=fullgraph)
        return compile(function, mode, fullgraph=fullgraph, backend="inductor")

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration: fields that differ from the default, as plain data."""
        return {name: value for name in CONFIGURATION if (value := getattr(self, name)) != getattr(ORIGINAL, name)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Candidate:
        """Reads the output of to_dict; raises ValueError for an unknown field, type, engine or precision."""
        for name, value in data.items():
            if name not in CONFIGURATION:
                raise ValueError(f"candidate's fields must be among {', '.join(CONFIGURATION)}, got {name}={value!r}")
            if not isinstance(value, str | bool | int):
                raise ValueError(f"{name} must be a str, bool or int, got {value!r}")
        for name, known in (("engine", get_args(Engine)), ("precision", PRECISIONS)):
            if name in data and data[name] not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {data[name]!r}")
        return cls(**data)


ORIGINAL, AS_FILE = Candidate(), Candidate("onnxruntime")


@dataclass(frozen=True)
class Reference:
    """The expected output of a batch, or its gradients, with one entry per tensor in the first four lists."""

    exact: Sequence[Tensor]  # in fp64, of the images `rows`
    limits: Sequence[dict[Measure, float]]  # allowed errors
    shapes: Sequence[tuple[int, ...]]  # of the whole batch
    names: Sequence[str]  # for errors
    rows: Sequence[int]
    outputs: Sequence[Tensor] = ()  # of this batch and of more batches, to measure agreement
    kind: type = Tensor  # the class of the output, which may contain several tensors


class Verdict(NamedTuple):
    """The largest error of a candidate, the allowed error, and the reason why it fails, or None."""

    max_error: float
    allowed_error: float
    reason: str | None


def judge(output: object, reference: Reference, tolerance: float | None = None) -> Verdict:
    """Compares the output of a whole batch with the reference; see Candidate.tolerance."""
    limits: Any = reference.limits
    if tolerance is not None:
        limits = [{"largest": tolerance * size_of(exact)} for exact in reference.exact]
    limit = max(allowed["largest"] for allowed in limits)
    leaves, shapes, reason = leaves_of(output), [*reference.shapes], None
    if not isinstance(output, reference.kind):
        reason = f"the output must be {reference.kind.__name__}, got {type(output).__name__}"
    elif (found := [tuple(leaf.shape) for leaf in leaves]) != shapes:
        got, expected = (one[0] if len(one) == 1 else one for one in (found, shapes))
        reason = f"the output's shape must be {expected}, got {got}"
    elif not all(bool(leaf.isfinite().all()) for leaf in leaves):
        reason = "the output contains NaN or infinity"
    if reason is not None:
        return Verdict(float("inf"), limit, reason)
    errors = [
        errors_of(leaf if leaf.shape == exact.shape else leaf[[*reference.rows]], exact)
        for leaf, exact in zip(leaves, reference.exact, strict=True)
    ]
    worst = max(error["largest"] for error in errors)
    for error, allowed, what in zip(errors, limits, reference.names, strict=True):
        for measure, most in allowed.items():
            if error[measure] > most:
                name = f"error{what}" if measure == "largest" else f"root mean square error{what}"
                return Verdict(worst, limit, f"the {name} must be at most {most:.3g}, got {error[measure]:.3g}")
    return Verdict(worst, limit, None)


def errors_of(leaf: Tensor, exact: Tensor) -> dict[Measure, float]:
    return {measure: error_of(leaf, exact, measure) for measure in MEASURES}


def limits_of(
    errors: dict[Measure, float], exact: Tensor, dtype: torch.dtype, factor: float = FORWARD_FACTOR
) -> dict[Measure, float]:
    """Returns the errors that the rule of vit_fast.accuracy allows, given the errors of eager PyTorch."""
    return {measure: allowed_error(error, exact, dtype, factor, measure) for measure, error in errors.items()}


def tensors_in(value: Any) -> list[Tensor]:
    value = dict(value) if isinstance(value, Mapping) and not isinstance(value, dict) else value
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def leaves_of(output: Any) -> list[Tensor]:
    """Returns the floating-point tensors in an output."""
    return [leaf for leaf in tensors_in(output) if leaf.is_floating_point()]


def same_class(one: Tensor, other: Tensor) -> Tensor:
    """Returns a bool per image: equal argmax of logits, or for other outputs a cosine similarity >= SAME_DIRECTION."""
    one, other = one.float(), other.to(one.device).float()
    if one.dim() == 2 and one.shape[1] > 1:
        return one.argmax(1) == other.argmax(1)
    rows = [value.flatten(1) if value.dim() > 1 else value.reshape(-1, 1) for value in (one, other)]
    return torch.cosine_similarity(rows[0], rows[1]) >= SAME_DIRECTION


@dataclass
class Prepared:
    """A candidate that was built, called and checked."""

    candidate: Candidate
    function: Any
    call: Call  # takes the number of a batch
    verdict: Verdict
    agreement: float | None
    build_s: float
    first_call_s: float
    calls_s: list[float]  # later calls; of a mode that captures CUDA graphs, without the second call
    own_bytes: int  # memory that building added
    call_bytes: int | None  # peak memory of a call; None if the check failed
    row: dict[str, Any] = field(default_factory=dict)  # row of the benchmark's table
    call_s = property(lambda self: min(self.calls_s))


def prepare(
    candidate: Candidate, build: Callable[[], tuple[Any, Call, Callable[[], Any] | None]], reference: Reference,
    device: torch.device, tolerance: float | None = None, watch: Callable[[list[float]], None] = lambda calls_s: None,
) -> Prepared:  # fmt: skip
    """Builds a candidate, calls it, compares its output with the reference, and measures its memory.

    `build` returns a callable, a call for a batch number, and in training a function that returns gradients to compare.
    `watch` gets the durations of all calls but the first after each call, and may raise an error.
    """

    def timed(action: Callable[[], Any]) -> tuple[float, Any]:
        synchronize(device)
        start = time.perf_counter()
        output = action()
        synchronize(device)
        return time.perf_counter() - start, output

    def call_again(number: int) -> Any:
        seconds, output = timed(lambda: call(number))
        calls_s.append(seconds)
        watch(calls_s)
        return output

    clock.free_memory(device)  # otherwise the garbage of earlier candidates would be freed later, and reduce own_bytes
    calls_s, before = list[float](), memory_in_use(device)
    build_s, (function, call, gradients) = timed(build)
    first_call_s, first = timed(gradients or (lambda: call(0)))
    # CUDA graphs are replayed from the third call on. In inference, check the third call, after another batch.
    (call if candidate.engine in GRAPH_MODES else call_again)(1)
    last = call_again(0)
    verdict, agreement, call_bytes = judge(last if gradients is None else first, reference, tolerance), None, None
    if verdict.reason is None and reference.outputs:
        # compare one by one, because the next replay of a CUDA graph overwrites the output
        outputs = itertools.chain([last], map(call_again, range(1, len(reference.outputs))))
        same = []
        for output, expected in zip(outputs, reference.outputs, strict=True):
            leaf = leaves_of(output)[0]
            same.append(same_class(leaf if leaf.shape == expected.shape else leaf[[*reference.rows]], expected).cpu())
        agreement = float(torch.cat(same).double().mean())
        del outputs, output, leaf
    del first, last  # their memory must not be counted
    own_bytes = max(0, memory_in_use(device) - before)
    if verdict.reason is None:
        begin(call, 1)
        call_bytes = peak_memory_of_call(lambda: call(1), device)
    times = build_s, first_call_s, calls_s
    return Prepared(candidate, function, call, verdict, agreement, *times, own_bytes, call_bytes)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns True if memory ran out, even if a compiler or a runtime wrapped the exception."""
    signs = "can't allocate memory", "CUDA out of memory", "CUDA error: out of memory"
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in signs):
            return True
        error = error.__cause__ or error.__context__
    return False


def why_failed(error: Exception) -> tuple[Status, str]:
    """Returns the status of a candidate that raised an exception, and the reason."""
    from ..export.runtime.runner import ProviderError

    if isinstance(error, UnsupportedInputError):
        return "unsupported", "; ".join(error.reasons)
    reason = describe_error(error)
    if any(sign in reason for sign in ("No available kernel", "No viable backend")):
        return "unsupported", "this attention kernel of torch does not support the device, dtype or shape"
    if isinstance(error, ProviderError):
        return "unsupported", str(error)
    return "out of memory" if is_out_of_memory(error) else "failed", reason


def describe_error(error: Exception) -> str:
    """Returns an exception in one line of at most 500 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]

"""Candidates: ways to run a model, which can be built, checked and timed.

Before a candidate is timed, its outputs are compared with fp64, by the rule of vit_fast.accuracy.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..accuracy import FORWARD_FACTOR, Measure, allowed_error, error_of, size_of
from ..errors import UnsupportedInputError
from ..ops.backends import triton_unavailable_reasons
from ..version import installed

Engine = Literal["torch", "compile", "reduce-overhead", "max-autotune", "onnxruntime", "tensorrt", "openvino"]
# Modes of torch.compile; "freezing" is Inductor's option (weights as constants), "none" does not compile.
CompileMode = Literal["none", "default", "freezing", "reduce-overhead", "max-autotune"]
COMPILE_MODES: tuple[CompileMode, ...] = get_args(CompileMode)
Precision = Literal["bf16", "fp16", "int8", "fp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# Dtypes of the model; with fp8, of everything except the operands of the linear layers.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
# Estimated seconds to prepare the first candidate of an engine.
_SECONDS: dict[Engine, float] = {
    "torch": 0.5, "compile": 25.0, "reduce-overhead": 30.0, "max-autotune": 120.0, "onnxruntime": 15.0,
    "openvino": 15.0, "tensorrt": 60.0,
}  # fmt: skip
# Runtimes that load a file.
RUNTIMES: dict[str, str] = {
    "onnxruntime": "ONNX Runtime", "tensorrt": "ONNX Runtime with TensorRT", "openvino": "OpenVINO",
}  # fmt: skip
CONFIGURATION = (
    "engine", "attention", "mlp", "precision", "frozen", "graphs", "channels_last", "threads", "split",
)  # fmt: skip
MEASURES: tuple[Measure, ...] = ("largest", "rms")
# Outputs that are no logits agree if their cosine similarity is at least this.
SAME_DIRECTION = 0.99


@dataclass(frozen=True)
class Candidate:
    """A way to run a model. The default is the model itself.

    `optimize` varies the first nine fields. The benchmark names its candidates, and describes each by the other fields.

    Attributes:
        engine: torch, a mode of torch.compile ("compile" is the default mode), or a runtime that loads a file.
        attention, mlp: Backends of `vit_fast.fuse` for attention, and for LayerNorm + MLP; None does not fuse them.
        precision: Number format of the computation, if it is lower than the model's.
        frozen: True to prepare weights once, by `vit_fast.freeze` or by torch.compile's freezing.
        graphs: True to replay CUDA graphs.
        threads: CPU threads; None means torch's number.
        split: Images per call of the model, which splits a batch; None does not split it.
        base, summary: Name and description of a candidate of the benchmark.
        builder: Builds this candidate for a benchmarks.models.Task. Returns a function of images: an nn.Module if
            compilable. Raises UnsupportedInputError with all reasons.
        packages: Packages that must be installed, besides torch.
        peer: True for another project's implementation. Ratios are relative to the fastest peer.
        compilable: True if torch.compile accepts it.
        trainable: True if it can run training steps.
        fullgraph: True to compile it without graph breaks.
        context: Context manager of each call.
        tolerance: Largest allowed error as a share of the largest output, for lower precision; None means the rule of
            vit_fast.accuracy.
        build_s: Estimated seconds to build and check the first one on two CPU cores, without compilation.
    """

    engine: Engine = "torch"
    attention: str | None = None
    mlp: str | None = None
    precision: Precision | None = None
    frozen: bool = False
    graphs: bool = False
    channels_last: bool = False
    threads: int | None = None
    split: int | None = None
    base: str = ""
    summary: str = ""
    builder: Callable[[Any, Any], Callable[[Any], Any]] | None = None
    packages: tuple[str, ...] = ()
    peer: bool = False
    compilable: bool = True
    trainable: bool = True
    fullgraph: bool = False
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    tolerance: float | None = None
    build_s: float = 1.0

    def backend_of(self, part: str) -> str | None:
        """Returns the backend of a part of a fuse report."""
        return self.attention if part.startswith("attention") else self.mlp

    @property
    def changes(self) -> int:
        """The number of changes to the model; a compiler or another runtime counts twice."""
        one_fuse = self.attention is not None and self.mlp is not None
        return len(self.to_dict()) + (self.engine != "torch") - one_fuse

    @property
    def seconds(self) -> float:
        """The estimated seconds to prepare it."""
        return _SECONDS[self.engine]

    @property
    def compile_mode(self) -> CompileMode:
        """The mode of torch.compile."""
        if self.engine == "reduce-overhead" or self.engine == "max-autotune":
            return "freezing" if self.frozen else self.engine
        return "none" if self.engine != "compile" else "freezing" if self.frozen else "default"

    def compiled_in(self, mode: CompileMode) -> Candidate:
        """Returns the candidate compiled in a mode of torch.compile."""
        engine: Any = "compile" if mode in ("default", "freezing") else "torch" if mode == "none" else mode
        return dataclasses.replace(self, engine=engine, frozen=mode == "freezing")

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
        words = []
        if self.attention is not None or self.mlp is not None:
            parts = {"attention": self.attention, "MLP": self.mlp}
            named = [f"{part} {backend}" for part, backend in parts.items() if backend is not None]
            words.append(f"fused {self.attention}" if self.attention == self.mlp else ", ".join(named))
        if mode != "none":
            words.append("torch.compile" if self.engine == "compile" else f"torch.compile {self.engine}")
        words += [RUNTIMES[self.engine]] if self.runs_file else []
        words += [self.precision] if self.precision else []
        words += [word for word in ("frozen", "graphs") if getattr(self, word)]
        words += ["channels last"] if self.channels_last else []
        words += [f"{self.threads} threads"] if self.threads else []
        words += [f"split into {self.split}"] if self.split else []
        return ", ".join(words) or "original"

    def missing_packages(self) -> list[str]:
        return [package for package in self.packages if importlib.util.find_spec(package) is None]

    def compiled(self, function: Callable[..., Any], *, fullgraph: bool) -> Callable[..., Any]:
        """Compiles a module in the candidate's mode, separately for each shape."""
        mode = self.compile_mode
        if mode == "none":
            return function
        from ..run.runtime import compile, compile_frozen  # imports torch's compiler

        if mode == "freezing":
            return compile_frozen(function, fullgraph=fullgraph)
        if not isinstance(function, nn.Module):
            raise UnsupportedInputError("torch.compile", [f"expected an nn.Module, got {type(function).__name__}"])
        return compile(function, mode, fullgraph=fullgraph)

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration: fields that differ from the default, as plain data."""
        defaults = Candidate()
        return {name: value for name in CONFIGURATION if (value := getattr(self, name)) != getattr(defaults, name)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Candidate:
        """Reads the output of to_dict; raises ValueError for an unknown field, type, engine or precision."""
        for name, value in data.items():
            if name not in CONFIGURATION or not isinstance(value, str | bool | int):
                raise ValueError(f"a candidate must consist of {', '.join(CONFIGURATION)}, got {name}={value!r}")
        for name, known in (("engine", tuple(_SECONDS)), ("precision", PRECISIONS)):
            if name in data and data[name] not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {data[name]!r}")
        return cls(**data)


ORIGINAL, AS_FILE = Candidate(), Candidate("onnxruntime")


def candidates(device: torch.device, allowed: Collection[Precision]) -> list[Candidate]:
    """Returns the initial candidates on a device, also in the allowed precisions; slow full-precision ones last."""
    on_cuda = device.type == "cuda"
    backends = ("triton", "sdpa") if on_cuda and not triton_unavailable_reasons(device) else ("sdpa",)
    parts = [(name, name) for name in backends] + list(itertools.permutations(backends, 2))
    found: list[Candidate] = []
    precisions: tuple[Precision | None, ...] = (None, "bf16", "fp16")
    for precision in precisions:
        if precision is not None and (precision not in allowed or (precision == "fp16" and not on_cuda)):
            continue
        for attention, mlp in parts:
            fused = Candidate(attention=attention, mlp=mlp, precision=precision)
            graphed = dataclasses.replace(fused, graphs=True, frozen=attention == mlp == "triton")
            frozen = dataclasses.replace(fused, frozen=True)
            found += [fused, graphed] if on_cuda else [frozen, fused]
        compiled = Candidate("compile", precision=precision)
        # on a CPU, freezing packs weights for its matmuls; on CUDA, our kernels are part of the compiled graph
        other: dict[str, Any] = {"attention": backends[0], "mlp": backends[0], "frozen": not on_cuda}
        found += [dataclasses.replace(compiled, **other), compiled]
        found += [] if on_cuda else [dataclasses.replace(compiled, frozen=True)]  # for a model that cannot be fused
        found += [dataclasses.replace(compiled, engine="max-autotune", **other)] if on_cuda else []
    if "fp8" in allowed:  # if it is unavailable, the table says why
        eight_bit = Candidate(attention="triton", mlp="triton", precision="fp8")
        found += [eight_bit, *([dataclasses.replace(eight_bit, graphs=True)] if on_cuda else [])]
    smaller: Precision = "fp16" if on_cuda else "int8"
    for candidate in _runtimes(device):
        fewer: Precision = "bf16" if candidate.engine == "openvino" else smaller
        found += [candidate, *([dataclasses.replace(candidate, precision=fewer)] if fewer in allowed else [])]
    # lower precision, if allowed, gains most, so slow full-precision candidates come last
    return sorted(found, key=lambda c: (c.seconds > 1 and c.precision is None, c.seconds, c.precision is None))


def candidates_of_file(device: torch.device, allowed: Collection[Precision]) -> list[Candidate]:
    """Returns the initial candidates for an ONNX file; the original runs in ONNX Runtime."""
    found = [candidate for candidate in _runtimes(device) if candidate != AS_FILE]
    if device.type == "cpu":
        found += [Candidate("onnxruntime", precision="int8")] * ("int8" in allowed)
        found += [Candidate("openvino", precision="bf16")] * (Candidate("openvino") in found and "bf16" in allowed)
    return found


def _runtimes(device: torch.device) -> list[Candidate]:
    on_ort = installed("onnxruntime") or installed("onnxruntime-gpu")
    if device.type == "cuda":
        return [AS_FILE, Candidate("onnxruntime", graphs=True), Candidate("tensorrt")] if on_ort else []
    return [*([AS_FILE] if on_ort else []), *([Candidate("openvino")] if installed("openvino") else [])]


def variations(candidate: Candidate, device: torch.device, batch: int) -> list[Candidate]:
    """Returns variations of a candidate with one change each."""
    pieces = [size for size in (batch // 2, batch // 4, 1) if 0 < size < batch]
    changes: list[dict[str, Any]] = [{"split": size} for size in dict.fromkeys(pieces)]
    if candidate.engine == "torch":
        changes.append({"channels_last": True})
    if device.type == "cpu":
        used, there = torch.get_num_threads(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        changes += [{"threads": count} for count in dict.fromkeys((used // 2, there)) if count not in (0, used)]
    return [dataclasses.replace(candidate, **change) for change in changes]


@dataclass(frozen=True)
class Reference:
    """The expected outputs of a batch, one entry per output tensor.

    `exact` are outputs in fp64 of the checked images, whose indices are `rows`. `shapes` are of the whole batch.
    `eager_errors` are errors of eager in the candidate's dtype. `dtypes` decide the allowed rounding.
    """

    exact: Sequence[Tensor]
    eager_errors: Sequence[dict[Measure, float]]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[tuple[int, ...]]
    rows: Sequence[int]

    def errors(self, leaves: Sequence[Tensor]) -> list[dict[Measure, float]]:
        return [
            errors_of(leaf if leaf.shape == exact.shape else leaf[[*self.rows]], exact)
            for leaf, exact in zip(leaves, self.exact, strict=True)
        ]

    def limits(self, factor: float, tolerance: float | None) -> list[dict[Measure, float]]:
        """Returns the largest allowed errors, by the accuracy rule or as a share of the largest output."""
        if tolerance is not None:
            return [{"largest": tolerance * size_of(exact)} for exact in self.exact]
        each = zip(self.exact, self.eager_errors, self.dtypes, strict=True)
        return [{m: allowed_error(eager[m], exact, dtype, factor, m) for m in MEASURES} for exact, eager, dtype in each]


@dataclass(frozen=True)
class Verdict:
    """The largest error of a candidate, the allowed error, the reason why it fails, and its top-1 agreement."""

    max_error: float
    allowed_error: float
    reason: str | None
    agreement: float | None = None

    @property
    def passed(self) -> bool:
        return self.reason is None


def judge(
    leaves: Sequence[object], reference: Reference, factor: float = FORWARD_FACTOR, tolerance: float | None = None
) -> Verdict:
    """Compares the outputs of a whole batch with the reference.

    `factor` is FORWARD_FACTOR or GRADIENT_FACTOR. `tolerance` is the largest error as a share of the largest output,
    for lower precision; None means the accuracy rule.
    """
    limits = reference.limits(factor, tolerance)
    limit = max(each["largest"] for each in limits)
    found = [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    if found != [*reference.shapes]:
        ours, theirs = (one[0] if len(one) == 1 else one for one in (found, [*reference.shapes]))
        return Verdict(float("inf"), limit, f"the output must be {theirs}, got {ours}")
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not all(bool(leaf.isfinite().all()) for leaf in tensors):
        return Verdict(float("inf"), limit, "the output contains NaN or infinity")
    errors = reference.errors(tensors)
    worst = max(each["largest"] for each in errors)
    for each, allowed in zip(errors, limits, strict=True):
        for measure, most in allowed.items():
            if each[measure] > most:
                name = "error" if measure == "largest" else "root mean square error"
                return Verdict(worst, limit, f"the {name} must be at most {most:.3g}, got {each[measure]:.3g}")
    return Verdict(worst, limit, None)


def errors_of(leaf: Tensor, exact: Tensor) -> dict[Measure, float]:
    return {measure: error_of(leaf, exact, measure) for measure in MEASURES}


def same_class(one: Tensor, other: Tensor) -> Tensor:
    """Returns a bool per image: equal argmax of logits, or for other outputs a cosine similarity >= SAME_DIRECTION."""
    one, other = one.float(), other.to(one.device).float()
    if one.dim() == 2 and one.shape[1] > 1:
        return one.argmax(1) == other.argmax(1)
    rows = [value.flatten(1) if value.dim() > 1 else value.reshape(-1, 1) for value in (one, other)]
    return torch.cosine_similarity(rows[0], rows[1]) >= SAME_DIRECTION

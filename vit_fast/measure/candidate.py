"""Candidates: ways to run a model, which can be built, checked and timed, and the limits of doing so.

Before a candidate is timed, its outputs are compared with fp64, by the rule of vit_fast.accuracy.
"""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..accuracy import FORWARD_FACTOR, Measure, allowed_error, error_of, size_of
from ..errors import UnsupportedInputError

Engine = Literal["torch", "compile", "reduce-overhead", "max-autotune", "onnxruntime", "tensorrt", "openvino"]
# Modes of `+compile:MODE`; "freezing" is Inductor's option (weights as constants).
COMPILE_MODES = ("default", "freezing", "reduce-overhead", "max-autotune")
Precision = Literal["bf16", "fp16", "int8", "fp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# Dtypes of the model; with fp8, of everything except the operands of the linear layers.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
# Runtimes that load a file.
RUNTIMES: dict[str, str] = {
    "onnxruntime": "ONNX Runtime", "tensorrt": "ONNX Runtime with TensorRT", "openvino": "OpenVINO",
}  # fmt: skip
CONFIGURATION = (
    "engine", "attention", "mlp", "precision", "frozen", "graphs", "threads", "split",
)  # fmt: skip
MEASURES: tuple[Measure, ...] = ("largest", "rms")
# Outputs that are no logits agree if their cosine similarity is at least this.
SAME_DIRECTION = 0.99


@dataclass(frozen=True)
class Candidate:
    """A way to run a model. The default is the model itself.

    `optimize` varies the first eight fields: `attention` and `mlp` are backends of `vit_fast.fuse` (None does not fuse
    them), `precision` is a number format below the model's, `split` is images per call. The benchmark describes its
    candidates by the others: `builder` returns a function of images for a benchmarks.models.Task, `peer` means another
    project's implementation, `tolerance` is the allowed error in lower precision as a share of the largest output (None
    means the rule of vit_fast.accuracy), and `build_s` estimates the seconds to build and check the first one.
    """

    engine: Engine = "torch"
    attention: str | None = None
    mlp: str | None = None
    precision: Precision | None = None
    frozen: bool = False
    graphs: bool = False
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
    def compile_mode(self) -> str:
        """The mode of torch.compile, "none" without it."""
        if self.engine == "torch" or self.runs_file:
            return "none"
        return "freezing" if self.frozen else "default" if self.engine == "compile" else self.engine

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
            "" if mode == "none" else "torch.compile" if self.engine == "compile" else f"torch.compile {self.engine}",
            RUNTIMES.get(self.engine, ""),
            self.precision or "",
            "frozen" if self.frozen else "",
            "graphs" if self.graphs else "",
            f"{self.threads} threads" if self.threads else "",
            f"split into {self.split}" if self.split else "",
        ]
        return ", ".join(filter(None, words)) or "original"

    def missing_packages(self) -> list[str]:
        return [package for package in self.packages if importlib.util.find_spec(package) is None]

    def compiled(self, function: Callable[..., Any], *, fullgraph: bool) -> Callable[..., Any]:
        """Compiles a module in the candidate's mode, separately for each shape."""
        mode: Any = self.compile_mode
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
        return {name: value for name in CONFIGURATION if (value := getattr(self, name)) != getattr(ORIGINAL, name)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Candidate:
        """Reads the output of to_dict; raises ValueError for an unknown field, type, engine or precision."""
        data = {name: value for name, value in data.items() if name != "channels_last"}  # of earlier versions
        for name, value in data.items():
            if name not in CONFIGURATION or not isinstance(value, str | bool | int):
                raise ValueError(f"a candidate must consist of {', '.join(CONFIGURATION)}, got {name}={value!r}")
        for name, known in (("engine", get_args(Engine)), ("precision", PRECISIONS)):
            if name in data and data[name] not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {data[name]!r}")
        return cls(**data)


ORIGINAL, AS_FILE = Candidate(), Candidate("onnxruntime")


@dataclass(frozen=True)
class Reference:
    """The expected outputs of a batch, one entry per tensor: in fp64 of the images `rows`, and shapes of the batch."""

    exact: Sequence[Tensor]
    eager_errors: Sequence[dict[Measure, float]]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[tuple[int, ...]]
    rows: Sequence[int]
    names: Sequence[str] = ()  # for errors


@dataclass(frozen=True)
class Verdict:
    """The largest error of a candidate, the allowed error, and the reason why it fails."""

    max_error: float
    allowed_error: float
    reason: str | None

    @property
    def passed(self) -> bool:
        return self.reason is None


def judge(
    leaves: Sequence[object], reference: Reference, factor: float = FORWARD_FACTOR, tolerance: float | None = None
) -> Verdict:
    """Compares the outputs of a whole batch with the reference; see Candidate.tolerance."""
    limits: list[dict[Measure, float]] = [{"largest": (tolerance or 0) * size_of(exact)} for exact in reference.exact]
    if tolerance is None:
        each = zip(reference.exact, reference.eager_errors, reference.dtypes, strict=True)
        limits = [
            {m: allowed_error(error, exact, dtype, factor, m) for m, error in eager.items()}
            for exact, eager, dtype in each
        ]
    limit = max(allowed["largest"] for allowed in limits)
    found = [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    if found != [*reference.shapes]:
        got, expected = (one[0] if len(one) == 1 else one for one in (found, [*reference.shapes]))
        return Verdict(float("inf"), limit, f"the output must be {expected}, got {got}")
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not all(bool(leaf.isfinite().all()) for leaf in tensors):
        return Verdict(float("inf"), limit, "the output contains NaN or infinity")
    errors = [
        errors_of(leaf if leaf.shape == exact.shape else leaf[[*reference.rows]], exact)
        for leaf, exact in zip(tensors, reference.exact, strict=True)
    ]
    worst = max(error["largest"] for error in errors)
    for error, allowed, what in zip(errors, limits, reference.names or [""] * len(limits), strict=True):
        for measure, most in allowed.items():
            if error[measure] > most:
                name = f"error{what}" if measure == "largest" else f"root mean square error{what}"
                return Verdict(worst, limit, f"the {name} must be at most {most:.3g}, got {error[measure]:.3g}")
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


# Limits. The alarm repeats after this time, because a weakref callback, a `__del__` or a handler may swallow its error.
# It is also the time for cleanup while an error unwinds.
REPEAT_S = 2.0


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[Callable[[], None]]:
    """Raises TimeoutError in a block after `seconds`, and cancels the compilations that Inductor has queued.

    Yields a function that restarts the limit. An alarm of the caller is delayed until the block ends. Code that never
    returns to Python is not interrupted, nor is code outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    expired = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal expired
        expired = True
        raise TimeoutError(f"more than {seconds:g} s")

    def again() -> None:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), REPEAT_S)

    (left, every), start = signal.setitimer(signal.ITIMER_REAL, 0), time.monotonic()
    outer = signal.signal(signal.SIGALRM, end)
    again()
    try:
        yield again
    except Exception as error:
        if not expired:
            raise
        raise TimeoutError(f"more than {seconds:g} s") from error  # also if a compiler wrapped it
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # an alarm may arrive here, too
            signal.signal(signal.SIGALRM, outer)
            if expired:
                _cancel_compilations()
            if left:
                signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1e-3), every)


def _cancel_compilations() -> None:
    """Cancels what Inductor has queued and ends its workers: they would disturb the next timing."""
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is None:
        return
    pool = inductor.AsyncCompile.pool
    if pool.cache_info().currsize:
        pool().shutdown(wait=False, cancel_futures=True)
        pool.cache_clear()
    for processes in inductor._pool_set:
        if (worker := getattr(processes, "process", None)) is not None:
            worker.kill()  # its own workers end with it
    inductor.after_fork()  # the next compilation starts others


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if memory ran out, also if a compiler or a runtime wrapped the exception."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        text = str(error)
        if any(sign in text for sign in ("can't allocate memory", "CUDA out of memory", "CUDA error: out of memory")):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_error(error: Exception) -> str:
    """Returns an exception in one line of at most 500 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


@contextlib.contextmanager
def patient_interrupt(*signals: signal.Signals) -> Iterator[Callable[[], None]]:
    """Raises KeyboardInterrupt at the first of these signals and ignores the second, so that results are still written.

    The caller's own handler runs before that. The third signal raises again, in case a library swallowed the first.
    Yields a function that raises KeyboardInterrupt again, if other code has swallowed it. Does nothing outside the main
    thread, nor for a signal that this process ignores.
    """
    pressed = 0

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        own = before[signal.Signals(number)]
        if callable(own) and own is not signal.default_int_handler:
            own(number, frame)
        if pressed != 2:
            raise KeyboardInterrupt

    heard = signals if threading.current_thread() is threading.main_thread() else ()
    ignored = signal.SIG_IGN, None
    before = {which: signal.signal(which, handle) for which in heard if signal.getsignal(which) not in ignored}
    try:
        yield check
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)

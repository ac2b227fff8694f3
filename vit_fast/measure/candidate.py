"""Candidates on a machine: engines, backends by part, number formats, threads, splitting of batches."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..ops.backends import triton_unavailable_reasons
from ..version import installed

Engine = Literal["torch", "compile", "max-autotune", "onnxruntime", "tensorrt", "openvino"]
Precision = Literal["bf16", "fp16", "int8", "fp8"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "int8", "fp8")
# Of what torch computes; with fp8, of all but the linear layers' operands.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}

# About how long the first of each takes to prepare, in seconds; what the budget does not hold is not begun.
_SECONDS: dict[Engine, float] = {
    "torch": 0.5, "compile": 25.0, "max-autotune": 120.0, "onnxruntime": 15.0, "openvino": 15.0, "tensorrt": 60.0,
}  # fmt: skip
# What runs files, in words.
RUNTIMES: dict[str, str] = {
    "onnxruntime": "ONNX Runtime", "tensorrt": "ONNX Runtime by TensorRT", "openvino": "OpenVINO",
}  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """One way to run a model; the default is the model as it was given.

    Attributes:
        engine: What runs it: torch, torch.compile (in mode "default" or "max-autotune"), or a file's runtime.
        attention: Backend of `vit_fast.fuse` for attention; None leaves what was given.
        mlp: Likewise for LayerNorm + MLP.
        precision: In what it computes; None means as it was given.
        frozen: Whether weights are prepared once: by `vit_fast.freeze`, and by torch.compile's own freezing.
        graphs: Whether CUDA graphs are replayed.
        channels_last: Whether images and convolutions lie channels last.
        threads: Threads of the CPU; None means all that torch uses.
        split: Images a call is cut into; None means not.
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

    def backend_of(self, part: str) -> str | None:
        """Returns the backend of a part in the words of a fuse report."""
        return self.attention if part.startswith("attention") else self.mlp

    @property
    def plainness(self) -> int:
        """The number of changes; a compiler or another runtime counts twice."""
        changed = sum(getattr(self, field.name) != field.default for field in dataclasses.fields(self))
        one_fuse = self.attention is not None and self.mlp is not None
        return changed + (self.engine != "torch") - one_fuse

    @property
    def seconds(self) -> float:
        """About how long it takes to prepare."""
        return _SECONDS[self.engine]

    @property
    def runs_file(self) -> bool:
        """True if a runtime of files runs it; the file holds the weights."""
        return self.engine in RUNTIMES

    @property
    def name(self) -> str:
        """The name in tables: "fused triton, torch.compile, bf16"."""
        words = []
        if self.attention is not None or self.mlp is not None:
            parts = {"attention": self.attention, "MLP": self.mlp}
            named = [f"{part} {backend}" for part, backend in parts.items() if backend is not None]
            words.append(f"fused {self.attention}" if self.attention == self.mlp else ", ".join(named))
        engines = {"torch": "", "compile": "torch.compile", **RUNTIMES}
        words += list(filter(None, [engines.get(self.engine, f"torch.compile {self.engine}")]))
        words += [self.precision] if self.precision else []
        words += [word for word in ("frozen", "graphs") if getattr(self, word)]
        words += ["channels last"] if self.channels_last else []
        words += [f"{self.threads} threads"] if self.threads else []
        words += [f"{self.split} images a call"] if self.split else []
        return ", ".join(words) or "as given"

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that differ from the default, as plain data."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Candidate:
        """Reads the output of to_dict.

        Raises:
            ValueError: a field, its type, an engine or a number format is unknown.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in data.items():
            if name not in known or not isinstance(value, str | bool | int):
                raise ValueError(f"choice {name}={value!r}: expected {', '.join(known)}")
        for name, accepted in (("engine", tuple(_SECONDS)), ("precision", PRECISIONS)):
            if name in data and data[name] not in accepted:
                raise ValueError(f"choice {name}={data[name]!r}: expected {', '.join(accepted)}")
        return cls(**data)


GIVEN, AS_FILE = Candidate(), Candidate("onnxruntime")


def candidates(device: torch.device, allowed: Collection[Precision]) -> list[Candidate]:
    """Returns the first candidates on a device: cheap before slow ones; where loss is allowed, lossy ones first.

    Args:
        device: Where the model and the example are.
        allowed: Number formats that may be used beside the model's own.
    """
    on_cuda = device.type == "cuda"
    backends = _backends(device)
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
        # on a CPU what is frozen is laid out for its matmuls; on CUDA our kernels go into what is compiled
        other: dict[str, Any] = {"attention": backends[0], "mlp": backends[0]} if on_cuda else {"frozen": True}
        found += [dataclasses.replace(compiled, **other), compiled]
        found += [dataclasses.replace(compiled, engine="max-autotune", **other)] if on_cuda else []
    if "fp8" in allowed:  # elsewhere its row says why not
        eight_bit = Candidate(attention="triton", mlp="triton", precision="fp8")
        found += [eight_bit, *([dataclasses.replace(eight_bit, graphs=True)] if on_cuda else [])]
    smaller: Precision = "fp16" if on_cuda else "int8"
    for choice in _runtimes(device):
        fewer: Precision = "bf16" if choice.engine == "openvino" else smaller
        found += [choice, *([dataclasses.replace(choice, precision=fewer)] if fewer in allowed else [])]
    # whoever allows loss expects most of it: what takes long and loses nothing waits
    return sorted(found, key=lambda c: (c.seconds > 1 and c.precision is None, c.seconds, c.precision is None))


def candidates_of_file(device: torch.device, allowed: Collection[Precision]) -> list[Candidate]:
    """Returns the first candidates for a model that is a file; as given it runs in ONNX Runtime."""
    found = [choice for choice in _runtimes(device) if choice != AS_FILE]
    if device.type == "cpu":
        found += [Candidate("onnxruntime", precision="int8")] * ("int8" in allowed)
        found += [Candidate("openvino", precision="bf16")] * (Candidate("openvino") in found and "bf16" in allowed)
    return found


def _runtimes(device: torch.device) -> list[Candidate]:
    """Runtimes of files that are installed for a device."""
    on_ort = installed("onnxruntime") or installed("onnxruntime-gpu")
    if device.type == "cuda":
        return [AS_FILE, Candidate("onnxruntime", graphs=True), Candidate("tensorrt")] if on_ort else []
    return [*([AS_FILE] if on_ort else []), *([Candidate("openvino")] if installed("openvino") else [])]


def variations(choice: Candidate, device: torch.device, batch: int) -> list[Candidate]:
    """Returns variations of the fastest, with one change each.

    Args:
        choice: The fastest so far.
        device: Where it runs.
        batch: Images of a call.
    """
    pieces = [size for size in (batch // 2, batch // 4, 1) if 0 < size < batch]
    changes: list[dict[str, Any]] = [{"split": size} for size in dict.fromkeys(pieces)]
    if choice.engine == "torch":
        changes.append({"channels_last": True})
    if device.type == "cpu":
        changes += [{"threads": count} for count in _thread_counts()]
    return [dataclasses.replace(choice, **change) for change in changes]


def _backends(device: torch.device) -> Sequence[str]:
    return ("sdpa",) if device.type != "cuda" or triton_unavailable_reasons(device) else ("triton", "sdpa")


def _thread_counts() -> list[int]:
    """Half of the threads that torch uses, and all that the process may run on where those are more."""
    used, there = torch.get_num_threads(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    return [count for count in dict.fromkeys((used // 2, there)) if count > 0 and count != used]

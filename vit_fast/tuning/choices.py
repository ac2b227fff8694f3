"""What there is to choose on a machine: engines, backends by part, number formats, and how calls are made."""

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

Engine = Literal["torch", "compile", "max-autotune", "onnxruntime"]
Precision = Literal["bf16", "fp16", "int8"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "int8")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# About how long each takes to prepare, in seconds; the search does not begin what its budget does not hold.
_SECONDS: dict[Engine, float] = {"torch": 0.5, "compile": 25.0, "max-autotune": 120.0, "onnxruntime": 15.0}


@dataclass(frozen=True)
class Choice:
    """One way to run a model; the default is the model as it was given.

    Attributes:
        engine: What runs it: torch, torch.compile (in mode "default" or "max-autotune"), or ONNX Runtime.
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

    @property
    def plainness(self) -> int:
        """How much is not as it was given; what needs a compiler or another runtime counts twice."""
        changed = sum(getattr(self, field.name) != field.default for field in dataclasses.fields(self))
        one_fuse = self.attention is not None and self.mlp is not None
        return changed + (self.engine != "torch") - one_fuse

    @property
    def seconds(self) -> float:
        return _SECONDS[self.engine]

    @property
    def name(self) -> str:
        """As it is written in tables: "fused triton, torch.compile, bf16"."""
        words = []
        if self.attention is not None or self.mlp is not None:
            parts = {"attention": self.attention, "MLP": self.mlp}
            named = [f"{part} {backend}" for part, backend in parts.items() if backend is not None]
            words.append(f"fused {self.attention}" if self.attention == self.mlp else ", ".join(named))
        words += {"torch": [], "onnxruntime": ["ONNX Runtime"], "compile": ["torch.compile"]}.get(
            self.engine, [f"torch.compile {self.engine}"]
        )
        words += [self.precision] if self.precision else []
        words += [word for word in ("frozen", "graphs") if getattr(self, word)]
        words += ["channels last"] if self.channels_last else []
        words += [f"{self.threads} threads"] if self.threads else []
        words += [f"{self.split} images a call"] if self.split else []
        return ", ".join(words) or "as given"

    def to_dict(self) -> dict[str, Any]:
        """What differs from the default, as plain data."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Choice:
        """What to_dict gave.

        Raises:
            ValueError: a field or its type is unknown.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in data.items():
            if name not in known or not isinstance(value, str | bool | int):
                raise ValueError(f"choice {name}={value!r}: accepted are {', '.join(known)}")
        return cls(**data)


GIVEN = Choice()


def candidates(device: torch.device, allowed: Collection[Precision]) -> list[Choice]:
    """What to try first on a device: the cheap before what takes long; where loss is allowed, what loses before.

    Args:
        device: Where the model and the example are.
        allowed: Number formats that may be used beside the model's own.
    """
    on_cuda = device.type == "cuda"
    backends = _backends(device)
    parts = [(name, name) for name in backends] + list(itertools.permutations(backends, 2))
    found: list[Choice] = []
    precisions: tuple[Precision | None, ...] = (None, "bf16", "fp16")
    for precision in precisions:
        if precision is not None and (precision not in allowed or (precision == "fp16" and not on_cuda)):
            continue
        for attention, mlp in parts:
            fused = Choice(attention=attention, mlp=mlp, precision=precision)
            graphed = dataclasses.replace(fused, graphs=True, frozen=attention == mlp == "triton")
            found += [fused, graphed] if on_cuda else [fused]
        compiled = Choice("compile", precision=precision)
        # on a CPU what is frozen is laid out for its matmuls; on CUDA our kernels go into what is compiled
        other: dict[str, Any] = {"attention": backends[0], "mlp": backends[0]} if on_cuda else {"frozen": True}
        found += [dataclasses.replace(compiled, **other), compiled]
        found += [dataclasses.replace(compiled, engine="max-autotune", **other)] if on_cuda else []
    if installed("onnxruntime") or installed("onnxruntime-gpu"):
        smaller: Precision = "fp16" if on_cuda else "int8"
        found += [Choice("onnxruntime"), *([Choice("onnxruntime", precision=smaller)] if smaller in allowed else [])]
    return sorted(found, key=lambda choice: (choice.seconds, choice.precision is None))


def variations(choice: Choice, device: torch.device, batch: int) -> list[Choice]:
    """What else to try of the fastest: one thing changed each.

    Args:
        choice: The fastest so far.
        device: Where it runs.
        batch: Images of a call.
    """
    changes: list[dict[str, Any]] = []
    pieces = [size for size in (batch // 2, batch // 4, 1) if 0 < size < batch]
    changes += [{"split": size} for size in dict.fromkeys(pieces)]
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

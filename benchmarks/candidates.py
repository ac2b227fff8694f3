"""Registry of candidates: everything that can be measured, and the syntax of its names.

A candidate is one way to compute a Vision Transformer, with the same weights as all others: ours on one backend, a
peer's implementation, an exported file. Its name may carry a compile mode: `timm+compile`, `timm+compile:max-autotune`.
The modules in PROVIDERS register them when first asked for.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vit_fast.config import ViTConfig
from vit_fast.errors import UnsupportedInputError
from vit_fast.measure.candidate import COMPILE_MODES, CompileMode

from .models import Model

PROVIDERS = ("candidates_models", "candidates_runtimes", "candidates_operators")


# In the order in which they are given time: what a run has no time for is the last of them.
DEFAULT_LABELS = {
    "cpu": (
        "timm", "timm+fused+frozen", "openvino", "onnxruntime", "timm+compile:freezing", "timm+compile", "timm+fused",
        "transformers", "torchvision", "sdpa", "eager", "onnxruntime-int8",
    ),
    "cuda": (
        "eager", "sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "triton", "triton-frozen", "triton-graphs",
        "timm", "transformers", "torchvision", "eager+compile", "sdpa+compile", "sdpa+compile:max-autotune",
        "triton+compile", "triton+compile:reduce-overhead", "triton+compile:max-autotune", "timm+compile",
        "timm+compile:max-autotune", "transformers+compile", "timm+fused", "timm+fused+compile", "transformers+fused",
        "optimized", "onnxruntime", "tensorrt", "torchao-int8+compile", "triton-fp8",
        "torchao-fp8+compile",
    ),
}  # fmt: skip
# On a CPU these have no products in bf16.
FP32_ALONE = ("onnxruntime", "onnxruntime-nobinding", "onnxruntime-int8")

_SDPA = ("sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient")
# For what is not a whole model of our shapes.
LABELS = {
    "given": (
        "given", "given+fused+frozen", "openvino", "onnxruntime", "given+compile:freezing", "given+compile",
        "given+fused", "given+fused+compile",
    ),
    "onnx": ("onnxruntime", "onnxruntime-nobinding", "openvino"),
    "block": ("eager", "sdpa", "triton", "timm", "timm+fused"),
    "attention": ("eager", *_SDPA, "triton", "flex", "flash-attn", "xformers"),
    "mlp": ("eager", "triton", "cublaslt", "transformer-engine", "eager+compile"),
    "matmul": ("eager", "triton"),
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """The task of every candidate of a group.

    Attributes:
        model: Its shape, preprocessing, or the model itself.
        weights: Parameters under our (timm's) names, on the CPU, in dtype; None of a model that has its own.
        dtype: Of parameters, images and logits.
        device: Where it runs.
        batch_size: Images a call.
        training: Whether a training step is asked for, not inference.
        amp: Whether that runs under autocast in bf16.
    """

    model: Model
    weights: Mapping[str, Tensor] | None
    dtype: torch.dtype
    device: torch.device
    batch_size: int
    training: bool = False
    amp: bool = False

    @property
    def whole(self) -> bool:
        """True for a model, False for a part of one."""
        return self.model.operator is None and not self.model.block

    @property
    def ours(self) -> tuple[ViTConfig, Mapping[str, Tensor]]:
        """The shape and weights that every library can build.

        Raises:
            UnsupportedInputError: the model is of another kind.
        """
        if self.model.config is None or self.weights is None:
            raise UnsupportedInputError("this candidate", [f"{self.model.name} is not of one of our shapes"])
        return self.model.config, self.weights


@dataclass(frozen=True)
class NamedCandidate:
    """One way to compute a Vision Transformer.

    Attributes:
        name: As it is written in tables and on the command line.
        summary: What it is, in a line.
        build: Makes a callable of images [B, in_chans, height, width] in task.dtype on task.device that gives logits
            (features, for a model without head) [B, outputs]. An nn.Module where it can be compiled. Raises
            UnsupportedInputError with all reasons when it cannot do the task.
        packages: What must be installed beside torch.
        peer: Whether it is another project's work, which ratios are taken to.
        compilable: Whether torch.compile applies to what build gives.
        fullgraph: Whether compiling must find one graph, or fail.
        context: Entered around every call.
        tolerance: Largest acceptable error as a share of the largest output, of candidates that compute in fewer bits
            than task.dtype; None means the rule of vit_fast.accuracy.
        trainable: Whether training steps make sense.
        precision: In what it computes where that is fewer bits than task.dtype, such as "int8".
        seconds: About how long the first of it takes to build and check on two quiet cores, without compiling.
        mode: How torch.compile compiles what build gives, one of COMPILE_MODES.
    """

    name: str
    summary: str
    build: Callable[[Task], Callable[[Tensor], Tensor]]
    packages: tuple[str, ...] = ()
    peer: bool = False
    compilable: bool = True
    fullgraph: bool = False
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    tolerance: float | None = None
    precision: str | None = None
    trainable: bool = True
    seconds: float = 1.0
    mode: CompileMode = "none"

    @property
    def label(self) -> str:
        """The name with its compile mode."""
        return self.name + {"none": "", "default": "+compile"}.get(self.mode, f"+compile:{self.mode}")

    def make(self, task: Task) -> Callable[[Tensor], Tensor]:
        """Builds the candidate, or its first block if that is the task."""
        made = self.build(task)
        if not task.model.block:
            return made
        blocks = getattr(made, "blocks", None)
        if not isinstance(blocks, nn.Sequential):
            raise UnsupportedInputError(self.name, ["its blocks take more than tokens"])
        block: Callable[[Tensor], Tensor] = blocks[0]
        return block

    def missing_packages(self) -> list[str]:
        return [package for package in self.packages if importlib.util.find_spec(package) is None]


_CANDIDATES: dict[str, NamedCandidate] = {}


def register(name: str, summary: str, build: Callable[[Task], Callable[[Tensor], Tensor]], **traits: Any) -> None:
    """Adds a candidate, see NamedCandidate; a second one of the same name is an error."""
    if name in _CANDIDATES:
        raise ValueError(f"candidate {name!r} is registered twice")
    _CANDIDATES[name] = NamedCandidate(name, summary, build, **traits)


@functools.cache
def _load_providers() -> None:
    for provider in PROVIDERS:
        importlib.import_module(f".{provider}", __package__)


def all_candidates() -> dict[str, NamedCandidate]:
    """Every candidate by name, in order of registration."""
    _load_providers()
    return dict(_CANDIDATES)


def get_candidate(name: str) -> NamedCandidate:
    """The candidate of this name.

    Raises:
        ValueError: there is none; names the nearest and all that are known.
    """
    candidates = all_candidates()
    if name not in candidates:
        nearest = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise ValueError(f"unknown candidate {name!r}: {hint}known are {', '.join(candidates)}")
    return candidates[name]


def parse_label(label: str) -> NamedCandidate:
    """Returns the candidate of a label such as `timm+compile:max-autotune`, in its compile mode.

    Raises:
        ValueError: unknown candidate or mode, or a candidate that cannot be compiled.
    """
    name, separator, mode = label.strip().partition("+compile")
    candidate = get_candidate(name)
    if not separator:
        return candidate
    if mode and not mode.startswith(":"):
        raise ValueError(f"candidate {label!r}: expected nothing or :MODE behind +compile")
    mode = mode[1:] if mode else "default"
    if mode not in COMPILE_MODES:
        raise ValueError(f"unknown compile mode {mode!r}: expected {', '.join(COMPILE_MODES)}")
    if not candidate.compilable:
        raise ValueError(f"candidate {name!r} cannot be compiled by torch.compile: expected {name!r} alone")
    return dataclasses.replace(candidate, mode=mode)


def default_labels(device: torch.device, kind: str, training: bool) -> tuple[str, ...]:
    """Returns the default labels for a kind of model (see models.Model) on a device; only modules are trained."""
    labels = DEFAULT_LABELS[device.type] if kind == "ours" else LABELS[kind]
    return tuple(name for name in labels if not training or get_candidate(name.partition("+compile")[0]).trainable)


def choose(
    labels: Sequence[str] | None, device: torch.device, kind: str = "ours", training: bool = False
) -> list[NamedCandidate]:
    """Returns the candidates of a run: those named, or by default those worth measuring on this device.

    Raises:
        ValueError: see parse_label.
    """
    chosen = map(parse_label, default_labels(device, kind, training) if labels is None else labels)
    return list({candidate.label: candidate for candidate in chosen}.values())

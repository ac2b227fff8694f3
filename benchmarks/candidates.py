"""The candidates of a run: default candidates, and the syntax of their names.

A name may have a compile mode: `timm+compile`, `timm+compile:max-autotune`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import torch

from vit_fast.measure.candidate import COMPILE_MODES, Candidate

from .builders import CANDIDATES

# The most important ones first: the last ones are skipped if time runs out.
DEFAULT_NAMES = {
    "cpu": (
        "timm", "timm+fused+frozen", "openvino", "onnxruntime", "timm+compile:freezing", "timm+fused+compile:freezing",
        "timm+compile", "timm+fused", "transformers", "torchvision", "sdpa", "eager", "onnxruntime-int8",
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
# Without bf16 on a CPU.
FP32_ALONE = ("onnxruntime", "onnxruntime-nobinding", "onnxruntime-int8")

_SDPA = ("sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient")
# For other models than our variants, and for parts of models.
NAMES = {
    "given": (
        "given", "given+fused+frozen", "openvino", "onnxruntime", "given+compile:freezing",
        "given+fused+compile:freezing", "given+compile", "given+fused", "given+fused+compile",
    ),
    "onnx": ("onnxruntime", "onnxruntime-nobinding", "openvino"),
    "block": ("eager", "sdpa", "triton", "timm", "timm+fused"),
    "attention": ("eager", *_SDPA, "triton", "flex", "flash-attn", "xformers"),
    "mlp": ("eager", "triton", "cublaslt", "transformer-engine", "eager+compile"),
    "matmul": ("eager", "triton"),
}  # fmt: skip


def get_candidate(name: str) -> Candidate:
    """Returns the candidate of this name.

    Raises:
        ValueError: there is none; names the nearest and all others.
    """
    if name not in CANDIDATES:
        nearest = difflib.get_close_matches(name, CANDIDATES, n=1, cutoff=0.6)
        hint = f"did you mean {nearest[0]}?" if nearest else f"must be one of {', '.join(CANDIDATES)}"
        raise ValueError(f"unknown candidate {name!r}: {hint}")
    return CANDIDATES[name]


def parse_candidate(word: str) -> Candidate:
    """Returns the candidate of a word such as `timm+compile:max-autotune`, in its compile mode.

    Raises:
        ValueError: the candidate or the mode is unknown, or the candidate cannot be compiled.
    """
    name, separator, mode = word.strip().partition("+compile")
    candidate = get_candidate(name)
    if not separator:
        return candidate
    if mode and not mode.startswith(":"):
        raise ValueError(f"candidate {word!r}: +compile must be followed by :MODE or nothing, got {mode}")
    found = next((known for known in COMPILE_MODES if known == (mode[1:] if mode else "default")), None)
    if found is None:
        raise ValueError(f"the compile mode must be one of {', '.join(COMPILE_MODES)}, got {mode[1:]!r}")
    if not candidate.compilable:
        raise ValueError(f"candidate {name!r} cannot be compiled by torch.compile; use {name!r} alone")
    return candidate.compiled_in(found)


def default_names(device: torch.device, kind: str, training: bool) -> tuple[str, ...]:
    """Returns the default candidates for a kind of model (see models.Model) on a device."""
    names = DEFAULT_NAMES[device.type] if kind == "ours" else NAMES[kind]
    return tuple(name for name in names if not training or get_candidate(name.partition("+compile")[0]).trainable)


def choose(
    names: Sequence[str] | None, device: torch.device, kind: str = "ours", training: bool = False
) -> list[Candidate]:
    """Returns the named candidates, or the default ones; see parse_candidate."""
    chosen = map(parse_candidate, default_names(device, kind, training) if names is None else names)
    return list({candidate.name: candidate for candidate in chosen}.values())

"""Cached results of `optimize`: the fastest candidate for a machine, library versions, a model and input shapes.

Each result is a JSON file in ~/.cache/vit_fast/answers. XDG_CACHE_HOME replaces ~/.cache, and VIT_FAST_CACHE the whole
path. A damaged file is ignored with a warning. Files are replaced atomically, so processes may run concurrently.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..blocks.fastest import describe_cpu
from ..files import cache_folder as folder
from ..files import file_aside
from ..version import describe
from ..weights.source import weights_digest
from .candidate import Candidate, tensors_in

FORMAT = 3
# Required fields.
KEY = ("machine", "model", "example", "request")
FIGURES = (
    "speedup", "speedup_over_compile", "resolution", "ms", "images_per_s", "agreement", "tried", "candidates",
    "budget_s", "finish_s",
)  # fmt: skip


@dataclass(frozen=True)
class CachedResult:
    """The fastest candidate and its measurements; see key_of for the key."""

    key: dict[str, Any]
    candidate: Candidate
    figures: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "key": self.key, "candidate": self.candidate.to_dict(), "figures": self.figures}

    @classmethod
    def read(cls, path: Path) -> CachedResult:
        """Reads a file of `write`; raises OSError, or ValueError for other content."""
        data = json.loads(path.read_text())
        version = data.get("format") if isinstance(data, dict) else None
        if version != FORMAT:
            raise ValueError(f"its format must be {FORMAT}, got {version!r}")
        key, candidate, figures = (data.get(name) for name in ("key", "candidate", "figures"))
        if not all(isinstance(part, dict) for part in (key, candidate, figures)):
            raise ValueError("key, candidate and figures must be JSON objects")
        if lacking := [*(name for name in KEY if name not in key), *(name for name in FIGURES if name not in figures)]:
            raise ValueError(f"key or figures lacks {', '.join(lacking)}")
        return cls(key, Candidate.from_dict(candidate), figures)

    def write(self, path: Path) -> None:
        with file_aside(path) as aside:
            aside.write_text(json.dumps(self.to_dict(), indent=1))


def key_of(model: nn.Module, example: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the key of a result. If `request` (options of `optimize`) allows loss, the key has a weights hash."""
    tensors = tensors_in(example)
    return {
        "machine": machine(tensors[0].device),
        "model": model_key(model),
        "weights": weights_digest(model) if request.get("allow") else None,
        "example": [[list(tensor.shape), str(tensor.dtype)] for tensor in tensors],
        "request": request,
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Returns what the speed of candidates depends on: device, driver, versions, CPU and torch's settings."""
    described = describe(device)
    return {name: described[name] for name in ("device", "gpu", "packages", "python")} | {"cpu": describe_cpu()}


def model_key(model: nn.Module) -> str:
    """Returns a hash of a model's class and of its tensors' names, shapes and dtypes; of a file, of its content."""
    described = [f"{type(model).__module__}.{type(model).__qualname__}"]
    for name, value in model.state_dict().items():  # quantized layers have other types, too; an OnnxFile has a string
        content = value if isinstance(value, str) else type(value).__name__
        if isinstance(value, torch.Tensor):
            content = f"{tuple(value.shape)} {value.dtype}"
        described.append(f"{name} {content}")
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]


def find(key: dict[str, Any]) -> Iterator[CachedResult]:
    """Yields the cached results whose key contains these entries, the newest first."""
    return (result for _, result in all_results() if all(result.key.get(name) == part for name, part in key.items()))


def store(result: CachedResult) -> None:
    """Writes a result to the cache, over a result with the same key; may raise OSError."""
    name = hashlib.sha256(json.dumps(result.key, sort_keys=True).encode()).hexdigest()[:24]
    result.write(folder() / f"{name}.json")


def all_results() -> Iterator[tuple[Path, CachedResult]]:
    """Yields the cached results that can be read, the newest first."""
    found = []
    for path in _paths():
        try:
            found.append((path.stat().st_mtime_ns, path, CachedResult.read(path)))
        except FileNotFoundError:  # another process removed it just now
            continue
        except (OSError, ValueError, TypeError) as error:  # TypeError: fields of other types
            warnings.warn(f"{path}: ignored, because it cannot be read: {error}", stacklevel=3)
    for _, path, result in sorted(found, key=lambda each: each[:2], reverse=True):
        yield path, result


def clear() -> int:
    """Removes all cached results, also those of `freeze`, and returns the number of results of `optimize`."""
    paths = _paths()
    for path in (*paths, *_paths("cpu/*.json")):
        path.unlink(missing_ok=True)
    return len(paths)


def _paths(pattern: str = "*.json") -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in folder().glob(pattern) if path.is_file()]
    return []

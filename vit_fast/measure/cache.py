"""Answers that are kept: for this machine, these versions, this model and these shapes, which choice was best.

One small JSON file each under ~/.cache/vit_fast/answers; XDG_CACHE_HOME moves it, VIT_FAST_CACHE names it. What cannot
be read is ignored with a warning; writing replaces a file at once, so that processes may race.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..files import file_aside
from ..version import __version__, cpu_name, installed
from ..weights.source import weights_digest
from .candidate import Candidate
from .optimized import tensors_in

FORMAT = 1
# What every answer has.
KEY = ("machine", "model", "example", "asked")
FIGURES = ("gain", "over_compile", "resolution", "ms", "images_per_s", "agreement")
PACKAGES = ("torch", "triton", "onnxruntime", "onnxruntime-gpu", "openvino", "timm", "transformers")


@dataclass(frozen=True)
class Answer:
    """A cached result.

    Attributes:
        key: What it holds for, as plain data; see key_of.
        choice: What to run.
        figures: What was measured, as plain data.
    """

    key: dict[str, Any]
    choice: Candidate
    figures: dict[str, Any]

    def suffices(self, budget_s: float) -> bool:
        """True if a search of this budget would find no more: the one before finished, or had as much time."""
        figures = self.figures
        return figures.get("finish_s", 0.0) is None or budget_s <= figures.get("budget_s", 0.0)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "key": self.key, "choice": self.choice.to_dict(), "figures": self.figures}

    @classmethod
    def from_dict(cls, data: Any) -> Answer:
        """Reads the output of to_dict.

        Raises:
            ValueError: it is something else, or of another format.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"format {found!r}: expected an answer of format {FORMAT}")
        parts = [data.get(name) for name in ("key", "choice", "figures")]
        if not all(isinstance(part, dict) for part in parts):
            raise ValueError("key, choice and figures: expected three objects")
        key, figures = dict(parts[0] or {}), dict(parts[2] or {})
        lacking = [name for name in KEY if name not in key] + [name for name in FIGURES if name not in figures]
        if lacking:
            raise ValueError(f"must have {', '.join((*KEY, *FIGURES))}, lacks {', '.join(lacking)}")
        return cls(parts[0], Candidate.from_dict(parts[1]), parts[2])  # type: ignore[arg-type]  # objects, as checked


def folder() -> Path:
    """Returns the folder of cached results.

    Raises:
        OSError: the user has no home.
    """
    if named := os.environ.get("VIT_FAST_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vit_fast" / "answers"
    except RuntimeError as error:
        raise OSError(f"{error} Name a folder for answers by VIT_FAST_CACHE") from None


def _paths() -> list[Path]:
    """Every kept file, readable or not; none where nobody may look."""
    with contextlib.suppress(OSError):
        return [path for path in folder().glob("*.json") if path.is_file()]
    return []


def key_of(model: nn.Module, example: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Returns the key of a result: machine, versions, the model's shape, the example's, and the request.

    Args:
        model: Its class, and the names, shapes and dtypes of its tensors, count; where loss is allowed, its values too.
        example: What it is called with.
        asked: What decides beside these, as plain data.
    """
    tensors = tensors_in(example)
    return {
        "machine": machine(tensors[0].device),
        "model": model_key(model),
        "weights": weights_digest(model) if asked.get("allow") else None,
        "example": [[list(tensor.shape), str(tensor.dtype)] for tensor in tensors],
        "asked": asked,
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Device, driver, versions, and whether products of fp32 may be rounded."""
    versions = {name: version for name in PACKAGES if (version := installed(name)) is not None}
    versions |= {"vit_fast": __version__, "python": platform.python_version()}
    precision = torch.get_float32_matmul_precision()
    if device.type != "cuda":
        return {"device": cpu_name(), "threads": torch.get_num_threads(), "versions": versions, "fp32": precision}
    properties = torch.cuda.get_device_properties(device)
    driver = getattr(torch._C, "_cuda_getDriverVersion")()  # noqa: B009  # builds without CUDA lack it
    return {
        "device": properties.name,
        "driver": driver,
        "cuda": torch.version.cuda,
        "versions": versions,
        "fp32": precision,
    }


def model_key(model: nn.Module) -> str:
    """A model's class and its tensors' names, shapes and dtypes, in a few letters; of a file, what is in it."""
    described = [f"{type(model).__module__}.{type(model).__qualname__}"]
    for name, value in model.state_dict().items():  # quantised layers keep more in it than tensors, files only a text
        if isinstance(value, torch.Tensor):
            described.append(f"{name} {tuple(value.shape)} {value.dtype}")
        else:
            described.append(f"{name} {value if isinstance(value, str) else type(value).__name__}")
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]


def find(model: nn.Module, example: Any, precision: str | None) -> Answer | None:
    """The newest kept answer for this model, example and machine whose choice is of this precision, or None."""
    key = key_of(model, example, {"allow": [precision] if precision else []})
    decisive = ["machine", "model", "example", *(["weights"] if precision else [])]
    for _, answer in all_answers():
        same = all(answer.key.get(name) == key[name] for name in decisive)
        if same and answer.choice.precision == precision:
            return answer
    return None


def look_up(key: dict[str, Any]) -> Answer | None:
    """The kept answer for exactly this, or None."""
    name = _name(key)
    path = next((path for path in _paths() if path.name == name), None)
    answer = None if path is None else _read(path)
    return answer if answer is not None and answer.key == key else None


def keep(answer: Answer) -> Path:
    """Keeps an answer in place of an older one for the same.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder() / _name(answer.key)
    with file_aside(path) as aside:
        aside.write_text(json.dumps(answer.to_dict(), indent=1))
    return path


def all_answers() -> Iterator[tuple[Path, Answer]]:
    """Every kept answer that can be read, the newest first."""
    written = []
    for path in _paths():
        with contextlib.suppress(FileNotFoundError):  # another process removed it just now
            written.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(written, reverse=True):
        answer = _read(path)
        if answer is not None:
            yield path, answer


def clear() -> int:
    """Removes all kept answers, readable or not; returns how many there were."""
    paths = _paths()
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def _name(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24] + ".json"


def _read(path: Path) -> Answer | None:
    try:
        return Answer.from_dict(json.loads(path.read_text()))
    except FileNotFoundError:  # another process removed it just now
        return None
    except (OSError, ValueError, TypeError) as error:  # the last of what is nested otherwise
        warnings.warn(f"{path}: not an answer of vit_fast.optimize, ignored ({error})", stacklevel=3)
        return None

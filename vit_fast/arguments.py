"""Argument checks. Each error states the argument, the requirement, and the actual value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .errors import check_type

MAX_SIZE = 2**31 - 1  # some torch operators index with 32 bits


def check_integer(name: str, value: object, minimum: int, maximum: int = MAX_SIZE) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
    if value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {value}")


def check_number(name: str, value: object, *, positive: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if positive and value <= 0:
        raise ValueError(f"{name} must be positive, got {value!r}")


def check_batch_sizes(sizes: object, name: str = "batch_sizes") -> None:
    valid = isinstance(sizes, Sequence) and not isinstance(sizes, str | bytes) and len(sizes) > 0
    if not valid or any(not isinstance(size, int) or size < 1 for size in sizes):  # type: ignore[attr-defined]
        raise ValueError(f"{name} must be one or more positive integers, got {sizes!r}")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def pair(name: str, value: object) -> tuple[int, int]:
    """Returns (height, width) as positive integers; one number sets both."""
    sides = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in sides):
        raise ValueError(f"{name} must be a positive integer or a pair (height, width), got {value!r}")
    for side in sides:
        check_integer(name, side, 1)
    return sides[0], sides[1]


def as_device(device: torch.device | str | None) -> torch.device:
    """Returns a device and checks that it exists; None means torch's default device."""
    try:
        found = torch.get_default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be a torch.device or a name such as cpu or cuda:0, got {device!r}") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device must exist, got {found}: this machine has {torch.cuda.device_count()} CUDA devices")
    return found


def known_fields(cls: type[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a dataclass from JSON and turns lists into tuples; unknown names raise ValueError."""
    check_type("fields", fields, Mapping)
    known = {field.name for field in dataclasses.fields(cls)}
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"{cls.__name__} fields must be among {', '.join(sorted(known))}, got {', '.join(unknown)}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}

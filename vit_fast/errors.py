"""Exceptions of this package, and checks of arguments."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAX_SIZE = 2**31 - 1  # some torch operators index with 32 bits


class VitFastError(Exception):
    """Base class of this package's exceptions."""


class UnsupportedInputError(VitFastError, ValueError):
    """A requested backend, precision or format does not support the input; `reasons` lists all reasons."""

    def __init__(self, what: str, reasons: Sequence[str]) -> None:
        self.what = what
        self.reasons = tuple(reasons)
        super().__init__(what + ":" + "".join(f"\n  - {reason}" for reason in self.reasons))

    def __reduce__(self) -> tuple[type[UnsupportedInputError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.what, self.reasons)


class MissingPackageError(VitFastError, ImportError):
    """Required packages are not installed; the message contains the pip command."""


def require_packages(extra: str, *packages: str) -> None:
    """Raises MissingPackageError if packages are not installed, which `pip install 'vit-fast[extra]'` installs."""
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise MissingPackageError(f"{', '.join(missing)} not installed: pip install 'vit-fast[{extra}]'")


def raise_unsupported(what: str, reasons: list[str]) -> None:
    """Raises UnsupportedInputError with all reasons, if there are any."""
    if reasons:
        raise UnsupportedInputError(what, reasons)


def check_type(name: str, value: object, *kinds: type) -> None:
    """Raises TypeError if `value` is not an instance of one of `kinds`."""
    if not isinstance(value, kinds):
        known = {"Module": "torch.nn.Module", "Tensor": "torch.Tensor", "dtype": "torch.dtype"}
        names = [known.get(kind.__name__, kind.__name__) for kind in kinds if kind is not type(None)]
        names = [f"{'an' if each[0] in 'aeiouAEIO' else 'a'} {each}" for each in names]
        names += ["None"] if type(None) in kinds else []
        plain = value is None or isinstance(value, int | float | str | bytes)
        raise TypeError(f"{name} must be {' or '.join(names)}, got {repr(value)[:60] if plain else type_name(value)}")


def type_name(value: object) -> str:
    """Returns the qualified name of an object's class, e.g. "numpy.ndarray"; built-in classes have no module prefix."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


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
        raise ValueError(f"{name} must be a list of one or more positive integers, got {sizes!r}")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def pair(name: str, value: object) -> tuple[int, int]:
    """Returns (height, width) as positive integers; one number sets height and width."""
    sides = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in sides):
        requirement = "must be a positive integer or a pair (height, width) of positive integers"
        raise ValueError(f"{name} {requirement}, got {value!r}")
    check_integer(name, max(sides), 1)
    return sides[0], sides[1]


def as_device(device: torch.device | str | None) -> torch.device:
    """Returns a device and checks that it exists; None: torch's default device, "auto": cuda if available, or cpu."""
    import torch  # imported here, because it is slow and the command line's help does not need it

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.get_default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be a torch.device or a name such as cpu or cuda:0, got {device!r}") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device must exist, got {found}: torch.cuda.device_count() is {torch.cuda.device_count()}")
    return found


def known_fields(cls: type[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON fields of a dataclass with lists converted to tuples; unknown names raise ValueError."""
    check_type("fields", fields, Mapping)
    known = {field.name for field in dataclasses.fields(cls)}
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"{cls.__name__} fields must be among {', '.join(sorted(known))}, got {', '.join(unknown)}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}

"""Exceptions of this package."""

from __future__ import annotations

from collections.abc import Sequence


class VitFastError(Exception):
    """Base class of this package's exceptions."""


class UnsupportedInputError(VitFastError, ValueError):
    """A requested backend, precision or format does not support the input.

    Attributes:
        what: The operation that failed.
        reasons: All reasons.
    """

    def __init__(self, what: str, reasons: Sequence[str]) -> None:
        self.what = what
        self.reasons = tuple(reasons)
        super().__init__(what + ":" + "".join(f"\n  - {reason}" for reason in self.reasons))

    def __reduce__(self) -> tuple[type[UnsupportedInputError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.what, self.reasons)


def check_type(name: str, value: object, *kinds: type) -> None:
    """Raises TypeError unless an argument has one of these types."""
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


class MissingPackageError(VitFastError, ImportError):
    """Required packages are not installed; the message contains the pip command."""

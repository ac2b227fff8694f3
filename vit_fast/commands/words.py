"""Options that hold several values."""

from __future__ import annotations

from pathlib import Path


def split_words(value: str | None, separator: str = ",") -> list[str] | None:
    return None if value is None else [part.strip() for part in value.split(separator) if part.strip()]


def integers(option: str, value: str | None, separator: str = ",") -> list[int] | None:
    parts = split_words(value, separator)
    try:
        return None if parts is None else [int(part) for part in parts]
    except ValueError:
        raise ValueError(f"{option} must be integers separated by {separator!r}, got {value}") from None


def model_name(name: str) -> str:
    """A variant's name as it is, a file or folder with a slash: create_model takes what has one by its own shape."""
    return f"./{name}" if "/" not in name and Path(name).exists() else name

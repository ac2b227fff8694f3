"""Versions: ours, for those who must not import the whole package to say it, and those of what is installed."""

import importlib.metadata

__version__ = "0.1.0"


def installed(package: str) -> str | None:
    """The version of an installed package; None where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

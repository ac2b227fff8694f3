"""Versions: ours, for those who must not import the whole package to say it, and those of what is installed."""

import importlib.metadata
import platform
from pathlib import Path

__version__ = "0.1.0"


def installed(package: str) -> str | None:
    """The version of an installed package; None where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

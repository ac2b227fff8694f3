"""Runs Python in child processes, without Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def environment(cache: str | None = None) -> dict[str, str]:
    """Returns the environment of a child without Triton's interpreter; `cache` is a folder for compiled kernels."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = *map(str, Path(__file__).parents[1::-1]), kept.get("PYTHONPATH")
    path = os.pathsep.join(folder for folder in folders if folder)
    caches = {} if cache is None else {"TRITON_CACHE_DIR": cache}
    return kept | caches | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def run_python(command: list[str], environment: Mapping[str, str], folder: Path | None = None) -> str:
    """Runs Python in a child and returns its output."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout

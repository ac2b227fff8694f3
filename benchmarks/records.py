"""Records on disk: a folder with record.json, the table as text, and the plot; written whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .machine import checkout, slug

RECORD_NAME = "record.json"
Record = dict[str, Any]


def default_base() -> Path:
    """Where records go when nobody says: benchmarks/results/local in a checkout, else ./vit-fast-results."""
    root = checkout()
    return Path("vit-fast-results") if root is None else root / "benchmarks" / "results" / "local"


def default_folder(record: Record) -> Path:
    """A folder of its own for a record, named by date and machine."""
    date = re.sub(r"[^0-9T]", "", record["machine"]["date"].partition("+")[0]).replace("T", "-")
    return _not_taken(default_base() / f"{date}-{slug(record['machine'])}")


def check_folder(folder: Path) -> None:
    """Whether a record may be written there: it is new or empty, and its nearest existing parent is writable.

    Raises:
        ValueError: it is a file, or holds something already.
        PermissionError: nothing may be written there.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file; accepted is a new or empty folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder}: is not empty; accepted is a new or empty folder")
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"{folder}: {existing} is a file; accepted is a new or empty folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder}: {existing} may not be written to")


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files into a folder that appears whole: made beside it under another name, then renamed.

    Raises:
        ValueError, OSError: see check_folder; and whatever the disk says. Nothing is left behind.
    """
    check_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, content in files.items():
            (beside / name).write_bytes(content)
        beside.chmod(0o755)  # mkdtemp's folders are for their owner only
        beside.rename(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def to_json(record: Record) -> bytes:
    return (json.dumps(record, indent=1, allow_nan=False) + "\n").encode()


def read_record(path: str | Path) -> Record:
    """A record from its JSON file, or from the folder that holds it.

    Raises:
        OSError: there is no such file.
        ValueError: it is not a record of ours.
    """
    path = Path(path)
    if path.is_dir():
        path = path / RECORD_NAME
    try:
        record = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(record, dict) or not str(record.get("format", "")).startswith("vit-fast-bench/"):
        raise ValueError(f"{path}: not a record of vit-fast bench")
    if record["format"] != "vit-fast-bench/1":
        raise ValueError(f"{path}: is {record['format']}, accepted is vit-fast-bench/1")
    return record


def _not_taken(folder: Path) -> Path:
    candidate, number = folder, 2
    while candidate.exists():
        candidate = folder.with_name(f"{folder.name}-{number}")
        number += 1
    return candidate

"""Writes files and folders atomically, in a hidden folder beside the target; reads JSON; imports functions by name."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:function
_PREFIX = ".vit-fast-partial-"  # does not contain the file name, which may have the maximum length


def cache_folder() -> Path:
    """Returns the folder of cached results; raises OSError if the user has no home folder."""
    if named := os.environ.get("VIT_FAST_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vit_fast" / "answers"
    except RuntimeError as error:
        raise OSError(f"{error} Set VIT_FAST_CACHE to a folder for cached results") from None


def find_function(given: str) -> Callable[..., Any] | None:
    """Imports module:function, also from the current folder; returns None for text of another form."""
    if not FUNCTION.fullmatch(given):
        return None
    module, _, function = given.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as in `python script.py`
    return getattr(importlib.import_module(module), function)


def read_object(path: Path, error_class: type[ValueError] = ValueError) -> dict[str, Any]:
    """Reads a JSON object from a file; raises `error_class` if the file cannot be read or contains something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise error_class(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise error_class(f"{path}: must contain a JSON object, got {type(content).__name__}")
    return content


@contextlib.contextmanager
def file_aside(path: Path, *errors: type[Exception]) -> Iterator[Path]:
    """Yields a path in a hidden folder. If the block succeeds, moves all files of that folder beside `path`.

    Missing folders are created. `errors` are exceptions that a library raises if a write fails; they become an OSError.
    """
    check_replaceable(path)
    with _hidden_folder(path, *errors) as aside:
        yield aside / path.name
        # Move `path` last, so that it never exists beside files of another version. If `path` is a symbolic link, this
        # replaces the link, not its target.
        parts = sorted(aside.iterdir(), key=lambda part: part.name == path.name)
        for part in parts:
            check_replaceable(aside.parent / part.name)
        if len(parts) > 1:
            path.unlink(missing_ok=True)
        for part in parts:
            part.replace(aside.parent / part.name)


@contextlib.contextmanager
def folder_aside(path: Path) -> Iterator[Path]:
    """Yields a hidden folder. If the block succeeds, renames it to `path`, which must be a new or empty folder."""
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    with _hidden_folder(path) as aside:
        yield aside
        aside.chmod(0o755)  # mkdtemp allows access for the owner only
        aside.replace(path)


def encodable(path: str | Path) -> str:
    """Returns a path or a file name as text that UTF-8 can encode, without loss.

    If its bytes are not valid UTF-8, a path becomes a `file:` URI, and a name gets percent escapes. The text of other
    paths never begins with `file://`.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return path.absolute().as_uri() if isinstance(path, Path) else quote(os.fsencode(path))
    return str(path)


def check_writable(path: Path) -> None:
    """Raises OSError if the nearest existing parent of a path is a file or a folder without write permission."""
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise NotADirectoryError(f"{path}: cannot be written: {parent} must be a folder, got a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{path}: cannot be written: no permission to write to {parent}")


def check_new_folder(path: Path) -> None:
    """Raises OSError unless the path is a new or empty folder with write permission."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        found = "a folder that is not empty" if path.is_dir() else "a file"
        raise FileExistsError(f"{path}: must be a new or empty folder, got {found}")
    check_writable(path)


def check_replaceable(path: Path) -> None:
    """Raises OSError unless the path is a new name or a regular file, with write permission."""
    check_writable(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path}: must be a file name such as {path / 'NAME'}, got a folder")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path}: must be a new name or a regular file, got a device, pipe or socket")


@contextlib.contextmanager
def _hidden_folder(path: Path, *errors: type[Exception]) -> Iterator[Path]:
    """Yields a new folder beside `path` and removes it at the end. After an error, also removes parents it created."""
    parent = Path(os.path.realpath(path.parent))  # Path.resolve raises RuntimeError for circular links
    created = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    aside = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        yield aside
    except Exception as error:
        if not (_is_about(error, aside) if isinstance(error, OSError) else isinstance(error, errors)):
            raise
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise OSError(f"{path}: cannot be written: {reason}") from error
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        for folder in created:
            with contextlib.suppress(OSError):  # not empty: the write succeeded
                folder.rmdir()


def _is_about(error: OSError, aside: Path | None) -> bool:
    """Returns True if creating `aside` or writing into it failed, and False for an error of another file."""
    names = [Path(os.fsdecode(name)) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    return error.errno is not None and (aside is None or not names or any(n.is_relative_to(aside) for n in names))

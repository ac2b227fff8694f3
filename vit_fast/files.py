"""Atomic writes: files and folders are written to a hidden folder beside their target, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":  # there the folders of killed processes stay
    import fcntl

_PREFIX = ".vit-fast-partial-"  # without the name of the file, which may have the maximal length
_SECONDS_TO_LOCK = 60.0  # the process that created a younger folder may not have locked it yet


@contextlib.contextmanager
def file_aside(path: Path, *errors: type[Exception]) -> Iterator[Path]:
    """Yields a place to write `path` and files beside it, which are moved to their final names if the block succeeds.

    Args:
        path: The final name. Missing folders are created, and removed again if the block fails.
        errors: Exceptions by which a library reports a failed write.
    Yields:
        The same file name in a new, hidden folder.
    Raises:
        OSError: `path` is not a regular file, the folder is read-only, or the disk is full. Nothing is left behind.
    """
    check_replaceable(path)
    with _hidden_folder(path, *errors) as aside:
        yield aside / path.name
        # `path` last, so that it never exists beside files of another version.
        # In the folder of `path` itself, not of a link's target: a link is replaced.
        parts = sorted(aside.iterdir(), key=lambda part: part.name == path.name)
        for part in parts:
            check_replaceable(aside.parent / part.name)
        if len(parts) > 1:
            path.unlink(missing_ok=True)
        for part in parts:
            part.replace(aside.parent / part.name)


@contextlib.contextmanager
def folder_aside(path: Path) -> Iterator[Path]:
    """Yields a hidden folder to fill, which becomes `path` if the block succeeds.

    Args:
        path: A new name or an empty folder; a symbolic link is followed.
    Raises:
        OSError: it cannot be written. Nothing is left behind.
    """
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    with _hidden_folder(path) as aside:
        yield aside
        aside.chmod(0o755)  # mkdtemp's folder is for its owner only
        aside.replace(path)


def check_writable(path: Path) -> None:
    """Raises OSError for a path below a file or below a folder without write permission."""
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise NotADirectoryError(f"{path}: cannot be written: {parent} is a file, must be a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{path}: cannot be written: no permission to write to {parent}")


def check_new_folder(path: Path) -> None:
    """Raises OSError unless the path is a new or empty folder that can be written."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        problem = "is not empty" if path.is_dir() else "is a file"
        raise FileExistsError(f"{path}: {problem}, must be a new or empty folder")
    check_writable(path)


def check_replaceable(path: Path) -> None:
    """Raises OSError unless the path is a new name or a regular file that can be replaced."""
    check_writable(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a folder, must be a file name such as {path / 'NAME'}")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path}: is {_kind(path)}, must be a new name or a regular file")


def _kind(path: Path) -> str:
    mode = path.stat().st_mode
    kinds = {stat.S_ISCHR: "a device", stat.S_ISBLK: "a device", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((kind for test, kind in kinds.items() if test(mode)), "no regular file")


@contextlib.contextmanager
def _hidden_folder(path: Path, *errors: type[Exception]) -> Iterator[Path]:
    """Yields a new folder beside `path`, removed at the end together with those of killed processes."""
    parent = Path(os.path.realpath(path.parent))  # Path.resolve raises RuntimeError for links in a circle
    created = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    aside = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent)
        aside = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with _locked(aside):
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
            with contextlib.suppress(OSError):  # not empty: the file is there
                folder.rmdir()


def _is_about(error: OSError, aside: Path | None) -> bool:
    """True if the system refused to write into `aside`, or to create it; False for another file's error."""
    names = [Path(os.fsdecode(name)) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    return error.errno is not None and (aside is None or not names or any(n.is_relative_to(aside) for n in names))


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _SECONDS_TO_LOCK:
                with _locked(folder) as is_ours:
                    if is_ours:
                        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """True if the folder could be locked; the system unlocks it when the process ends, however it does."""
    if sys.platform == "win32":
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process has it, or the file system knows no locks
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)

"""Files of a run: a folder with record.json, tables and a plot, which appears when it is complete.

During the run, its findings are appended to FOLDER.partial/rows.jsonl and synced to disk, so that a killed run can be
resumed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vit_fast.files import check_new_folder

from .records import FORMAT

JOURNAL_NAME, PARTIAL = "rows.jsonl", ".partial"


def default_folder(machine: Mapping[str, Any]) -> Path:
    """Returns a new folder for a record in ./vit-fast-results, named by date and machine."""
    date = re.sub(r"[^0-9T]", "", machine["date"].partition("+")[0]).replace("T", "-")
    name = f"{date}-{re.sub(r'[^a-z0-9]+', '-', machine['device'].lower()).strip('-')}"
    folder, number = Path("vit-fast-results", name), 2
    while folder.exists():
        folder, number = folder.with_name(f"{name}-{number}"), number + 1
    return folder


def check_folder(folder: Path) -> None:
    """Raises ValueError for a folder with an unfinished run, and OSError if a record cannot be written there."""
    check_new_folder(folder)
    if (partial := _partial(folder)).exists():
        raise ValueError(f"{partial} contains an unfinished run: pass --resume {folder}, or another folder")


def _partial(folder: Path) -> Path:
    folder = folder if folder.name else folder.absolute()  # of "."
    return folder.with_name(f"{folder.name.removesuffix(PARTIAL)}{PARTIAL}")


class Journal:
    """The findings of a run as (kind, value): row, control, ceilings, begun (a candidate of a group), resumed."""

    def __init__(
        self, folder: Path | None = None, header: Mapping[str, Any] | None = None, entries: Iterable[Any] = ()
    ) -> None:
        self.header, self.entries = dict(header or {}), [*entries]
        if folder is not None:
            self.folder = folder if folder.name else folder.absolute()
        self._path = None if folder is None else _partial(folder) / JOURNAL_NAME

    @classmethod
    def begin(cls, folder: Path, request: Mapping[str, Any], machine: Mapping[str, Any]) -> Journal:
        """Starts the journal of a new run; see check_folder."""
        check_folder(folder)
        _partial(folder).mkdir(parents=True)
        journal = cls(folder, {"format": FORMAT, "request": dict(request), "machine": dict(machine)})
        try:
            journal._write("header", journal.header)
        except OSError:
            shutil.rmtree(_partial(folder), ignore_errors=True)
            raise
        return journal

    @classmethod
    def resume(cls, folder: Path) -> Journal:
        """Opens the journal of an interrupted run in the folder of `--out`, with or without .partial."""
        folder = folder.with_name(folder.name.removesuffix(PARTIAL))
        path = _partial(folder) / JOURNAL_NAME
        if (folder / JOURNAL_NAME).is_file():  # ended by Ctrl-C
            folder.replace(_partial(folder))
        if not path.is_file():
            raise ValueError(f"{folder} must contain an unfinished run, but {path} does not exist")
        whole = path.read_bytes()
        text = whole[: whole.rfind(b"\n") + 1]  # the last line may be incomplete
        try:
            (_, header), *entries = [(line["kind"], line["value"]) for line in map(json.loads, text.splitlines())]
            found = header["format"] if all(isinstance(header[part], dict) for part in ("request", "machine")) else None
        except (ValueError, LookupError, TypeError):
            found = None
        if found != FORMAT:
            raise ValueError(f"{path}: must be a journal of {FORMAT}, got {found or 'another file'}: start a new run")
        os.truncate(path, len(text))
        journal = cls(folder, header, entries)
        journal.add("resumed", None)
        return journal

    def check_machine(self, machine: Mapping[str, Any]) -> None:
        """Raises ValueError for other hardware, versions or code than those of the run."""
        before = self.header["machine"]
        for name in ("device", "threads", "packages", "commit"):
            if before.get(name) != machine[name]:
                raise ValueError(f"{self.folder}: {name} must be {before.get(name)} to resume, got {machine[name]}")

    def found(self, kind: str) -> list[Any]:
        return [value for known, value in self.entries if known == kind]

    def has_ended(self, *begun: str | int) -> bool:
        """True if the process ended twice while this was begun; once may have another reason."""
        following = itertools.pairwise(self.entries)
        return sum(one == ("begun", [*begun]) and other[0] == "resumed" for one, other in following) > 1

    def add(self, kind: str, value: Any) -> None:
        """Adds a finding, and writes it to disk unless a resumed run should repeat it."""
        self.entries.append((kind, value))
        if not (kind == "row" and value["status"] in ("skipped", "interrupted")):
            self._write(kind, value)

    def _write(self, kind: str, value: object) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"kind": kind, "value": value}, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def finish(self, files: Mapping[str, bytes], *, keep: bool) -> None:
        """Writes the files into the record's folder, which then appears; keep: the run can be resumed."""
        assert self._path is not None
        for name, content in files.items():
            (self._path.parent / name).write_bytes(content)
        if not keep:
            self._path.unlink()
        self._path.parent.replace(self.folder)

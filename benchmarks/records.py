"""Records on disk: a folder with record.json, the tables and the plot.

While a run goes on, what it found stands line by line in FOLDER.partial/rows.jsonl, written through to the disk, so
that a killed run can be resumed; FOLDER itself appears whole, when everything is in it.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_fast.files import check_writable

from .record_check import check, check_bench, check_depth

FORMAT = "vit-fast-bench/2"
RECORD_NAME, JOURNAL_NAME, PARTIAL = "record.json", "rows.jsonl", ".partial"
Record = dict[str, Any]


def default_folder(machine: Mapping[str, Any]) -> Path:
    """A new folder for a record in ./vit-fast-results, named by date and machine."""
    date = re.sub(r"[^0-9T]", "", machine["date"].partition("+")[0]).replace("T", "-")
    name = f"{date}-{re.sub(r'[^a-z0-9]+', '-', machine['device'].lower()).strip('-')}"
    folder, number = Path("vit-fast-results", name), 2
    while folder.exists():
        folder, number = folder.with_name(f"{name}-{number}"), number + 1
    return folder


def check_folder(folder: Path) -> None:
    """Whether a record may be written there: it is new or empty, and its nearest existing parent is writable.

    Raises:
        ValueError: it is a file, or holds something already.
        OSError: nothing may be written there.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file; accepted is a new or empty folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder}: is not empty; accepted is a new or empty folder")
    if (partial := _partial(folder)).exists():
        raise ValueError(f"{partial}: holds an unfinished run; accepted is --resume {folder}, or another folder")
    check_writable(folder)


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name.removesuffix(PARTIAL)}{PARTIAL}")


class Journal:
    """What a run has found so far, kept on the disk line by line; see begin and resume.

    Attributes:
        folder: Where the record will be.
        header: What the first line says: the run's request and its machine.
        entries: What the other lines say, each (kind, value).
    """

    def __init__(self, folder: Path, header: dict[str, Any], entries: list[tuple[str, Any]]) -> None:
        self.folder, self.header, self.entries = folder, header, entries
        self._path = _partial(folder) / JOURNAL_NAME

    @classmethod
    def begin(cls, folder: Path, request: Mapping[str, Any], machine: Mapping[str, Any]) -> Journal:
        """Of a new run.

        Raises:
            ValueError, OSError: see check_folder.
        """
        check_folder(folder)
        _partial(folder).mkdir(parents=True)
        journal = cls(folder, {"format": FORMAT, "request": dict(request), "machine": dict(machine)}, [])
        try:
            journal._write("header", journal.header)
        except OSError:
            shutil.rmtree(_partial(folder), ignore_errors=True)
            raise
        return journal

    @classmethod
    def resume(cls, folder: Path) -> Journal:
        """Of a run that was ended before it was through.

        Args:
            folder: What `--out` was, or that with .partial.
        Raises:
            ValueError: there is no such run, or it is of another format.
        """
        folder = folder.with_name(folder.name.removesuffix(PARTIAL))
        path = _partial(folder) / JOURNAL_NAME
        if (folder / JOURNAL_NAME).is_file():  # ended by Ctrl-C, with tables of what there was
            folder.replace(_partial(folder))
        if not path.is_file():
            raise ValueError(f"{folder}: no unfinished run is there ({path} is missing)")
        whole = path.read_bytes()
        text = whole[: whole.rfind(b"\n") + 1]  # the last line may have been cut
        try:
            entries = [(line["kind"], line["value"]) for line in map(json.loads, text.splitlines())]
            is_ours = entries[0][0] == "header" and entries[0][1]["format"] == FORMAT
        except (ValueError, LookupError, TypeError):
            is_ours = False
        if not is_ours:
            raise ValueError(f"{path}: is no journal of {FORMAT}")
        os.truncate(path, len(text))
        journal = cls(folder, entries[0][1], entries[1:])
        journal.add("resumed", None)
        return journal

    def check_machine(self, machine: Mapping[str, Any]) -> None:
        """Refuses to go on with other hardware, versions or code.

        Raises:
            ValueError: says what differs.
        """
        before = self.header["machine"]
        for name in ("device", "threads", "packages", "commit"):
            if before[name] != machine[name]:
                raise ValueError(f"{self.folder}: {name} was {before[name]}, is {machine[name]}: accepted is the same")

    def add(self, kind: str, value: object) -> None:
        self.entries.append((kind, value))
        self._write(kind, value)

    def _write(self, kind: str, value: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, "value": value}, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self, files: Mapping[str, bytes], *, keep: bool) -> None:
        """Puts the files into the record's folder, which appears with all of them; keep: the run can be resumed."""
        for name, content in files.items():
            (self._path.parent / name).write_bytes(content)
        if not keep:
            self._path.unlink()
        self._path.parent.replace(self.folder)


def to_json(record: Record) -> bytes:
    return (json.dumps(record, indent=1, allow_nan=False) + "\n").encode()


def read_record(path: str | Path) -> Record:
    """A record of `vit-fast bench` from its JSON file, or from the folder that holds it.

    Raises:
        OSError: there is no such file.
        ValueError: it is not a record of ours.
    """
    record = read_any(path)
    if not is_bench(record):
        raise ValueError(f"{path}: not a record of vit-fast bench")
    return record


def read_any(path: str | Path) -> Record:
    """A record of any of our benchmarks, see read_record: of bench, of gpu-check, of kernels --host --json."""
    path = Path(path)
    path = path / RECORD_NAME if path.is_dir() else path
    try:
        record = json.loads(path.read_bytes(), parse_constant=_finite, parse_float=_finite)
        check_depth(record)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON of a record: {error}") from None
    if not isinstance(record, dict) or not (is_bench(record) or isinstance(record.get("machine"), dict)):
        raise ValueError(f"{path}: not a record: accepted is JSON of vit-fast bench, gpu-check, kernels --host --json")
    if is_bench(record) and record["format"] != FORMAT:
        raise ValueError(f"{path}: is {record['format']}, accepted is {FORMAT}")
    needed = ("machine", "plan", "ceilings", "rows") if is_bench(record) else ("machine", "rows")
    missing = [name for name in needed if name not in record]
    if missing or not isinstance(record.get("rows"), list):
        raise ValueError(f"{path}: is a record without {', '.join(missing) or 'a list of rows'}")
    try:
        check_bench(record) if is_bench(record) else check(record["rows"], [{}], "rows")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for row in [*record["rows"], *record["controls"]] if is_bench(record) else ():
        row.setdefault("data", "device")  # before rows said so, there was no other
    return record


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"numbers must be finite, got {text}")
    return value


def is_bench(record: Record) -> bool:
    """Whether it is of `vit-fast bench`, in whatever version."""
    return str(record.get("format", "")).startswith(FORMAT.partition("/")[0])

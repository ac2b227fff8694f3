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
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vit_fast.files import check_new_folder

from .rows import CHECKED_FIELDS, SPEED_FIELDS

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
    """Checks that a record can be written there.

    Raises:
        ValueError: an unfinished run is there.
        OSError: it is no new or empty folder, or cannot be written.
    """
    if (partial := _partial(folder)).exists():
        raise ValueError(f"{partial}: holds an unfinished run; expected --resume {folder}, or another folder")
    check_new_folder(folder)


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name.removesuffix(PARTIAL)}{PARTIAL}")


class Journal:
    """The findings of a run, stored on the disk line by line; see begin and resume.

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
        """Starts the journal of a new run.

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
        """Opens the journal of an interrupted run.

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
                raise ValueError(f"{self.folder}: {name} was {before[name]}, is {machine[name]}: expected the same")

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
        raise ValueError(f"{path}: not a record: expected JSON of vit-fast bench, gpu-check, kernels --host --json")
    if is_bench(record) and record["format"] != FORMAT:
        raise ValueError(f"{path}: is {record['format']}, expected {FORMAT}")
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
    """True for a record of `vit-fast bench`, of any version."""
    return str(record.get("format", "")).startswith(FORMAT.partition("/")[0])


_MISSING = object()
_MOST = sys.float_info.max  # JSON also holds longer integers
_KINDS: dict[str, Callable[[Any], bool]] = {
    "a text": lambda v: isinstance(v, str),
    "a flag": lambda v: isinstance(v, bool),
    "a list": lambda v: isinstance(v, list),
    "an object": lambda v: isinstance(v, dict),
    "a count": lambda v: isinstance(v, int) and v is not True and v >= 1,
    "a number >= 0": lambda v: isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v <= _MOST,
    "a number > 0": lambda v: v != 0 and _KINDS["a number >= 0"](v),
    "null": lambda v: v is None,
    "missing": lambda v: v is _MISSING,
}
_ABOUT = dict.fromkeys(("model", "dtype"), "a text") | dict.fromkeys(("batch", "requested_batch"), "a count")
_ABOUT |= {"data": "a text or missing"}
_ROW: dict[str, Any] = _ABOUT | dict.fromkeys(("subject", "task", "precision", "status", "compile_mode"), "a text")
_ROW |= {"img_size": ["a count"], "peer": "a flag"} | dict.fromkeys(("reason", "defect"), "a text or null")
_ROW |= {"images_per_s": "a number > 0 or null"}
# Of a measured row, first what none lacks; the lists where they are not null.
_RATES = dict.fromkeys(("images_per_s", "ms", "ms_p20", "ms_p80"), "a number > 0")
_FIGURES = dict.fromkeys((*CHECKED_FIELDS, *SPEED_FIELDS, "cold_s", "cold_MiB"), "a number >= 0 or null or missing")
_FIGURES |= _RATES | {"host_bound": "a flag or null or missing", "ratio_to_best_peer": "a number > 0 or null"}
_FIGURES |= dict.fromkeys(("verdict", "best_peer", "defect"), "a text or null")
_FIGURES |= dict.fromkeys(("samples_ms", "ratio_interval"), "a list or null")
_LISTS = {
    "samples_ms": ["a number > 0"],
    "ratio_interval": ("a number > 0", "a number > 0"),
    "explained": {
        "kernels": [("a text", "a text", "a number >= 0", "a number >= 0")],
        "least": {"*": ("a number >= 0", "a number >= 0")},
    },
}
_CEILINGS = {"matmul_TFLOP_per_s": {"*": "a number > 0"}, "copy_GB_per_s": "a number > 0"}
_CEILINGS |= dict.fromkeys(("copy_bytes", "matmul_size"), "a count")
_MACHINE = dict.fromkeys(("device", "date", "float32_matmul_precision"), "a text")
_MACHINE |= {"threads": "a count", "packages": "an object", "gpu": "an object or null", "commit": "a text or null"}
_CONTROL = {"img_size": "a list or missing", "resolution": "a number >= 0", "between_runs": "a number >= 0 or missing"}
_PLAN = {"images": ["a text"], "batch_sizes": "a list", "img_size": "a list or null or missing"}
_RECORD = {
    "vit_fast": "a text",
    "busy": ["a text"],
    "plan": _PLAN,
    "machine": _MACHINE,
    "controls": [_ABOUT | _CONTROL],
    "rows": [_ROW],
}


def check_bench(record: dict[str, Any]) -> None:
    """Checks a record of `vit-fast bench`.

    Raises:
        ValueError: names the field, what it must be and what came.
    """
    check(record, _RECORD | {"ceilings": _CEILINGS if record["ceilings"] else "an object"}, "")
    for number, row in enumerate(record["rows"]):
        if row["status"] == "measured":
            lists = {name: fields for name, fields in _LISTS.items() if row.get(name) is not None}
            check(row, _FIGURES | lists, f"rows[{number}]")


def check(value: Any, schema: Any, where: str) -> None:
    """Refuses what does not fit: a text names kinds, [one] is for every item, a tuple for each, "*" for every field."""
    kinds = schema if isinstance(schema, str) else "an object" if isinstance(schema, dict) else "a list"
    fits = any(_KINDS[kind](value) for kind in kinds.split(" or "))
    if not fits or (isinstance(schema, tuple) and len(value) != len(schema)):
        came = "nothing" if value is _MISSING else repr(value)[:60]
        raise ValueError(f"{where or 'the record'} must be {kinds}, got {came}")
    if isinstance(schema, dict):
        for name in value if "*" in schema else schema:
            check(value.get(name, _MISSING), schema.get("*") or schema[name], f"{where}.{name}".lstrip("."))
    elif not isinstance(schema, str):
        for number, item in enumerate(value):
            check(item, schema[number if isinstance(schema, tuple) else 0], f"{where}[{number}]")


def check_depth(value: Any, levels: int = 20) -> None:
    """Refuses values nested deeper than any record's.

    Raises:
        ValueError: they are.
    """
    if not levels:
        raise ValueError("values must be nested at most 20 deep, got more")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_depth(inner, levels - 1)

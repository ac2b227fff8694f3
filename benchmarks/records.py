"""Records on disk: a folder with record.json, tables and a plot.

During a run, its findings are appended to FOLDER.partial/rows.jsonl and synced to disk, so that a killed run can be
resumed. FOLDER appears when it is complete.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vit_fast.files import check_new_folder

from .rows import CHECKED_FIELDS, SPEED_FIELDS, Record

FORMAT, BEFORE = "vit-fast-bench/3", "vit-fast-bench/2"
RECORD_NAME, JOURNAL_NAME, PARTIAL = "record.json", "rows.jsonl", ".partial"


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
        raise ValueError(f"{partial} contains an unfinished run; add --resume {folder}, or use another folder")


def _partial(folder: Path) -> Path:
    folder = folder if folder.name else folder.absolute()  # of "."
    return folder.with_name(f"{folder.name.removesuffix(PARTIAL)}{PARTIAL}")


class Findings:
    """The findings of a run by kind: row, control, ceilings, skipped, begun (a candidate of a group), resumed."""

    def __init__(self, entries: Iterable[tuple[str, Any]] = ()) -> None:
        self.found: dict[str, list[Any]] = defaultdict(list)
        self._begun: list[Any] | None = None
        self._ended: Counter[tuple[Any, ...]] = Counter()
        for kind, value in entries:
            Findings.add(self, kind, value)

    def add(self, kind: str, value: Any) -> None:
        self.found[kind].append(value)
        if kind == "resumed" and self._begun is not None:
            self._ended[tuple(self._begun)] += 1
        self._begun = value if kind == "begun" else None

    def has_ended(self, *begun: str | int) -> bool:
        """True if the process ended twice while this was begun; once may have another reason."""
        return self._ended[begun] > 1


class Journal(Findings):
    """Findings on disk, one (kind, value) per line, below a header: format, request and machine."""

    def __init__(self, folder: Path, header: dict[str, Any], entries: Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__(entries)
        self.folder, self.header = folder if folder.name else folder.absolute(), header
        self._path = _partial(folder) / JOURNAL_NAME

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
        """Opens the journal of an interrupted run in the folder of `--out`, with or without .partial.

        Raises ValueError if there is no such run, or if it is of another format.
        """
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
            raise ValueError(f"{path}: must be a journal of {FORMAT}, got {found or 'another file'}; start a new run")
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

    def add(self, kind: str, value: Any) -> None:
        """Adds a finding, and writes it to disk unless a resumed run should repeat it."""
        super().add(kind, value)
        if not (kind == "row" and value["status"] in ("skipped", "interrupted")):
            self._write(kind, value)

    def _write(self, kind: str, value: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, "value": value}, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self, files: Mapping[str, bytes], *, keep: bool) -> None:
        """Writes the files into the record's folder, which then appears; keep: the run can be resumed."""
        for name, content in files.items():
            (self._path.parent / name).write_bytes(content)
        if not keep:
            self._path.unlink()
        self._path.parent.replace(self.folder)


def to_json(record: Record) -> bytes:
    return (json.dumps(record, indent=1, allow_nan=False) + "\n").encode()


def read_record(path: str | Path) -> Record:
    """Reads a record of `vit-fast bench` from its JSON file or folder, also of the format before.

    Raises OSError for a missing file, and ValueError for anything else.
    """
    record = read_any(path)
    if not is_bench(record):
        raise ValueError(f"{path}: must be a record of vit-fast bench")
    return record


def read_any(path: str | Path) -> Record:
    """Reads a record of bench, gpu-check or kernels --host --json; see read_record."""
    path = Path(path)
    path = path / RECORD_NAME if path.is_dir() else path
    try:
        record = json.loads(path.read_bytes(), parse_constant=_finite, parse_float=_finite)
        check_depth(record)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: must be the JSON of a record: {error}") from None
    if not isinstance(record, dict) or not (is_bench(record) or isinstance(record.get("machine"), dict)):
        raise ValueError(f"{path}: must be a record of vit-fast bench, gpu-check or kernels --host --json")
    if record.get("format") == BEFORE:
        _upgrade(record)
    if is_bench(record) and record["format"] != FORMAT:
        raise ValueError(f"{path}: must be of format {FORMAT}, got {record['format']}")
    try:
        if is_bench(record):
            check_bench(record)
        else:
            check(record.get("rows", _MISSING), [{}], "rows")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return record


def _upgrade(record: Record) -> None:
    """Converts a record of the format before, whose oldest rows and controls lack fields."""
    record["format"] = FORMAT
    names = {"plan": "configuration", "subjects": "candidates", "subject": "candidate", "left_out": "skipped"}
    lists = [part for name in ("rows", "controls") if isinstance(part := record.get(name), list)]
    rows = [row for row in itertools.chain(*lists) if isinstance(row, dict)]
    for part in (record, record.get("plan"), *rows):
        if isinstance(part, dict):
            for name in names.keys() & part.keys():
                part[names[name]] = part.pop(name)
    sizes = {str(row.get("model")): row["img_size"] for row in rows if "img_size" in row}
    for row in rows:
        row.setdefault("data", "device")
        row.setdefault("img_size", sizes.get(str(row.get("model"))))
        if "resolution" in row:
            row.setdefault("between_runs", row["resolution"])
        if row.get("status") == "wrong":
            row["status"] = "incorrect"


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"numbers must be finite, got {text}")
    return value


def is_bench(record: Record) -> bool:
    """True for a record of `vit-fast bench` of any version."""
    return str(record.get("format", "")).startswith(FORMAT.partition("/")[0])


_MISSING = object()
_MOST = sys.float_info.max  # JSON may have larger integers
_KINDS: dict[str, Callable[[Any], bool]] = {
    "a string": lambda v: isinstance(v, str),
    "a boolean": lambda v: isinstance(v, bool),
    "a list": lambda v: isinstance(v, list),
    "an object": lambda v: isinstance(v, dict),
    "an integer >= 1": lambda v: isinstance(v, int) and v is not True and v >= 1,
    "a number >= 0": lambda v: isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v <= _MOST,
    "a number > 0": lambda v: v != 0 and _KINDS["a number >= 0"](v),
    "null": lambda v: v is None,
    "missing": lambda v: v is _MISSING,
}


def _all(kind: str, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


_ABOUT = _all("a string", "model dtype data") | _all("an integer >= 1", "batch requested_batch")
_ROW = (
    _ABOUT
    | _all("a string", "candidate task precision status compile_mode")
    | _all("a string or null", "reason defect")
    | {"img_size": ["an integer >= 1"], "peer": "a boolean", "images_per_s": "a number > 0 or null"}
)
_MEASURED = (
    dict.fromkeys((*CHECKED_FIELDS, *SPEED_FIELDS, "cold_s", "cold_MiB"), "a number >= 0 or null or missing")
    | _all("a number > 0", "images_per_s ms ms_p20 ms_p80")
    | _all("a string or null", "verdict best_peer defect")
    | _all("a list or null", "samples_ms ratio_interval")
    | {"host_bound": "a boolean or null or missing", "ratio_to_best_peer": "a number > 0 or null"}
)
# Fields of measured rows that are checked inside if they are not null.
_LISTS = {
    "samples_ms": ["a number > 0"],
    "ratio_interval": ("a number > 0", "a number > 0"),
    "explained": {
        "kernels": [("a string", "a string", "a number >= 0", "a number >= 0")],
        "least": {"*": ("a number >= 0", "a number >= 0")},
    },
}
_CEILINGS = {"matmul_TFLOP_per_s": {"*": "a number > 0"}, "copy_GB_per_s": "a number > 0"}
_CEILINGS |= _all("an integer >= 1", "copy_bytes matmul_size")
_RECORD = {
    "vit_fast": "a string",
    "busy": ["a string"],
    "configuration": {
        "images": ["a string"], "dtypes": ["a string"], "batch_sizes": "a list",
        "img_size": "a list or null or missing",
    },
    "machine": _all("a string", "device date float32_matmul_precision")
    | {"threads": "an integer >= 1", "packages": "an object", "gpu": "an object or null", "commit": "a string or null"},
    "controls": [_ABOUT | {"img_size": "a list"} | _all("a number >= 0", "resolution between_runs")],
    "rows": [_ROW],
}  # fmt: skip


def check_bench(record: dict[str, Any]) -> None:
    """Raises ValueError for a record of `vit-fast bench` with the field, the expected and the actual value."""
    ceilings = _CEILINGS if record.get("ceilings") else "an object"
    skipped = {"skipped": ["a string"]} if "skipped" in record else {}
    check(record, _RECORD | {"ceilings": ceilings} | skipped, "")
    for number, row in enumerate(record["rows"]):
        if row["status"] == "measured":
            lists = {name: fields for name, fields in _LISTS.items() if row.get(name) is not None}
            check(row, _MEASURED | lists, f"rows[{number}]")


def check(value: Any, schema: Any, where: str) -> None:
    """Raises ValueError for a value that does not match a schema.

    A schema is a string of kinds, [one] for every item, a tuple for each item, or a dict of fields; "*" is every field.
    """
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
    """Raises ValueError for values that are nested deeper than any record."""
    if not levels:
        raise ValueError("values must be nested at most 20 deep, got more")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_depth(inner, levels - 1)

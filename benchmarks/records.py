"""Records of `vit-fast bench`: rows, journal of a run, and comparison.

A row describes one candidate in one group (see models.Group): the status, and the figures if measured. A control
compares two timings of one candidate, which differ only by noise. During a run, rows are appended to FOLDER/rows.jsonl
and synced to disk, so that a killed run can be resumed. A folder with this file contains an unfinished run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vit_fast.files import check_new_folder, file_aside
from vit_fast.measure import clock
from vit_fast.measure.candidate import Candidate, Status, describe_error
from vit_fast.measure.clock import Samples, percentile
from vit_fast.version import __version__
from vit_fast.work import Work, total

from .models import Group

FORMAT = "vit-fast-bench/3"
RECORD_NAME, JOURNAL_NAME = "record.json", "rows.jsonl"
Row = dict[str, Any]
Record = dict[str, Any]

GAIN = 1.03  # minimum gain in throughput for which `--batch-sizes best` tries the next batch size
# Figures of measured rows.
SPEED_FIELDS = (
    "images_per_s", "ms", "ms_p20", "ms_p80", "ms_p90", "ms_p99", "repeats", "host_ms", "host_bound", "TFLOP_per_s",
    "samples_ms", "ceiling_share", "FLOP", "bytes", "tokens", "GFLOP_per_image", "floor_ms", "ratio_to_best_peer",
    "ratio_interval", "verdict", "best_peer", "defect",
)  # fmt: skip
# Figures of rows that were built and called.
CHECKED_FIELDS = ("max_error", "allowed_error", "agreement", "build_s", "first_call_s", "peak_MiB")
# Bytes of an element in lower precision.
ITEMSIZES = {"bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
# Minimum number of calls for a 90th and a 99th percentile.
PERCENTILE_REPEATS = 100
# Fields that pair two rows.
KEY_FIELDS = ("model", "task", "dtype", "batch", "img_size", "data", "candidate")


def make_row(group: Group, candidate: Candidate, status: Status, reason: str | None = None) -> Row:
    """Makes a row without figures."""
    return group.about(candidate.name) | {
        "peer": candidate.peer or (group.model.operator is not None and candidate.base != "triton"),
        "compile_mode": candidate.compile_mode,
        "task": "training" if group.training else "inference",
        "precision": candidate.precision or group.model.precision or group.dtype_name,
        "status": status,
        "reason": reason,
        **dict.fromkeys((*CHECKED_FIELDS, *SPEED_FIELDS)),
    }


def add_timing(row: Row, timing: Samples, group: Group) -> None:
    """Adds the durations, and throughput and operations per second."""
    least = total(group.least().values())
    flop, moved = least.flop or None, least.elements * ITEMSIZES.get(row["precision"], group.dtype.itemsize) or None
    row |= timing.figures() | {
        "images_per_s": group.batch_size / timing.ms * 1e3,
        "TFLOP_per_s": flop and flop / timing.ms / 1e9,
        "FLOP": flop,
        "bytes": moved,
        "tokens": group.model.config and group.model.config.seqlen,
        "GFLOP_per_image": flop and flop / group.batch_size / 1e9,
    }
    if len(timing) >= PERCENTILE_REPEATS:
        row |= {f"ms_p{p}": percentile(timing, p / 100) for p in (90, 99)}


def finish(rows: Sequence[Row], ceilings: dict[str, Any], controls: Sequence[Row]) -> None:
    """Adds shares of the matmul ceiling, and ratios to the fastest peer at the same precision."""
    for row in measured(rows):
        if ceiling := ceiling_of(row["precision"], ceilings):
            share = row["TFLOP_per_s"] and row["TFLOP_per_s"] / ceiling
            if share and share > 1:
                share, row["defect"] = None, f"{share:.2f}x the matmul ceiling of this run"
            row["ceiling_share"] = share
            if row["bytes"]:
                row["floor_ms"] = Work(row["FLOP"], row["bytes"]).floor_ms(1, ceiling, ceilings["copy_GB_per_s"])
        alike = [other for other in measured(rows) if key_of(other) == key_of(row)]
        peers = [other for other in alike if other["peer"] and other["precision"] == row["precision"]]
        if not peers:
            continue
        best = max(peers, key=lambda peer: peer["images_per_s"])
        row.update(best_peer=best["candidate"], ratio_to_best_peer=1.0)
        if row is not best:
            found = clock.compare_rows(best, row, resolution_of(row, controls), paired=True)
            row.update(ratio_to_best_peer=found["ratio"], ratio_interval=found["interval"], verdict=found["verdict"])


def measured(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "measured"]


def is_lower(row: Row) -> bool:
    """True if the candidate computes in lower precision than its group."""
    return bool(row["precision"] != row["dtype"])


def ceiling_of(precision: str, ceilings: dict[str, Any]) -> float | None:
    """Returns the measured matmul ceiling of a precision in TFLOP/s, if there is one."""
    return ceilings.get("matmul_TFLOP_per_s", {}).get("bf16" if precision == "amp" else precision)


def resolution_of(row: Row, controls: Sequence[Row], field: str = "resolution") -> float:
    """Returns the worst resolution of the controls of a row's group; infinity without a control."""
    return max((float(c[field]) for c in controls if key_of(c) == key_of(row)), default=float("inf"))


def key_of(row: Row) -> tuple[Any, ...]:
    return row["model"], row["dtype"], row["batch"], row["data"], *row["img_size"]


def may_gain(group: Group, rows: Sequence[Row]) -> bool:
    """True if the last batch size of a search raised the throughput of any candidate; see GAIN."""
    rates: dict[str, list[float]] = {}
    for row in rows:
        if (row["model"], row["dtype"], *row["img_size"]) == (group.model.name, group.dtype_name, *group.sizes):
            rates.setdefault(row["candidate"], []).append(row["images_per_s"] or 0.0)
    most = max(map(len, rates.values()), default=0)
    return most < 2 or any(rate[-1] > GAIN * max(rate[:-1]) for rate in rates.values() if len(rate) == most)


def best_ceilings(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the highest of repeated ceilings, because other processes only lower them."""
    if not measured:
        return {}
    names = dict.fromkeys(name for each in measured for name in each["matmul_TFLOP_per_s"])
    matmul = {name: max(each["matmul_TFLOP_per_s"].get(name, 0.0) for each in measured) for name in names}
    copy = max(each["copy_GB_per_s"] for each in measured)
    return measured[0] | {"copy_GB_per_s": copy, "matmul_TFLOP_per_s": matmul, "taken": len(measured)}


class Journal:
    """The findings of a run as (kind, value). Kinds: row, alone (a row that was not timed interleaved), control,
    ceilings, begun (preparing a candidate), omitted (a mode of torch.compile that was not selected), resumed.

    Without a folder, the findings stay in memory.
    """

    def __init__(
        self, folder: Path | None = None, header: Mapping[str, Any] | None = None, entries: Iterable[Any] = ()
    ) -> None:
        self.header, self.entries = {} if header is None else header, [*entries]
        self.folder = Path() if folder is None else folder
        self._path = None if folder is None else folder / JOURNAL_NAME

    @classmethod
    def begin(cls, folder: Path | None, header: Mapping[str, Any]) -> Journal:
        """Starts the journal of a new run in a new or empty folder, by default in ./vit-fast-results."""
        if folder is None:
            machine = header["machine"]
            date = re.sub(r"[^0-9T]", "", machine["date"].partition("+")[0]).replace("T", "-")
            folder = unused(Path("vit-fast-results", f"{date}-{folder_name(machine)}"))
        check_folder(folder)
        journal = cls(folder, {"format": FORMAT, **header})
        with file_aside(folder / JOURNAL_NAME) as aside:  # a killed process leaves a folder with a header, or none
            _append(aside, "header", journal.header)
        return journal

    @classmethod
    def resume(cls, folder: Path, resumes: bool = True) -> Journal:
        """Opens the journal of an unfinished run in the folder of `--out`. `resumes` False only reads it."""
        path = folder / JOURNAL_NAME
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
            got = f"the format {found}" if found else "another file"
            raise ValueError(f"{path}: must be an unfinished run in the format {FORMAT}, got {got}: start a new run")
        if not resumes:
            return cls(None, header, entries)
        (folder / RECORD_NAME).unlink(missing_ok=True)  # of a run that was ended by Ctrl-C
        os.truncate(path, len(text))
        journal = cls(folder, header, entries)
        kind, value = entries[-1] if entries else ("", None)
        journal.add("resumed", value if kind == "begun" else None)  # the candidate that may have ended the process
        return journal

    def found(self, kind: str) -> list[Any]:
        return [value for known, value in self.entries if known == kind]

    def record(self, interrupted: bool = True) -> Record:
        """Returns the record of the run so far. Rows that were only timed alone have no ratios."""
        rows = {(*key_of(row), row["candidate"]): dict(row) for kind in ("alone", "row") for row in self.found(kind)}
        for omitted in self.found("omitted"):
            rows.pop(tuple(omitted), None)
        ceilings, controls = best_ceilings(self.found("ceilings")), self.found("control")
        finish([row for row in rows.values() if not row.get("alone")], ceilings, controls)
        return {
            "format": FORMAT, "vit_fast": __version__, "machine": self.header["machine"], "ceilings": ceilings,
            "controls": controls, "configuration": self.header["configuration"],
            "correctness_rule": self.header["correctness_rule"], "rows": [*rows.values()], "interrupted": interrupted,
            "busy": list(dict.fromkeys(reason for control in controls for reason in control["conditions"]["busy"])),
        }  # fmt: skip

    def add(self, kind: str, value: Any) -> None:
        """Adds a finding, and writes it to disk, except rows that a resumed run repeats."""
        self.entries.append((kind, value))
        if self._path is not None and not (kind == "row" and value["status"] in ("skipped", "interrupted")):
            _append(self._path, kind, value)

    def finish(self, files: Mapping[str, bytes], *, keep: bool) -> None:
        """Writes the files. `keep` keeps the journal to resume the run."""
        assert self._path is not None
        for name, content in files.items():
            with file_aside(self.folder / name) as aside:
                aside.write_bytes(content)
        if not keep:  # removed last, so that a run that is killed here can be resumed
            self._path.unlink()


def _append(path: Path, kind: str, value: object) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"kind": kind, "value": value}, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def folder_name(machine: Mapping[str, Any]) -> str:
    """Returns the name of a folder for records of a machine: letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")


def unused(path: Path) -> Path:
    """Returns the path, or PATH.1, PATH.2 and so on if an earlier run wrote it."""
    paths = (path.with_name(f"{path.name}.{n}" if n else path.name) for n in itertools.count())
    return next(one for one in paths if not one.exists())


def check_folder(folder: Path) -> None:
    """Raises ValueError for a folder with an unfinished run, and OSError if it is not a new or empty folder."""
    if (folder / JOURNAL_NAME).exists():
        raise ValueError(f"{folder} contains an unfinished run: pass --resume {folder}, or another folder to --out")
    check_new_folder(folder)


def compare_records(first: Record, second: Record) -> dict[str, Any]:
    """Returns pairs of rows of two records with ratio, interval, resolution and verdict; unpaired rows; warnings."""
    rows, others = (
        {tuple(str(row[field]) for field in KEY_FIELDS): row for row in record["rows"]} for record in (first, second)
    )
    drift, (one, two) = 0.0, (first["ceilings"], second["ceilings"])
    if one and two:
        matmuls = one["matmul_TFLOP_per_s"], two["matmul_TFLOP_per_s"]
        both = [[each[dtype] for each in matmuls] for dtype in matmuls[0].keys() & matmuls[1].keys()]
        both.append([one["copy_GB_per_s"], two["copy_GB_per_s"]])
        drift = max(max(pair) / min(pair) for pair in both) - 1
    pairs, unpaired = [], []
    for key in dict.fromkeys([*rows, *others]):
        row, other = rows.get(key), others.get(key)
        name = "{model} {dtype} batch {batch} {candidate}".format(**(row or other or {}))
        if row is None or other is None:
            unpaired.append(f"{name}: only in the {'second' if row is None else 'first'} record")
        elif row["status"] != "measured" or other["status"] != "measured":
            unpaired.append(f"{name}: {row['status']} in the first record, {other['status']} in the second")
        else:
            sides = (row, first["controls"]), (other, second["controls"])
            resolution = max(drift, *(resolution_of(*side, "between_runs") for side in sides))
            rates = [row["images_per_s"], other["images_per_s"]]
            found: Row = {"ratio": rates[1] / rates[0], "interval": None, "verdict": clock.UNKNOWN}
            if row["samples_ms"] and other["samples_ms"]:
                found = clock.compare_rows(row, other, resolution, paired=False)
            known = {"images_per_s": rates, "resolution": resolution if resolution != float("inf") else None}
            pairs.append({field: row[field] for field in KEY_FIELDS} | known | found)
    return {"pairs": pairs, "unpaired": unpaired, "warnings": _warnings(first, second, drift, pairs)}


def _warnings(first: Record, second: Record, drift: float, pairs: list[Row]) -> list[str]:
    warnings = []
    for name, record in (("first", first), ("second", second)):
        warnings += [f"the {name} record was measured on a busy machine: {reason}" for reason in record["busy"]]
        warnings += [] if record["rows"] else [f"the {name} record has no rows"]
    for field in ("device", "threads", "packages", "float32_matmul_precision"):
        one, other = first["machine"][field], second["machine"][field]
        if isinstance(one, dict):
            names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
            one, other = ({name: side.get(name) for name in names} for side in (one, other))
        if one != other:
            warnings.append(f"different {field}: {one} and {other}")
    if first["configuration"]["images"] != second["configuration"]["images"]:
        warnings.append("images differ")
    if drift > 0.01:
        warnings.append(f"the machine's matmul or copy speed differs by {drift:.1%}, which hides smaller differences")
    if any(pair["verdict"] == clock.UNKNOWN for pair in pairs):
        warnings.append(f"some pairs cannot be ranked; {clock.QUIET_RUN}")
    return warnings


def to_json(record: Record) -> bytes:
    return (json.dumps(record, indent=1, allow_nan=False) + "\n").encode()


def read_record(path: str | Path, *, of_bench: bool = True) -> Record:
    """Reads a record from its JSON file or folder.

    `of_bench` False also allows records of gpu-check and kernels --host --json. Raises OSError for a missing file, and
    ValueError for other content.
    """
    path = Path(path)
    if (path / JOURNAL_NAME).is_file() and not (path / RECORD_NAME).exists():  # of a process that was killed
        with damaged(path):
            return Journal.resume(path, resumes=False).record() | {"gpu_failed": False, "seconds": 0.0}
    content = (path / RECORD_NAME if path.is_dir() else path).read_bytes()
    with damaged(path):
        record: Record = json.loads(content)
        rows = record["rows"]
        if is_bench(record):
            if record["format"] != FORMAT:
                raise ValueError(f"the format must be {FORMAT}, got {record['format']}")
            record["rows"] = rows = [dict.fromkeys((*CHECKED_FIELDS, *SPEED_FIELDS)) | row for row in rows]
            known = {(key_of(row), row["precision"], row["candidate"]) for row in rows}
            for row in rows:  # until 2026-11, int8 was compared with peers at full precision
                if (key_of(row), row["precision"], row["best_peer"]) not in known:
                    row |= dict.fromkeys(("best_peer", "ratio_to_best_peer", "ratio_interval", "verdict"))
        elif of_bench:
            raise ValueError("the record is of another command")
    return record


@contextlib.contextmanager
def damaged(*paths: str | Path) -> Iterator[None]:
    """Replaces an exception in the block by a ValueError that names the records."""
    try:
        yield
    except Exception as error:  # damaged records raise many types
        names = ", ".join(map(str, paths))
        rule = "must be a record of bench (for report, also of gpu-check or kernels --host --json)"
        raise ValueError(f"{names}: {rule}, got an error: {describe_error(error)}") from None


def is_bench(record: Record) -> bool:
    """True for a record of `vit-fast bench` in any format."""
    return str(record.get("format", "")).startswith(FORMAT.partition("/")[0])

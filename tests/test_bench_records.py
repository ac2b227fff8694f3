"""Damaged records: whatever is wrong in one, `compare` and `report` name the file in one line."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import run

from vit_fast.benchmarks import records, rendering, rows
from vit_fast.measure import clock

COMMITTED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "cpu-2core-batch-1" / "record.json"
Path_ = tuple[str | int, ...]


@pytest.fixture
def record() -> records.Record:
    """A record with one row of each kind, one of them explained."""
    found = json.loads(COMMITTED.read_bytes())
    measured = next(row for row in found["rows"] if row["ratio_interval"])
    measured.update(samples_ms=[1.0, 1.1], explained={"kernels": [["norms", "k", 1, 0.5]], "least": {"norms": [1, 2]}})
    found["rows"] = [measured, next(row for row in found["rows"] if row["status"] != "measured")]
    return found


def paths(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Paths of the values inside a value; of a list the first two."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for name, inner in inside:
        yield (*at, name)
        yield from paths(inner, (*at, name))


BAD = [None, -1, "x", [1, 2], "removed"]


@pytest.mark.parametrize("sampled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_any_value_of_another_kind_is_refused_or_does_no_harm(sampled, record, tmp_path, monkeypatch):
    """Puts one bad value at every fourth place; with --slow every bad value at each."""
    monkeypatch.setattr(clock, "RESAMPLES", 10)
    path, refused = tmp_path / "record.json", 0
    cases = [(at, bad) for at in paths(record) for bad in BAD]
    for at, bad in cases[:: 4 * len(BAD) + 1] if sampled else cases:
        damaged = copy.deepcopy(record)
        inner = damaged
        for name in at[:-1]:
            inner = inner[name]
        inner[at[-1]] = bad
        if bad == "removed":
            del inner[at[-1]]
        path.write_text(json.dumps(damaged))
        try:
            read = records.read_any(path)
        except ValueError as error:
            assert str(error).startswith(f"{path}: "), (at, bad)
            refused += 1
            continue
        if records.is_bench(read):
            rows.compare_records(read, records.read_record(COMMITTED))
        rendering.render({"damaged": read})
    assert refused > 10


@pytest.mark.parametrize(
    ("at", "bad", "message"),
    [
        (("rows",), [1, 2], "rows[0] must be an object, got 1"),
        (("rows", 0, "ms"), -3.0, "rows[0].ms must be a number > 0, got -3.0"),
        (("rows", 0, "samples_ms"), [1.0, float("nan")], "numbers must be finite, got NaN"),
        (("rows", 0, "samples_ms"), [1.0, -1.0], "rows[0].samples_ms[1] must be a number > 0, got -1.0"),
        (("rows", 0, "peak_MiB"), True, "rows[0].peak_MiB must be a number >= 0"),
        (("ceilings", "copy_GB_per_s"), 0, "ceilings.copy_GB_per_s must be a number > 0, got 0"),
        (("machine",), "x" * 400, "machine must be an object"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "report"])
def test_the_line_names_file_and_field(command, at, bad, message, record, tmp_path, capsys):
    inner = record
    for name in at[:-1]:
        inner = inner[name]
    inner[at[-1]] = bad
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(record))
    arguments = [str(path)] if command == "report" else [str(COMMITTED), str(path)]
    assert run(command, *arguments) == 2
    error = capsys.readouterr().err
    assert f"{path}: " in error and message in error and error.count("\n") == 1


def nested(levels: int) -> str:
    return '{"machine": ' + '{"a": ' * levels + "1" + "}" * levels + ', "rows": []}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be the JSON of a record"),
        ("[]", "must be a record"),
        ('{"format": "vit-fast-bench/9"}', "vit-fast-bench/9"),
        ('{"format": "vit-fast-bench/3", "machine": {}}', "must be a string, got nothing"),
        *((nested(levels), "must be") for levels in (30, 990, 10**5)),
        (None, "No such file"),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("command", ["compare", "report"])
def test_a_file_that_is_no_record_is_refused_in_one_line(command, content, message, tmp_path, capsys):
    path = tmp_path / "record.json"
    if content is not None:
        path.write_text(content)
    arguments = [str(COMMITTED)] if command == "compare" else ["--out", str(tmp_path / "r.html")]
    assert run(command, *arguments, str(path)) == 2
    error = capsys.readouterr().err
    assert str(path) in error and message in error and error.count("\n") == 1

"""`vit-fast bench`, `compare` and `report`: folders, resuming, damaged files, and errors in one line."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from bench_support import assert_no_speed, breaking, shrink
from command_line import run
from PIL import Image

from vit_fast.benchmarks import records, report

pytestmark = pytest.mark.usefixtures("small_ceilings")

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
COMMITTED = RESULTS / "amd-epyc-family-26-avx512-2-threads" / "batch-1" / "record.json"
SMALL = ["--models", "vit_test", "--batch-sizes", "2", "--dtypes", "fp32"]
FILES = ["plot.png", "record.json", "report.html", "table.md"]


@pytest.fixture(scope="module")
def image_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image_files")
    for number, size in enumerate([(64, 48), (50, 90)]):
        Image.effect_noise(size, 80).convert("RGB").save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, image_files: Path) -> tuple[Path, str]:
    """The folder that the command wrote, and its output."""
    folder, printed = tmp_path_factory.mktemp("out") / "deep" / "run", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        shrink(patch)
        assert run("bench", str(image_files), *SMALL, "--candidates", "eager,sdpa,timm", "--out", str(folder)) == 0
    return folder, printed.getvalue()


@pytest.fixture(scope="module")
def record(finished: tuple[Path, str]) -> dict:
    return records.read_record(finished[0])


def test_a_run_prints_a_table_and_writes_record_table_and_plot(finished: tuple[Path, str], record: dict) -> None:
    folder, printed = finished
    assert {row["status"] for row in record["rows"]} == {"measured"}
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert [path.name for path in folder.parent.iterdir()] == ["run"]
    assert str(folder) in printed.replace("\n", "")
    assert all(word in printed for word in ("candidate", "images/s", "ms", "x best peer", "max error", "agreement"))
    assert record["configuration"]["images"] == ["0.png", "1.png"]
    assert str(folder) not in (folder / "record.json").read_text()
    assert (folder / "table.md").read_text() == report.markdown(record)


def test_an_unfinished_run_is_resumed_in_its_folder(
    tmp_path: Path, record: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(records.os, "fsync", Mock(side_effect=KeyboardInterrupt))
        records.Journal.begin(target, {"request": {}})
    assert not [*tmp_path.iterdir()]
    begun = records.Journal.begin(target, {"request": {}, "machine": record["machine"]})
    with pytest.raises(IsADirectoryError):
        begun.finish({"a": b"a", ".": b"cannot be written"}, keep=False)
    records.Journal.resume(target).finish({"a": b"b"}, keep=False)
    assert [(path.name, path.read_bytes()) for path in target.iterdir()] == [("a", b"b")]
    with pytest.raises(FileExistsError, match="must be a new or empty folder"):
        records.Journal.begin(target, {})
    monkeypatch.chdir(tmp_path)
    first, second = (records.Journal.begin(None, {"machine": record["machine"]}) for _ in range(2))
    assert str(first.folder).startswith(f"vit-fast-results/{record['machine']['date'][:10].replace('-', '')}")
    assert second.folder == first.folder.with_name(first.folder.name + ".1")


def header(**fields: object) -> str:
    return json.dumps({"kind": "header", "value": {"machine": {"device": ""}, **fields}})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (None, "must contain an unfinished run"),
        (header(format="vit-fast-bench/2", request={}), "got the format vit-fast-bench/2"),
        (header(format=records.FORMAT, request={"subjects": None}), "another version"),
        (header(format=records.FORMAT, request={}), "must be"),
        *((line, "rows.jsonl: must be an unfinished run") for line in ("1", "{")),
    ],
)
def test_resuming_a_damaged_run_or_one_of_another_version_fails(line, message: str, tmp_path: Path, capsys) -> None:
    if line is not None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "rows.jsonl").write_text(line + "\n")
    assert run("bench", "--resume", str(tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_ended_run_is_resumed_and_what_ends_it_twice_is_failed(tmp_path: Path, image_files, add, capsys) -> None:
    """It is ended by Ctrl-C, and then by an exit, which writes as little as a killed process."""

    def press() -> None:
        raise KeyboardInterrupt

    folder, sizes = tmp_path / "run", ("--batch-sizes", "1,2", "--seconds", "0.05")
    arguments = ("bench", str(image_files), *SMALL, *sizes, "--candidates", "eager,deadly", "--out", str(folder))
    add("deadly", breaking(press, above=1))
    assert run(*arguments) == 130
    assert f"--resume {folder}" in capsys.readouterr().out
    rows = records.read_record(folder)["rows"]
    assert [row["status"] for row in rows] == ["measured"] * 2 + ["interrupted"] * 2
    for row in rows[2:]:
        assert_no_speed(row)
    add("deadly", breaking(lambda: sys.exit(9), after=0, above=1))
    resume = ("bench", "--resume", str(folder), "--json")
    for _ in range(2):
        assert run(*resume) == 9 and len(records.read_record(folder)["rows"]) == 2
        with pytest.raises(ValueError, match="run contains an unfinished run: pass --resume"):
            records.check_folder(folder)
        with (folder / "rows.jsonl").open("a") as file:
            file.write('{"kind": "row", "val')  # cut in the middle of a line
    assert run(*resume) == 1
    told = json.loads(capsys.readouterr().out)
    assert told == records.read_record(folder)
    assert [row["samples_ms"] for row in told["rows"][:2]] == [row["samples_ms"] for row in rows[:2]]
    assert [row["status"] for row in told["rows"]] == ["measured"] * 3 + ["failed"]
    assert "the process ended twice" in told["rows"][3]["reason"]
    assert sorted(path.name for path in folder.iterdir()) == FILES and [*tmp_path.iterdir()] == [folder]


def compared(tmp_path: Path, record: dict, capsys, factors: dict[str, float], **fields: Any) -> dict:
    """Compares a record whose rows took 10 ms with one in which they took 10 ms times a factor per candidate."""
    files, resolution = [tmp_path / name for name in ("a.json", "b.json")], fields.pop("resolution", 0.02)
    for path, each, changes in zip(files, ({}, factors), ({}, fields), strict=True):
        made = copy.deepcopy(record) | {"busy": []} | changes
        for row in made["rows"]:
            ms = 10 * each.get(row["candidate"], 1.0)
            samples = [ms * wobble for wobble in (0.999, 1.0, 1.001) * 4]
            row.update(ms=ms, images_per_s=row["batch"] / ms * 1e3, samples_ms=samples)
        made["controls"][0].update(resolution=resolution, between_runs=resolution)
        path.write_bytes(records.to_json(made))
    assert run("compare", *map(str, files)) == 0
    printed = capsys.readouterr().out
    assert run("compare", *map(str, files), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert all(pair["verdict"] in printed for pair in told["pairs"])
    return told


def test_compare_tells_differences_from_noise_and_from_those_of_the_machine(record: dict, tmp_path, capsys) -> None:
    rows = [*record["rows"], {**record["rows"][1], "candidate": "new"}]
    threads = record["machine"] | {"threads": record["machine"]["threads"] + 1}
    slower_copies = record["ceilings"] | {"copy_GB_per_s": record["ceilings"]["copy_GB_per_s"] / 1.08}
    same, unknown = "no difference", "cannot be ranked"
    for ms, fields, verdicts, warning in (
        ((0.5, 0.99, 1.25), {"machine": threads}, ("faster", same, "slower"), "different threads"),
        ((1.0, 1.0, 13.0), {"resolution": 0.5, "busy": ["80%"]}, (unknown,) * 3, "on a busy machine: 80%"),
        ((1.05, 1.05, 1.05), {"ceilings": slower_copies}, (same,) * 3, "differs by 8.0%"),
    ):
        factors = dict(zip(("eager", "sdpa", "timm"), ms, strict=True))
        told = compared(tmp_path, record, capsys, factors, rows=rows, **fields)
        found = {pair["candidate"]: (pair["verdict"], round(pair["ratio"], 2)) for pair in told["pairs"]}
        assert found == {name: (verdict, round(1 / factors[name], 2)) for name, verdict in zip(factors, verdicts)}
        assert all(pair["interval"][0] <= pair["ratio"] <= pair["interval"][1] for pair in told["pairs"])
        assert told["unpaired"] == ["vit_test fp32 batch 2 new: only in the second record"]
        assert any(warning in one for one in told["warnings"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda record: record.update(format="vit-fast-bench/9"), "must be vit-fast-bench/3, got vit-fast-bench/9"),
        (lambda record: record["rows"][0].pop("model"), "must be a record of"),
        (lambda record: record["machine"].pop("packages"), "must be a record of"),
        (lambda record: record["ceilings"].update(copy_GB_per_s="x"), "must be a record of"),
        (lambda record: record["controls"][0].update(img_size=None), "must be a record of"),
        ("[" * 10**5, "must be a record of"),
        ("[]", "must be a record of"),
        (None, "No such file"),
    ],
)
def test_other_and_damaged_files_are_refused_in_one_line(damage: Any, message: str, tmp_path: Path, capsys) -> None:
    path, record = tmp_path / "record.json", json.loads(COMMITTED.read_bytes())
    if callable(damage):
        damage(record)
        damage = json.dumps(record)
    if damage is not None:
        path.write_text(damage)
    for command in (["compare", str(COMMITTED)], ["report", "--out", str(tmp_path / "r.html")]):
        assert run(*command, str(path)) == 2
        error = capsys.readouterr().err
        assert str(path) in error and message in error and error.count("\n") == 1

"""`vit-fast bench`, `compare` and `report`: folders, resuming, damaged files, and errors in one line."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
from pathlib import Path

import pytest
from bench_support import assert_no_speed, breaking, build, shrink
from command_line import run
from PIL import Image

from vit_fast.benchmarks import records, report
from vit_fast.measure import clock

pytestmark = pytest.mark.usefixtures("small_ceilings")

COMMITTED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "cpu-2core-batch-1" / "record.json"
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
    """The folder that the command wrote, and its output with a list of the candidates."""
    folder, printed = tmp_path_factory.mktemp("out") / "deep" / "run", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        shrink(patch)
        status = run("bench", str(image_files), *SMALL, "--candidates", "eager,sdpa,timm", "--out", str(folder))
        assert run("bench", "--list-candidates") == status == 0
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
    titles = ("candidate", "precision", "images/s", "ms", "x best peer", "max error", "agreement")
    assert all(word in printed for word in (*titles, "triton", "transformers", "torchvision", "+compile"))
    assert record["configuration"]["images"] == ["0.png", "1.png"]
    assert str(folder) not in (folder / "record.json").read_text()
    assert (folder / "table.md").read_text() == report.markdown(record)


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path, record: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "run"
    begun = records.Journal.begin(target, {}, record["machine"])
    with pytest.raises(IsADirectoryError):
        begun.finish({"a": b"a", ".": b"cannot be written"}, keep=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run.partial"]
    records.Journal.resume(target).finish({"a": b"a"}, keep=False)
    assert (target / "a").read_bytes() == b"a"
    with pytest.raises(FileExistsError, match="must be a new or empty folder"):
        records.Journal.begin(target, {}, {})
    monkeypatch.chdir(tmp_path)
    first, second = (records.Journal.begin(None, {}, record["machine"]) for _ in range(2))
    assert str(first.folder).startswith(f"vit-fast-results/{record['machine']['date'][:10].replace('-', '')}")
    assert second.folder == first.folder.with_name(first.folder.name + "-2")


def header(**fields: object) -> str:
    return json.dumps({"kind": "header", "value": {"machine": {"device": ""}, **fields}})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (None, "must contain an unfinished run"),
        (header(format="vit-fast-bench/2", request={}), "got vit-fast-bench/2"),
        (header(format=records.FORMAT, request={"subjects": None}), "another version"),
        (header(format=records.FORMAT, request={}), "must be"),
        *((line, "rows.jsonl: must be a journal") for line in ("1", "{")),
    ],
)
def test_resuming_a_damaged_run_or_one_of_another_version_fails(line, message: str, tmp_path: Path, capsys) -> None:
    if line is not None:
        (tmp_path / "run.partial").mkdir()
        (tmp_path / "run.partial" / "rows.jsonl").write_text(line + "\n")
    assert run("bench", "--resume", str(tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_interrupted_run_is_written_and_resumed(tmp_path: Path, image_files: Path, add, capsys) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    folder, sizes = tmp_path / "run", ("--batch-sizes", "1,2,4", "--seconds", "0.05")
    arguments = ("bench", str(image_files), *SMALL, *sizes, "--candidates", "eager,pressed", "--out", str(folder))
    add("pressed", breaking(press, above=1))
    assert run(*arguments) == 130
    assert f"--resume {folder}" in capsys.readouterr().out
    rows = records.read_record(folder)["rows"]
    assert [row["status"] for row in rows] == ["measured"] * 2 + ["interrupted"] * 4
    for row in rows[2:]:
        assert_no_speed(row)
    add("pressed", lambda group: build("sdpa", group))
    assert run("bench", "--resume", str(folder), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == records.read_record(folder)
    assert [row["samples_ms"] for row in told["rows"][:2]] == [row["samples_ms"] for row in rows[:2]]
    assert [row["status"] for row in told["rows"]] == ["measured"] * 6
    assert sorted(path.name for path in folder.iterdir()) == FILES


def exact(record: dict, resolution: float = 0.02, factors: dict[str, float] | None = None) -> dict:
    """A record of rows that took 10 ms each, times a factor by candidate."""
    made = copy.deepcopy(record)
    for row in made["rows"]:
        ms = 10 * (factors or {}).get(row["candidate"], 1.0)
        samples = [ms * wobble for wobble in (0.999, 1.0, 1.001) * 4]
        row.update(ms=ms, images_per_s=row["batch"] / ms * 1e3, samples_ms=samples)
    made["controls"][0].update(resolution=resolution, between_runs=resolution)
    made["busy"] = []
    return made


def compared(tmp_path: Path, first: dict, second: dict, capsys) -> dict:
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for path, content in zip(files, (first, second), strict=True):
        path.write_bytes(records.to_json(content))
    assert run("compare", *map(str, files)) == 0
    printed = capsys.readouterr().out
    assert run("compare", *map(str, files), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert all(pair["verdict"] in printed for pair in told["pairs"])
    return told


def test_compare_tells_differences_from_noise(record: dict, tmp_path: Path, capsys) -> None:
    later = exact(record, factors={"eager": 0.5, "sdpa": 0.99, "timm": 1.25})
    later["rows"].append({**later["rows"][1], "candidate": "new"})
    later["machine"]["threads"] += 1
    told = compared(tmp_path, exact(record), later, capsys)
    verdicts = {pair["candidate"]: (pair["verdict"], round(pair["ratio"], 2)) for pair in told["pairs"]}
    assert verdicts == {"eager": ("faster", 2), "sdpa": ("no difference", 1.01), "timm": ("slower", 0.8)}
    for pair in told["pairs"]:
        low, high = pair["interval"]
        assert low <= pair["ratio"] <= high < low * 1.01
    assert told["unpaired"] == ["vit_test fp32 batch 2 new: only in the second record"]
    assert len(told["warnings"]) == 1 and "threads" in told["warnings"][0]


def faster_copies(record: dict) -> dict:
    later = exact(record, factors=dict.fromkeys(("eager", "sdpa", "timm"), 1.05))
    return later | {"ceilings": later["ceilings"] | {"copy_GB_per_s": later["ceilings"]["copy_GB_per_s"] / 1.08}}


def test_compare_does_not_rank_differences_of_the_machine(record: dict, tmp_path: Path, capsys) -> None:
    busy = exact(record, 0.5, {"timm": 13.0}) | {"busy": ["other processes used 80%"]}
    for changed, verdict, warning in (
        (busy, "cannot be ranked", "second record was measured on a busy machine: other processes used 80%"),
        (faster_copies(record), "no difference", "differ by 8.0%"),
    ):
        told = compared(tmp_path, exact(record), changed, capsys)
        assert {pair["verdict"] for pair in told["pairs"]} == {verdict}
        assert any(warning in one for one in told["warnings"])


@pytest.fixture
def small_record() -> records.Record:
    """A committed record with one measured row, which is explained, and one that was not measured."""
    found = json.loads(COMMITTED.read_bytes())
    measured = next(row for row in found["rows"] if row["ratio_interval"])
    measured.update(samples_ms=[1.0, 1.1], explained={"kernels": [["norms", "k", 1, 0.5]], "least": {"norms": [1, 2]}})
    return found | {"rows": [measured, next(row for row in found["rows"] if row["status"] != "measured")]}


def parts(record: dict) -> list[dict]:
    """The dictionaries in a record."""
    own = record, record["machine"], record["ceilings"], record["configuration"], record["rows"][0]["explained"]
    return [*own, *record["rows"], *record["controls"]]


@pytest.mark.parametrize("step", [21, pytest.param(1, marks=pytest.mark.slow)])
def test_a_record_with_a_value_of_another_type_is_read_or_refused_in_one_line(
    step, small_record, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(clock, "RESAMPLES", 10)
    path, statuses = tmp_path / "record.json", set()
    places = [(number, name) for number, part in enumerate(parts(small_record)) for name in part]
    for (number, name), bad in list(itertools.product(places, (None, -1, "x", [1, 2], "removed")))[::step]:
        record = copy.deepcopy(small_record)
        changed = parts(record)[number]
        changed[name] = bad
        if bad == "removed":
            del changed[name]
        path.write_text(json.dumps(record))
        for command in (["compare", str(COMMITTED)], ["report", "--out", str(tmp_path / "r.html")]):
            statuses.add(status := run(*command, str(path)))
            error = capsys.readouterr().err
            assert status == 0 or (str(path) in error and error.count("\n") == 1), (number, name, bad)
    assert statuses == {0, 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": "vit-fast-bench/9", "rows": []}', "the format must be vit-fast-bench/3, got vit-fast-bench/9"),
        ("[" * 10**5, "must be a record of"),
        ("[]", "must be a record of"),
        (None, "No such file"),
    ],
    ids=["format", "nested", "list", "missing"],
)
def test_other_files_are_refused_in_one_line(content: str | None, message: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "record.json"
    if content is not None:
        path.write_text(content)
    for command in (["compare", str(COMMITTED)], ["report", "--out", str(tmp_path / "r.html")]):
        assert run(*command, str(path)) == 2
        error = capsys.readouterr().err
        assert str(path) in error and message in error and error.count("\n") == 1

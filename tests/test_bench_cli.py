"""`vit-fast bench` and `compare` as one meets them: folders, tables, plots, and one clear line for every bad input."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import signal
from pathlib import Path

import pytest
from bench_support import shrink
from command_line import run
from PIL import Image
from rich.console import Console

from vit_fast.benchmarks import records, rendering, report, runner
from vit_fast.cli import table
from vit_fast.measure.candidate import patient_interrupt

pytestmark = pytest.mark.usefixtures("small_ceilings")

SMALL = ["--models", "vit_test", "--batch-sizes", "2", "--dtypes", "fp32"]


@pytest.fixture(scope="module")
def image_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image_files")
    for number, size in enumerate([(64, 48), (50, 90)]):
        Image.effect_noise(size, 80).convert("RGB").save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, image_files: Path) -> tuple[Path, str]:
    """The folder that the command wrote, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("out") / "deep" / "run", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        shrink(patch)
        status = run("bench", str(image_files), *SMALL, "--candidates", "eager,sdpa,timm", "--out", str(folder))
    assert status == 0
    return folder, printed.getvalue()


@pytest.fixture(scope="module")
def record(finished: tuple[Path, str]) -> dict:
    return records.read_record(finished[0])


def test_a_run_prints_a_table_and_writes_record_table_and_plot(finished: tuple[Path, str], record: dict) -> None:
    folder, printed = finished
    assert {row["status"] for row in record["rows"]} == {"measured"}
    assert sorted(path.name for path in folder.iterdir()) == ["plot.png", "record.json", "report.html", "table.md"]
    assert [path.name for path in folder.parent.iterdir()] == ["run"]
    assert str(folder) in printed.replace("\n", "")
    for title in ("candidate", "precision", "images/s", "ms", "x best peer", "max error", "agreement"):
        assert title in printed
    assert "[p20, p80]" not in printed and "[p20, p80]" in (folder / "table.md").read_text()
    assert record["configuration"]["images"] == ["0.png", "1.png"]
    assert str(folder) not in (folder / "record.json").read_text()
    with Image.open(folder / "plot.png") as picture:
        assert picture.format == "PNG" and picture.width >= 1000
        assert len(picture.convert("RGB").getcolors(2**24)) > 20
    assert (folder / "table.md").read_text() == report.markdown(record)


def test_candidates_are_listed_with_what_is_missing(capsys) -> None:
    assert run("bench", "--list-candidates") == 0
    printed = capsys.readouterr().out
    for name in ("eager", "sdpa", "triton", "timm", "transformers", "torchvision", "+compile"):
        assert name in printed


def test_the_second_ctrl_c_does_not_lose_what_the_first_kept() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with patient_interrupt(signal.SIGINT):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: heard.append(number))  # a caller's own handler is called too
    with pytest.raises(KeyboardInterrupt), patient_interrupt(signal.SIGINT):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT] * 2


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "run"
    journal = records.Journal.begin(target, {}, {})
    with pytest.raises(IsADirectoryError):
        journal.finish({"a": b"a", ".": b"cannot be written"}, keep=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run.partial"]
    records.Journal.resume(target).finish({"a": b"a"}, keep=False)
    assert (target / "a").read_bytes() == b"a"
    with pytest.raises(FileExistsError, match="not empty"):
        records.Journal.begin(target, {}, {})


def test_default_folder_names_date_and_machine_and_is_never_taken(record: dict, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = records.default_folder(record["machine"])
    assert first.parent == Path("vit-fast-results")
    assert first.name.startswith(record["machine"]["date"][:10].replace("-", ""))
    first.mkdir(parents=True)
    assert records.default_folder(record["machine"]) == first.with_name(first.name + "-2")


def journal_of(**fields: object) -> str:
    return json.dumps({"kind": "header", "value": {"machine": {"device": ""}, **fields}})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (None, "must contain an unfinished run"),
        (journal_of(format="vit-fast-bench/2", request={}), "got vit-fast-bench/2"),
        (journal_of(format=records.FORMAT, request={"subjects": None}), "another version"),
        *(
            (line, "rows.jsonl: must be a journal")
            for line in ("1", '{"kind": "header"}', "{", '{"kind": "header", "value": 3}')
        ),
    ],
)
def test_a_damaged_run_or_one_of_another_version_is_not_resumed(line, message: str, tmp_path: Path, capsys) -> None:
    if line is not None:
        (tmp_path / "run.partial").mkdir()
        (tmp_path / "run.partial" / "rows.jsonl").write_text(line + "\n")
    assert run("bench", "--resume", str(tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_interrupted_run_is_written_and_can_go_on(tmp_path: Path, image_files: Path, capsys, monkeypatch) -> None:
    """Interrupted before anything is timed; resumed by the folder that it named."""
    folder, timed = tmp_path / "run", runner.time_interleaved

    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "time_interleaved", press)
    arguments = ("bench", str(image_files), *SMALL, "--candidates", "eager,sdpa", "--out", str(folder))
    assert run(*arguments) == 130
    assert f"--resume {folder}" in capsys.readouterr().out
    assert {row["status"] for row in records.read_record(folder)["rows"]} == {"interrupted"}
    monkeypatch.setattr(runner, "time_interleaved", timed)
    assert run("bench", "--resume", str(folder), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == records.read_record(folder)
    assert [row["status"] for row in told["rows"]] == ["measured", "measured"]
    assert sorted(path.name for path in folder.iterdir()) == ["plot.png", "record.json", "report.html", "table.md"]


def exact(record: dict, resolution: float = 0.02, factors: dict[str, float] | None = None) -> dict:
    """A record whose rows took 10 ms each, times a factor by candidate, and whose control says this resolution."""
    made = copy.deepcopy(record)
    for row in made["rows"]:
        ms = 10 * (factors or {}).get(row["candidate"], 1.0)
        samples = [ms * wobble for wobble in (0.999, 1.0, 1.001) * 4]
        row.update(ms=ms, images_per_s=row["batch"] / ms * 1e3, samples_ms=samples)
    made["controls"][0].update(resolution=resolution, between_runs=resolution)
    made["busy"] = []
    return made


def before_renaming(record: dict) -> dict:
    """The record as an early version with format 2 wrote it."""
    old = {**copy.deepcopy(record), "format": "vit-fast-bench/2"}
    old["plan"], old["left_out"] = old.pop("configuration"), old.pop("skipped")
    old["plan"]["subjects"] = old["plan"].pop("candidates")
    for row in [*old["rows"], *old["controls"]]:
        row["subject"] = row.pop("candidate")
        del row["data"]
    for control in old["controls"]:
        del control["img_size"], control["between_runs"]
    return old


def compared(tmp_path: Path, first: dict, second: dict, capsys) -> dict:
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, content in zip(paths, (before_renaming(first), second), strict=True):
        path.write_bytes(records.to_json(content))
    assert run("compare", *map(str, paths)) == 0
    printed = capsys.readouterr().out
    assert run("compare", *map(str, paths), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert all(pair["verdict"] in printed for pair in told["pairs"])
    return told


def test_compare_pairs_rows_and_tells_difference_from_noise(record: dict, tmp_path: Path, capsys) -> None:
    first = exact(record)
    later = exact(record, factors={"eager": 0.5, "sdpa": 0.99, "timm": 1.25})
    later["rows"].append({**later["rows"][1], "candidate": "new"})
    later["machine"]["threads"] += 1
    told = compared(tmp_path, first, later, capsys)
    verdicts = {pair["candidate"]: pair["verdict"] for pair in told["pairs"]}
    assert verdicts == {"eager": "faster", "sdpa": "no difference", "timm": "slower"}
    assert {pair["candidate"]: pair["ratio"] for pair in told["pairs"]} == pytest.approx(
        {"eager": 2, "sdpa": 1 / 0.99, "timm": 0.8}
    )
    for pair in told["pairs"]:
        low, high = pair["interval"]
        assert low <= pair["ratio"] <= high < low * 1.01
    assert told["unpaired"] == ["vit_test fp32 batch 2 new: only in the second record"]
    assert len(told["warnings"]) == 1
    assert "threads" in told["warnings"][0]


def busy(record: dict) -> dict:
    return exact(record, resolution=0.5, factors={"timm": 13.0}) | {"busy": ["other processes used 80%"]}


def slower_with_its_machine(record: dict) -> dict:
    later = exact(record, factors=dict.fromkeys(("eager", "sdpa", "timm"), 1.05))
    later["ceilings"]["copy_GB_per_s"] /= 1.08
    return later


@pytest.mark.parametrize(
    ("change", "verdicts", "warning"),
    [
        (busy, {"cannot be ranked"}, "the second record was measured on a busy machine: other processes used 80%"),
        (slower_with_its_machine, {"no difference"}, "differ by 8.0%"),
        (lambda record: exact(record) | {"rows": []}, set(), "the second record has no rows"),
    ],
)
def test_compare_ranks_no_difference_of_the_machine(change, verdicts, warning, record, tmp_path, capsys) -> None:
    told = compared(tmp_path, exact(record), change(record), capsys)
    assert {pair["verdict"] for pair in told["pairs"]} == verdicts
    assert any(warning in one for one in told["warnings"])


def test_a_table_says_what_it_can_tell_apart(record: dict) -> None:
    (line,) = report.remarks(exact(record, resolution=0.031))
    assert line.startswith("vit_test, fp32, batch 2, 32x32: resolution 3.1%")
    (line,) = report.remarks(exact(record, resolution=0.34))
    assert "cannot be ranked: repeated timings differed by 34%; to reduce noise" in line
    above = exact(record)
    above["rows"][0].update(ceiling_share=None, defect="1.25x the matmul ceiling of this run")
    above["busy"] = ["reason"]
    busy, _, defect = report.remarks(above)
    assert busy == "BUSY: reason" and "DEFECT: eager at 1.25x the matmul ceiling" in defect
    text = report.markdown(above)
    assert "125%" not in text and "| above |" in text and "DEFECT" in text


def test_rows_without_figures_are_named_once_with_their_reason(record: dict) -> None:
    other = copy.deepcopy(record)
    timm = next(row for row in other["rows"] if row["candidate"] == "timm")
    timm.update(status="not installed", reason="pip install timm", images_per_s=None)
    larger = copy.deepcopy(other["rows"])
    for row in larger:
        row["requested_batch"] = 64
        row["batch"] = 32
    other["rows"] += larger
    assert report.not_measured(other) == [
        "timm: not installed: pip install timm (vit_test, fp32, batch 2, 32x32)",
        "timm (batch 32): not installed: pip install timm (vit_test, fp32, batch 64, 32x32)",
    ]
    text = report.markdown(other)
    assert "| `sdpa (batch 32)` |" in text
    assert "| `timm` |" not in text
    assert len(rendering.draw(other)) > 10_000
    for row in other["rows"]:
        row["status"] = "skipped"
    assert len(rendering.draw(other)) > 5_000


def test_blocks_of_a_document_are_filled_from_their_records(record: dict, tmp_path: Path, capsys) -> None:
    record = exact(record)
    (tmp_path / "r.json").write_bytes(records.to_json(record))
    document = tmp_path / "README.md"
    document.write_text("before\n<!-- record: r.json -->\nold\n<!-- /record -->\nafter\n")
    report.main(["--fill", str(document)])
    filled = document.read_text()
    assert filled == f"before\n<!-- record: r.json -->\n{report.markdown(record)}<!-- /record -->\nafter\n"
    report.main(["--fill", str(document)])
    assert document.read_text() == filled
    short = report.fill("<!-- summary: r.json -->\n<!-- /record -->", tmp_path)
    assert short == f"<!-- summary: r.json -->\n{report.summary(record)}<!-- /record -->"
    assert report.heading(record) in short
    report.main([str(tmp_path / "r.json")])
    assert capsys.readouterr().out == report.markdown(record)


def test_tables_in_the_documents_are_those_of_the_committed_records() -> None:
    root = Path(__file__).parent.parent
    for document in root.glob("*.md"):
        text = document.read_text()
        assert report.fill(text, root) == text, f"run: python -m vit_fast.benchmarks.report --fill {document.name}"


@pytest.mark.parametrize("width", [80, 100, 126, 200])
def test_a_table_shows_whole_words_in_any_terminal(width: int, record: dict) -> None:
    """Columns that do not fit are omitted; nothing is cut or broken."""
    shown = exact(record)
    shown["rows"][0]["candidate"] = "onnxruntime-nobinding"
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    kept = report.columns_in(shown, width)
    ((caption, titles, rows),) = report.tables(shown, kept)
    console.print(table(caption, titles, rows))
    text = console.file.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert text.splitlines()[2].split() == " ".join(titles).split()
    assert titles[:3] == ["candidate", "precision", "images/s"] and "x best peer" in titles
    assert len(kept) <= report.MOST_ON_SCREEN

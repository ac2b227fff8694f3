"""Runs the README's Python blocks; checks its tables, and the commands in documents, examples and docstrings."""

from __future__ import annotations

import functools
import json
import operator
import re
import shlex
from pathlib import Path

import pytest
import typer

from vit_fast import cli
from vit_fast.benchmarks.records import read_record
from vit_fast.benchmarks.report import fill, objections

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PAGES = [README, *(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))]
SOURCE = [
    path.read_text()
    for folder in ("vit_fast", "kernels", "export", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".cpp"}
]
COMMANDS = sorted(
    {
        command.strip()
        for text in (*PAGES, *SOURCE)
        for command in re.findall(r"(?:^ {4,}|`)(vit-fast [a-z][^`#\n\\]*)", text, re.MULTILINE)
    }
)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {})


@pytest.fixture(scope="module")
def app():
    return typer.main.get_command(cli.make_app())


@pytest.mark.parametrize("command", COMMANDS)
def test_command_and_its_options_exist(command, app):
    _, name, *arguments = shlex.split(command)
    context = typer.Context(app, info_name="vit-fast")
    subcommand = app.get_command(context, name)
    assert subcommand is not None
    known = {option for parameter in subcommand.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {argument for argument in arguments if argument.startswith("-")} <= known


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|    )make ([a-z-]+)", "".join(PAGES))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_tables_are_those_of_the_committed_records():
    assert re.search(r"<!-- summary: \S+ -->\n\|.+", README)
    assert fill(README, ROOT) == README


def test_no_committed_record_is_one_that_nobody_should_cite():
    paths = sorted((ROOT / "benchmarks" / "results").rglob("record.json"))
    assert paths
    for path in paths:
        assert not objections(read_record(path)), path


@pytest.mark.parametrize(
    ("place", "value"), [("busy", ["load 7.5 on 2 cores"]), ("rows.3.defect", "1.25x its ceiling")]
)
def test_a_table_of_a_busy_record_or_one_above_its_ceiling_is_refused(place, value, tmp_path):
    record = json.loads((ROOT / re.search(r"<!-- summary: (\S+) -->", README)[1]).read_text())
    *path, last = [int(name) if name.isdigit() else name for name in place.split(".")]
    functools.reduce(operator.getitem, path, record)[last] = value
    (tmp_path / "record.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"record.json must not be cited: .*(BUSY|ceiling)"):
        fill("<!-- record: record.json -->\n<!-- /record -->", tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        ["--batch-sizes", "4"], ["--host", "--tune"], ["--model", "m", "--warm-up", "m"],
        ["--warm-up", "m", "--arch", "sm_90"], ["--tune", "--json"], ["--model", "m", "--update-baseline"],
    ],
)  # fmt: skip
def test_kernels_ignores_no_option(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["kernels", *options])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert all(option in error for option in options if option.startswith("--"))

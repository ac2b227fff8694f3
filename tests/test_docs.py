"""README and guide: Python and sh blocks run, tables match the records, commands exist, and the guide builds."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from command_line import run

from vit_fast import cli

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
README = (ROOT / "README.md").read_text()
fill = runpy.run_path(str(DOCS / "make_tables.py"))["fill"]
TEXTS = PAGES | {"README.md": README}
WITH_CODE = [name for name, text in TEXTS.items() if "```python" in text]
SOURCE = [
    path.read_text()
    for folder in ("vit_fast", "kernels", "export", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".cpp"}
]


@pytest.mark.fast_cases("howto/fuse.md", "README.md")
@pytest.mark.usefixtures("small_ceilings")
@pytest.mark.parametrize("page", WITH_CODE)
def test_code_runs(
    page: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the blocks in the order of the page."""
    monkeypatch.setenv("VIT_FAST_CACHE", str(tmp_path_factory.mktemp("answers")))  # of this page only
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, (language, block) in enumerate(re.findall(r"```(python|sh)\n(.*?)```", TEXTS[page], re.DOTALL)):
        if language == "python":
            exec(compile(block, f"{page}, block {number}", "exec"), names)
            continue
        for line in block.splitlines():
            program, *arguments = shlex.split(line)
            assert program == "vit-fast" and run(*arguments) == 0, line
    assert page == "README.md" or list(tmp_path.iterdir()) == [], "no file remains"


@pytest.mark.slow
def test_the_guide_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    built = subprocess.run([*command, str(DOCS), str(tmp_path / "html")], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for page in PAGES:
        html = (tmp_path / "html" / page).with_suffix(".html").read_text()
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', html), "it needs no network"
    assert "vit_fast.fuse" in (tmp_path / "html" / "reference.html").read_text()


def test_commands_and_options_in_texts_and_source_exist() -> None:
    app = typer.main.get_command(cli.make_app())
    commands = re.findall(
        r"(?:^ {4,}|`)(vit-fast [a-z][^`#\n\\]*)", "\n".join([*TEXTS.values(), *SOURCE]), re.MULTILINE
    )
    assert len(commands) > 50
    for command in set(commands):
        _, name, *arguments = shlex.split(command.strip())
        assert name in app.commands, command
        parameters = app.commands[name].params
        known = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {argument for argument in arguments if argument.startswith("-")} <= known, command


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|    )make ([a-z-]+)", "".join(TEXTS.values()))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_tables_match_the_committed_records(tmp_path: Path) -> None:
    assert re.search(r"<!-- summary: \S+ -->\n\|.+", README)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "README.md").write_text(README)
    fill(tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text() == README

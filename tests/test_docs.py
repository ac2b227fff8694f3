"""The guide: every block of Python and of sh runs, in the order of its page; it builds offline, without a warning."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vit_fast.cli import main

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
WITH_CODE = [name for name, text in PAGES.items() if "```python" in text]


@pytest.mark.fast_cases("howto/fuse.md")
@pytest.mark.usefixtures("small_ceilings")
@pytest.mark.parametrize("page", WITH_CODE)
def test_code_runs(
    page: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIT_FAST_CACHE", str(tmp_path_factory.mktemp("answers")))  # of this page, for no other test
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, (language, block) in enumerate(re.findall(r"```(python|sh)\n(.*?)```", PAGES[page], re.DOTALL)):
        if language == "python":
            exec(compile(block, f"{page}, block {number}", "exec"), names)
            continue
        for line in block.splitlines():
            program, *arguments = shlex.split(line)
            assert program == "vit-fast"
            with pytest.raises(SystemExit) as exit_:
                main(arguments)
            assert not exit_.value.code, line
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.slow
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    built = subprocess.run([*command, str(DOCS), str(tmp_path / "html")], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for page in PAGES:
        html = (tmp_path / "html" / page).with_suffix(".html").read_text()
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', html), "it needs no network"
    assert "vit_fast.fuse" in (tmp_path / "html" / "reference.html").read_text()

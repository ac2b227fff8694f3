"""Runs tests, and prints the lines about CUDA, streams, events, graphs and memory that no test executes.

    python tests/cuda_lines.py [options and files of pytest]    # by default all fast tests; takes twice as long

cuda_lines.txt lists lines that need not be executed: a reason, and below it lines "path: text". An entry excuses each
line of a file, or of the files in a folder, that contains the text. Exits with 1 if there are other lines.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
FOLDERS = ("vit_fast", "kernels", "export", "benchmarks")
MENTIONS = re.compile(r"cuda|(?<![a-z])stream|(?<![a-z])event|(?<!para)graph|memory", re.IGNORECASE)
left: dict[str, dict[int, str]] = {}  # lines that were not executed, by file
seen: dict[int, tuple[CodeType, str, set[int]]] = {}  # by id: code, its file, and its lines that were not executed
hits = tempfile.TemporaryFile()  # noqa: SIM115  # executed lines, also those of forked processes


def functions_in(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from functions_in(each)
    if code.co_flags & 2:  # has local variables: no class or module, which an import executes
        yield code


def lines_of(code: CodeType) -> set[int]:
    first = None if code.co_name.startswith("<") else code.co_firstlineno
    return {line for _, _, line in code.co_lines() if line is not None and line != first}


def read() -> None:
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        lines = {line for code in functions_in(compile(text, path, "exec")) for line in lines_of(code)}
        code = {number: line.partition("  #")[0].strip() for number, line in enumerate(text.splitlines(), 1)}
        left[str(path.relative_to(ROOT))] = {n: code[n] for n in sorted(lines) if MENTIONS.search(code[n])}


def lines_left(code: CodeType) -> set[int]:
    if id(code) not in seen:  # a module may be imported through a symbolic link
        file = os.path.relpath(os.path.realpath(code.co_filename), ROOT)
        seen[id(code)] = code, file, lines_of(code) & left.get(file, {}).keys()
    return seen[id(code)][2]


def on_call(frame: FrameType, event: str, value: Any) -> Any:
    return on_line if lines_left(frame.f_code) else None


def on_line(frame: FrameType, event: str, value: Any) -> Any:
    if event == "line" and frame.f_lineno in (lines := lines_left(frame.f_code)):
        lines.remove(frame.f_lineno)
        os.write(hits.fileno(), f"{seen[id(frame.f_code)][1]}:{frame.f_lineno}\n".encode())
    return on_line


def main(arguments: list[str]) -> int:
    import pytest

    read()
    threading.settrace(on_call)
    sys.settrace(on_call)
    status = int(pytest.main(["-q", "-p", "no:cacheprovider", *(arguments or [str(TESTS)])]))
    sys.settrace(None)
    hits.seek(0)
    for file, line in (hit.split(":") for hit in hits.read().decode().split()):
        left[file].pop(int(line), None)
    excuses = (TESTS / "cuda_lines.txt").read_text().splitlines()
    entries = [line.partition(": ")[::2] for line in excuses if ": " in line]
    for file, lines in left.items():
        for number, text in lines.items():
            if not any(file.startswith(start) and part in text for start, part in entries):
                print(f"not executed: {file}:{number}: {text}")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

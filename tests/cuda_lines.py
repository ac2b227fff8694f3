"""Lists the lines about CUDA, streams, events, graphs and memory that no test has executed. See `make test-gpu-lines`.

    coverage run -m pytest [options and files]    # any number of runs; also counts child processes
    python tests/cuda_lines.py                    # combines all runs since `coverage erase`

cuda_lines.txt lists lines that need not be executed: a reason, and below it lines "path: text". An entry excuses each
line of a file, or of the files in a folder, that contains the text. Exits with 1 if there are other lines. Also prints
entries that excuse no line, which may differ between CPUs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from coverage import Coverage

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
FOLDERS = ("vit_fast", "kernels", "export", "benchmarks")
MENTIONS = re.compile(r"cuda|(?<![a-z])stream(?!ed)|(?<![a-z])event|(?<!para)(?<!full)graph|memory", re.IGNORECASE)


def lines_of(code: CodeType) -> Iterator[int]:
    """Yields the lines of functions; an import executes all others."""
    if code.co_flags & 2:  # has local variables: no class or module
        first = None if code.co_name.startswith("<") else code.co_firstlineno
        yield from (line for _, _, line in code.co_lines() if line is not None and line != first)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from lines_of(each)


def main() -> int:
    coverage = Coverage(config_file=ROOT / "pyproject.toml")
    coverage.combine(keep=True)
    executed = coverage.get_data()
    excuses = [line.partition(": ")[::2] for line in (TESTS / "cuda_lines.txt").read_text().splitlines()]
    unused = {(start, part) for start, part in excuses if part}
    status = 0
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text, file = path.read_text(), str(path.relative_to(ROOT))
        left = {*lines_of(compile(text, path, "exec"))} - {*(executed.lines(str(path)) or ())}
        for number, line in enumerate(text.splitlines(), 1):
            code = line.partition("  #")[0].strip()
            if number in left and MENTIONS.search(code):
                fitting = {(start, part) for start, part in excuses if part and file.startswith(start) and part in code}
                unused -= fitting
                if not fitting:
                    print(f"not executed: {file}:{number}: {code}")
                    status = 1
    for start, part in sorted(unused):
        print(f"excuses no line on this machine: {start}: {part}")
    return status


if __name__ == "__main__":
    sys.exit(main())

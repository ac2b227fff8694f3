"""A committed record as a markdown table, and the blocks of a document that show one.

    python -m vit_fast.benchmarks.readme_table RECORD.json       prints the table
    python -m vit_fast.benchmarks.readme_table --fill README.md  puts it between the marks that name a record

A block starts with the line `<!-- record: PATH -->`, PATH relative to the document, and ends with `<!-- /record -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from .records import read_record
from .report import markdown, objections

_BLOCK = re.compile(r"(<!-- record: (\S+) -->\n).*?(<!-- /record -->)", re.DOTALL)


def fill(document: str, folder: Path) -> str:
    """The document with every block replaced by its record's table; of a busy machine no figure goes into a document.

    Args:
        document: Markdown.
        folder: Where the records' paths start.
    Raises:
        OSError, ValueError: see records.read_record; or a record is none to cite, see report.objections.
    """

    def filled(match: re.Match[str]) -> str:
        record = read_record(folder / match[2])
        if reasons := objections(record):
            raise ValueError(f"{match[2]}: not to be cited: {'; '.join(reasons)}")
        return f"{match[1]}{markdown(record)}{match[3]}"

    return _BLOCK.sub(filled, document)


def main(arguments: list[str]) -> None:
    try:
        if len(arguments) == 2 and arguments[0] == "--fill":
            path = Path(arguments[1])
            path.write_text(fill(path.read_text(), path.parent))
        elif len(arguments) == 1:
            sys.stdout.write(markdown(read_record(arguments[0])))
        else:
            sys.exit("usage: python -m vit_fast.benchmarks.readme_table RECORD.json | --fill DOCUMENT.md")
    except (OSError, ValueError) as error:
        sys.exit(f"readme_table: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])

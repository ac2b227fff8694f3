"""A committed record as a markdown table, and the blocks of a document that show one.

    python -m vit_fast.benchmarks.readme_table RECORD.json       prints the table
    python -m vit_fast.benchmarks.readme_table --fill README.md  puts it between the marks that name a record
    python -m vit_fast.benchmarks.readme_table --check RECORD    refuses one that nobody should cite

A block starts with the line `<!-- record: PATH -->`, PATH relative to the document, and ends with `<!-- /record -->`.
`<!-- summary: PATH -->` to `<!-- /record -->` holds only the best of ours beside the best peer.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from .records import Record, read_record
from .report import markdown, objections, summary

_BLOCK = re.compile(r"(<!-- (record|summary): (\S+) -->\n).*?(<!-- /record -->)", re.DOTALL)
_TABLES = {"record": markdown, "summary": summary}


def fill(document: str, folder: Path) -> str:
    """The document with every block filled from its record; of a busy machine no figure goes into a document.

    Args:
        document: Markdown.
        folder: Where the records' paths start.
    Raises:
        OSError, ValueError: see records.read_record; or a record is none to cite, see report.objections.
    """

    return _BLOCK.sub(lambda match: f"{match[1]}{_TABLES[match[2]](check(folder / match[3]))}{match[4]}", document)


def check(path: Path) -> Record:
    """A record to cite; see fill."""
    record = read_record(path)
    if reasons := objections(record):
        raise ValueError(f"{path.name}: not to be cited: {'; '.join(reasons)}")
    return record


def main(arguments: list[str]) -> None:
    try:
        match arguments:
            case ["--fill", document]:
                Path(document).write_text(fill(Path(document).read_text(), Path(document).parent))
            case ["--check", record]:
                check(Path(record))
            case [record]:
                sys.stdout.write(markdown(read_record(record)))
            case _:
                sys.exit("usage: python -m vit_fast.benchmarks.readme_table [--check] RECORD.json | --fill DOCUMENT.md")
    except (OSError, ValueError) as error:
        sys.exit(f"readme_table: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])

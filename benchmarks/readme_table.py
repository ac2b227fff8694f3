"""`python -m vit_fast.benchmarks.readme_table RECORD`: a committed record as a markdown table for the README."""

from __future__ import annotations

import sys

from .records import read_record
from .report import markdown


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        sys.exit("usage: python -m vit_fast.benchmarks.readme_table RECORD.json")
    try:
        sys.stdout.write(markdown(read_record(arguments[0])))
    except (OSError, ValueError) as error:
        sys.exit(f"readme_table: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Tables of documents, filled from records that may be cited.

python docs/make_tables.py --check RECORD
    Fails if the record must not be cited; otherwise prints the name of the folder for records of its machine.
python docs/make_tables.py --fill README.md
    Fills blocks of a document, which start with `<!-- summary: PATTERN -->`, a pattern of records relative to the
    document, and end with `<!-- /summary -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from vit_fast.benchmarks.records import Record, folder_name, read_record
from vit_fast.benchmarks.report import COLUMNS, contests, heading, objections
from vit_fast.measure.clock import format_number

_BLOCK = re.compile(r"(<!-- summary: (\S+) -->\n).*?(<!-- /summary -->)", re.DOTALL)
_TITLES = (
    "machine", "model", "precision", "batch", "vit-fast (images/s)", "timm", "best peer", "ratio to best peer",
)  # fmt: skip


def summary(found: Mapping[str, Record]) -> str:
    """Returns a table of vit-fast's fastest candidate, timm and the best peer of each group; and notes on each record.

    Args:
        found: Records by their folders, relative to the document.
    """
    lines, notes = [f"| {' | '.join(_TITLES)} |", "|---|---|---|---:|---|---:|---|---:|"], []
    for folder, record in found.items():
        gains = []
        for alike, own in contests(record):
            if own is None:
                continue
            rates = {row["candidate"]: row["images_per_s"] for row in alike}
            best, peer = (f"{format_number(rates[name])} (`{name}`)" for name in (own["candidate"], own["best_peer"]))
            about = record["machine"]["device"], own["model"], own["precision"], str(own["batch"])
            timm = format_number(rates["timm"]) if "timm" in rates else ""
            lines.append(f"| {' | '.join((*about, best, timm, peer, COLUMNS['x best peer'](own)))} |")
            gains += [own["images_per_s"] / rates["timm"]] if timm else []
        bounds = dict.fromkeys(f"{gain:.1f}" for gain in (min(gains), max(gains))) if gains else ()
        gain = f"vit-fast is {' to '.join(bounds)} times as fast as timm on " if bounds else ""
        files = f"[all results]({folder}/table.md), [plot]({folder}/plot.png)"
        notes.append(f"- {gain}{heading(record)} ({files})")
    return "\n".join([*lines, "", *notes]) + "\n"


def fill(document: Path) -> None:
    """Fills every block of a markdown document; raises ValueError if a record is missing or must not be cited."""
    folder = document.parent

    def filled(match: re.Match[str]) -> str:
        if not (paths := sorted(folder.glob(match[2]))):
            raise ValueError(f"{document}: {match[2]} must match a record")
        text = summary({path.parent.relative_to(folder).as_posix(): check(path) for path in paths})
        return f"{match[1]}{text}{match[3]}"

    document.write_text(_BLOCK.sub(filled, document.read_text()))


def check(path: Path) -> Record:
    """Reads a record to cite; see objections."""
    record = read_record(path)
    if reasons := objections(record):
        raise ValueError(f"{path.name} must not be cited: {'; '.join(reasons)}")
    return record


if __name__ == "__main__":
    if sys.argv[1] == "--fill":
        fill(Path(sys.argv[2]))
    else:
        print(folder_name(check(Path(sys.argv[2]))["machine"]))

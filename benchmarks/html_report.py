"""Records as one HTML page that needs no network: `vit-fast report`, and beside every record of `vit-fast bench`.

The tables are complete without a script; the script of report.html sorts them. A record that is not of `vit-fast bench`
(`make gpu-check`, `vit-fast kernels --host --json`) is a table of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .explain import tables
from .records import Record, is_bench
from .report import ceilings_line, cells, command, heading, not_measured, objections, remarks

REPORT_NAME = "report.html"
_TEMPLATE = Path(__file__).with_name(REPORT_NAME)
_SETTINGS = ("batch", "model", "dtype")


def render(records: Mapping[str, Record]) -> str:
    """The page.

    Args:
        records: By the name under which each is shown; see records.read_any.
    """
    parts = []
    for name, record in records.items():
        parts.append(f"<h2>{escape(name)}</h2>")
        parts += _bench(record) if is_bench(record) else [_other(record)]
        parts.append(_details("Environment", _table("environment", ("", ""), _flat(record, "machine", "plan"))))
    return _TEMPLATE.read_text(encoding="utf-8").replace("<!-- body -->", "\n".join(parts), 1)


def _bench(record: Record) -> Iterable[str]:
    yield f"<p>{escape(heading(record))}; {escape(ceilings_line(record))}.</p>"
    if reasons := objections(record):
        yield f'<p class="objection" role="note">Not to be cited: {escape("; ".join(reasons))}.</p>'
    if record["controls"]:
        yield "<ul>" + "".join(f"<li>{escape(remark)}</li>" for remark in remarks(record)) + "</ul>"
    columns = cells(record)
    # what all rows have in common stands above them, where a narrow screen needs no column for it; of the rest last
    common = {title: columns.pop(title)[0] for title in _SETTINGS if len(set(columns[title])) == 1}
    ends = {title: columns.pop(title) for title in ("model", "dtype") if title in columns}
    columns = {"candidate": columns["candidate"]} | columns | ends
    caption = ", ".join([*(f"{title} {value}" for title, value in common.items()), "click a heading to sort"])
    yield _table(caption, list(columns), zip(*columns.values(), strict=True))
    if notes := not_measured(record):
        yield "<p>Not measured:</p><ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"
    for caption, titles, lines in tables(record):
        yield _table(f"{caption}; click a heading to sort", titles, lines)
    yield f"<p>The same again:</p><pre tabindex=0>{escape(command(record))}</pre>"


def _other(record: Record) -> str:
    """Tabulates the rows of any other record: fields that are a number, a word or a measured median."""
    rows = [{name: _plain(value) for name, value in row.items()} for row in record["rows"]]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) for row in rows)]
    first = f"<p>{escape(str(record['note']))}</p>" if record.get("note") else ""
    return first + _table("click a heading to sort", names, [[row.get(name, "") for name in names] for row in rows])


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return _plain(value.get("median"))
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _table(caption: str, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that scrolls by itself; the first cell of a row is its heading."""
    head = "".join(f'<th scope=col aria-sort="none">{escape(title)}</th>' for title in titles)
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td>{escape(str(cell))}</td>" for cell in others)
        lines.append(f"<tr><th scope=row>{escape(str(first))}</th>{cells}</tr>\n")
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex=0><table><caption>{escape(caption)}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>\n{''.join(lines)}</tbody></table></div>"
    )


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _flat(record: Mapping[str, Any], *names: str) -> list[tuple[str, str]]:
    """Nested values as lines of "a.b": value."""
    found = []
    for name in names:
        value = record.get(name)
        if isinstance(value, dict):
            found += [(f"{name}.{key}", text) for key, text in _flat(value, *value)]
        elif value is not None:
            found.append((name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return found

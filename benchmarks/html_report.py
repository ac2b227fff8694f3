"""Records as one HTML page that needs no network: `vit-fast report`, and beside every record of `vit-fast bench`.

What there is to read is written here, as tables, and needs no script either; that of report.html sorts them and draws
curves. A record of `vit-fast bench` has curves; any other of ours (`make gpu-check`, `vit-fast kernels --host --json`)
is a table of its rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .explain import tables
from .plot import colour_of
from .records import Record, is_bench
from .report import ceilings_line, cells, command, contests, heading, label, not_measured, objections, remarks
from .rows import Row, measured

REPORT_NAME = "report.html"
_TEMPLATE = Path(__file__).with_name(REPORT_NAME)
_SETTINGS = ("batch", "model", "dtype")
# The curves of a record: title, what stays the same along one, x and y with their units, and whether x is logarithmic.
_CURVES = (
    ("Latency and throughput", ("model", "dtype", "img_size"), ("ms", "ms per call"), ("images_per_s", "images/s")),
    ("Batch", ("model", "dtype", "img_size"), ("requested_batch", "images per call"), ("images_per_s", "images/s")),
    ("Tokens", ("model", "dtype", "requested_batch"), ("tokens", "tokens per image"), ("TFLOP_per_s", "TFLOP/s")),
    ("Model size", ("dtype", "requested_batch"), ("GFLOP_per_image", "GFLOP per image"), ("TFLOP_per_s", "TFLOP/s")),
)  # fmt: skip


def render(records: Mapping[str, Record]) -> str:
    """The page.

    Args:
        records: By the name under which each is shown; see records.read_any.
    """
    curves: list[dict[str, Any]] = []
    parts = []
    for name, record in records.items():
        parts.append(f"<h2>{escape(name)}</h2>")
        parts += _bench(record, curves) if is_bench(record) else [_other(record)]
        parts.append(_details("Environment", _table("environment", ("", ""), _flat(record, "machine", "plan"))))
    page = _TEMPLATE.read_text(encoding="utf-8")
    page = page.replace("<!-- body -->", "\n".join(parts), 1)
    # "</script>" in a name must not end the element
    return page.replace("/* curves */", json.dumps(curves, allow_nan=False).replace("<", "\\u003c"), 1)


def _bench(record: Record, curves: list[dict[str, Any]]) -> Iterable[str]:
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
    for curve in _curves(record):
        curves.append(curve)
        yield f'<figure data-curve="{len(curves) - 1}"><figcaption>{escape(curve["title"])}</figcaption></figure>'
    for caption, titles, lines in tables(record):
        yield _table(f"{caption}; click a heading to sort", titles, lines)
    yield f"<p>The same again:</p><pre tabindex=0>{escape(command(record))}</pre>"


def _curves(record: Record) -> Iterable[dict[str, Any]]:
    """Yields the curves that the script draws; last, where bytes were counted, the roofline."""
    rows = [row for rows in contests(record).values() for row in measured(rows)]
    for title, same, x, y in _CURVES:
        for group, lines in _series(rows, same, x[0], y[0]).items():
            if any(len({point["x"] for point in line["points"]}) > 1 for line in lines):
                yield {"title": f"{title}: {group}", "x": x[1], "y": y[1], "series": lines}
    ceilings = record["ceilings"]
    counted = [row | {"intensity": row["FLOP"] / row["bytes"]} for row in rows if row.get("bytes") and row.get("FLOP")]
    for lines in _series(counted, (), "intensity", "TFLOP_per_s").values() if ceilings else ():
        slope = ceilings["copy_GB_per_s"] / 1e3
        yield {
            "title": "Roofline: rows under the ceilings of the same run",
            "x": "FLOP a byte, of operands and results of all products", "y": "TFLOP/s",
            "series": lines, "scatter": True,
            "roofs": [{"name": n, "flat": flat, "slope": slope} for n, flat in ceilings["matmul_TFLOP_per_s"].items()],
        }  # fmt: skip


def _series(rows: Iterable[Row], same: Sequence[str], x: str, y: str) -> dict[str, list[dict[str, Any]]]:
    """Returns a line for each subject, by the fields that stay the same."""
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        if row.get(x) is not None and row.get(y) is not None and all(field in row for field in same):
            group = ", ".join("x".join(map(str, v)) if isinstance(v := row[f], list) else f"{f} {v}" for f in same)
            about = f"{label(row)}, {row['model']}, {row['dtype']}, batch {row['batch']}"
            point = {"x": row[x], "y": row[y], "tip": f"{about}: {row[x]:.4g}, {row[y]:.4g}"}
            point |= {"peer": row["peer"], "compiled": row["compile_mode"] != "none"}
            groups.setdefault(group, {}).setdefault(row["subject"], []).append(point)
    return {
        group: [
            {"name": name, "colour": colour_of(name), "points": sorted(points, key=lambda p: p["x"])}
            for name, points in lines.items()
        ]
        for group, lines in groups.items()
    }


def _other(record: Record) -> str:
    """The rows of a record without curves, one column for each field that is a number, a word or a measured median."""
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

"""A record as an HTML page, which needs no network, and as a plot.

The script of report.html sorts the tables. A record of `make gpu-check` or `vit-fast kernels --host --json` becomes a
table of its rows.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from vit_fast.measure.clock import SAME, UNKNOWN, format_number

from . import report
from .records import RECORD_NAME, Record, Row, damaged, is_bench, measured, to_json
from .report import Table

REPORT_NAME = "report.html"
INK, FAINT, ACCENT = "#1e293b", "#64748b", "#0f766e"


def files(name: str, record: Record) -> dict[str, bytes]:
    """Returns the files of a record by name: JSON, tables, plot and page."""
    found = {RECORD_NAME: to_json(record), "table.md": report.markdown(record).encode(), "plot.png": draw(record)}
    return found | {REPORT_NAME: render({name: record}).encode()}


def render(records: Mapping[str, Record]) -> str:
    """Returns the HTML page of records by name; see records.read_any."""
    parts: list[str] = []
    for name, record in records.items():
        with damaged(name):
            parts += _sections(name, record)
    template = Path(__file__).with_name(REPORT_NAME).read_text(encoding="utf-8")
    return template.replace("<!-- body -->", "\n".join(parts), 1)


def _sections(name: str, record: Record) -> Iterator[str]:
    yield f"<h2>{escape(name)}</h2>"
    if is_bench(record) and (reasons := report.objections(record)):
        yield f'<p class="objection" role="note">Must not be cited: {escape("; ".join(reasons))}.</p>'
    yield from map(_html, report.sections(record) if is_bench(record) else _other(record))
    environment = list(_flat({part: record.get(part) for part in ("machine", "configuration")}))
    yield f"<details><summary>Environment</summary>{_html(Table('environment', ('', ''), environment))}</details>"


def _html(part: str | list[str] | Table) -> str:
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>"
    if not isinstance(part, Table):
        return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in part) + "</ul>"
    caption = escape(part.caption)
    head = "".join(f'<th scope=col aria-sort="none">{escape(title)}</th>' for title in part.titles)
    lines = []
    for first, *others in part.rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        lines.append(f"<tr><th scope=row>{escape(first)}</th>{cells}</tr>\n")
    return (
        f'<div class="scroll" role="region" aria-label="{caption}" tabindex=0><table><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>\n{''.join(lines)}</tbody></table></div>"
    )


def _other(record: Record) -> Iterator[str | Table]:
    """Yields the note of another record, and a table of its rows: texts, numbers and medians."""
    if record.get("note"):
        yield str(record["note"])
    rows = [{name: _plain(value) for name, value in row.items()} for row in record["rows"]]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) for row in rows)]
    yield Table("rows", names, [[row.get(name, "") for name in names] for row in rows])


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return _plain(value.get("median"))
    if isinstance(value, float):
        return format_number(value, 4)
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def draw(record: Record) -> bytes:
    """Draws a PNG of the measured rows, fastest on top, with whiskers from the 20th to the 80th percentile."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = {title: found[::-1] for title, rows in report.groups(record).items() if (found := measured(rows))}
    panels = panels or {"nothing was measured": []}
    lines = [report.heading(record), report.ceilings_line(record), *report.not_measured(record)[:4]]
    foot = "\n".join(part for line in lines for part in textwrap.wrap(line[:400], 150))
    inches = 0.8 + sum(0.6 + 0.32 * len(rows) for rows in panels.values()) + 0.13 * foot.count("\n")
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(10.0, inches), dpi=150, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    title = "ViT throughput, images per second (green: vit-fast; gray: peers; lines: p20 to p80)"
    figure.suptitle(title, x=0.02, ha="left", size=12, weight="bold", color=INK)
    figure.supxlabel(foot, x=0.02, ha="left", size=7, color=FAINT, parse_math=False)
    heights = [1 + len(rows) for rows in panels.values()]
    each = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, rows) in zip(each, panels.items(), strict=True):
        axes.set_title(name, loc="left", fontsize=10, color=INK, weight="bold")
        axes.spines[:].set_visible(False)
        axes.set_xticks([])
        axes.tick_params(left=False, labelsize=9, labelcolor=INK)
        _draw_bars(axes, rows)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_bars(axes: Any, rows: list[Row]) -> None:
    slow, middle, fast = ([row["batch"] / row[field] * 1e3 for row in rows] for field in ("ms_p80", "ms", "ms_p20"))
    whiskers = [[b - a for a, b in zip(low, high, strict=True)] for low, high in ((slow, middle), (middle, fast))]
    colors = [FAINT if row["peer"] else ACCENT for row in rows]
    bars = axes.barh(range(len(rows)), middle, 0.72, color=colors, xerr=whiskers, error_kw={"ecolor": INK})
    texts = []
    for row, rate in zip(rows, middle, strict=True):
        ratio = "" if row["ratio_to_best_peer"] is None else f"{row['ratio_to_best_peer']:.2f}x best peer"
        ratio = {SAME: "no difference", UNKNOWN: "not ranked"}.get(row["verdict"], ratio)
        texts.append(", ".join(filter(None, (format_number(rate), ratio))))
    axes.bar_label(bars, texts, padding=4, fontsize=8.5, color=INK)
    axes.set_yticks(range(len(rows)), [report.label(row) for row in rows])
    axes.set_xlim(0, 1.3 * max(fast, default=1.0))

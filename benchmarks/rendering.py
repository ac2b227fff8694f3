"""A record as an HTML page, which needs no network, and as a plot.

The script of report.html sorts the tables. A record of `make gpu-check` or `vit-fast kernels --host --json` becomes a
table of its rows.
"""

from __future__ import annotations

import colorsys
import io
import textwrap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from vit_fast.measure.compare import SAME, UNKNOWN, format_number

from .records import RECORD_NAME, is_bench, to_json
from .report import (
    ceilings_line,
    cells,
    command,
    groups,
    heading,
    label,
    markdown,
    not_measured,
    objections,
    remarks,
    tables,
)
from .rows import Record, Row, measured

REPORT_NAME = "report.html"
_TEMPLATE = Path(__file__).with_name(REPORT_NAME)
_SETTINGS = ("batch", "model", "dtype")
INK, FAINT = "#1e293b", "#64748b"
# Colours of frequent candidates; those of others are computed from their names.
COLOURS = {
    "timm+fused+frozen": "#0f766e", "timm+fused": "#4ade80", "timm": "#4f7fdb", "timm+compile": "#7c6bd6",
    "timm+compile:freezing": "#c2417c", "timm+fused+compile:freezing": "#16a34a", "openvino": "#b42318",
    "onnxruntime": "#d97706", "onnxruntime-int8": "#facc15", "transformers": "#96764a", "torchvision": "#64748b",
    "sdpa": "#38bdf8", "eager": "#cbd5e1", "triton": "#14b8a6", "triton-frozen": "#065f46",
}  # fmt: skip
BAR_INCHES, TITLE_INCHES, HEAD_INCHES, LINE_INCHES, WIDTH_INCHES = 0.32, 0.55, 0.6, 0.13, 10.0
# Characters of a line at the foot.
FOOT_CHARACTERS = 150
LABEL_SHARE = 0.0095  # of the width, per character of a label


def files(name: str, record: Record) -> dict[str, bytes]:
    """Returns the files of a record by name: JSON, tables, plot and page."""
    found = {RECORD_NAME: to_json(record), "table.md": markdown(record).encode(), "plot.png": draw(record)}
    return found | {REPORT_NAME: render({name: record}).encode()}


def render(records: Mapping[str, Record]) -> str:
    """Returns the HTML page of records by name; see records.read_any."""
    parts = []
    for name, record in records.items():
        parts.append(f"<h2>{escape(name)}</h2>")
        parts += _bench(record) if is_bench(record) else [_other(record)]
        parts.append(
            _details("Environment", _table("environment", ("", ""), _flat(record, "machine", "configuration")))
        )
    return _TEMPLATE.read_text(encoding="utf-8").replace("<!-- body -->", "\n".join(parts), 1)


def _bench(record: Record) -> Iterable[str]:
    yield f"<p>{escape(heading(record))}; {escape(ceilings_line(record))}.</p>"
    if reasons := objections(record):
        yield f'<p class="objection" role="note">Must not be cited: {escape("; ".join(reasons))}.</p>'
    if record["controls"]:
        yield "<ul>" + "".join(f"<li>{escape(remark)}</li>" for remark in remarks(record)) + "</ul>"
    columns = cells(record)
    # common settings go into the caption, the others into the last columns
    common = {title: columns.pop(title)[0] for title in _SETTINGS if len(set(columns[title])) == 1}
    ends = {title: columns.pop(title) for title in ("model", "dtype") if title in columns}
    columns = {"candidate": columns["candidate"]} | columns | ends
    caption = ", ".join([*(f"{title} {value}" for title, value in common.items()), "click a heading to sort"])
    yield _table(caption, list(columns), zip(*columns.values(), strict=True))
    if notes := not_measured(record):
        yield "<p>Not measured:</p><ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"
    for caption, titles, lines in tables(record):
        yield _table(f"{caption}; click a heading to sort", titles, lines)
    yield f"<p>Command:</p><pre tabindex=0>{escape(command(record))}</pre>"


def _other(record: Record) -> str:
    """Tabulates the rows of another record: texts, numbers and medians."""
    rows = [{name: _plain(value) for name, value in row.items()} for row in record["rows"]]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) for row in rows)]
    first = f"<p>{escape(str(record['note']))}</p>" if record.get("note") else ""
    return first + _table("click a heading to sort", names, [[row.get(name, "") for name in names] for row in rows])


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return _plain(value.get("median"))
    if isinstance(value, float):
        return format_number(value, 4)
    return value if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _table(caption: str, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that scrolls; the first cell of a row is its heading."""
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
    found = []
    for name in names:
        value = record.get(name)
        if isinstance(value, dict):
            found += [(f"{name}.{key}", text) for key, text in _flat(value, *value)]
        elif value is not None:
            found.append((name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return found


def colour_of(name: str) -> str:
    """Returns the colour of a candidate, the same in every plot and report."""
    drawn = zlib.crc32(name.encode())
    lightness, saturation = 0.35 + 0.3 * (drawn >> 16 & 255) / 255, 0.4 + 0.4 * (drawn >> 24) / 255
    parts = colorsys.hls_to_rgb((drawn & 0xFFFF) / 2**16, lightness, saturation)
    return COLOURS.get(name, "#" + "".join(f"{round(255 * part):02x}" for part in parts))


def draw(record: Record) -> bytes:
    """Draws a PNG of the measured rows, fastest on top, with whiskers from the 20th to the 80th percentile."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    # A group without measured rows is named at the foot, unless there is nothing else to draw.
    panels = {title: rows for title, rows in groups(record).items() if measured(rows)} or groups(record)
    heights = [max(1, len(measured(rows))) * BAR_INCHES for rows in panels.values()]
    lines = [heading(record), ceilings_line(record), *(_shortened(line) for line in not_measured(record)[:4])]
    foot = "\n".join(part for line in lines for part in textwrap.wrap(line, FOOT_CHARACTERS))
    foot_inches = 0.4 + LINE_INCHES * (foot.count("\n") + 1)
    total = HEAD_INCHES + sum(height + TITLE_INCHES for height in heights) + foot_inches
    figure = Figure(figsize=(WIDTH_INCHES, total), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    title = "ViT throughput, images per second"
    figure.text(0.02, 1 - 0.3 / total, title, size=13, weight="bold", color=INK, va="center")
    handles = [
        Line2D([], [], linestyle="none", label="bold: vit-fast"),
        Line2D([], [], color=INK, linewidth=1.2, label="p20 to p80"),
    ]
    anchor = (0.985, 1 - 0.3 / total)
    place = {"loc": "center right", "bbox_to_anchor": anchor, "ncols": 2}
    figure.legend(handles=handles, frameon=False, fontsize=8, labelcolor=INK, **place)
    bottom = total - HEAD_INCHES
    left = max(0.23, LABEL_SHARE * max((len(label(row)) for rows in panels.values() for row in rows), default=0))
    for (name, rows), height in zip(panels.items(), heights, strict=True):
        bottom -= height + TITLE_INCHES
        axes = figure.add_axes((left, bottom / total, 0.8 - left, height / total))
        _draw_panel(axes, name, rows)
    figure.text(0.02, (foot_inches - 0.25) / total, foot, size=7, color=FAINT, va="top", parse_math=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_panel(axes: Any, title: str, rows: list[Row]) -> None:
    shown = measured(rows)[::-1]
    axes.set_title(title, loc="left", fontsize=10, color=INK, weight="bold")
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xticks([])
    axes.tick_params(left=False, labelsize=9, labelcolor=INK)
    if not shown:
        axes.set_yticks([])
        axes.text(0, 0.5, "nothing was measured", color=FAINT, transform=axes.transAxes, va="center")
        return
    longest = max(row["batch"] / row["ms_p20"] * 1e3 for row in shown)
    for position, row in enumerate(shown):
        rate, slow, fast = (row["batch"] / row[field] * 1e3 for field in ("ms", "ms_p80", "ms_p20"))
        axes.barh(position, rate, color=colour_of(row["candidate"]), linewidth=0, height=0.72)
        axes.plot([slow, fast], [position, position], color=INK, linewidth=1.2, solid_capstyle="butt")
        texts = {1.02: format_number(rate)}
        if row["ratio_to_best_peer"] is not None:
            verdict = {SAME: "no difference", UNKNOWN: "not ranked"}.get(row["verdict"])
            texts[1.14] = verdict or f"{row['ratio_to_best_peer']:.2f}x best peer"
        for x, text in texts.items():
            axes.text(x, position, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5, color=INK)
    axes.set_yticks(range(len(shown)), [label(row) for row in shown])
    for name, row in zip(axes.get_yticklabels(), shown, strict=True):
        name.set_fontweight("normal" if row["peer"] else "bold")
    axes.set_xlim(0, longest)
    axes.set_ylim(-0.6, len(shown) - 0.4)


def _shortened(text: str, most: int = 170) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."

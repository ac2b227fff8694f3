"""A record as an HTML page, which needs no network, and as a plot.

The script of report.html sorts the tables. A record of `make gpu-check` or `vit-fast kernels --host --json` becomes a
table of its rows.
"""

from __future__ import annotations

import colorsys
import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from vit_fast.measure.candidate import COMPILE_MODES
from vit_fast.measure.clock import SAME, UNKNOWN, format_number

from . import report
from .candidates import CANDIDATES, DEFAULT_NAMES
from .records import RECORD_NAME, is_bench, to_json
from .rows import Record, Row, measured

REPORT_NAME = "report.html"
_TEMPLATE = Path(__file__).with_name(REPORT_NAME)
INK, FAINT, OURS = "#1e293b", "#64748b", "#0f766e"
GOLDEN = 0.618034  # steps of the hue that keep any number of consecutive colours apart
_MODES = [one.compiled_in(mode).name for one in CANDIDATES.values() for mode in COMPILE_MODES[: 1 + 4 * one.compilable]]
# All names, the most frequent first; their order decides the colours.
NAMES = list(dict.fromkeys((*DEFAULT_NAMES["cpu"], *DEFAULT_NAMES["cuda"], *_MODES)))


def files(name: str, record: Record) -> dict[str, bytes]:
    """Returns the files of a record by name: JSON, tables, plot and page."""
    found = {RECORD_NAME: to_json(record), "table.md": report.markdown(record).encode(), "plot.png": draw(record)}
    return found | {REPORT_NAME: render({name: record}).encode()}


def render(records: Mapping[str, Record]) -> str:
    """Returns the HTML page of records by name; see records.read_any."""
    parts = []
    for name, record in records.items():
        parts.append(f"<h2>{escape(name)}</h2>")
        parts += _bench(record) if is_bench(record) else [_other(record)]
        environment = _table("environment", ("", ""), _flat(record, "machine", "configuration"))
        parts.append(f"<details><summary>Environment</summary>{environment}</details>")
    return _TEMPLATE.read_text(encoding="utf-8").replace("<!-- body -->", "\n".join(parts), 1)


def _bench(record: Record) -> Iterable[str]:
    yield f"<p>{escape(report.heading(record))}; {escape(report.ceilings_line(record))}.</p>"
    if reasons := report.objections(record):
        yield f'<p class="objection" role="note">Must not be cited: {escape("; ".join(reasons))}.</p>'
    if record["controls"]:
        yield "<ul>" + "".join(f"<li>{escape(remark)}</li>" for remark in report.remarks(record)) + "</ul>"
    for caption, titles, lines in report.tables(record):
        yield _table(f"{caption}; click a heading to sort", titles, lines)
    if notes := report.not_measured(record):
        yield "<p>Not measured:</p><ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"
    yield f"<p>Command:</p><pre tabindex=0>{escape(report.command(record))}</pre>"


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
    colour = '<th scope=row style="border-left: .4rem solid {}">' if titles[0] == "candidate" else "<th scope=row>"
    head = "".join(f'<th scope=col aria-sort="none">{escape(title)}</th>' for title in titles)
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td>{escape(str(cell))}</td>" for cell in others)
        lines.append(f"<tr>{colour.format(colour_of(str(first)))}{escape(str(first))}</th>{cells}</tr>\n")
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex=0><table><caption>{escape(caption)}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>\n{''.join(lines)}</tbody></table></div>"
    )


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
    """Returns the colour of a candidate, the same in every plot and report: strong for ours, pale for peers."""
    name = name.partition(" (")[0]  # the notes of a label
    if name not in NAMES:
        return FAINT
    saturation, value = (0.4, 0.85) if CANDIDATES[name.partition("+compile")[0]].peer else (0.9, 0.6)
    place = NAMES.index(name)
    parts = colorsys.hsv_to_rgb((0.862 + GOLDEN * place) % 1, saturation, value - 0.1 * (place % 3))
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def draw(record: Record) -> bytes:
    """Draws a PNG of the measured rows, fastest on top, with whiskers from the 20th to the 80th percentile."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = {title: measured(rows)[::-1] for title, rows in report.groups(record).items() if measured(rows)}
    panels = panels or {"nothing was measured": []}
    notes = [line[:170] for line in report.not_measured(record)[:4]]
    lines = [report.heading(record), report.ceilings_line(record), *notes]
    foot = "\n".join(part for line in lines for part in textwrap.wrap(line, 150))
    inches = 0.8 + sum(0.6 + 0.32 * len(rows) for rows in panels.values()) + 0.13 * foot.count("\n")
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(10.0, inches), dpi=150, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    title = "ViT throughput, images per second (bold and strong: vit-fast; lines: p20 to p80)"
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
    colours = [colour_of(row["candidate"]) for row in rows]
    texts = []
    for row, rate in zip(rows, middle, strict=True):
        ratio = "" if row["ratio_to_best_peer"] is None else f"{row['ratio_to_best_peer']:.2f}x best peer"
        ratio = {SAME: "no difference", UNKNOWN: "not ranked"}.get(row["verdict"], ratio)
        texts.append(", ".join(filter(None, (format_number(rate), ratio))))
    bars = axes.barh(range(len(rows)), middle, 0.72, color=colours, xerr=whiskers, error_kw={"ecolor": INK})
    axes.bar_label(bars, texts, padding=4, fontsize=8.5, color=INK)
    axes.set_yticks(range(len(rows)), [report.label(row) for row in rows])
    for name, row in zip(axes.get_yticklabels(), rows, strict=True):
        name.set_fontweight("normal" if row["peer"] else "bold")
    axes.set_xlim(0, 1.3 * max(fast, default=1.0))

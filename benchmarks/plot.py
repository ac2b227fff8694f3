"""The plot of a record: bars of images a second, one panel for each model, dtype and batch size."""

from __future__ import annotations

import colorsys
import io
import textwrap
import zlib
from typing import Any

from vit_fast.measure.resolution import SAME, UNKNOWN

from .records import Record
from .report import ceilings_line, contests, format_rate, heading, label, not_measured
from .rows import Row, measured

INK, FAINT = "#1e293b", "#64748b"
# Of the candidates that are mostly seen together; the others' follow from their names.
COLOURS = {
    "timm+fused+frozen": "#0f766e", "timm+fused": "#4ade80", "timm": "#4f7fdb", "timm+compile": "#7c6bd6",
    "timm+compile:freezing": "#c2417c", "openvino": "#b42318", "onnxruntime": "#d97706", "onnxruntime-int8": "#facc15",
    "transformers": "#96764a", "torchvision": "#64748b", "sdpa": "#38bdf8", "eager": "#cbd5e1", "triton": "#14b8a6",
    "triton-frozen": "#065f46",
}  # fmt: skip
BAR_INCHES, TITLE_INCHES, HEAD_INCHES, LINE_INCHES, WIDTH_INCHES = 0.32, 0.55, 0.6, 0.13, 10.0
# Characters of the foot that fit beside one another, of wide ones.
FOOT_CHARACTERS = 150
LABEL_SHARE = 0.0095  # of the width, a character of a name in bold


def colour_of(name: str) -> str:
    """A candidate's own colour, the same in every plot and report."""
    drawn = zlib.crc32(name.encode())
    lightness, saturation = 0.35 + 0.3 * (drawn >> 16 & 255) / 255, 0.4 + 0.4 * (drawn >> 24) / 255
    parts = colorsys.hls_to_rgb((drawn & 0xFFFF) / 2**16, lightness, saturation)
    return COLOURS.get(name, "#" + "".join(f"{round(255 * part):02x}" for part in parts))


def draw(record: Record) -> bytes:
    """A PNG of every measured row, fastest on top; whiskers from the 20th to the 80th percentile.

    What was not measured is named at the foot. A record without one measured row still gives a picture that says so.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    # A contest in which nothing was measured is named at the foot, unless there is nothing else to draw.
    panels = {title: rows for title, rows in contests(record).items() if measured(rows)} or contests(record)
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
        axes.barh(position, rate, color=colour_of(row["subject"]), linewidth=0, height=0.72)
        axes.plot([slow, fast], [position, position], color=INK, linewidth=1.2, solid_capstyle="butt")
        texts = {1.02: format_rate(rate)}
        if row["ratio_to_best_peer"] is not None:
            told = {SAME: "no difference", UNKNOWN: "not ranked"}.get(row["verdict"])
            texts[1.14] = told or f"{row['ratio_to_best_peer']:.2f}x best peer"
        for x, text in texts.items():
            axes.text(x, position, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5, color=INK)
    axes.set_yticks(range(len(shown)), [label(row) for row in shown])
    for name, row in zip(axes.get_yticklabels(), shown, strict=True):
        name.set_fontweight("normal" if row["peer"] else "bold")
    axes.set_xlim(0, longest)
    axes.set_ylim(-0.6, len(shown) - 0.4)


def _shortened(text: str, most: int = 170) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."

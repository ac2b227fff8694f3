"""A record as text, as a plot, and as an HTML page that needs no network."""

from __future__ import annotations

import io
import json
import re
import shlex
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from vit_fast.measure.clock import QUIET_RUN, SAME, UNKNOWN, UNRANKABLE, format_number
from vit_fast.work import Work

from .preparation import PARTS, REST
from .records import Record, Row, ceiling_of, damaged, is_bench, is_lower, resolution_of

MOST_KERNELS = 8
MOST_ON_SCREEN = 7  # columns besides the candidate
INK, FAINT, ACCENT = "#1e293b", "#64748b", "#0f766e"


class Table(NamedTuple):
    caption: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]  # the first cell is a heading
    bars: Sequence[str] = ()  # HTML attributes of the cells with images/s, which draw a bar


def _number(field: str, pattern: str | int = 3) -> Callable[[Row], str]:
    """Formats a field by a format string, or with this number of significant digits."""

    def cell(row: Row) -> str:
        if (value := row.get(field)) is None:
            return ""
        return pattern.format(value) if isinstance(pattern, str) else format_number(value, pattern)

    return cell


def _ratio(row: Row) -> str:
    if row["ratio_interval"] is None:
        return _number("ratio_to_best_peer", "{:.2f}")(row)
    if row["verdict"] == UNKNOWN:
        return "?"
    is_same = row["verdict"] == SAME
    # more digits if a bound would round to 1, which means no difference
    low, high = (f"{bound:.{2 if is_same or abs(bound - 1) >= 0.005 else 4}f}" for bound in row["ratio_interval"])
    return f"{row['ratio_to_best_peer']:.2f} [{low}, {high}]" + (" =" if is_same else "")


# Cells of measured rows.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "images/s": _number("images_per_s"),
    "ms": _number("ms", 4),
    "[p20, p80]": lambda row: f"[{format_number(row['ms_p20'], 4)}, {format_number(row['ms_p80'], 4)}]",
    "p90 ms": _number("ms_p90", 4),
    "p99 ms": _number("ms_p99", 4),
    "host ms": lambda row: _number("host_ms")(row) + (" bound" if row.get("host_bound") else ""),
    "TFLOP/s": _number("TFLOP_per_s"),
    "of ceiling": lambda row: "above" if row["defect"] else _number("ceiling_share", "{:.0%}")(row),
    "floor ms": _number("floor_ms", 4),
    "x best peer": _ratio,
    "peak MiB": _number("peak_MiB", "{:,.1f}"),
    "max error": _number("max_error", "{:.1e}"),
    "first call s": _number("first_call_s"),
    "cold s": _number("cold_s"),
    "cold MiB": _number("cold_MiB", "{:,.0f}"),
    "agreement": _number("agreement", "{:.0%}"),
}
# On the screen, the most important ones first.
SCREEN = ("images/s", "x best peer", "ms", "max error", "agreement", "cold s", "p99 ms", "host ms")


def groups(record: Record, status: str = "") -> dict[str, list[Row]]:
    """Returns the rows by group and precision, fastest first; `status` selects rows."""
    grouped: dict[str, list[Row]] = defaultdict(list)
    for row in record["rows"]:
        if status in ("", row["status"]):
            size = "x".join(map(str, row["img_size"])) + (", data on the host" if row["data"] == "host" else "")
            task = "" if row["task"] == "inference" else ", training"
            precision = f"{row['precision']} (from {row['dtype']})" if is_lower(row) else row["dtype"]
            grouped[f"{row['model']}{task}, {precision}, batch {row['batch']}, {size}"].append(row)
    for rows in grouped.values():
        rows.sort(key=lambda row: -(row["images_per_s"] or 0))
    return grouped


def contests(record: Record) -> Iterator[tuple[list[Row], Row | None]]:
    """Yields the measured rows of a group and precision, and the best of vit-fast if there is a peer."""
    for rows in groups(record, "measured").values():
        yield rows, next((row for row in rows if not row["peer"] and row["best_peer"]), None)


def closing(record: Record) -> str:
    """Returns a sentence: vit-fast's fastest candidate relative to the best peer of each group, and a next step."""
    found, next_command, is_ranked = [], command(record), True
    for (fastest, *_), own in contests(record):
        where = f"({fastest['precision']}, batch {fastest['batch']})"
        if own is None:
            found.append(f"{fastest['candidate']} is the fastest {where}")
        else:
            verdicts = {SAME: f"equal to {own['best_peer']}", UNKNOWN: "not ranked, the machine is too noisy"}
            ratio = f"{own['ratio_to_best_peer']:.2f}x {own['best_peer']}"
            found.append(f"{verdicts.get(own['verdict'], ratio)} {where}")
            is_ranked &= own["verdict"] != UNKNOWN
        if fastest["task"] == "inference" and not fastest["model"].startswith(("attention:", "mlp:", "block:")):
            next_command = f"vit-fast optimize {fastest['model']} --batch {fastest['batch']}"
            if record["configuration"].get("img_size"):
                next_command += f" --img-size {'x'.join(map(str, fastest['img_size']))}"
    if not is_ranked:
        next_command = f"on a quiet machine, {command(record)}"
    text = "best of vit-fast relative to the best peer: " if any(row["best_peer"] for row in record["rows"]) else ""
    return f"Result: {text if found else 'nothing was measured'}{', '.join(found)}; next: {next_command}"


def remarks(record: Record) -> list[str]:
    """Returns warnings about the run: a busy machine, its resolution, rows above their ceiling."""
    lines = [f"BUSY: {reason}" for reason in record["busy"]]
    best: dict[str, Row] = {}
    for title, rows in groups(record, "measured").items():
        resolution = resolution_of(rows[0], record["controls"])
        if resolution == float("inf"):
            lines.append(f"{title}: cannot be ranked: no candidate was timed twice to measure the noise")
        elif resolution > UNRANKABLE:
            lines.append(f"{title}: cannot be ranked: repeated timings differed by {resolution:.0%}; {QUIET_RUN}")
        else:
            lines.append(f'{title}: "=" marks differences below {resolution:.1%}, the resolution of the timings')
        lines += [f"{title}: DEFECT: {label(row)} at {row['defect']}" for row in rows if row["defect"]]
        for row in rows:
            name = " ".join(map(str, (row["model"], row["dtype"], *row["img_size"][:1], row["candidate"])))
            best[name] = max(best.get(name, row), row, key=lambda row: row["images_per_s"])
    if record["configuration"]["batch_sizes"] == ["best"]:
        rates = {name: format_number(row["images_per_s"]) for name, row in best.items()}
        lines += [f"{n}: highest throughput at batch {best[n]['batch']}, {rate} images/s" for n, rate in rates.items()]
    return lines


def heading(record: Record) -> str:
    """Returns machine, versions, commit and date in a line, and BUSY for a busy machine."""
    machine, packages, gpu = record["machine"], record["machine"]["packages"], record["machine"]["gpu"]
    names = ("torch", "triton", "timm", "transformers", "torchvision")
    versions = ", ".join(f"{name} {packages[name]}" for name in names if name in packages)
    driver = f", driver {gpu['driver']}" if gpu and gpu.get("driver") else ""
    commit = f", commit {machine['commit']}" if machine["commit"] else ""
    date, busy = machine["date"].partition("T")[0], "; BUSY" if record["busy"] else ""
    return f"{machine['device']}{driver}; {versions}; vit-fast {record['vit_fast']}{commit}; {date}{busy}"


def ceilings_line(record: Record) -> str:
    if not (ceilings := record["ceilings"]):
        return "ceilings: not measured"
    matmul = ", ".join(f"{name} {value:.3g} TFLOP/s" for name, value in ceilings["matmul_TFLOP_per_s"].items())
    copied = f"copy of {ceilings['copy_bytes'] / 2**20:.0f} MiB {ceilings['copy_GB_per_s']:.3g} GB/s"
    return f"ceilings: matmul {ceilings['matmul_size']}^3 {matmul}; {copied}"


def objections(record: Record) -> list[str]:
    """Returns the reasons not to cite a record: a busy machine, a row above its ceiling, an interrupted run."""
    found = [f"the machine was BUSY: {reason}" for reason in record["busy"]]
    found += [f"{label(row)} is at {row['defect']}" for row in record["rows"] if row["defect"]]
    return found + ["the run was interrupted"] * bool(record.get("interrupted"))


def command(record: Record) -> str:
    """Returns the command line that repeats the run; includes images other than the default."""
    given = record["configuration"]
    words = ["vit-fast", "bench", *(given["images"] if given["images"] != ["grace_hopper.jpg"] else ())]
    words += [f"--{name}" for name in ("train", "explain", "cold", "latency") if given.get(name)]
    if size := given.get("img_size"):
        sizes = size if isinstance(size[0], list) else [size]
        words += ["--img-size", ",".join("x".join(map(str, sides)) for sides in sizes)]
    for name in ("models", "batch_sizes", "dtypes", "candidates", "device", "data", "seconds"):
        value = given.get(name)
        if value not in (None, "device") and not (name == "batch_sizes" and given.get("latency")):
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [f"--{name.replace('_', '-')}", text]
    return shlex.join(words)


def label(row: Row) -> str:
    """Returns the candidate, with a note for data on the host."""
    return f"{row['candidate']} (data on the host)" if row["data"] == "host" else str(row["candidate"])


def not_measured(record: Record) -> list[str]:
    """Returns a line per reason why candidates have no figures. It names the groups if only some have the reason."""
    grouped = groups(record)
    titles: dict[tuple[str, str], list[str]] = defaultdict(list)
    names: dict[str, list[str]] = defaultdict(list)
    for title, rows in grouped.items():
        for row in rows:
            if row["status"] != "measured":
                titles[label(row), ": ".join(filter(None, (row["status"], row["reason"])))].append(title)
    for (name, why), where in titles.items():
        names[why if len(where) == len(grouped) else f"{why} ({'; '.join(where)})"].append(name)
    return [f"{', '.join(together)}: {why}" for why, together in names.items()]


def _columns(rows: Sequence[Row], width: int | None) -> list[str]:
    """Returns the columns with any cell; `width` limits them to the most important columns that fit."""
    columns = [title for title, cell in COLUMNS.items() if any(map(cell, rows))]
    if width is None:
        return columns
    shown: list[str] = []
    left = width - max((len(label(row)) for row in rows), default=0) - 2
    for title in [title for title in SCREEN if title in columns][:MOST_ON_SCREEN]:
        left -= max(map(len, (title, *map(COLUMNS[title], rows)))) + 3
        if left < 0:
            break
        shown.append(title)
    return sorted(shown, key=columns.index)


def tables(record: Record, width: int | None = None) -> Iterator[Table]:
    """Yields a table of measured rows per group, with columns that fit into `width`, then the tables of profiles."""
    grouped = groups(record, "measured")
    for title, rows in grouped.items():
        columns = _columns(rows, width)
        lines = [[label(row), *(COLUMNS[column](row) for column in columns)] for row in rows]
        fastest = rows[0]["images_per_s"]
        shares = ((row["images_per_s"] / fastest, "peer" if row["peer"] else "own") for row in rows)
        bars = [f'class="bar {kind}" style="--share:{share:.1%}"' for share, kind in shares]
        yield Table(title, ["candidate", *columns], lines, bars)
    for title, rows in grouped.items():
        if explained := [row for row in rows if row.get("explained")]:
            yield Table(f"Time per part, ms per call: {title}", *_parts(record, explained))
            kernels = [
                [name, label(row), part, f"{calls:g}", format_number(ms, 4)]
                for row in explained
                for part, name, calls, ms in row["explained"]["kernels"][:MOST_KERNELS]
            ]
            yield Table(f"Longest kernels: {title}", ["kernel", "candidate", "part", "calls", "ms"], kernels)


def _parts(record: Record, rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    matmul = ceiling_of(rows[0]["precision"], record["ceilings"])
    least = rows[0]["explained"]["least"] if matmul else {}
    floors = {part: Work(*w).floor_ms(1, matmul or 0, record["ceilings"]["copy_GB_per_s"]) for part, w in least.items()}
    spent: list[Counter[str]] = [Counter() for _ in rows]
    for row, found in zip(rows, spent, strict=True):
        for part, _, _, ms in row["explained"]["kernels"]:
            found[part] += ms
    parts = [part for part in (*PARTS, REST, "all") if part in floors or any(part in found for found in spent)]
    lines: list[tuple[str, list[float | None]]] = [
        *((part, [floors.get(part), *(found.get(part) for found in spent)]) for part in parts),
        ("sum", [sum(floors.values()), *(sum(found.values()) for found in spent)]),
        # with host time, and what the profiler does not see, such as ONNX Runtime
        ("measured without the profiler", [None, *(row["ms"] for row in rows)]),
    ]
    cells = [[title, *("" if ms is None else format_number(ms, 4) for ms in line)] for title, line in lines]
    return ["part", "floor", *map(label, rows)], cells


def sections(record: Record, width: int | None = None) -> Iterator[str | list[str] | Table]:
    """Yields the paragraphs, lists and tables of a record; for other commands than bench, a table of rows.

    The tables of bench fit into `width` characters.
    """
    if not is_bench(record):
        yield str(record.get("note", ""))
        rows = [{name: _plain(value) for name, value in row.items()} for row in record["rows"]]
        names = [name for name in dict.fromkeys(n for row in rows for n in row) if any(row.get(name) for row in rows)]
        yield Table("rows", names, [[row.get(name, "") for name in names] for row in rows])
        return
    yield f"Measured on {heading(record)}; {ceilings_line(record)}."
    yield from tables(record, width)
    if record["controls"]:
        yield remarks(record)
    if notes := not_measured(record):
        yield "Not measured:"
        yield notes
    yield f"Reproduce with `{command(record)}`; for one row, pass only its model, dtype, batch and candidate."


def _plain(value: object) -> str:
    value = value.get("median") if isinstance(value, dict) else value
    return format_number(value, 4) if isinstance(value, float) else str(value) if isinstance(value, str | int) else ""


def markdown(record: Record) -> str:
    blocks = []
    for part in sections(record):
        if isinstance(part, Table):
            lines = [part.titles, ["---", *["---:"] * (len(part.titles) - 1)]]
            lines += [[f"`{first}`", *rest] for first, *rest in part.rows]
            part = f"{part.caption}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)
        blocks.append(part if isinstance(part, str) else "\n".join(f"- {line}" for line in part))
    return "\n\n".join(blocks) + "\n"


def render(records: Mapping[str, Record]) -> str:
    """Returns the HTML page of records by name; see records.read_record. A script in the page sorts the tables."""
    parts: list[str] = []
    for name, record in records.items():
        parts.append(f"<h2>{escape(name)}</h2>")
        with damaged(name):
            if is_bench(record) and (reasons := objections(record)):
                parts.append(f'<p class="objection">Must not be cited: {escape("; ".join(reasons))}.</p>')
            parts += map(_html, sections(record))
            environment = {part: record.get(part) for part in ("machine", "configuration")}
        text = escape(json.dumps(environment, indent=1))
        parts.append(f"<details><summary>Environment</summary><pre>{text}</pre></details>")
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return template.replace("<!-- body -->", "\n".join(parts), 1)


def _html(part: str | list[str] | Table) -> str:
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>"
    if not isinstance(part, Table):
        return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in part) + "</ul>"
    head = "".join(f'<th scope="col">{_breakable(title)}</th>' for title in part.titles)
    caption = escape(part.caption) + ("; green: vit-fast, gray: other projects" if part.bars else "")
    lines = []
    for number, (first, *others) in enumerate(part.rows):
        cells = ""
        for title, cell in zip(part.titles[1:], others, strict=True):
            bar = part.bars[number] if part.bars and title == "images/s" else ""
            interval = 'class="wide"' if "[" in cell else ""
            cells += f"<td {bar or interval}>{escape(cell)}</td>"
        lines.append(f'<tr><th scope="row">{_breakable(first)}</th>{cells}</tr>\n')
    return (
        f'<div class="scroll" tabindex=0><table><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>\n{''.join(lines)}</tbody></table></div>"
    )


def _breakable(name: str) -> str:
    return re.sub("([+:])", r"\1<wbr/>", escape(name))


def draw(record: Record) -> bytes:
    """Draws a PNG of the measured rows, fastest on top, with whiskers from the 20th to the 80th percentile."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = {title: rows[::-1] for title, rows in groups(record, "measured").items()} or {"nothing was measured": []}
    foot = textwrap.fill(f"{heading(record)}; {ceilings_line(record)}", 150)
    heights = [1 + len(rows) for rows in panels.values()]
    inches = 0.8 + sum(0.3 + 0.32 * height for height in heights) + 0.13 * foot.count("\n")
    figure = Figure(figsize=(10.0, inches), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    title = "ViT throughput, images per second (green: vit-fast; gray: peers; lines: p20 to p80), ratio to best peer"
    figure.suptitle(title, x=0.02, ha="left", size=12, weight="bold", color=INK)
    figure.supxlabel(foot, x=0.02, ha="left", size=7, color=FAINT, parse_math=False)
    each = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, rows) in zip(each, panels.items(), strict=True):
        axes.set_title(name, loc="left", fontsize=10, color=INK, weight="bold")
        axes.spines[:].set_visible(False)
        axes.set_xticks([])
        axes.tick_params(left=False, labelsize=9, labelcolor=INK)
        slow, rates, fast = ([r["batch"] / r[field] * 1e3 for r in rows] for field in ("ms_p80", "ms", "ms_p20"))
        whiskers = [[b - a for a, b in zip(*ends, strict=True)] for ends in ((slow, rates), (rates, fast))]
        colors = [FAINT if row["peer"] else ACCENT for row in rows]
        bars = axes.barh(range(len(rows)), rates, 0.72, color=colors, xerr=whiskers, error_kw={"ecolor": INK})
        ratios = [{SAME: "no difference", UNKNOWN: "not ranked"}.get(row["verdict"]) or _ratio(row) for row in rows]
        texts = [", ".join(filter(None, (format_number(rate), text))) for rate, text in zip(rates, ratios, strict=True)]
        axes.bar_label(bars, texts, padding=4, fontsize=8.5, color=INK)
        axes.set_yticks(range(len(rows)), [label(row) for row in rows])
        axes.set_xlim(0, 1.3 * max(fast, default=1.0))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()

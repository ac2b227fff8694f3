"""A record as text: rows as columns, remarks, and a table for a document."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vit_fast.measure.resolution import QUIET_RUN, SAME, UNKNOWN, UNRANKABLE

from .records import Record
from .rows import Row, is_lower, measured, resolution_of


@dataclass(frozen=True)
class Column:
    """A column of the table: its title, how a measured row fills it, and its place on the screen, where it has one."""

    title: str
    cell: Callable[[Row], str]
    rank: int | None = None


def _number(row: Row, field: str, pattern: str = "{:.3g}") -> str:
    return "" if row.get(field) is None else pattern.format(row[field])


def format_rate(images_per_s: float) -> str:
    """Three significant figures, thousands separated, never in powers of ten."""
    return f"{images_per_s:,.0f}" if images_per_s >= 100 else f"{images_per_s:.3g}"


def _ratio(row: Row) -> str:
    if row["ratio_to_best_peer"] is None:
        return ""
    text = f"{row['ratio_to_best_peer']:.2f}"
    if row["ratio_interval"] is None:
        return text
    if row["verdict"] == UNKNOWN:
        return "?"
    low, high = row["ratio_interval"]
    return f"{text} [{low:.2f}, {high:.2f}]" + (" =" if row["verdict"] == SAME else "")


COLUMNS = (
    Column("images/s", lambda row: format_rate(row["images_per_s"]), 0),
    Column("ms", lambda row: f"{row['ms']:.4g}", 2),
    Column("[p20, p80]", lambda row: f"[{row['ms_p20']:.4g}, {row['ms_p80']:.4g}]"),
    Column("p90 ms", lambda row: _number(row, "ms_p90", "{:.4g}")),
    Column("p99 ms", lambda row: _number(row, "ms_p99", "{:.4g}"), 6),
    Column("host ms", lambda row: _number(row, "host_ms") + (" bound" if row.get("host_bound") else ""), 7),
    Column("TFLOP/s", lambda row: _number(row, "TFLOP_per_s")),
    Column("of ceiling", lambda row: "above" if row["defect"] else _number(row, "ceiling_share", "{:.0%}")),
    Column("floor ms", lambda row: _number(row, "floor_ms", "{:.4g}")),
    Column("x best peer", _ratio, 1),
    Column("J/image", lambda row: _number(row, "J_per_image")),
    Column("peak MiB", lambda row: _number(row, "peak_MiB", "{:,.1f}")),
    Column("max error", lambda row: _number(row, "max_error", "{:.1e}"), 3),
    Column("first call s", lambda row: _number(row, "first_call_s")),
    Column("cold s", lambda row: _number(row, "cold_s"), 5),
    Column("cold MiB", lambda row: _number(row, "cold_MiB", "{:,.0f}")),
    Column("agrees", lambda row: _number(row, "agreement", "{:.0%}"), 4),
)
PRECISION = Column("precision", lambda row: str(row["precision"]), 0)  # on the screen, where no column says the dtype
MOST_ON_SCREEN = 7  # beside the candidate


def contests(record: Record, *, by_dtype: bool = True) -> dict[str, list[Row]]:
    """The rows by what they compete in, fastest first, those of lower precision after the others.

    Args:
        record: See records.read_record.
        by_dtype: False to put a batch's contests under one title, one dtype after the other.
    """
    grouped: dict[str, list[Row]] = {}
    for row in record["rows"]:
        size = "x".join(map(str, row["img_size"])) + (", data on the host" if row["data"] == "host" else "")
        task = "" if row["task"] == "inference" else ", training step"
        dtype = f"{row['dtype']}, " if by_dtype else ""
        title = f"{row['model']}{task}, {dtype}batch {row['requested_batch']}, {size}"
        grouped.setdefault(title, []).append(row)
    for rows in grouped.values():
        dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
        rows.sort(key=lambda row: (dtypes.index(row["dtype"]), is_lower(row), -(row["images_per_s"] or 0)))
    return grouped


def closing(record: Record) -> str:
    """Returns the result in a sentence: the best of ours against the best peer by contest, and what to try next."""
    found, next_command = [], ""
    for rows in contests(record).values():
        alike = [row for row in measured(rows) if not is_lower(row)]
        where = f"({alike[0]['dtype']}, batch {alike[0]['requested_batch']})" if alike else ""
        ours = next((row for row in alike if not row["peer"]), None)
        if ours is not None and ours["best_peer"] is not None:
            ratio = f"{ours['ratio_to_best_peer']:.2f}x {ours['best_peer']}"
            told = {SAME: f"equal to {ours['best_peer']}", UNKNOWN: "not ranked, the machine is too noisy"}
            found.append(f"{told.get(ours['verdict'], ratio)} {where}")
        elif alike:
            found.append(f"{alike[0]['subject']} is the fastest {where}")
        if alike and alike[0]["task"] == "inference":
            next_command = f"vit-fast optimize {alike[0]['model']} --batch {alike[0]['requested_batch']}"
    if any(row["verdict"] == UNKNOWN for row in measured(record["rows"])):
        longer = record | {"plan": record["plan"] | {"seconds": 2 * (record["plan"].get("seconds") or 5)}}
        next_command = f"on a quiet machine, {command(longer)}"
    text = "the best of vit-fast against the best peer: " if any(row["best_peer"] for row in record["rows"]) else ""
    result = f"Result: {text}{', '.join(found)}" if found else "Result: nothing was measured"
    return f"{result}; next: {next_command or command(record)}"


def remarks(record: Record) -> list[str]:
    """Returns warnings about the run: a busy machine, its resolution, rows above their ceiling."""
    lines = [f"BUSY: {reason}" for reason in record["busy"]]
    for title, rows in contests(record).items():
        if not measured(rows):
            continue
        resolution = resolution_of(rows[0], record["controls"])
        if resolution == float("inf"):
            lines.append(f"{title}: no control was measured, so differences cannot be assessed")
        elif resolution > UNRANKABLE:
            lines.append(
                f"{title}: nothing here can be ranked: identical code differed by {resolution:.0%}; {QUIET_RUN}"
            )
        else:
            lines.append(f"{title}: resolution {resolution:.1%}; = marks differences below it")
        lines += [f"{title}: DEFECT: {label(row)} at {row['defect']}" for row in rows if row["defect"]]
    return [*lines, *_best_batches(record)]


def _best_batches(record: Record) -> Iterable[str]:
    best: dict[str, Row] = {}
    for row in measured(record["rows"]) if record["plan"]["batch_sizes"] == ["best"] else []:
        name = " ".join(map(str, (row["model"], row["dtype"], *row["img_size"][:1], row["subject"])))
        best[name] = max(best.get(name, row), row, key=lambda row: row["images_per_s"])
    for name, row in best.items():
        yield f"{name}: highest throughput at batch {row['batch']}, {format_rate(row['images_per_s'])} images/s"


def heading(record: Record) -> str:
    """Machine, versions, commit and date, in a line; and whether the machine was BUSY with something else."""
    machine = record["machine"]
    packages = machine["packages"]
    names = ("torch", "triton", "timm", "transformers", "torchvision")
    versions = ", ".join(f"{name} {packages[name]}" for name in names if name in packages)
    gpu = machine["gpu"]
    driver = f", driver {gpu['driver']}" if gpu and gpu.get("driver") else ""
    commit = f", commit {machine['commit']}" if machine["commit"] else ""
    date = machine["date"].partition("T")[0]
    busy = "; BUSY" if record["busy"] else ""
    return f"{machine['device']}{driver}; {versions}; vit-fast {record['vit_fast']}{commit}; {date}{busy}"


def objections(record: Record) -> list[str]:
    """Returns the reasons not to cite a record: a busy machine, a row above its ceiling, an interrupted run."""
    found = [f"the machine was BUSY: {reason}" for reason in record["busy"]]
    found += [f"{label(row)} is at {row['defect']}" for row in record["rows"] if row["defect"]]
    if record.get("interrupted"):
        found.append("the run was interrupted")
    return found


def command(record: Record) -> str:
    """Returns the command line that repeats the run; names the images if they are not the default."""
    words, implied = ["vit-fast", "bench"], {"dtypes": "amp", "batch_sizes": "latency"}
    if record["plan"]["images"] != ["grace_hopper.jpg"]:
        words += record["plan"]["images"]
    words += [f"--{name}" for name in ("train", "amp", "explain", "cold", "latency") if record["plan"].get(name)]
    if size := record["plan"].get("img_size"):
        sizes = size if isinstance(size[0], list) else [size]
        words += ["--img-size", ",".join("x".join(map(str, sides)) for sides in sizes)]
    for name in ("models", "batch_sizes", "dtypes", "subjects", "device", "data", "seconds"):
        value = record["plan"].get(name)
        if value not in (None, "device") and not record["plan"].get(implied.get(name, "")):
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            option = "candidates" if name == "subjects" else name.replace("_", "-")
            words += [f"--{option}", text]
    return shlex.join(words)


def ceilings_line(record: Record) -> str:
    """The two ceilings measured in that run, with their sizes."""
    ceilings = record["ceilings"]
    if not ceilings:
        return "ceilings: not measured"
    size = ceilings["matmul_size"]
    matmul = ", ".join(f"{name} {value:.3g} TFLOP/s" for name, value in ceilings["matmul_TFLOP_per_s"].items())
    copied = ceilings["copy_bytes"] / 2**20
    return f"ceilings: matmul {size}^3 {matmul}; copy of {copied:.0f} MiB {ceilings['copy_GB_per_s']:.3g} GB/s"


def label(row: Row, *, precision: bool = True) -> str:
    """Returns the candidate, with its precision if lower, the batch if not the requested one, and data on the host."""
    notes = [str(row["precision"])] if precision and is_lower(row) else []
    notes += [f"batch {row['batch']}"] if row["batch"] != row["requested_batch"] else []
    notes += ["data on the host"] if row["data"] == "host" else []
    return f"{row['subject']} ({', '.join(notes)})" if notes else str(row["subject"])


def not_measured(record: Record) -> list[str]:
    """Returns the rows without figures by reason, with the contests unless that is all of them."""
    titles: dict[str, list[str]] = {}
    grouped = contests(record)
    for title, rows in grouped.items():
        for row in rows:
            if row["status"] != "measured":
                reason = f"{row['status']}: {row['reason']}" if row["reason"] else str(row["status"])
                titles.setdefault(f"{label(row)}: {reason}", []).append(title)
    lines = [line if len(where) == len(grouped) else f"{line} ({'; '.join(where)})" for line, where in titles.items()]
    left_out: dict[str, list[str]] = {}
    for name in record.get("left_out", ()):
        found, _, dtype = name.removesuffix(")").partition(" (")
        left_out.setdefault(found, []).append(dtype)
    if left_out:
        every = len(record["plan"]["dtypes"])
        names = [name if len(of) == every else f"{name} ({', '.join(of)})" for name, of in left_out.items()]
        lines.append(f"skipped for lack of time; --time-budget 0 measures all: {', '.join(names)}")
    return lines


def filled_columns(record: Record) -> list[Column]:
    """The columns that any measured row fills: only rows of a GPU have a time of the host."""
    return [column for column in COLUMNS if any(map(column.cell, measured(record["rows"])))]


def cells(record: Record) -> dict[str, list[str]]:
    """The measured rows, contest by contest, as columns by title: what each is about, then those that are filled."""
    rows = [row for rows in contests(record).values() for row in measured(rows)]
    about = {"model": "model", "dtype": "dtype", "batch": "requested_batch"}
    found = {title: [str(row[field]) for row in rows] for title, field in about.items()}
    return found | {"candidate": [*map(label, rows)]} | {c.title: [*map(c.cell, rows)] for c in filled_columns(record)}


def markdown(record: Record) -> str:
    """Returns the record as one markdown table under its heading."""
    columns = cells(record)
    columns["candidate"] = [f"`{name}`" for name in columns["candidate"]]
    marks = ["---" if title in ("model", "dtype", "batch", "candidate") else "---:" for title in columns]
    lines = [f"| {' | '.join(line)} |" for line in (columns, marks, *zip(*columns.values(), strict=True))]
    text = "\n".join([f"Measured on {heading(record)}; {ceilings_line(record)}.", "", *lines]) + "\n"
    if record["controls"]:
        text += "\n" + "".join(f"- {remark}\n" for remark in remarks(record))
    if notes := not_measured(record):
        text += "\nNot measured:\n\n" + "".join(f"- {note}\n" for note in notes)
    text += f"\nReproduce with `{command(record)}`, or one row with its model, dtype, batch and candidate.\n"
    return text


def summary(record: Record) -> str:
    """Returns a table for a document: per contest, the best of ours, timm and the best peer."""
    titles = ("model", "precision", "batch", "vit-fast (images/s)", "timm", "best peer", "ratio to best peer")
    lines = [f"| {' | '.join(titles)} |", "|---|---|---:|---|---:|---|---:|"]
    for rows in contests(record).values():
        alike = {row["subject"]: row for row in measured(rows) if not is_lower(row)}
        rates = {name: format_rate(row["images_per_s"]) for name, row in alike.items()}
        ours = next((row for row in alike.values() if not row["peer"] and row["best_peer"]), None)
        if ours is not None:
            best, peer = (f"{rates[name]} (`{name}`)" for name in (ours["subject"], ours["best_peer"]))
            about = ours["model"], ours["dtype"], str(ours["requested_batch"])
            lines.append(f"| {' | '.join((*about, best, rates.get('timm', ''), peer, _ratio(ours)))} |")
    return "\n".join([*lines, "", f"Measured on {heading(record)}."]) + "\n"

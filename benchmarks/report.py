"""A record as text: tables, warnings, and the blocks of a document that show a committed record.

    python -m vit_fast.benchmarks.report RECORD.json       prints the table
    python -m vit_fast.benchmarks.report --fill README.md  fills the blocks of a document
    python -m vit_fast.benchmarks.report --check RECORD    fails if the record must not be cited

A block starts with `<!-- record: PATH -->` or `<!-- summary: PATH -->`, PATH relative to the document, and ends with
`<!-- /record -->`.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vit_fast.measure.clock import QUIET_RUN, SAME, UNKNOWN, UNRANKABLE, format_number
from vit_fast.work import Work

from .machine import PARTS, REST
from .records import Record, Row, is_lower, measured, read_record, resolution_of

_BLOCK = re.compile(r"(<!-- (record|summary): (\S+) -->\n).*?(<!-- /record -->)", re.DOTALL)
MOST_KERNELS = 3  # kernels of each part
MOST_ON_SCREEN = 7  # columns besides the candidate


class Column(NamedTuple):
    """A column of the table: its title, the cell of a measured row, and its rank on the screen, if shown there."""

    title: str
    cell: Callable[[Row], str]
    rank: int | None = None


class Table(NamedTuple):
    """A table of text; the first cell of a row is its heading."""

    caption: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]


def _number(field: str, pattern: str | int = 3) -> Callable[[Row], str]:
    """Formats a field by a format string, or with this number of significant digits."""

    def cell(row: Row) -> str:
        if (value := row.get(field)) is None:
            return ""
        return pattern.format(value) if isinstance(pattern, str) else format_number(value, pattern)

    return cell


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
    Column("precision", _number("precision", "{}"), 0),
    Column("images/s", _number("images_per_s"), 0),
    Column("ms", _number("ms", 4), 2),
    Column(
        "[p20, p80]", lambda row: "[{}, {}]".format(*(format_number(row[field], 4) for field in ("ms_p20", "ms_p80")))
    ),
    Column("p90 ms", _number("ms_p90", 4)),
    Column("p99 ms", _number("ms_p99", 4), 6),
    Column("host ms", lambda row: _number("host_ms")(row) + (" bound" if row.get("host_bound") else ""), 7),
    Column("TFLOP/s", _number("TFLOP_per_s")),
    Column("of ceiling", lambda row: "above" if row["defect"] else _number("ceiling_share", "{:.0%}")(row)),
    Column("floor ms", _number("floor_ms", 4)),
    Column("x best peer", _ratio, 1),
    Column("peak MiB", _number("peak_MiB", "{:,.1f}")),
    Column("max error", _number("max_error", "{:.1e}"), 3),
    Column("first call s", _number("first_call_s")),
    Column("cold s", _number("cold_s"), 5),
    Column("cold MiB", _number("cold_MiB", "{:,.0f}")),
    Column("agreement", _number("agreement", "{:.0%}"), 4),
)


def groups(record: Record) -> dict[str, list[Row]]:
    """Returns the rows by group, fastest first, and lower precision last."""
    grouped: dict[str, list[Row]] = {}
    for row in record["rows"]:
        size = "x".join(map(str, row["img_size"])) + (", data on the host" if row["data"] == "host" else "")
        task = "" if row["task"] == "inference" else ", training step"
        title = f"{row['model']}{task}, {row['dtype']}, batch {row['requested_batch']}, {size}"
        grouped.setdefault(title, []).append(row)
    for rows in grouped.values():
        rows.sort(key=lambda row: (is_lower(row), -(row["images_per_s"] or 0)))
    return grouped


def _measured_groups(record: Record) -> dict[str, list[Row]]:
    return {title: found for title, rows in groups(record).items() if (found := measured(rows))}


def _contests(record: Record) -> Iterator[tuple[list[Row], Row | None]]:
    """Yields the measured rows of a group at full precision, and the best of vit-fast if there is a peer."""
    for rows in _measured_groups(record).values():
        if alike := [row for row in rows if not is_lower(row)]:
            yield alike, next((row for row in alike if not row["peer"] and row["best_peer"]), None)


def closing(record: Record) -> str:
    """Returns a sentence: vit-fast's fastest candidate relative to the best peer of each group, and a next step."""
    found, next_command, is_ranked = [], command(record), True
    for (fastest, *_), own in _contests(record):
        where = f"({fastest['dtype']}, batch {fastest['requested_batch']})"
        if own is None:
            found.append(f"{fastest['candidate']} is the fastest {where}")
        else:
            ratio = f"{own['ratio_to_best_peer']:.2f}x {own['best_peer']}"
            verdicts = {SAME: f"equal to {own['best_peer']}", UNKNOWN: "not ranked, the machine is too noisy"}
            found.append(f"{verdicts.get(own['verdict'], ratio)} {where}")
            is_ranked = is_ranked and own["verdict"] != UNKNOWN
        if fastest["task"] == "inference":
            next_command = f"vit-fast optimize {fastest['model']} --batch {fastest['requested_batch']}"
    if not is_ranked:
        next_command = f"on a quiet machine, {command(record)}"
    if not found:
        return f"Result: nothing was measured; next: {next_command}"
    text = "best of vit-fast relative to the best peer: " if any(row["best_peer"] for row in record["rows"]) else ""
    return f"Result: {text}{', '.join(found)}; next: {next_command}"


def remarks(record: Record) -> list[str]:
    """Returns warnings about the run: a busy machine, its resolution, rows above their ceiling."""
    lines = [f"BUSY: {reason}" for reason in record["busy"]]
    for title, rows in _measured_groups(record).items():
        resolution = resolution_of(rows[0], record["controls"])
        if resolution == float("inf"):
            lines.append(f"{title}: cannot be ranked: no candidate was timed twice to measure the noise")
        elif resolution > UNRANKABLE:
            lines.append(f"{title}: cannot be ranked: repeated timings differed by {resolution:.0%}; {QUIET_RUN}")
        else:
            lines.append(f"{title}: resolution {resolution:.1%}; = marks differences below it")
        lines += [f"{title}: DEFECT: {label(row)} at {row['defect']}" for row in rows if row["defect"]]
    best: dict[str, Row] = {}
    for row in measured(record["rows"]) if record["configuration"]["batch_sizes"] == ["best"] else []:
        name = " ".join(map(str, (row["model"], row["dtype"], *row["img_size"][:1], row["candidate"])))
        best[name] = max(best.get(name, row), row, key=lambda row: row["images_per_s"])
    for name, row in best.items():
        rate = format_number(row["images_per_s"])
        lines.append(f"{name}: highest throughput at batch {row['batch']}, {rate} images/s")
    return lines


def heading(record: Record) -> str:
    """Returns machine, versions, commit and date in a line, and BUSY for a busy machine."""
    machine, packages, gpu = record["machine"], record["machine"]["packages"], record["machine"]["gpu"]
    names = ("torch", "triton", "timm", "transformers", "torchvision")
    versions = ", ".join(f"{name} {packages[name]}" for name in names if name in packages)
    driver = f", driver {gpu['driver']}" if gpu and gpu.get("driver") else ""
    commit = f", commit {machine['commit']}" if machine["commit"] else ""
    date = machine["date"].partition("T")[0]
    busy = "; BUSY" if record["busy"] else ""
    return f"{machine['device']}{driver}; {versions}; vit-fast {record['vit_fast']}{commit}; {date}{busy}"


def ceilings_line(record: Record) -> str:
    """Returns the ceilings that were measured in the run."""
    ceilings = record["ceilings"]
    if not ceilings:
        return "ceilings: not measured"
    size = ceilings["matmul_size"]
    matmul = ", ".join(f"{name} {value:.3g} TFLOP/s" for name, value in ceilings["matmul_TFLOP_per_s"].items())
    copied = ceilings["copy_bytes"] / 2**20
    return f"ceilings: matmul {size}^3 {matmul}; copy of {copied:.0f} MiB {ceilings['copy_GB_per_s']:.3g} GB/s"


def objections(record: Record) -> list[str]:
    """Returns the reasons not to cite a record: a busy machine, a row above its ceiling, an interrupted run."""
    found = [f"the machine was BUSY: {reason}" for reason in record["busy"]]
    found += [f"{label(row)} is at {row['defect']}" for row in record["rows"] if row["defect"]]
    return found + ["the run was interrupted"] * bool(record.get("interrupted"))


def command(record: Record) -> str:
    """Returns the command line that repeats the run; names the images unless they are the default."""
    words, implied = ["vit-fast", "bench"], {"dtypes": "amp", "batch_sizes": "latency"}
    given = record["configuration"]
    if given["images"] != ["grace_hopper.jpg"]:
        words += given["images"]
    words += [f"--{name}" for name in ("train", "amp", "explain", "cold", "latency") if given.get(name)]
    if size := given.get("img_size"):
        sizes = size if isinstance(size[0], list) else [size]
        words += ["--img-size", ",".join("x".join(map(str, sides)) for sides in sizes)]
    for name in ("models", "batch_sizes", "dtypes", "candidates", "device", "data", "seconds"):
        value = given.get(name)
        if value not in (None, "device") and not given.get(implied.get(name, "")):
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [f"--{name.replace('_', '-')}", text]
    return shlex.join(words)


def label(row: Row, *, precision: bool = True) -> str:
    """Returns the candidate, with its precision if lower, its batch size if reduced, and data on the host."""
    notes = [str(row["precision"])] if precision and is_lower(row) else []
    notes += [f"batch {row['batch']}"] if row["batch"] != row["requested_batch"] else []
    notes += ["data on the host"] if row["data"] == "host" else []
    return f"{row['candidate']} ({', '.join(notes)})" if notes else str(row["candidate"])


def not_measured(record: Record) -> list[str]:
    """Returns the rows without figures by reason, with their groups unless that is all of them."""
    titles: dict[str, list[str]] = defaultdict(list)
    grouped = groups(record)
    for title, rows in grouped.items():
        for row in rows:
            if row["status"] != "measured":
                reason = f"{row['status']}: {row['reason']}" if row["reason"] else str(row["status"])
                titles[f"{label(row)}: {reason}"].append(title)
    lines = [line if len(where) == len(grouped) else f"{line} ({'; '.join(where)})" for line, where in titles.items()]
    skipped: dict[str, list[str]] = defaultdict(list)
    for name in record.get("skipped", ()):
        found, _, dtype = name.removesuffix(")").partition(" (")
        skipped[found].append(dtype)
    if skipped:
        every = len(record["configuration"]["dtypes"])
        names = [name if len(of) == every else f"{name} ({', '.join(of)})" for name, of in skipped.items()]
        lines.append(f"skipped for lack of time; --time-budget 0 measures all: {', '.join(names)}")
    return lines


def filled_columns(record: Record) -> list[Column]:
    """Returns the columns with any cell: only rows of a GPU have host times."""
    return [column for column in COLUMNS if any(map(column.cell, measured(record["rows"])))]


def columns_in(record: Record, width: int) -> list[Column]:
    """Returns the most important columns that fit into a terminal of `width` characters, beside the candidate."""
    rows, columns = measured(record["rows"]), filled_columns(record)
    shown: list[Column] = []
    left = width - max((len(label(row, precision=False)) for row in rows), default=0) - 2
    ranked = sorted((column for column in columns if column.rank is not None), key=lambda column: column.rank or 0)
    for column in ranked[:MOST_ON_SCREEN]:
        left -= max(map(len, (column.title, *map(column.cell, rows)))) + 3
        if left < 0:
            break
        shown.append(column)
    return sorted(shown, key=columns.index)


def tables(record: Record, columns: Sequence[Column] | None = None) -> Iterator[Table]:
    """Yields the tables of the measured rows of each group, and of their profiles."""
    columns = filled_columns(record) if columns is None else columns
    grouped = _measured_groups(record)
    for title, rows in grouped.items():
        lines = [[label(row, precision=False), *(column.cell(row) for column in columns)] for row in rows]
        yield Table(title, ["candidate", *(column.title for column in columns)], lines)
    for title, rows in grouped.items():
        if explained := [row for row in rows if row.get("explained")]:
            yield Table(f"Time per part, ms per call: {title}", *_parts(record, explained))
            heads = ["kernel", "candidate", "part", "calls", "ms"]
            yield Table(f"Longest kernels: {title}", heads, list(_kernels(explained)))


def _parts(record: Record, rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    ceilings, dtype = record["ceilings"], rows[0]["dtype"]
    matmul = ceilings.get("matmul_TFLOP_per_s", {}).get("bf16" if dtype == "amp" else dtype)
    least = rows[0]["explained"]["least"] if matmul else {}
    floors = {part: Work(*some).floor_ms(1, matmul, ceilings["copy_GB_per_s"]) for part, some in least.items()}
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


def _kernels(rows: list[Row]) -> Iterator[list[str]]:
    for row in rows:
        seen: Counter[str] = Counter()
        for part, name, calls, ms in row["explained"]["kernels"]:
            seen[part] += 1
            if seen[part] <= MOST_KERNELS:
                yield [name, label(row), part, f"{calls:g}", format_number(ms, 4)]


def summary(record: Record) -> str:
    """Returns a table for a document: the fastest candidate of vit-fast, timm and the best peer of each group."""
    titles = ("model", "precision", "batch", "vit-fast (images/s)", "timm", "best peer", "ratio to best peer")
    lines = [f"| {' | '.join(titles)} |", "|---|---|---:|---|---:|---|---:|"]
    for alike, own in _contests(record):
        rates = {row["candidate"]: format_number(row["images_per_s"]) for row in alike}
        if own is not None:
            best, peer = (f"{rates[name]} (`{name}`)" for name in (own["candidate"], own["best_peer"]))
            about = own["model"], own["dtype"], str(own["requested_batch"])
            lines.append(f"| {' | '.join((*about, best, rates.get('timm', ''), peer, _ratio(own)))} |")
    return "\n".join([*lines, "", f"Measured on {heading(record)}."]) + "\n"


def sections(record: Record) -> Iterator[str | list[str] | Table]:
    """Yields the paragraphs, lists and tables of a record of `vit-fast bench`."""
    yield f"Measured on {heading(record)}; {ceilings_line(record)}."
    yield from tables(record)
    if record["controls"]:
        yield remarks(record)
    if notes := not_measured(record):
        yield "Not measured:"
        yield notes
    yield f"Reproduce with `{command(record)}`, or one row with its model, dtype, batch and candidate."


def markdown(record: Record) -> str:
    """Returns the sections of a record as markdown."""
    blocks = []
    for part in sections(record):
        if isinstance(part, Table):
            lines = [part.titles, ["---", *["---:"] * (len(part.titles) - 1)]]
            lines += [[f"`{first}`", *rest] for first, *rest in part.rows]
            part = f"{part.caption}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)
        blocks.append(part if isinstance(part, str) else "\n".join(f"- {line}" for line in part))
    return "\n\n".join(blocks) + "\n"


def fill(document: str, folder: Path) -> str:
    """Fills every block of a markdown document from its record; raises ValueError if a record must not be cited."""
    tables = {"record": markdown, "summary": summary}

    def filled(match: re.Match[str]) -> str:
        return f"{match[1]}{tables[match[2]](check(folder / match[3]))}{match[4]}"

    return _BLOCK.sub(filled, document)


def check(path: Path) -> Record:
    """Reads a record to cite; see objections."""
    record = read_record(path)
    if reasons := objections(record):
        raise ValueError(f"{path.name} must not be cited: {'; '.join(reasons)}")
    return record


def main(arguments: list[str]) -> None:
    try:
        match arguments:
            case ["--fill", document]:
                Path(document).write_text(fill(Path(document).read_text(), Path(document).parent))
            case ["--check", record]:
                check(Path(record))
            case [record]:
                sys.stdout.write(markdown(read_record(record)))
            case _:
                sys.exit("usage: python -m vit_fast.benchmarks.report [--check] RECORD.json | --fill DOCUMENT.md")
    except (OSError, ValueError) as error:
        sys.exit(f"report: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])

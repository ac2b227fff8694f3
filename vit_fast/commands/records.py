"""`vit-fast compare`: compares two records of `vit-fast bench`; `vit-fast report`: writes an HTML page of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .words import AsJson


def compare(
    first: Annotated[Path, typer.Argument(help="Baseline: a record.json or its folder.")],
    second: Annotated[Path, typer.Argument(help="Record to compare with the baseline.")],
    as_json: AsJson = False,
) -> None:
    """Compare two records of `bench`: print ratio, confidence interval and verdict of each pair of rows."""
    from ..benchmarks.records import read_record
    from ..benchmarks.rows import compare_records

    comparison = compare_records(read_record(first), read_record(second))
    if as_json:
        typer.echo(json.dumps(comparison, indent=2))
        return

    from ..measure.compare import format_number
    from .words import table, wide_console

    rows = []
    for pair in comparison["pairs"]:
        rates = map(format_number, pair["images_per_s"])
        interval = "" if pair["interval"] is None else "[{:.3f}, {:.3f}]".format(*pair["interval"])
        resolution = "unknown" if pair["resolution"] is None else f"{pair['resolution']:.1%}"
        about = pair["model"], pair["dtype"], str(pair["batch"]), pair["candidate"], pair["verdict"]
        rows.append((*about, *rates, f"{pair['ratio']:.3f}", interval, resolution))
    texts = ("model", "dtype", "batch", "candidate", "verdict")
    titles = (*texts, "first", "second", "ratio", "interval", "resolution")
    console = wide_console()
    console.print(table("second / first, images per second", titles, rows, texts=len(texts)))
    for line in (*comparison["warnings"], *comparison["unpaired"]):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def report(
    records: Annotated[
        list[Path],
        typer.Argument(help="Records, or their folders: of `bench`, `make gpu-check` or `kernels --host --json`."),
    ],
    out: Annotated[Path, typer.Option(help="Output file.")] = Path("report.html"),
) -> None:
    """Write an HTML page with sortable tables of records. The page needs no network."""
    from ..benchmarks.records import read_any
    from ..benchmarks.rendering import render
    from ..files import file_aside

    page = render({str(path): read_any(path) for path in records})
    with file_aside(out) as aside:
        aside.write_text(page, encoding="utf-8")
    typer.echo(f"wrote {out}")

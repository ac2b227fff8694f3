"""`vit-fast compare`: what two records of `vit-fast bench` say of one another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command(name="compare")(compare)


def compare(
    first: Annotated[Path, typer.Argument(help="A record.json, or its folder: what is compared with.")],
    second: Annotated[Path, typer.Argument(help="Another: what is compared.")],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Pairs the rows of two records: each ratio with its interval, and what it says at the records' resolution."""
    from ..benchmarks.comparison import compare as compare_records
    from ..benchmarks.records import read_record

    comparison = compare_records(read_record(first), read_record(second))
    if as_json:
        typer.echo(json.dumps(comparison, indent=2))
        return

    from rich.console import Console
    from rich.table import Table

    from ..benchmarks.report import FULL_WIDTH, format_rate

    console = Console(markup=False)
    if not console.is_terminal:
        console.width = FULL_WIDTH
    table = Table(title="second / first, images per second", title_justify="left")
    for name in ("model", "dtype", "batch", "candidate"):
        table.add_column(name, no_wrap=True)
    for name in ("first", "second", "ratio", "interval", "resolution"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for pair in comparison["pairs"]:
        rates = map(format_rate, pair["images_per_s"])
        interval = "" if pair["interval"] is None else "[{:.3f}, {:.3f}]".format(*pair["interval"])
        resolution = "unknown" if pair["resolution"] is None else f"{pair['resolution']:.1%}"
        told = (f"{pair['ratio']:.3f}", interval, resolution, pair["verdict"])
        table.add_row(pair["model"], pair["dtype"], str(pair["batch"]), pair["subject"], *rates, *told)
    console.print(table)
    for line in (*comparison["warnings"], *comparison["unpaired"]):
        console.print(line, highlight=False, soft_wrap=True)

"""`vit-fast report`: records as one page to read, sort and pass on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command(name="report")(report)


def report(
    records: Annotated[
        list[Path],
        typer.Argument(help="Records or their folders: of bench, make gpu-check, kernels --host --json."),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Writes one HTML page of records with sortable tables; it needs no network."""
    from ..benchmarks.html_report import render
    from ..benchmarks.records import read_any
    from ..files import file_aside

    page = render({str(path): read_any(path) for path in records})
    with file_aside(out) as aside:
        aside.write_text(page, encoding="utf-8")
    typer.echo(f"written: {out}")

"""`vit-fast report`: writes an HTML page of benchmark records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    records: Annotated[
        list[Path],
        typer.Argument(help="Records or their folders, of bench, make gpu-check or kernels --host --json."),
    ],
    out: Annotated[Path, typer.Option(help="Output file.")] = Path("report.html"),
) -> None:
    """Write an HTML page with sortable tables of records. It needs no network."""
    from ..benchmarks.records import read_any
    from ..benchmarks.rendering import render
    from ..files import file_aside

    page = render({str(path): read_any(path) for path in records})
    with file_aside(out) as aside:
        aside.write_text(page, encoding="utf-8")
    typer.echo(f"written: {out}")

"""`vit-fast latency`: how long an ONNX file takes on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..export.latency import Latency


def register(app: typer.Typer) -> None:
    app.command(name="latency")(latency)


def latency(
    file: Annotated[Path, typer.Argument(help="An ONNX file that takes images.", metavar="FILE.onnx")],
    batches: Annotated[str, typer.Option(help="Images a call, separated by commas.")] = "1",
    threads: Annotated[str, typer.Option(help="Threads on the CPU, separated by commas; else all cores.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, tensorrt or openvino.")] = "auto",
    runs: Annotated[int, typer.Option(help="Calls of each combination.")] = 100,
    img_size: Annotated[
        int | None, typer.Option(help="Height and width in pixels, for a file that leaves them open.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw it: a .png, .svg or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Times a file: median, 95th and 99th percentile of a call, by batch and threads, all combinations in turns."""
    from ..export.latency import draw_latency, measure_latency
    from ..files import check_replaceable, file_aside

    if picture is not None:
        check_replaceable(picture)
    image_hw = None if img_size is None else (img_size, img_size)
    rows = measure_latency(
        file, _integers("--batches", batches), _integers("--threads", threads) if threads else (None,),
        device=device, runs=runs, image_hw=image_hw,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps({"file": str(file), "runs": runs, "rows": [row.to_dict() for row in rows]}, indent=2))
    else:
        _print(rows)
    if picture is not None:  # last: what was measured is told whatever becomes of it
        with file_aside(picture) as aside:
            draw_latency(rows, aside, file.name)


def _print(rows: Sequence[Latency]) -> None:
    typer.echo("  batch  threads   p50 ms   p95 ms   p99 ms   images/s")
    for row in rows:
        count = "auto" if row.threads is None else row.threads
        typer.echo(f"{row.batch:7d}{count:>9}{row.p50:9.2f}{row.p95:9.2f}{row.p99:9.2f}{row.images_per_second:11.1f}")


def _integers(option: str, text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise ValueError(f"{option}={text!r}: accepted are integers >= 1, separated by commas")
    return values

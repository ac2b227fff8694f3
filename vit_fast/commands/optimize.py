"""`vit-fast optimize`: finds the fastest configuration of a model; `vit-fast cache`: lists cached results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .words import AsJson, integers, open_model, table, wide_console

if TYPE_CHECKING:
    from rich.table import Table

    from ..measure.optimization import Optimization


def optimize(
    model: Annotated[
        str,
        typer.Argument(
            help="One of `vit-fast models`, timm:NAME, hf:FOLDER, a weights file, FILE.onnx, or "
            "package.module:function that returns an nn.Module."
        ),
    ],
    batch: Annotated[int, typer.Option(help="Images per call.", min=1)] = 1,
    img_size: Annotated[
        str | None, typer.Option(help="Image size in pixels (default: the model's).", metavar="N|HxW")
    ] = None,
    allow: Annotated[
        str | None, typer.Option(help="Also try lower precision: bf16, fp16, int8, fp8.", metavar="A,B")
    ] = None,
    min_agreement: Annotated[
        float, typer.Option(help="With --allow: required top-1 agreement with the model.", min=0, max=1)
    ] = 0.99,
    images: Annotated[
        list[Path] | None,
        typer.Option(help="Image files or folders for check and calibration (default: matplotlib's sample image)."),
    ] = None,
    budget: Annotated[
        float, typer.Option(help="Time limit of the search in seconds, including builds, exports and checks.", min=1)
    ] = 100,
    latency: Annotated[bool, typer.Option("--latency", help="Minimize p90 latency instead of median latency.")] = False,
    memory_limit: Annotated[
        float | None,
        typer.Option(help="Skip candidates that need more than this many MiB in addition to the model.", min=0.001),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    save: Annotated[Path | None, typer.Option(help="Save the result for vit_fast.load_optimized.")] = None,
    export: Annotated[
        Path | None, typer.Option(help="New or empty folder for the result: an ONNX file or a PyTorch package.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and everything else to stderr.")] = False,
) -> None:
    """Find the fastest configuration of a model on this machine, verify it against fp64, and cache it.

    The speedup is relative to the given model, or to the eager backend if you pass a name of `vit-fast models`. Press
    Ctrl-C to stop the search and get the best result so far.
    """
    from rich.console import Console
    from rich.markup import escape

    from ..files import check_new_folder, check_replaceable
    from ..measure.optimization import deploy
    from ..measure.optimization import optimize as run

    if export is not None:
        check_new_folder(export)
    if save is not None:
        check_replaceable(save)
    console, progress = wide_console(stderr=as_json), Console(stderr=True)
    opened = open_model(model, batch, images or (), device, integers("--img-size", img_size, "x"))
    with progress.status(escape(model)):
        result = run(
            opened.module,
            opened.example,
            budget_s=budget,
            lossless=allow is None,
            allow=None if allow is None else [name.strip() for name in allow.split(",")],  # type: ignore[misc]  # checked
            min_agreement=min_agreement,
            calibration=opened.image_files,
            images=opened.others,
            latency_or_throughput="latency" if latency else "throughput",
            memory_limit=None if memory_limit is None else int(memory_limit * 2**20),
            progress=lambda what, seconds: progress.out(f"{seconds:.1f} of {budget:g} s: {what}", highlight=False),
        )
    if result.table:
        console.print(_table(result))
    console.print(f"{opened.model.name}, batch {batch}: {result}", soft_wrap=True, highlight=False, markup=False)
    if save is not None:
        result.save(save)
        console.print(f"wrote {save}", soft_wrap=True, highlight=False, markup=False)
    if export is not None:
        for path in deploy(result.cached, opened.module, opened.example, export, opened.image_files):
            console.print(f"wrote {path}", soft_wrap=True, highlight=False, markup=False)
    if as_json:
        rows = [_plain(row) for row in result.table]
        typer.echo(json.dumps(result.cached.to_dict() | {"name": result.candidate.name, "table": rows}, indent=2))


def _plain(row: Any) -> dict[str, Any]:
    facts = {**vars(row), "candidate": row.candidate.to_dict(), "name": row.candidate.name}
    return facts | {"checked": None if row.checked is None else vars(row.checked)}


def _table(result: Optimization) -> Table:
    from rich.markup import escape

    from ..measure.clock import format_number

    titles = (
        "candidate", "ms", "images/s", "speedup", "max error", "agreement", "peak MiB", "first call s", "status",
    )  # fmt: skip
    made = table(f"{result.objective}, in the order of the search", titles)
    made.columns[-1].justify, made.columns[-1].no_wrap, made.columns[0].no_wrap = "left", False, False
    for row in result.table:
        timed, checked = ["", "", ""], ["", "", "", ""]
        if row.ms is not None and row.images_per_s is not None:
            interval = "" if row.speedup_interval is None else " [{:.2f}, {:.2f}]".format(*row.speedup_interval)
            timed = [format_number(row.ms, 4), format_number(row.images_per_s, 4), f"{row.speedup:.2f}{interval}"]
        if (found := row.checked) is not None:
            peak = f"{found.peak_bytes / 2**20:.0f}"
            checked = [f"{found.error:.1e}", f"{found.agreement:.1%}", peak, f"{found.first_call_s:.1f}"]
        chosen = row.candidate == result.candidate
        cells = map(escape, (row.candidate.name, *timed, *checked, row.reason or "selected"))
        made.add_row(*cells, style="bold" if chosen else None)
    return made


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all cached results.")] = False,
    as_json: AsJson = False,
) -> None:
    """List or remove the cached results of `optimize`."""
    from ..measure import cache

    if clear:
        typer.echo(f"removed {cache.clear()} cached results from {cache.folder()}")
        return
    found = list(cache.all_results())
    if as_json:
        typer.echo(json.dumps([result.to_dict() for _, result in found], indent=2))
        return
    typer.echo(f"{len(found)} cached result{'s' * (len(found) != 1)} in {cache.folder()}")
    for path, result in found:
        key = result.key
        shapes = " ".join("x".join(map(str, shape)) + f" {dtype}" for shape, dtype in key["example"])
        typer.echo(
            f"{path.stem}  {key['request']['objective']}, {shapes}, model {key['model']}, {key['machine']['device']}: "
            f"{result.candidate.name}, speedup {result.figures['speedup']:.2f}"
        )

"""`vit-fast optimize`: the fastest right way to run a model on this machine; `vit-fast cache`: what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .words import integers, table, wide_console

if TYPE_CHECKING:
    from rich.table import Table

    from ..measure.optimization import Optimization


def register(app: typer.Typer) -> None:
    app.command(name="optimize")(optimize)
    app.command(name="cache")(cache)


def optimize(
    model: Annotated[
        str,
        typer.Argument(
            help="One of our names, timm:NAME, hf:FOLDER, a weights file, a file.onnx, or module:function that gives a "
            "module."
        ),
    ],
    batch: Annotated[int, typer.Option(help="Images a call.", min=1)] = 1,
    img_size: Annotated[str | None, typer.Option(help="Pixels a side; default: the model's.", metavar="N|HxW")] = None,
    allow: Annotated[
        str | None, typer.Option(help="Number formats that may lose accuracy: bf16, fp16, int8, fp8.", metavar="A,B")
    ] = None,
    min_agreement: Annotated[
        float, typer.Option(help="Share of images that these must answer as the model does.", min=0, max=1)
    ] = 0.99,
    images: Annotated[
        list[Path] | None, typer.Option(help="Photographs or folders of them; default: one of matplotlib's wheel.")
    ] = None,
    budget: Annotated[
        float, typer.Option(help="Seconds for the search: building, exports, checks and timing.", min=1)
    ] = 100,
    latency: Annotated[bool, typer.Option("--latency", help="Compare what nine of ten calls stay below.")] = False,
    memory_limit: Annotated[float | None, typer.Option(help="MiB beside the model itself.", min=0.001)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    save: Annotated[Path | None, typer.Option(help="Write what vit_fast.load_optimized reads.")] = None,
    export: Annotated[
        Path | None, typer.Option(help="New or empty folder for what was chosen in deployable form, with its figures.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output; all else goes to stderr.")] = False,
) -> None:
    """Tries what could be faster, holds each against the model, and keeps the best for this machine.

    Our own models are compared to plain eager PyTorch, others to what they are. Ctrl-C gives the best so far.
    """
    from rich.console import Console
    from rich.markup import escape

    from ..benchmarks.opening import open_model
    from ..files import check_new_folder, check_replaceable
    from ..measure import deployable
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
            calibration=opened.photographs,
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
        console.print(f"written: {save}", soft_wrap=True, highlight=False, markup=False)
    if export is not None:
        for path in deployable.write(result, opened.module, opened.example, export, opened.photographs):
            console.print(f"written: {path}", soft_wrap=True, highlight=False, markup=False)
    if as_json:
        rows = [_plain(row) for row in result.table]
        typer.echo(json.dumps(result.answer.to_dict() | {"name": result.choice.name, "table": rows}, indent=2))


def _plain(row: Any) -> dict[str, Any]:
    facts = {**vars(row), "choice": row.choice.to_dict(), "name": row.choice.name}
    return facts | {"checked": None if row.checked is None else vars(row.checked)}


def _table(result: Optimization) -> Table:
    from rich.markup import escape

    titles = ("candidate", "ms", "images/s", "x as given", "max error", "agrees", "peak MiB", "first call s", "why not")
    made = table(f"{result.objective}, in order of trial", titles)
    made.columns[-1].justify, made.columns[-1].no_wrap, made.columns[0].no_wrap = "left", False, False
    for row in result.table:
        timed, checked = ["", "", ""], ["", "", "", ""]
        if row.ms is not None:
            interval = "" if row.ratio_interval is None else " [{:.2f}, {:.2f}]".format(*row.ratio_interval)
            timed = [f"{row.ms:.4g}", f"{row.images_per_s:.4g}", f"{row.ratio:.2f}{interval}"]
        if (found := row.checked) is not None:
            peak = f"{found.peak_bytes / 2**20:.0f}"
            checked = [f"{found.error:.1e}", f"{found.agreement:.1%}", peak, f"{found.first_call_s:.1f}"]
        chosen = row.choice == result.choice
        cells = map(escape, (row.choice.name, *timed, *checked, row.reason or "chosen"))
        made.add_row(*cells, style="bold" if chosen else None)
    return made


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all kept answers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Shows what `optimize` has found on this machine, or removes it."""
    from ..measure import cache

    if clear:
        typer.echo(f"removed {cache.clear()} from {cache.folder()}")
        return
    found = list(cache.all_answers())
    if as_json:
        typer.echo(json.dumps([answer.to_dict() for _, answer in found], indent=2))
        return
    typer.echo(f"{len(found)} kept in {cache.folder()}")
    for path, answer in found:
        key = answer.key
        shapes = " ".join("x".join(map(str, shape)) + f" {dtype}" for shape, dtype in key["example"])
        typer.echo(
            f"{path.stem}  {key['asked']['objective']}, {shapes}, model {key['model']}, {key['machine']['device']}: "
            f"{answer.choice.name}, {answer.figures['gain']:.2f} times as fast as given"
        )

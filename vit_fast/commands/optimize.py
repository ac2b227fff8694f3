"""`vit-fast optimize`: finds the fastest configuration of a model; `vit-fast cache`: lists cached results.

`vit-fast show` draws figures of a model's attention, features and filters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..cli import PLAIN, AsJson, Device, ImageSize, argument, integers, option, split_words, table, wide_console

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, nn

    from ..benchmarks.models import Model
    from ..measure.optimization import Optimization

OTHER_BATCHES = 3  # besides the example, to measure agreement
ModelName = Annotated[
    str, argument("One of `vit-fast models`, timm:NAME, hf:FOLDER, a weights file, FILE.onnx, or module:function.")
]
FIGURES = ("patches", "filters", "positions", "attention", "rollout", "attention_distance", "features")


def optimize(
    model: ModelName,
    batch: Annotated[int, option("Images per call.", min=1)] = 1,
    img_size: ImageSize = None,
    allow: Annotated[str | None, option("Also try lower precision: bf16, fp16, int8, fp8.", metavar="A,B")] = None,
    min_agreement: Annotated[float, option("With --allow: minimum top-1 agreement with MODEL.", min=0, max=1)] = 0.99,
    images: Annotated[list[Path] | None, option(
        "Image files or folders for checks and calibration (default: a sample image).")] = None,
    budget: Annotated[float, option("Time limit of the search in seconds, including builds and checks.", min=1)] = 100,
    latency: Annotated[bool, option("Minimize p90 latency instead of median latency.", "--latency")] = False,
    memory_limit: Annotated[float | None, option(
        "Maximum memory of a candidate in MiB, not counting MODEL: what its build adds, plus the peak of one call.",
        min=0.001)] = None,
    device: Device = "auto",
    export: Annotated[Path | None, option("New or empty folder, to write the result as .onnx or .pt2 file.")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Find the fastest way to run a model on this machine, verify its outputs, and cache the result.

    A candidate is one way to run MODEL, e.g. torch.compile. The baseline of the printed speedup is MODEL itself. For
    models of vit-fast, the baseline runs the eager backend. Press Ctrl-C to stop the search and get the best result so
    far.
    """
    from rich.console import Console
    from rich.markup import escape

    from ..files import check_new_folder
    from ..measure.optimization import deploy
    from ..measure.optimization import optimize as run

    if export is not None:
        check_new_folder(export)
    console, progress = wide_console(stderr=as_json), Console(stderr=True)
    opened = open_model(model, batch, images or (), device, integers("--img-size", img_size, "x"))
    with progress.status(escape(model)):
        result = run(
            opened.module, opened.example, budget_s=budget, lossless=allow is None,
            allow=split_words(allow),  # type: ignore[arg-type]  # checked by run
            min_agreement=min_agreement, calibration=opened.image_files, images=opened.others,
            latency_or_throughput="latency" if latency else "throughput",
            memory_limit=None if memory_limit is None else int(memory_limit * 2**20),
            progress=lambda what, seconds: progress.out(f"{seconds:.1f} of {budget:g} s: {what}", highlight=False),
        )  # fmt: skip
    if result.table:
        console.print(_table(result))
    console.print(f"{opened.model.name}, batch {batch}: {result}", **PLAIN)
    if export is not None:
        for path in deploy(result.cached, opened.module, opened.example, export, opened.image_files):
            console.print(f"wrote {path}", **PLAIN)
    if as_json:
        rows = [
            {**vars(row), "candidate": row.candidate.to_dict(), "name": row.candidate.name}
            | {"checked": None if row.checked is None else vars(row.checked)}
            for row in result.table
        ]
        typer.echo(json.dumps(result.cached.to_dict() | {"name": result.candidate.name, "table": rows}, indent=2))


def _table(result: Optimization) -> Table:
    from rich.markup import escape

    from ..measure.clock import format_number

    titles = ["candidate", "ms", "images/s", "speedup", "max error", "agreement", "peak MiB", "first call s", "status"]
    made = table(f"candidates in the order of the search, by {result.objective}", titles)
    made.columns[-1].justify, made.columns[-1].no_wrap, made.columns[0].no_wrap = "left", False, False
    for row in result.table:
        cells = [""] * 7
        if row.ms is not None and row.images_per_s is not None:
            interval = "" if row.speedup_interval is None else " [{:.2f}, {:.2f}]".format(*row.speedup_interval)
            cells[:3] = format_number(row.ms, 4), format_number(row.images_per_s, 4), f"{row.speedup:.2f}{interval}"
        if (found := row.checked) is not None:
            cells[3:5] = f"{found.error:.1e}", f"{found.agreement:.1%}"
            cells[5:] = f"{found.peak_bytes / 2**20:.0f}", f"{found.first_call_s:.1f}"
        texts = map(escape, (row.candidate.name, *cells, row.reason or "selected"))
        made.add_row(*texts, style=None if row.reason else "bold")
    return made


def cache(
    clear: Annotated[bool, option("Remove all cached results, also the measurements of freeze.", "--clear")] = False,
) -> None:
    """List or remove the cached results of `optimize`, which are JSON files."""
    from ..measure import cache

    if clear:
        typer.echo(f"removed {cache.clear()} cached results from {cache.folder()}")
        return
    found = list(cache.all_results())
    typer.echo(f"cached results in {cache.folder()}: {len(found)}")
    for path, result in found:
        key = result.key
        shapes = " ".join("x".join(map(str, shape)) + f" {dtype}" for shape, dtype in key["example"])
        typer.echo(
            f"{path.stem}  {key['request']['objective']}, {shapes}, model {key['model']}, {key['machine']['device']}: "
            f"{result.candidate.name}, speedup {result.figures['speedup']:.2f}"
        )


def show(
    model: Annotated[str, argument("One of `vit-fast models`, timm:NAME, hf:FOLDER, a weights file, module:function.")],
    image: Annotated[Path | None, argument("An image file (default: matplotlib's sample image).")] = None,
    figures: Annotated[str, option("Figures to draw.", metavar="A,B")] = ",".join(FIGURES),
    blocks: Annotated[str, option("Blocks in the attention figure, by index; -1 is the last block.")] = "0,-1",
    img_size: ImageSize = None,
    out: Annotated[Path, option("Output folder, for one file FIGURE.png per figure.")] = Path("figures"),
) -> None:
    """Draw patches, filters, positions, attention and features of a model as PNG files.

    Skips figures that do not apply to the model, and prints the reason.
    """
    from .. import figures as drawn
    from ..errors import UnsupportedInputError, check_choice
    from ..files import check_replaceable, file_aside

    check_replaceable(out / "figure.png")
    wanted = split_words(figures) or []
    for name in wanted:
        check_choice("--figures", name, FIGURES)
    options = {"attention": {"blocks": integers("--blocks", blocks)}}
    opened = open_model(model, 1, [] if image is None else [image], "cpu", integers("--img-size", img_size, "x"))
    prepared = drawn.open_image(
        opened.module, image or opened.image_files[0], data_config=opened.model.data, image_hw=opened.model.image_hw,
        in_chans=opened.model.in_chans,
    )  # fmt: skip
    made = {}
    for name in wanted:
        inputs = [opened.module, prepared][: 1 if name == "filters" else 2]
        try:
            made[out / f"{name}.png"] = getattr(drawn, name)(*inputs, **options.get(name, {}))
        except UnsupportedInputError as error:
            typer.echo(f"skipped {name}: {'; '.join(error.reasons)}", err=True)
    for path, figure in made.items():
        with file_aside(path) as aside:
            figure.savefig(aside)
        typer.echo(f"wrote {path}")


class Opened(NamedTuple):
    """A model in fp32 on its device, with an example batch, other batches, and the image files."""

    model: Model
    module: nn.Module
    example: Tensor
    others: list[Tensor]
    image_files: tuple[Path, ...]


def open_model(
    name: str, batch: int, images: Sequence[Path], device: str = "auto", img_size: Sequence[int] | None = None
) -> Opened:
    """Opens a model and images with the same arguments as `vit-fast bench`; see make_configuration."""
    import torch

    from ..apps.data import as_pixels, read_image
    from ..benchmarks.candidates import build_reference
    from ..benchmarks.configuration import make_configuration
    from ..benchmarks.models import MAX_VIEWS, Group, image_views
    from ..measure.runtimes import OnnxFile

    configuration = make_configuration(
        images, models=[name], batch_sizes=[batch], dtypes=["fp32"], img_size=img_size, device=device
    )
    on, paths, (model, *more) = configuration.device, configuration.images, configuration.models
    if more:
        names = ", ".join(model.name for model in configuration.models)
        raise ValueError(f"MODEL must match one model, got {name!r}, which matches {names}")
    if model.kind not in ("vit-fast", "given", "onnx"):
        raise ValueError(f"MODEL must not be a single block or operator, got {name}")
    count = max(batch, min(MAX_VIEWS, batch * (1 + OTHER_BATCHES)))
    views = image_views(paths, model, count)
    if model.onnx is None:
        module: Any = build_reference(Group(model, "fp32", batch, device=on))
    else:
        module = OnnxFile(model.onnx, on, img_size if img_size is None else model.image_hw)
        if module.runner.takes_pixels:
            views = torch.from_numpy(as_pixels(read_image(paths[0]), count, module.runner.in_chans))
        else:
            views = views.to(getattr(torch, module.runner.info.inputs[0]["dtype"]))
    batches = [part for part in views.to(on).split(batch) if len(part) == batch]
    return Opened(model, module, batches[0], batches[1:], paths)

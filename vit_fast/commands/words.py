"""Options, models with images, and tables of several commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor, nn

    from ..benchmarks.models import Model

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Backend = Annotated[str, typer.Option(help="auto, eager, sdpa or triton.")]
ClassNames = Annotated[
    Path | None, typer.Option(help="File with class names: one per line, or JSON (a list, or an index-to-name object).")
]
DataConfigFile = Annotated[
    Path | None,
    typer.Option(
        help="JSON file with the preprocessing (mean, std, crop_pct, interpolation, img_size) of an ONNX file without "
        "this metadata."
    ),
]
Side = Annotated[int | None, typer.Option(help="Height and width in pixels (default: the model's).")]
WeightsFile = Annotated[str, typer.Option(help="A weights file, a folder, a Hugging Face Hub id, or FILE.onnx.")]
WeightsModel = Annotated[str | None, typer.Option(help="Name of the model, if the weights contain no config.")]

FULL_WIDTH = 160  # line width if the output is not a terminal


def split_words(value: str | None, separator: str = ",") -> list[str] | None:
    return None if value is None else [part.strip() for part in value.split(separator) if part.strip()]


def integers(option: str, value: str | None, separator: str = ",") -> list[int] | None:
    parts = split_words(value, separator)
    try:
        return None if parts is None else [int(part) for part in parts]
    except ValueError:
        raise ValueError(f"{option} must be integers, separated by {separator!r}, got {value}") from None


def model_name(name: str) -> str:
    """Adds "./" to the name of an existing file or folder, so that create_model opens it as weights."""
    return f"./{name}" if "/" not in name and Path(name).exists() else name


def wide_console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = FULL_WIDTH
    return console


def table(title: str, titles: Sequence[str], rows: Iterable[Sequence[str]] = (), *, texts: int = 1) -> Table:
    """Builds a table whose first `texts` columns contain text and the others numbers; escapes rich markup."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    made = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(titles):
        made.add_column(escape(name), justify="left" if place < texts else "right", no_wrap=True)
    for row in rows:
        made.add_row(*map(escape, row))
    return made


OTHER_BATCHES = 3  # to measure agreement


@dataclass(frozen=True)
class Opened:
    """A model in fp32 on its device, with an example batch, other batches, and the image files."""

    model: Model
    module: nn.Module
    example: Tensor
    others: list[Tensor]
    image_files: tuple[Path, ...]


def open_model(
    name: str, batch: int, images: Sequence[Path], device: str = "auto", img_size: Sequence[int] | None = None
) -> Opened:
    """Opens a model and images with the same arguments as `vit-fast bench`; see make_configuration.

    Raises:
        ValueError: an argument is unknown, out of range or unreadable, or the name matches several models.
    """
    import numpy as np
    import torch

    from ..apps.data import as_pixels, read_image
    from ..benchmarks.candidates import build_reference
    from ..benchmarks.configuration import make_configuration
    from ..benchmarks.models import MAX_VIEWS, Task
    from ..benchmarks.preparation import image_views, random_weights
    from ..measure.runtimes import OnnxFile

    configuration = make_configuration(
        images, models=[name], batch_sizes=[batch], dtypes=["fp32"], img_size=img_size, device=device
    )
    on, paths = configuration.device, configuration.images
    if len(configuration.models) > 1:
        names = ", ".join(model.name for model in configuration.models)
        raise ValueError(f"the name must match one model, got {name!r}, which matches {names}")
    (model,) = configuration.models
    if model.onnx is not None:
        module: Any = OnnxFile(model.onnx, on, img_size if img_size is None else model.image_hw)
    elif model.kind not in ("ours", "given"):
        raise ValueError(f"the model must not be a single block or operator, got {name}")
    else:
        weights = model.weights if model.config is None or model.weights else random_weights(model.config)
        task = Task(model, weights, torch.float32, on, batch)
        module = build_reference(task)
    count = max(batch, min(MAX_VIEWS, batch * (1 + OTHER_BATCHES)))
    if model.onnx is None:
        views = image_views(paths, model, count)
    elif module.runner.takes_pixels:
        views = torch.from_numpy(as_pixels(read_image(paths[0]), count, module.runner.in_chans))
    else:
        one = torch.from_numpy(module.runner.example(1, np.random.default_rng(0)))
        views = image_views(paths, model, count).to(one.dtype)
    batches = [part for part in views.to(on).split(batch) if len(part) == batch]
    return Opened(model, module, batches[0], batches[1:], paths)

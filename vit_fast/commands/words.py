"""Options that several commands have, options with several values, and tables on the screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Backend = Annotated[str, typer.Option(help="auto, eager, sdpa or triton.")]
ClassNames = Annotated[
    Path | None, typer.Option(help="File of class names: one per line, or JSON (list, or index to name).")
]
DataConfigFile = Annotated[
    Path | None,
    typer.Option(
        help="JSON with mean, std, crop_pct, interpolation, img_size, for an ONNX file without this metadata."
    ),
]
Side = Annotated[int | None, typer.Option(help="Height and width in pixels; default: the model's.")]
WeightsFile = Annotated[
    str, typer.Option(help="A weights file, a folder, a Hugging Face Hub id, or an ONNX file (FILE.onnx).")
]
WeightsModel = Annotated[str | None, typer.Option(help="Model of the weights, if they contain no config.")]

FULL_WIDTH = 160  # characters of a line where the output is no terminal: enough for every table


def split_words(value: str | None, separator: str = ",") -> list[str] | None:
    return None if value is None else [part.strip() for part in value.split(separator) if part.strip()]


def integers(option: str, value: str | None, separator: str = ",") -> list[int] | None:
    parts = split_words(value, separator)
    try:
        return None if parts is None else [int(part) for part in parts]
    except ValueError:
        raise ValueError(f"{option} must be integers separated by {separator!r}, got {value}") from None


def model_name(name: str) -> str:
    """Adds a slash to an existing file or folder, which create_model then takes for weights, not for a variant."""
    return f"./{name}" if "/" not in name and Path(name).exists() else name


def wide_console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = FULL_WIDTH
    return console


def table(title: str, titles: Sequence[str], rows: Iterable[Sequence[str]] = (), *, texts: int = 1) -> Table:
    """Makes a table whose first `texts` columns are text and the others numbers; nothing in it is markup."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    made = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(titles):
        made.add_column(escape(name), justify="left" if place < texts else "right", no_wrap=True)
    for row in rows:
        made.add_row(*map(escape, row))
    return made

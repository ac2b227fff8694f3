"""The `vit-fast` command, and the options that several of its commands share."""

from __future__ import annotations

import importlib
import inspect
import io
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import VitFastError
from .version import __version__

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COMMANDS = {
    "info": "info", "models": "info", "bench": "bench", "compare": "bench", "report": "bench", "verify": "info",
    "kernels": "kernels", "predict": "predict", "train": "train", "evaluate": "predict", "export": "export",
    "optimize": "optimize", "cache": "optimize", "show": "optimize",
}  # fmt: skip
"""Maps each command to its module in `commands/`. `vit-fast COMMAND` imports only this module."""

USER_ERRORS = (VitFastError, ValueError, TypeError, OSError)
FULL_WIDTH = 160  # characters per line if the output is not a terminal


def option(help_text: str, *names: str, **settings: Any) -> Any:
    """Declares an option. Pass the name of a flag: otherwise, typer also adds --no-FLAG."""
    return typer.Option(*names, help=help_text, **settings)


def argument(help_text: str, **settings: Any) -> Any:
    return typer.Argument(help=help_text, **settings)


PLAIN: Any = {"soft_wrap": True, "highlight": False, "markup": False}  # of Console.print, for unchanged text
AsJson = Annotated[bool, option("Print JSON to stdout, and all other output to stderr.", "--json")]
Backend = Annotated[str, option("Backend of the model: auto, eager, sdpa or triton.")]
ClassNames = Annotated[
    Path | None, option("Class names: a text file, one per line, or .json with a list or an object from index to name.")
]
DataConfigFile = Annotated[Path | None, option(
    "Preprocessing, if the model or file contains none: JSON with mean, std, crop_pct, interpolation, img_size.")
]  # fmt: skip
Device = Annotated[str, option("cpu, cuda, cuda:N, or auto (cuda if available).")]
ImageSize = Annotated[str | None, option("Image size in pixels (default: the model's).", metavar="N|HxW")]
Side = Annotated[int | None, option("Side of the square input image in pixels (default: the model's).")]
WeightsFile = Annotated[str, option(
    "A weights file, a folder, a Hugging Face Hub id, or FILE.onnx; of a checkpoint, e.g. FILE#key=student.")
]  # fmt: skip
WeightsModel = Annotated[str | None, option("One of `vit-fast models`, if the weights contain no config.")]


def make_app(wanted: str = "") -> typer.Typer:
    """Builds the typer application with the command `wanted`, or with all commands if `wanted` is unknown."""
    app = typer.Typer(name="vit-fast", no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_before_every_command)
    for name in [wanted] if wanted in COMMANDS else COMMANDS:
        module = importlib.import_module(f".commands.{COMMANDS[name]}", __package__)
        function = getattr(module, name)
        paragraphs = (inspect.getdoc(function) or "").split("\n\n")
        # typer removes line breaks from the first paragraph only
        app.command(name, help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))(function)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vit-fast {__version__}")
        raise typer.Exit


def _before_every_command(
    version: Annotated[
        bool, option("Show the version and exit.", "--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Speed up, export and measure Vision Transformers.

    To see the traceback of an error, run `vit-fast --traceback COMMAND ...`.
    """


def main(args: list[str] | None = None) -> None:
    """Runs the command line. Prints an error as one line and exits with 2, or raises it after `--traceback`."""
    args = list(sys.argv[1:] if args is None else args)
    if isinstance(sys.stdout, io.TextIOWrapper):  # print names that the encoding of the terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    traceback_wanted = args[:1] == ["--traceback"]
    if traceback_wanted:
        del args[0]
    try:
        make_app(*args[:1])(args=args, prog_name="vit-fast")
    except USER_ERRORS as error:
        if traceback_wanted:
            raise
        text = str(error).replace(":\n  - ", ": ").replace("\n  - ", "; ")  # joins reasons of UnsupportedInputError
        message = " ".join(text.split()) or type(error).__name__
        if isinstance(error, OSError) and error.filename and error.strerror:  # without "[Errno 2]"
            message = f"{error.filename}: {error.strerror}"
        sys.stderr.write(f"vit-fast: error: {message}\n")
        sys.exit(2)


def split_words(value: str | None, separator: str = ",") -> list[str] | None:
    return None if value is None else [part.strip() for part in value.split(separator) if part.strip()]


def integers(name: str, value: str | None, separator: str = ",") -> list[int] | None:
    parts = split_words(value, separator)
    try:
        return None if parts is None else [int(part) for part in parts]
    except ValueError:
        raise ValueError(f"{name} must be integers separated by {separator!r}, got {value}") from None


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
    """Builds a table: left-aligned text in the first `texts` columns, then right-aligned numbers.

    Text in the last column wraps. Otherwise, a long note would leave no space for the other columns.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    made = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(titles):
        is_text, is_last = place < texts, place == len(titles) - 1
        made.add_column(escape(name), justify="left" if is_text else "right", no_wrap=not (is_text and is_last))
    for row in rows:
        made.add_row(*map(escape, row))
    return made


if __name__ == "__main__":
    main()

"""The `vit-fast` command. Imports only the module of the given command, and prints errors as one line."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Annotated

import typer

from .errors import VitFastError
from .version import __version__

COMMANDS = {
    "info": "info", "models": "info", "bench": "bench", "compare": "bench", "report": "bench", "verify": "info",
    "kernels": "kernels", "predict": "predict", "train": "train", "evaluate": "evaluate", "export": "export",
    "optimize": "optimize", "cache": "optimize", "show": "show", "hf-kernel": "export",
}  # fmt: skip
"""Maps each command to its module, which contains a function with the command's name."""

USER_ERRORS = (VitFastError, ValueError, TypeError, OSError)


def make_app(wanted: str = "") -> typer.Typer:
    """Builds the typer application with the command `wanted`, or with all commands if it is unknown."""
    app = typer.Typer(
        name="vit-fast",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_before_every_command)
    for name in [wanted] if wanted in COMMANDS else COMMANDS:
        module = importlib.import_module(f".commands.{COMMANDS[name]}", __package__)
        function = getattr(module, name.replace("-", "_"))
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Speed up, export and measure Vision Transformers."""


def main(args: list[str] | None = None) -> None:
    """Runs the command line. Prints errors as one line and exits with 2; with `--traceback` first, raises them."""
    args = list(sys.argv[1:] if args is None else args)
    traceback_wanted = args[:1] == ["--traceback"]
    if traceback_wanted:
        del args[0]
    try:
        make_app(*args[:1])(args=args, prog_name="vit-fast")
    except USER_ERRORS as error:
        if traceback_wanted:
            raise
        sys.stderr.write(f"vit-fast: error: {_one_line(error)}\n")
        sys.exit(2)


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:  # without "[Errno 2]"
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    main()

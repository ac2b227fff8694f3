"""`vit-fast show`: draws figures of a model's attention, features and filters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .words import integers, open_model

FIGURES = ("patches", "filters", "positions", "attention", "rollout", "attention_distance", "features")


def show(
    model: Annotated[
        str,
        typer.Argument(
            help="One of `vit-fast models`, timm:NAME, hf:FOLDER, a weights file, or "
            "package.module:function that returns an nn.Module."
        ),
    ],
    image: Annotated[Path | None, typer.Argument(help="An image file (default: matplotlib's sample image).")] = None,
    figures: Annotated[str, typer.Option(help=f"Some of {', '.join(FIGURES)}.", metavar="A,B")] = ",".join(FIGURES),
    blocks: Annotated[
        str, typer.Option(help="Blocks of the attention figure; negative indices count from the end.", metavar="0,-1")
    ] = "0,-1",
    img_size: Annotated[
        str | None, typer.Option(help="Image size in pixels (default: the model's).", metavar="N|HxW")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the files FIGURE.png.")] = Path("figures"),
) -> None:
    """Draw patches, filters, positions, attention and features of a model as PNG files.

    Skips figures that do not apply to the model and prints the reason.
    """
    from .. import figures as drawn
    from ..errors import UnsupportedInputError
    from ..files import check_replaceable, file_aside

    check_replaceable(out / "figure.png")
    wanted = [name.strip() for name in figures.split(",")]
    for name in wanted:
        if name not in FIGURES:
            raise ValueError(f"--figures must be among {', '.join(FIGURES)}, got {name}")
    of_attention = {"blocks": integers("--blocks", blocks)}
    opened = open_model(model, 1, [] if image is None else [image], "cpu", integers("--img-size", img_size, "x"))
    prepared = drawn.open_image(
        opened.module, image or opened.image_files[0], data_config=opened.model.data, image_hw=opened.model.image_hw,
        in_chans=opened.model.in_chans,
    )  # fmt: skip
    made = {}
    for name in wanted:
        try:
            if name == "filters":
                made[name] = drawn.filters(opened.module)
            else:
                options = of_attention if name == "attention" else {}
                made[name] = getattr(drawn, name)(opened.module, prepared, **options)
        except UnsupportedInputError as error:
            typer.echo(f"skipped {name}: {'; '.join(error.reasons)}", err=True)
    for name, figure in made.items():
        path = out / f"{name}.png"
        with file_aside(path) as aside:
            figure.savefig(aside)
        typer.echo(f"wrote {path}")

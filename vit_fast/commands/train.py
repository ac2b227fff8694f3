"""`vit-fast train`: trains or fine-tunes on a folder of images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

_DTYPES: dict[str, Literal["float32", "bfloat16"]] = {"fp32": "float32", "bf16": "bfloat16"}


def register(app: typer.Typer) -> None:
    app.command(name="train")(train_command)


def train_command(
    folder: Annotated[Path, typer.Argument(help="Images, one subfolder a class.")],
    out: Annotated[Path, typer.Option(help="Where weights, checkpoint and log go.")],
    model: Annotated[str, typer.Option(help="One of `vit-fast models`, or a Hugging Face Hub id.")],
    weights: Annotated[str | None, typer.Option(help="Start from these; their head is replaced.")] = None,
    validation: Annotated[Path | None, typer.Option(help="A folder like the first, to measure accuracy on.")] = None,
    epochs: Annotated[int, typer.Option()] = 10,
    batch_size: Annotated[int, typer.Option()] = 64,
    lr: Annotated[float, typer.Option(help="Learning rate after the warm-up.")] = 5e-4,
    weight_decay: Annotated[float, typer.Option()] = 0.05,
    warmup_epochs: Annotated[float, typer.Option()] = 1.0,
    drop_path: Annotated[float, typer.Option(help="Stochastic depth of the last block.")] = 0.0,
    img_size: Annotated[int | None, typer.Option(help="Height and width; None means the model's own.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, or bf16 by autocast.")] = "fp32",
    backend: Annotated[str, typer.Option(help="auto, eager, sdpa or triton.")] = "auto",
    augment: Annotated[bool, typer.Option(help="Random crops and mirroring.")] = True,
    grad_checkpointing: Annotated[bool, typer.Option(help="Less memory, one more forward pass.")] = False,
    seed: Annotated[int, typer.Option()] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after the last finished epoch in --out.")] = False,
) -> None:
    """Trains a model on a folder of images, and says loss and accuracy after every epoch."""
    if dtype not in _DTYPES:
        raise ValueError(f"--dtype {dtype}: accepted are {', '.join(_DTYPES)}")

    import torch

    from ..factory import create_model
    from ..image_folder import class_names_of
    from ..train import WEIGHTS, TrainConfig, train

    config = TrainConfig(
        epochs=epochs, batch_size=batch_size, lr=lr, weight_decay=weight_decay, warmup_epochs=warmup_epochs,
        dtype=_DTYPES[dtype],
        grad_checkpointing=grad_checkpointing, augment=augment, seed=seed,
    )  # fmt: skip
    overrides: dict[str, Any] = {"num_classes": len(class_names_of(folder)), "drop_path_rate": drop_path}
    if img_size is not None:
        overrides["img_size"] = img_size
    torch.manual_seed(seed)
    made = create_model(
        model, weights=weights, backend=backend, device="cuda" if torch.cuda.is_available() else "cpu", **overrides
    )

    def say(row: dict[str, Any]) -> None:
        accuracy = "" if row["accuracy"] is None else f", accuracy {row['accuracy']:.2%}"
        typer.echo(f"epoch {row['epoch'] + 1}/{epochs}: loss {row['loss']:.4f}{accuracy}")

    train(made, folder, out, config, validation=validation, resume=resume, on_epoch=say)
    typer.echo(f"wrote {out / WEIGHTS}")

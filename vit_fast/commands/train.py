"""`vit-fast train`: trains or fine-tunes on labelled images; alone, a small model on bundled digits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .words import model_name

if TYPE_CHECKING:
    from ..training.processes import Processes
    from ..training.train import TrainConfig
    from ..training.trainer import Measure

_DTYPES = ("fp32", "bf16")


def register(app: typer.Typer) -> None:
    app.command(name="train")(train_command)


def train_command(
    folder: Annotated[Path | None, typer.Argument(help="As --data.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Images, one subfolder a class; or the files of MNIST, Fashion-MNIST (IDX) or CIFAR-10 (its python "
            "version). Without, 1,797 digits that are bundled."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where weights, checkpoint, log and curve go.")] = Path("trained"),
    model: Annotated[
        str,
        typer.Option(help="One of `vit-fast models`, a weights file that says its shape, or a Hugging Face Hub id."),
    ] = "vit_micro_patch7_28",
    weights: Annotated[str | None, typer.Option(help="Start from these; a head of another size is replaced.")] = None,
    validation: Annotated[Path | None, typer.Option(help="A folder like --data's, to measure accuracy on.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="What is not given is the model's recipe, or TrainConfig's.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images a step, of all processes together.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate after the warm-up.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="AdamW's; 0 makes it Adam.")] = None,
    warmup_epochs: Annotated[float | None, typer.Option()] = None,
    schedule: Annotated[str | None, typer.Option(help="cosine or constant, behind the warm-up.")] = None,
    layer_decay: Annotated[float | None, typer.Option(help="Each block's rate over the next one's.")] = None,
    label_smoothing: Annotated[float | None, typer.Option()] = None,
    mixup: Annotated[float | None, typer.Option(help="alpha; 0 mixes nothing.")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="0 clips nothing.")] = None,
    ema_decay: Annotated[float | None, typer.Option(help="Keep the weights' running mean, with this decay.")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Parts that a batch is computed in.")] = None,
    patience: Annotated[int | None, typer.Option(help="Stop after so many epochs without a better accuracy.")] = None,
    drop_path: Annotated[float, typer.Option(help="Stochastic depth of the last block.")] = 0.0,
    img_size: Annotated[int | None, typer.Option(help="Height and width; None means the model's own.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, or bf16 by autocast.")] = None,
    backend: Annotated[str, typer.Option(help="auto, eager, sdpa or triton.")] = "auto",
    augment: Annotated[bool | None, typer.Option(help="Random crops, shifts and mirroring, as suits the data.")] = None,
    grad_checkpointing: Annotated[
        bool | None, typer.Option("--grad-checkpointing", help="Less memory, one more forward pass.")
    ] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    workers: Annotated[int, typer.Option(help="Processes that read images beside this one.")] = 0,
    parallel: Annotated[str, typer.Option(help="Under torchrun: ddp, or fsdp for parameters in shares.")] = "ddp",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write OUT/tensorboard.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after the last finished epoch in --out.")] = False,
) -> None:
    """Trains a model on labelled images, says loss and accuracy after every epoch, and draws their curve."""
    if folder is not None and data is not None:
        raise ValueError(f"--data {data} beside {folder}: accepted is one of them")
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"--dtype {dtype}: accepted are {', '.join(_DTYPES)}")
    given = {
        "epochs": epochs, "batch_size": batch_size, "lr": lr, "weight_decay": weight_decay,
        "warmup_epochs": warmup_epochs, "schedule": schedule, "layer_decay": layer_decay,
        "label_smoothing": label_smoothing, "mixup": mixup, "max_grad_norm": max_grad_norm, "ema_decay": ema_decay,
        "accumulation": accumulation, "patience": patience, "dtype": dtype,
        "augment": augment, "grad_checkpointing": grad_checkpointing, "seed": seed,
    }  # fmt: skip

    from ..training.config import config_for
    from ..training.processes import joined

    config = config_for(model, {name: value for name, value in given.items() if value is not None})
    overrides: dict[str, Any] = {"drop_path_rate": drop_path} | ({} if img_size is None else {"img_size": img_size})
    with joined(parallel) as processes:
        rows = _run(
            data or folder, validation, out, model, weights, backend, overrides, config, processes,
            workers=workers, resume=resume, tensorboard=tensorboard,
        )  # fmt: skip
    if processes.rank == 0 and rows:
        _tell_the_end(out, rows, config)


def _run(
    data_path: Path | None,
    validation: Path | None,
    out: Path,
    name: str,
    weights: str | None,
    backend: str,
    overrides: dict[str, Any],
    config: TrainConfig,
    processes: Processes,
    *,
    workers: int,
    resume: bool,
    tensorboard: bool,
) -> list[dict[str, Any]]:
    """The rows of the log; the model ends with this function, and with it what refers to the other processes."""
    import torch

    from ..factory import create_model
    from ..training.datasets import open_data
    from ..training.figures import tensorboard_rows
    from ..training.train import train

    data = open_data(data_path, validation)
    torch.manual_seed(config.seed)
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    overrides = {"num_classes": len(data.train.class_names), **overrides}
    made = create_model(model_name(name), weights=weights, backend=backend, device=device, **overrides)
    first = processes.rank == 0
    with _progress(first, config.epochs) as on_step, tensorboard_rows(out if first and tensorboard else None) as keep:

        def on_epoch(row: dict[str, Any]) -> None:
            keep(row)
            if first:
                _tell(row, config.epochs)

        return train(
            made, data, out, config, resume=resume, workers=workers, processes=processes, on_step=on_step,
            on_epoch=on_epoch,
        )  # fmt: skip


def _tell(row: dict[str, Any], epochs: int) -> None:
    held_out = "" if row["accuracy"] is None else f", accuracy {row['accuracy']:.2%}"
    typer.echo(f"epoch {row['epoch'] + 1}/{epochs}: loss {row['loss']:.4f}{held_out}")


def _tell_the_end(out: Path, rows: list[dict[str, Any]], config: TrainConfig) -> None:
    from ..files import file_aside
    from ..training.figures import draw_curve
    from ..training.runs import WEIGHTS
    from ..training.train import kept_row

    row = kept_row(rows, config)
    if row["accuracy"] is not None:
        typer.echo(f"test loss: {row['held_out_loss']:.2f}")
        typer.echo(f"test accuracy: {row['accuracy']:.2%}")
    with file_aside(out / "curve.png") as curve:
        curve.write_bytes(draw_curve(rows))
    typer.echo(f"wrote {out / WEIGHTS}, {out / 'curve.png'}")


@contextmanager
def _progress(shown: bool, epochs: int) -> Iterator[Callable[[int, int, int, Measure], None]]:
    """A bar of the epoch on standard error, where that is a terminal: loss, accuracy and images a second so far."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task("", total=None)
        seen, right, loss, begun = 0, 0, 0.0, time.perf_counter()

        def on_step(epoch: int, step: int, steps: int, measure: Measure) -> None:
            nonlocal seen, right, loss, begun
            if step == 0:  # the rate is of this epoch, its first batch left out: workers start in it
                seen, right, loss, begun = 0, 0, 0.0, time.perf_counter()
                progress.reset(task, total=steps)
            else:
                seen, right, loss = seen + measure.seen, right + measure.right, loss + measure.loss * measure.seen
            if seen:
                rate = seen / (time.perf_counter() - begun)
                text = f"epoch {epoch + 1}/{epochs}  loss {loss / seen:.4f}  accuracy {right / seen:.1%}"
                progress.update(task, completed=step + 1, description=f"{text}  {rate:,.0f} images/s")

        yield on_step

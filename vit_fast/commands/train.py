"""`vit-fast train`: trains or fine-tunes a model on labeled images; by default a small model on bundled digits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..cli import Backend, Device, Side, argument, model_name, option
from ..errors import as_device, require_packages
from .predict import list_unreadable

if TYPE_CHECKING:
    from ..apps.trainer import Measure


def train(
    data: Annotated[Path | None, argument(
        "Folder with one subfolder of images per class, or the folder into which torchvision downloaded MNIST, "
        "FashionMNIST or CIFAR10 (default: 1,797 bundled images of digits).")] = None,
    out: Annotated[Path, option("Folder for weights, checkpoint, log and plot.")] = Path("trained"),
    model: Annotated[str, option(
        "One of `vit-fast models`, a weights file of vit-fast, or a Hugging Face Hub id.")] = "vit_micro_patch7_28",
    weights: Annotated[str | None, option(
        "Start from these weights: a file, a folder or a Hub id (default: those of --model if it is a file or Hub id, "
        "else random).")] = None,
    validation: Annotated[Path | None, option(
        "Folder of validation images, with subfolders of the same names as DATA. Not for torchvision data or the "
        "bundled digits, which contain a test set.")] = None,
    epochs: Annotated[int | None, option(
        "Number of epochs (default: 10; vit_micro_patch7_28: 60; vit_mnist: 5).")] = None,
    batch_size: Annotated[int | None, option(
        "Images per step, summed over processes (default: 64; vit_micro_patch7_28: 32; vit_mnist: 128).")] = None,
    lr: Annotated[float | None, option(
        "Learning rate after the warm-up (default: 5e-4; vit_micro_patch7_28: 2e-3; vit_mnist: 5e-3).")] = None,
    settings: Annotated[list[str] | None, option(
        "Set a field of vit_fast.apps.training.TrainConfig, or a rate of ViTConfig, e.g. drop_path_rate. Can be "
        "repeated.", "--set", metavar="mixup=0.2")] = None,
    img_size: Side = None,
    backend: Backend = "auto",
    workers: Annotated[int, option("Additional processes that read images.")] = 0,
    on_bad_image: Annotated[str, option(
        "If images cannot be read: error stops before the first epoch, skip trains without them. All files are decoded "
        "before the first epoch, JPEG files at an eighth of their size.")] = "error",
    device: Device = "auto",
    parallel: Annotated[str, option("Under torchrun: ddp, or fsdp, which shards the parameters.")] = "ddp",
    tensorboard: Annotated[bool, option("Also write TensorBoard logs to OUT/tensorboard.", "--tensorboard")] = False,
    resume: Annotated[bool, option("Resume the run in --out after its last finished epoch.", "--resume")] = False,
) -> None:  # fmt: skip
    """Train or fine-tune a model on labeled images. Prints and plots loss and validation accuracy of each epoch."""
    import torch

    from ..apps import training
    from ..apps.datasets import open_data
    from ..apps.trainer import joined
    from ..files import file_aside
    from ..weights import create_model

    given = {"epochs": epochs, "batch_size": batch_size, "lr": lr}
    config, overrides = training.config_for(model, given, settings or ())
    if tensorboard:
        require_packages("train", "tensorboard")
    bad: list[str] = []
    with joined(parallel, device) as processes:
        first = processes.rank == 0
        with contextlib.ExitStack() as stack:
            on_step = stack.enter_context(_progress(first, config.epochs))
            writer: Any = None
            if first and tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                writer = stack.enter_context(SummaryWriter(str(out / "tensorboard")))

            def on_epoch(row: dict[str, Any]) -> None:
                if writer is not None:
                    for name in row.keys() - {"epoch"}:
                        if row[name] is not None:
                            writer.add_scalar(name, row[name], row["epoch"])
                if first:
                    validated = "" if row["accuracy"] is None else f", validation accuracy {row['accuracy']:.2%}"
                    typer.echo(f"epoch {row['epoch'] + 1}/{config.epochs}: loss {row['loss']:.4f}{validated}")

            opened = open_data(data, validation)
            overrides |= {} if img_size is None else {"img_size": img_size}
            overrides |= {"num_classes": len(opened.class_names)}
            torch.manual_seed(config.seed)
            place = as_device(device)
            # Do not store the model in a variable: it must be freed before the process group.
            rows = training.train(
                create_model(model_name(model), weights=weights, backend=backend, device=place, **overrides), opened,
                out, config, resume=resume, workers=workers, processes=processes, on_bad_image=on_bad_image,
                on_step=on_step, on_epoch=on_epoch, on_skip=bad.extend,
            )  # fmt: skip
    if first:
        list_unreadable(bad)
        if bad:
            typer.echo(f"trained without {len(bad)} unreadable images", err=True)
    if first and rows:
        row = rows[training.saved_epoch(rows, config)]
        if row["accuracy"] is not None:
            typer.echo(f"validation loss: {row['held_out_loss']:.2f}")
            typer.echo(f"validation accuracy: {row['accuracy']:.2%}")
        with file_aside(out / "curve.png") as aside:
            _draw_curve(rows, aside)
        typer.echo(f"wrote {out / training.WEIGHTS}, {out / 'curve.png'}")


@contextlib.contextmanager
def _progress(shown: bool, epochs: int) -> Iterator[Callable[[int, int, int, Measure], None]]:
    """Shows a progress bar with the loss and images per second of the last steps on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task("", total=None)

        def on_step(epoch: int, step: int, steps: int, measure: Measure) -> None:
            if step == 0:
                progress.reset(task, total=steps)
            rate = (progress.tasks[0].speed or 0.0) * measure.seen
            text = f"epoch {epoch + 1}/{epochs}  loss {measure.loss:.4f}  {rate:,.0f} images/s"
            progress.update(task, completed=step + 1, description=text)

        yield on_step


def _draw_curve(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 3.8), dpi=150, layout="constrained")
    epochs = [row["epoch"] + 1 for row in rows]
    panels = (("loss", 1, "loss", "held_out_loss"), ("accuracy, percent", 100, "train_accuracy", "accuracy"))
    for axes, (title, scale, *fields) in zip(figure.subplots(1, 2), panels, strict=True):
        axes.set(title=title, xlabel="epoch")
        axes.grid(axis="y", alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        for field, name in zip(fields, ("training", "validation"), strict=True):
            if rows[-1][field] is not None:
                values = [scale * row[field] for row in rows]
                axes.plot(epochs, values, marker=".", label=f"{name}: {values[-1]:.4g}")
        axes.legend(frameon=False)
    figure.savefig(path, format="png")

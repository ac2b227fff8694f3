"""`vit-fast train`: trains or fine-tunes a model on labeled images; by default a small model on bundled digits."""

from __future__ import annotations

import importlib.util
import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .words import Backend, Side, model_name

if TYPE_CHECKING:
    from ..apps.trainer import Measure, TrainConfig

TRAINED, VALIDATED, INK, FAINT = "#94a3b8", "#0f766e", "#1e293b", "#64748b"


def train(
    data: Annotated[
        Path | None,
        typer.Argument(
            help="Folder with one subfolder of images per class, or with MNIST, FashionMNIST or CIFAR10 as "
            "downloaded by torchvision (default: 1,797 bundled images of digits)."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for weights, checkpoint, log and plot.")] = Path("trained"),
    model: Annotated[
        str,
        typer.Option(help="One of `vit-fast models`, a weights file of vit-fast, or a Hugging Face Hub id."),
    ] = "vit_micro_patch7_28",
    weights: Annotated[
        str | None,
        typer.Option(help="Fine-tune these weights: a file, a folder or a Hugging Face Hub id."),
    ] = None,
    validation: Annotated[
        Path | None, typer.Option(help="Measure the accuracy on this folder, with one subfolder of images per class.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Number of epochs (default: from the model's recipe or TrainConfig).")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per step, summed over all processes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate after the warm-up.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Set another field of TrainConfig, e.g. mixup=0.2. Can be repeated.", metavar="NAME=VALUE"
        ),
    ] = None,
    drop_path: Annotated[float, typer.Option(help="Drop path rate (stochastic depth) of the last block.")] = 0.0,
    img_size: Side = None,
    backend: Backend = "auto",
    workers: Annotated[int, typer.Option(help="Additional processes that read images.")] = 0,
    parallel: Annotated[str, typer.Option(help="Under torchrun: ddp, or fsdp, which shards the parameters.")] = "ddp",
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write logs for TensorBoard to OUT/tensorboard.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in --out after its last finished epoch.")
    ] = False,
) -> None:
    """Train or fine-tune a model on labeled images. Prints loss and accuracy after each epoch, and plots them."""
    from ..apps.datasets import open_data
    from ..apps.trainer import joined
    from ..apps.training import config_for
    from ..apps.training import train as run

    config = config_for(model, {"epochs": epochs, "batch_size": batch_size, "lr": lr}, settings or ())
    with joined(parallel) as processes:
        first = processes.rank == 0
        with (
            _progress(first, config.epochs) as on_step,
            _tensorboard_rows(out if first and tensorboard else None) as write,
        ):

            def on_epoch(row: dict[str, Any]) -> None:
                write(row)
                if first:
                    _print_epoch(row, config.epochs)

            opened = open_data(data, validation)
            # Do not store the model in a variable: it must be freed before the process group.
            rows = run(
                _model(model, weights, backend, config, len(opened.train.class_names), drop_path, img_size), opened,
                out, config, resume=resume, workers=workers, processes=processes, on_step=on_step, on_epoch=on_epoch,
            )  # fmt: skip
    if first and rows:
        _print_result(out, rows, config)


def _model(
    name: str, weights: str | None, backend: str, config: TrainConfig, classes: int, drop_path: float, size: int | None
) -> Any:
    import torch

    from ..weights.factory import create_model

    torch.manual_seed(config.seed)
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    overrides: dict[str, Any] = {"num_classes": classes, "drop_path_rate": drop_path}
    if size is not None:
        overrides["img_size"] = size
    return create_model(model_name(name), weights=weights, backend=backend, device=device, **overrides)


def _print_epoch(row: dict[str, Any], epochs: int) -> None:
    validated = "" if row["accuracy"] is None else f", validation accuracy {row['accuracy']:.2%}"
    typer.echo(f"epoch {row['epoch'] + 1}/{epochs}: loss {row['loss']:.4f}{validated}")


def _print_result(out: Path, rows: list[dict[str, Any]], config: TrainConfig) -> None:
    from ..apps.training import WEIGHTS, saved_row
    from ..files import file_aside

    row = saved_row(rows, config)
    if row["accuracy"] is not None:
        typer.echo(f"validation loss: {row['held_out_loss']:.2f}")
        typer.echo(f"validation accuracy: {row['accuracy']:.2%}")
    with file_aside(out / "curve.png") as curve:
        curve.write_bytes(_draw_curve(rows))
    typer.echo(f"wrote {out / WEIGHTS}, {out / 'curve.png'}")


@contextmanager
def _progress(shown: bool, epochs: int) -> Iterator[Callable[[int, int, int, Measure], None]]:
    """Shows a progress bar with loss, accuracy and images per second on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task("", total=None)
        seen, correct, loss, begun = 0, 0, 0.0, time.perf_counter()

        def on_step(epoch: int, step: int, steps: int, measure: Measure) -> None:
            nonlocal seen, correct, loss, begun
            if step == 0:  # exclude the first batch of an epoch from the rate, because workers start in it
                seen, correct, loss, begun = 0, 0, 0.0, time.perf_counter()
                progress.reset(task, total=steps)
            else:
                seen, correct, loss = seen + measure.seen, correct + measure.correct, loss + measure.loss * measure.seen
            if seen:
                rate = seen / (time.perf_counter() - begun)
                text = f"epoch {epoch + 1}/{epochs}  loss {loss / seen:.4f}  accuracy {correct / seen:.1%}"
                progress.update(task, completed=step + 1, description=f"{text}  {rate:,.0f} images/s")

        yield on_step


def _draw_curve(rows: Sequence[dict[str, Any]]) -> bytes:
    """Plots loss and accuracy per epoch for training and validation images; returns a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 3.8), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    epochs = [row["epoch"] + 1 for row in rows]
    for axes, title, fields, scale in zip(
        figure.subplots(1, 2),
        ("loss", "accuracy, percent"),
        (("loss", "held_out_loss"), ("train_accuracy", "accuracy")),
        (1, 100),
        strict=True,
    ):
        axes.set_title(title, loc="left", fontsize=10, color=INK, weight="bold")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.tick_params(left=False, labelsize=9, labelcolor=INK, color=FAINT)
        axes.grid(axis="y", color=FAINT, alpha=0.2)
        axes.set_xlabel("epoch", fontsize=9, color=FAINT)
        axes.xaxis.get_major_locator().set_params(integer=True)
        for field, color, name in zip(fields, (TRAINED, VALIDATED), ("training", "validation"), strict=True):
            if rows[-1][field] is not None:
                values = [scale * row[field] for row in rows]
                marker = "o" if len(rows) == 1 else None
                axes.plot(epochs, values, color=color, linewidth=2, marker=marker, label=f"{name}: {values[-1]:.4g}")
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


@contextmanager
def _tensorboard_rows(out: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that writes a row of the log to out/tensorboard; it does nothing if out is None.

    Raises:
        MissingPackageError: TensorBoard is not installed.
    """
    if out is None:
        yield lambda row: None
        return
    from ..errors import MissingPackageError

    if importlib.util.find_spec("tensorboard") is None:
        raise MissingPackageError("tensorboard not installed: pip install 'vit-fast[train]'")
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(out / "tensorboard"))
    with writer:

        def write(row: dict[str, Any]) -> None:
            for name, value in row.items():
                if name != "epoch" and value is not None:
                    writer.add_scalar(name, value, row["epoch"])

        yield write

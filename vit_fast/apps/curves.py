"""Training curves: a plot, and TensorBoard's files."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import MissingPackageError

TRAINED, HELD_OUT, INK, FAINT = "#94a3b8", "#0f766e", "#1e293b", "#64748b"


def draw_curve(rows: Sequence[dict[str, Any]]) -> bytes:
    """Draws loss and accuracy by epoch, of training and held-out images, as a PNG.

    Args:
        rows: Of the log, at least one.
    """
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
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.tick_params(left=False, labelsize=9, labelcolor=INK, color=FAINT)
        axes.grid(axis="y", color=FAINT, alpha=0.2)
        axes.set_xlabel("epoch", fontsize=9, color=FAINT)
        axes.xaxis.get_major_locator().set_params(integer=True)
        for field, color, name in zip(fields, (TRAINED, HELD_OUT), ("training", "held out"), strict=True):
            if rows[-1][field] is not None:
                values = [scale * row[field] for row in rows]
                marker = "o" if len(rows) == 1 else None
                axes.plot(epochs, values, color=color, linewidth=2, marker=marker, label=f"{name}: {values[-1]:.4g}")
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


@contextmanager
def tensorboard_rows(out: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that writes a row of the log to out/tensorboard, or does nothing if out is None.

    Raises:
        MissingPackageError: TensorBoard is not installed.
    """
    if out is None:
        yield lambda row: None
        return
    if importlib.util.find_spec("tensorboard") is None:
        raise MissingPackageError("tensorboard not installed: pip install 'vit-fast[train]'")
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(out / "tensorboard"))
    with writer:

        def keep(row: dict[str, Any]) -> None:
            for name, value in row.items():
                if name != "epoch" and value is not None:
                    writer.add_scalar(name, value, row["epoch"])

        yield keep

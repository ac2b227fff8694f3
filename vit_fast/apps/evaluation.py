"""Accuracy of a classifier on labeled images: top-1, top-5, per class, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .data import ImageFolder

TOP = 5


def labelled_images(folder: Path, classes: int, class_names: Sequence[str] | None) -> list[tuple[Path, int]]:
    """Returns the images of a folder with one subfolder per class, each with the index of its class.

    A subfolder's name is the name of a class, or its index. Other names, such as ImageNet's n01440764, must be as many
    as there are classes; their alphabetical order gives the index.

    Args:
        folder: Folder with at least two subfolders.
        classes: Number of the model's classes.
        class_names: Names of the model's classes, if known.
    Raises:
        ImageError: the folder does not exist, or has fewer than two subfolders or an empty one.
        ValueError: the subfolders do not match the model's classes.
    """
    images = ImageFolder(folder)
    names = images.class_names
    known = {name: i for i, name in enumerate(class_names or ())}
    indices: Sequence[int] = range(classes)
    if all(name in known for name in names):
        indices = [known[name] for name in names]
    elif all(name.isdecimal() and int(name) < classes for name in names):
        indices = list(map(int, names))
    elif len(names) != classes:
        strangers = ", ".join([repr(name) for name in names if name not in known][:5])
        raise ValueError(
            f"{folder}: the names of the subfolders must be names or indices of the model's classes, or there must be "
            f"{classes} subfolders, got {len(names)}, among them {strangers}"
        )
    return [(file, indices[label]) for file, label in images.files]


@dataclass(frozen=True)
class Evaluation:
    """Outputs of a classifier for labeled images.

    Attributes:
        files: The N images.
        labels: Their classes [N].
        predicted: The most probable classes [N, min(5, classes)], in descending order of probability.
        probabilities: Probabilities of `predicted`.
        classes: Number of classes.
    """

    files: list[Path]
    labels: np.ndarray
    predicted: np.ndarray
    probabilities: np.ndarray
    classes: int

    @property
    def correct(self) -> np.ndarray:
        """True for each image that was classified correctly [N]."""
        hits: np.ndarray = self.predicted[:, 0] == self.labels
        return hits

    @property
    def top1(self) -> float:
        return float(self.correct.mean())

    @property
    def top5(self) -> float:
        """Fraction of images whose class is among the five most probable."""
        return float((self.predicted == self.labels[:, None]).any(axis=1).mean())

    @property
    def confusion(self) -> np.ndarray:
        """Confusion matrix [classes, classes]: number of images by true class (row) and predicted class (column)."""
        counts = np.zeros((self.classes, self.classes), np.int64)
        np.add.at(counts, (self.labels, self.predicted[:, 0]), 1)
        return counts

    def by_class(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Returns a row per class: name, number of images, top-1 accuracy, and the most frequent incorrect class."""
        rows = []
        for index, counts in enumerate(self.confusion):
            if total := int(counts.sum()):
                others = counts.copy()
                others[index] = 0
                row: dict[str, Any] = {"class": names[index], "images": total, "top1": counts[index] / total}
                rows.append(row | {"confused_with": names[int(others.argmax())] if others.any() else None})
        return rows

    def disagreements(self, other: Evaluation) -> list[int]:
        """Returns the indices of images for which another classifier predicts a different class."""
        return np.flatnonzero(self.predicted[:, 0] != other.predicted[:, 0]).tolist()


def evaluate(labelled: Sequence[tuple[Path, int]], rows: Iterable[Sequence[float] | np.ndarray]) -> Evaluation:
    """Collects the outputs of a classifier.

    Args:
        labelled: Images, each with the index of its class.
        rows: Probabilities (or logits) of all classes for each image, in the same order.
    """
    predicted, probabilities, classes = [], [], 0
    for row in rows:
        values = np.asarray(row, np.float64)
        classes = len(values)
        best = np.argsort(-values, kind="stable")[:TOP]
        predicted.append(best)
        probabilities.append(values[best])
    labels = np.array([label for _, label in labelled])
    if labels.max() >= classes:
        raise ValueError(f"labels must be between 0 and {classes - 1}, got {labels.max()}")
    return Evaluation([file for file, _ in labelled], labels, np.stack(predicted), np.stack(probabilities), classes)


def draw_confusion(evaluation: Evaluation, names: Sequence[str], path: Path) -> None:
    """Draws the confusion matrix, normalized by row; up to 40 classes also show counts.

    Raises:
        ValueError: matplotlib cannot write a file with this suffix.
    """
    from matplotlib.figure import Figure

    counts = evaluation.confusion
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = 3.0 + 0.35 * min(len(counts), 40)
    figure = Figure(figsize=(side, side), layout="constrained")
    title = f"top-1 {evaluation.top1:.2%} of {len(evaluation.files)} images"
    axes = figure.add_subplot(xlabel="predicted class", ylabel="true class", title=title)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(counts) <= 40:
        axes.set_xticks(range(len(counts)), names, rotation=90)
        axes.set_yticks(range(len(counts)), names)
        for (row, column), count in np.ndenumerate(counts):
            if count:
                color = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize=8)
    figure.savefig(path)

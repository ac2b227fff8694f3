"""Accuracy of a classifier on labelled images: top-1, top-5, by class, and its confusions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .data import ImageFolder

TOP = 5


def labelled_images(folder: Path, classes: int, class_names: Sequence[str] | None) -> list[tuple[Path, int]]:
    """Finds the images of a folder with one subfolder per class, each with the index of its class.

    A subfolder holds the class of that name; if no class has such a name, of that number; if the names are others
    altogether (ImageNet's n01440764), the subfolders are all classes in alphabetical order.

    Args:
        folder: With at least two subfolders.
        classes: Number of the model's classes.
        class_names: Their names, if known.
    Raises:
        ImageError: no such folder, fewer than two subfolders, or one without images.
        ValueError: the subfolders are not classes of the model; names some.
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
            f"{folder}: subfolders must be names of the model's {classes} classes, their numbers, or as many as "
            f"classes, got {len(names)}, among them {strangers}"
        )
    return [(file, indices[label]) for file, label in images.files]


@dataclass(frozen=True)
class Evaluation:
    """Outputs of a classifier for labelled images.

    For each image its class [N], and the most probable classes, best first, with probabilities [N, min(5, classes)].
    """

    files: list[Path]
    labels: np.ndarray
    answers: np.ndarray
    probabilities: np.ndarray
    classes: int

    @property
    def right(self) -> np.ndarray:
        """True for each image that was classified correctly [N]."""
        hits: np.ndarray = self.answers[:, 0] == self.labels
        return hits

    @property
    def top1(self) -> float:
        return float(self.right.mean())

    @property
    def top5(self) -> float:
        """Share of images whose class is among the five most probable."""
        return float((self.answers == self.labels[:, None]).any(axis=1).mean())

    @property
    def confusion(self) -> np.ndarray:
        """Number of images of each class (row) that were classified as each (column) [classes, classes]."""
        counts = np.zeros((self.classes, self.classes), np.int64)
        np.add.at(counts, (self.labels, self.answers[:, 0]), 1)
        return counts

    def by_class(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Returns a row per class with images: name, number, top1, and the class that it is most often taken for."""
        rows = []
        for index, counts in enumerate(self.confusion):
            if total := int(counts.sum()):
                others = counts.copy()
                others[index] = 0
                row: dict[str, Any] = {"class": names[index], "images": total, "top1": counts[index] / total}
                rows.append(row | {"taken for": names[int(others.argmax())] if others.any() else None})
        return rows

    def disagreements(self, other: Evaluation) -> list[int]:
        """Returns the indices of images that another classifier classifies otherwise."""
        return np.flatnonzero(self.answers[:, 0] != other.answers[:, 0]).tolist()


def evaluate(labelled: Sequence[tuple[Path, int]], rows: Iterable[Sequence[float] | np.ndarray]) -> Evaluation:
    """Collects a classifier's outputs.

    Args:
        labelled: Images, each with the index of its class.
        rows: For each image, in order, the probabilities (or logits) of all classes.
    """
    answers, probabilities, classes = [], [], 0
    for row in rows:
        values = np.asarray(row, np.float64)
        classes = len(values)
        best = np.argsort(-values, kind="stable")[:TOP]
        answers.append(best)
        probabilities.append(values[best])
    labels = np.array([label for _, label in labelled])
    if labels.max() >= classes:
        raise ValueError(f"labels must be 0 to {classes - 1}, got {labels.max()}")
    return Evaluation([file for file, _ in labelled], labels, np.stack(answers), np.stack(probabilities), classes)


def draw_confusion(evaluation: Evaluation, names: Sequence[str], path: Path) -> None:
    """Draws the confusion matrix: each row's share by colour, with counts for up to 40 classes.

    Raises:
        ValueError: matplotlib cannot write a file with this suffix; .png, .svg and .pdf are possible.
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
                colour = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, str(count), ha="center", va="center", color=colour, fontsize=8)
    figure.savefig(path)

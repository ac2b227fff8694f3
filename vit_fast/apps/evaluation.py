"""How often a classifier is right on labelled images: top-1, top-5, by class, and what is taken for what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .data import find_images
from .image_folder import class_names_of

TOP = 5


@dataclass(frozen=True)
class Labelled:
    """Images and what they show.

    Attributes:
        files: Image files.
        labels: The class of each, as the model counts them.
        order: How the folders' names became classes: "by name", "by number" or "in alphabetical order".
    """

    files: list[Path]
    labels: list[int]
    order: str


def labelled_images(folder: Path, classes: int, class_names: Sequence[str] | None) -> Labelled:
    """The images of a folder that has one subfolder a class.

    A subfolder is the class of that name; where no class has such a name, of that number; where the names are others
    altogether (ImageNet's n01440764), the subfolders are all classes in alphabetical order.

    Args:
        folder: With at least two subfolders.
        classes: How many the model knows.
        class_names: Their names, where they are known.
    Raises:
        ImageError: no such folder, fewer than two subfolders, or one without images.
        ValueError: the subfolders cannot be told to be classes of the model; names some.
    """
    names = class_names_of(folder)
    known = {name: i for i, name in enumerate(class_names or ())}
    if all(name in known for name in names):
        indices, order = [known[name] for name in names], "by name"
    elif all(name.isdecimal() and int(name) < classes for name in names):
        indices, order = [int(name) for name in names], "by number"
    elif len(names) == classes:
        indices, order = list(range(classes)), "in alphabetical order"
    else:
        strangers = [name for name in names if name not in known][:5]
        raise ValueError(
            f"{folder}: {len(names)} subfolders, among them {', '.join(map(repr, strangers))}: accepted are names of "
            f"the model's {classes} classes, their numbers, or as many subfolders as classes"
        )
    found = [(file, index) for name, index in zip(names, indices) for file in find_images([folder / name])]
    return Labelled([file for file, _ in found], [index for _, index in found], order)


@dataclass(frozen=True)
class Evaluation:
    """What a classifier answered to labelled images.

    Attributes:
        files: The images.
        labels: What each shows [N].
        answers: Its most probable classes, the best first [N, min(5, classes)].
        probabilities: Theirs [N, min(5, classes)].
        classes: How many there are.
    """

    files: list[Path]
    labels: np.ndarray
    answers: np.ndarray
    probabilities: np.ndarray
    classes: int

    @property
    def right(self) -> np.ndarray:
        """Whether each image was recognised [N]."""
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
        """How many images of each class (row) were taken for each (column) [classes, classes]."""
        counts = np.zeros((self.classes, self.classes), np.int64)
        np.add.at(counts, (self.labels, self.answers[:, 0]), 1)
        return counts

    def by_class(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """A row a class with images: its name, their number, top1, and what it is taken for most where not itself."""
        rows = []
        for index, counts in enumerate(self.confusion):
            if total := int(counts.sum()):
                others = counts.copy()
                others[index] = 0
                taken_for = names[int(others.argmax())] if others.any() else None
                rows.append(
                    {"class": names[index], "images": total, "top1": counts[index] / total, "taken for": taken_for}
                )
        return rows

    def disagreements(self, other: Evaluation) -> list[int]:
        """Which images another classifier, asked the same, gives another class."""
        return np.flatnonzero(self.answers[:, 0] != other.answers[:, 0]).tolist()


def evaluate(labelled: Labelled, rows: Iterable[tuple[Path, Sequence[float]]]) -> Evaluation:
    """Collects a classifier's answers.

    Args:
        labelled: The images.
        rows: Each file of them, in order, with the probabilities (or logits) of all classes.
    Raises:
        ValueError: a label is no class of the classifier.
    """
    answers, probabilities, classes = [], [], 0
    for _, row in rows:
        values = np.asarray(row, np.float64)
        classes = len(values)
        best = np.argsort(-values, kind="stable")[:TOP]
        answers.append(best)
        probabilities.append(values[best])
    if max(labelled.labels) >= classes:
        raise ValueError(f"an image is of class {max(labelled.labels)}: accepted are 0 to {classes - 1}")
    return Evaluation(labelled.files, np.asarray(labelled.labels), np.stack(answers), np.stack(probabilities), classes)


def draw_confusion(evaluation: Evaluation, names: Sequence[str], path: Path) -> None:
    """A picture of the confusion matrix: each row's share, by colour; with counts where there is room.

    Args:
        path: What matplotlib can write, by suffix: .png, .svg, .pdf.
    Raises:
        ValueError: another suffix.
    """
    from matplotlib.figure import Figure

    counts = evaluation.confusion
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = 3.0 + 0.35 * min(len(counts), 40)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot(
        xlabel="predicted class",
        ylabel="true class",
        title=f"top-1 {evaluation.top1:.2%} of {len(evaluation.files)} images",
    )
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(counts) <= 40:
        axes.set_xticks(range(len(counts)), names, rotation=90)
        axes.set_yticks(range(len(counts)), names)
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, str(count), ha="center", va="center", color=colour, fontsize=8)
    figure.savefig(path)

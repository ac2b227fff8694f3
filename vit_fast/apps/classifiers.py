"""Classifies image files, and measures the accuracy on labeled images."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import DataLoader

from ..errors import as_device
from ..files import encodable
from ..model import VisionTransformer
from ..weights import create_model, load
from .data import ImageError, ImageFolder, batches_of, make_transform, read_image, reason

BATCH_SIZE, TOP = 32, 5


def open_classifier(weights: str, model_name: str | None, device: str) -> VisionTransformer:
    """Builds a model that returns one row of logits per image."""
    model = load(weights) if model_name is None else create_model(model_name, weights=weights)
    if model.config.global_pool == "":
        raise ValueError(f"{weights}: global_pool must not be '', which gives logits per token")
    if model.config.num_classes == 0:
        raise ValueError(f"{weights}: must have a classification head, got num_classes=0")
    return model.to(as_device(device))


def class_names_for(count: int, given: Sequence[str] | None, known: Sequence[str] | None) -> Sequence[str]:
    """Returns the given names, otherwise the names stored with the weights, otherwise "class 0", "class 1", ..."""
    if given is not None and len(given) != count:
        origin = "--classes or, without --classes, from --weights"
        raise ValueError(f"the model requires {count} class names, got {len(given)} from {origin}")
    return given or known or [f"class {i}" for i in range(count)]


def read_class_names(path: Path) -> list[str]:
    """Reads class names from a text file, one per line, or from .json: a list, or an object from index to name."""
    is_json = path.suffix.lower() == ".json"
    try:
        text = path.read_text(encoding="utf-8")
        if not is_json:
            return [line.strip() for line in text.splitlines() if line.strip()]
        content: Any = json.loads(text)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file of class names") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: must be {'JSON' if is_json else 'text'} in UTF-8: {error}") from None
    if isinstance(content, Mapping):
        content = [content.get(str(index)) for index in range(len(content))]
    if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
        raise ValueError(f'{path}: must be a JSON list of names, or an object that maps "0", "1", ... to names')
    return content


@torch.inference_mode()
def rows(
    model: VisionTransformer, files: Sequence[Path], class_names: Sequence[str], workers: int = 0
) -> Generator[dict[str, Any]]:
    """Yields one row per file, in the order of `files`.

    A row contains path, label, index and probability of the predicted class, and two arrays: fp64 `probabilities`, and
    fp32 `embedding`, the input of the head. The row of an unreadable image contains only path and error.
    """
    parameter = next(model.parameters())
    transform = make_transform(model.data_config, model.config.image_hw, model.config.in_chans)

    read = partial(_read, transform=transform, shape=(model.config.in_chans, *model.config.image_hw))
    dataset: Any = files
    for paths, images, errors in batches_of(DataLoader(dataset, BATCH_SIZE, num_workers=workers, collate_fn=read)):
        tokens = model.forward_features(images.to(parameter.device, parameter.dtype))
        logits, embeddings = (model.forward_head(tokens, pre_logits=pre_logits) for pre_logits in (False, True))
        assert isinstance(logits, Tensor) and isinstance(embeddings, Tensor)  # in evaluation mode
        for file, error, row, embedding in zip(paths, errors, logits.double().cpu(), embeddings.float().cpu()):
            if error:
                yield {"path": encodable(file), "error": error}
                continue
            if not row.isfinite().all():
                raise ValueError(f"{file}: the model's logits are not finite")
            probabilities = row.softmax(dim=0).numpy()
            best = int(probabilities.argmax())
            yield {
                "path": encodable(file), "label": class_names[best], "index": best,
                "probability": float(probabilities[best]), "probabilities": probabilities,
                "embedding": embedding.numpy(),
            }  # fmt: skip


def _read(
    paths: Sequence[Path], transform: Callable[[Image], Tensor], shape: Sequence[int]
) -> tuple[Sequence[Path], Tensor, list[str]]:
    images, errors = torch.zeros(len(paths), *shape, device="cpu"), [""] * len(paths)
    for i, path in enumerate(paths):
        try:
            images[i] = transform(read_image(path))
        except ImageError as error:
            errors[i] = reason(path, error)
    return paths, images, errors


def labeled_images(folder: Path, classes: int, class_names: Sequence[str] | None) -> list[tuple[Path, int]]:
    """Returns the images of a folder with one subfolder per class, each with the index of its class.

    Subfolders are named after classes or class indices. If a subfolder has another name, e.g. ImageNet's n01440764,
    there must be one subfolder per class, in the alphabetical order of the indices.
    """
    images = ImageFolder(folder)
    names, known = images.class_names, {name: i for i, name in enumerate(class_names or ())}
    indices: Sequence[int] = range(classes)
    if all(name in known for name in names):
        indices = [known[name] for name in names]
    elif all(name.isdecimal() and int(name) < classes for name in names):
        indices = list(map(int, names))
    elif len(names) != classes:
        strangers = ", ".join([repr(name) for name in names if name not in known][:5])
        raise ValueError(
            f"{folder}: must have subfolders named after classes or class indices, or one subfolder per class "
            f"({classes}), got {len(names)}: no class is named {strangers}"
        )
    return [(file, indices[label]) for file, label in images.files]


@dataclass(frozen=True)
class Evaluation:
    """Outputs of a classifier for labeled images."""

    files: list[Path]
    labels: np.ndarray  # [N]
    predicted: np.ndarray  # indices of the most probable classes [N, min(5, classes)], best first
    probabilities: np.ndarray  # of `predicted`
    classes: int
    unreadable: list[str]  # reasons of the images that are not counted

    @property
    def top1(self) -> float:
        return float((self.predicted[:, 0] == self.labels).mean())

    @property
    def top5(self) -> float:
        return float((self.predicted == self.labels[:, None]).any(axis=1).mean())

    @property
    def confusion(self) -> np.ndarray:
        """Number of images by true class (row) and predicted class (column)."""
        counts = np.zeros((self.classes, self.classes), np.int64)
        np.add.at(counts, (self.labels, self.predicted[:, 0]), 1)
        return counts

    def by_class(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Returns a row per class with images: name, count, top-1 accuracy, and the most frequent incorrect class."""
        rows = []
        for index, counts in enumerate(self.confusion):
            if total := int(counts.sum()):
                others = np.where(np.arange(self.classes) == index, 0, counts)
                row: dict[str, Any] = {"class": names[index], "images": total, "top1": counts[index] / total}
                rows.append(row | {"confused_with": names[int(others.argmax())] if others.any() else None})
        return rows

    def disagreements(self, other: Evaluation, names: Sequence[str]) -> list[dict[str, Any]]:
        """Returns a row per image for which another classifier predicts a different class."""
        return [
            {
                "image": encodable(self.files[i]), "class": names[self.labels[i]],
                "predicted": names[self.predicted[i, 0]], "probability": float(self.probabilities[i, 0]),
                "against": names[other.predicted[i, 0]], "against_probability": float(other.probabilities[i, 0]),
            }
            for i in np.flatnonzero(self.predicted[:, 0] != other.predicted[:, 0])
        ]  # fmt: skip


def evaluate(labeled: Sequence[tuple[Path, int]], rows: Iterable[Sequence[float] | np.ndarray | str]) -> Evaluation:
    """Collects a classifier's probabilities of all classes, one row per image, in the order of `labeled`.

    The row of an unreadable image is the reason, and the image is not counted.
    """
    predicted, probabilities, counted, bad, classes = [], [], [], [], 0
    for one, row in zip(labeled, rows, strict=True):
        if isinstance(row, str):
            bad.append(row)
            continue
        counted.append(one)
        values = np.asarray(row, np.float64)
        classes = len(values)
        best = np.argsort(-values, kind="stable")[:TOP]
        predicted.append(best)
        probabilities.append(values[best])
    if not counted:
        raise ImageError(f"no image can be read: {'; '.join(bad[:3])}")
    labels = np.array([label for _, label in counted])
    if labels.max() >= classes:
        raise ValueError(f"labels must be between 0 and {classes - 1}, got {labels.max()}")
    files = [file for file, _ in counted]
    return Evaluation(files, labels, np.stack(predicted), np.stack(probabilities), classes, bad)


def draw_confusion(evaluation: Evaluation, names: Sequence[str], path: Path) -> None:
    """Draws the confusion matrix, normalized by row. With at most 40 classes, also writes names and counts."""
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

"""`vit-fast evaluate`: measures accuracy on labeled images and compares two models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .predict import classify
from .words import Backend, ClassNames, DataConfigFile, WeightsFile, WeightsModel

if TYPE_CHECKING:
    from ..apps.classifiers import Evaluation

LISTED = 20  # number of disagreements and classes to print; --json prints all


def evaluate(
    folder: Annotated[Path, typer.Argument(help="Folder with one subfolder of images per class.")],
    weights: WeightsFile,
    model: WeightsModel = None,
    against: Annotated[
        str | None, typer.Option(help="Weights of a second model: list the images with different predicted classes.")
    ] = None,
    classes: ClassNames = None,
    backend: Backend = "auto",
    data_config: DataConfigFile = None,
    confusion: Annotated[
        Path | None, typer.Option(help="Draw the confusion matrix to this .png, .svg or .pdf file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with all classes and disagreements.")] = False,
) -> None:
    """Measure top-1, top-5 and per-class accuracy of a model on labeled images, or compare it with a second model."""
    from ..apps.classifiers import draw_confusion, read_class_names
    from ..files import check_replaceable, file_aside

    if confusion is not None:
        check_replaceable(confusion)
    requested = [weights] if against is None else [weights, against]
    if data_config is not None and not any(name.endswith(".onnx") for name in requested):
        raise ValueError(f"--data-config requires an ONNX file, got {' and '.join(requested)}")
    given = None if classes is None else read_class_names(classes)
    names, evaluation = _evaluate(folder, weights, given, model, backend, data_config)
    other: Evaluation | None = None
    if against is not None:
        _, other = _evaluate(folder, against, names, model, backend, data_config)
    if as_json:
        typer.echo(json.dumps(_as_dict(evaluation, other, names), indent=2))
    else:
        _print(evaluation, other, names)
    if confusion is not None:  # last, so that the result is printed even if this fails
        with file_aside(confusion) as aside:
            draw_confusion(evaluation, names, aside)


def _evaluate(
    folder: Path, weights: str, given: Sequence[str] | None, model: str | None, backend: str, data_config: Path | None
) -> tuple[Sequence[str], Evaluation]:
    from ..apps.classifiers import class_names_for, labelled_images
    from ..apps.classifiers import evaluate as collect
    from ..apps.data import ImageFolder

    files = [file for file, _ in ImageFolder(folder).files]
    if weights.endswith(".onnx"):  # --model and --backend apply to weights, --data-config to ONNX files
        known, rows = classify(files, weights, data_config=data_config)
    else:
        known, rows = classify(files, weights, model, backend)
    first = next(rows)  # its length is the number of classes
    names = class_names_for(len(first), given, known)
    return names, collect(labelled_images(folder, len(first), given or known), chain([first], rows))


def _as_dict(evaluation: Evaluation, other: Evaluation | None, names: Sequence[str]) -> dict[str, Any]:
    content = _summary(evaluation) | {
        "classes": _classes(evaluation, names),
        "confusion": evaluation.confusion.tolist(),
    }
    if other is not None:
        content["against"] = _summary(other) | {"classes": _classes(other, names)}
        content["disagreements"] = [_disagreement(evaluation, other, names, i) for i in evaluation.disagreements(other)]
    return content


def _classes(evaluation: Evaluation, names: Sequence[str]) -> list[dict[str, Any]]:
    # "taken for" is the former name of "confused_with", for existing readers
    return [row | {"taken for": row["confused_with"]} for row in evaluation.by_class(names)]


def _summary(evaluation: Evaluation) -> dict[str, Any]:
    return {"images": len(evaluation.files), "top1": evaluation.top1, "top5": evaluation.top5}


def _disagreement(one: Evaluation, other: Evaluation, names: Sequence[str], index: int) -> dict[str, Any]:
    predicted = names[one.predicted[index, 0]]
    return {
        "image": str(one.files[index]),
        "class": names[one.labels[index]],
        "predicted": predicted,
        "answer": predicted,  # former name of "predicted", for existing readers
        "probability": float(one.probabilities[index, 0]),
        "against": names[other.predicted[index, 0]],
        "against_probability": float(other.probabilities[index, 0]),
    }


def _print(evaluation: Evaluation, other: Evaluation | None, names: Sequence[str]) -> None:
    typer.echo(f"{len(evaluation.files)} images: top-1 {evaluation.top1:.2%}, top-5 {evaluation.top5:.2%}")
    rows = sorted(evaluation.by_class(names), key=lambda row: row["top1"])
    for row in rows[:LISTED]:
        confused = "" if row["confused_with"] is None else f", most often confused with {row['confused_with']}"
        typer.echo(f"  {row['top1']:7.2%}  {row['class']} ({row['images']} images){confused}")
    if len(rows) > LISTED:
        typer.echo(f"  ... and {len(rows) - LISTED} classes with higher accuracy")
    if other is None:
        return
    differing = evaluation.disagreements(other)
    typer.echo(
        f"against: top-1 {other.top1:.2%}, top-5 {other.top5:.2%}; the models disagree on {len(differing)} images "
        f"({len(differing) / len(evaluation.files):.2%})"
    )
    for index in differing[:LISTED]:
        row = _disagreement(evaluation, other, names, index)
        typer.echo(
            f"  {row['image']} ({row['class']}): {row['predicted']} {row['probability']:.1%}, "
            f"against {row['against']} {row['against_probability']:.1%}"
        )
    if len(differing) > LISTED:
        typer.echo(f"  ... and {len(differing) - LISTED} more: use --json to list all")

"""`vit-fast evaluate`: how often a model is right on labelled images, and where two models differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .predict import class_names_for, onnx_predictions, predictions, read_class_names, torch_classifier

if TYPE_CHECKING:
    from ..apps.evaluation import Evaluation

LISTED = 20  # disagreements and classes that are printed; --json holds all


def register(app: typer.Typer) -> None:
    app.command(name="evaluate")(evaluate)


def evaluate(
    folder: Annotated[Path, typer.Argument(help="Images, one subfolder a class.")],
    weights: Annotated[str | None, typer.Option(help="A weights file, a folder, or a Hugging Face Hub id.")] = None,
    onnx: Annotated[Path | None, typer.Option(help="An ONNX file instead, run by ONNX Runtime.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The variant, where the weights do not say what shape they are for.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="A second model on the same images: an ONNX file, or weights; lists where they differ."),
    ] = None,
    classes: Annotated[Path | None, typer.Option(help="Class names: one a line, or JSON.")] = None,
    backend: Annotated[str, typer.Option(help="auto, eager, sdpa or triton, for weights.")] = "auto",
    data_config: Annotated[
        Path | None, typer.Option(help="JSON with mean, std, crop_pct, for an ONNX file that does not say them.")
    ] = None,
    img_size: Annotated[
        int | None, typer.Option(help="Height and width in pixels, for an ONNX file that leaves them open.")
    ] = None,
    confusion: Annotated[
        Path | None, typer.Option(help="Draw which class is taken for which: a .png, .svg or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output, all images.")] = False,
) -> None:
    """Measures accuracy on labelled images: top-1, top-5, by class; with --against, of two models side by side."""
    from ..apps.evaluation import draw_confusion
    from ..files import check_replaceable, file_aside

    if confusion is not None:
        check_replaceable(confusion)
    if (weights is None) == (onnx is None):
        raise ValueError("evaluate needs --weights or --onnx: accepted is one of them")
    if onnx is None and (data_config is not None or img_size is not None):
        raise ValueError("--data-config and --img-size: accepted with --onnx only")
    names_given = None if classes is None else read_class_names(classes)
    if onnx is not None:
        names, evaluation = _of_onnx(onnx, folder, names_given, data_config, img_size)
    else:
        names, evaluation = _of_weights(str(weights), folder, names_given, model, backend)
    other: Evaluation | None = None
    if against is not None:
        if against.endswith(".onnx"):
            _, other = _of_onnx(Path(against), folder, names, data_config, img_size)
        else:
            _, other = _of_weights(against, folder, names, model, backend)
    if as_json:
        typer.echo(json.dumps(_as_dict(evaluation, other, names), indent=2))
    else:
        _print(evaluation, other, names)
    if confusion is not None:  # last: what was found is told whatever becomes of it
        with file_aside(confusion) as aside:
            draw_confusion(evaluation, names, aside)


def _of_onnx(
    path: Path, folder: Path, names: Sequence[str] | None, data_config: Path | None, img_size: int | None
) -> tuple[Sequence[str], Evaluation]:
    known, rows = onnx_predictions(path, _files(folder), data_config, img_size)
    return _evaluated(folder, names, known, rows)


def _of_weights(
    weights: str, folder: Path, names: Sequence[str] | None, model: str | None, backend: str
) -> tuple[Sequence[str], Evaluation]:
    classifier = torch_classifier(weights, model, backend)
    return _evaluated(folder, names, classifier.class_names, predictions(classifier, _files(folder)))


def _files(folder: Path) -> list[Path]:
    """The images of a labelled folder, class by class: as labelled_images has them."""
    from ..apps.data import find_images
    from ..apps.image_folder import class_names_of

    return [file for name in class_names_of(folder) for file in find_images([folder / name])]


def _evaluated(
    folder: Path, given: Sequence[str] | None, known: Sequence[str] | None, rows: Iterator[tuple[Path, list[float]]]
) -> tuple[Sequence[str], Evaluation]:
    from ..apps.evaluation import evaluate as collect
    from ..apps.evaluation import labelled_images

    first = next(rows)  # says how many classes there are
    count = len(first[1])
    names = class_names_for(count, given, known)
    labelled = labelled_images(folder, count, given or known)
    return names, collect(labelled, chain([first], rows))


def _as_dict(evaluation: Evaluation, other: Evaluation | None, names: Sequence[str]) -> dict[str, Any]:
    content = _summary(evaluation) | {
        "classes": evaluation.by_class(names),
        "confusion": evaluation.confusion.tolist(),
    }
    if other is not None:
        content["against"] = _summary(other) | {"classes": other.by_class(names)}
        content["disagreements"] = [_disagreement(evaluation, other, names, i) for i in evaluation.disagreements(other)]
    return content


def _summary(evaluation: Evaluation) -> dict[str, Any]:
    return {"images": len(evaluation.files), "top1": evaluation.top1, "top5": evaluation.top5}


def _disagreement(one: Evaluation, other: Evaluation, names: Sequence[str], index: int) -> dict[str, Any]:
    return {
        "image": str(one.files[index]),
        "class": names[one.labels[index]],
        "answer": names[one.answers[index, 0]],
        "probability": float(one.probabilities[index, 0]),
        "against": names[other.answers[index, 0]],
        "against_probability": float(other.probabilities[index, 0]),
    }


def _print(evaluation: Evaluation, other: Evaluation | None, names: Sequence[str]) -> None:
    typer.echo(f"{len(evaluation.files)} images: top-1 {evaluation.top1:.2%}, top-5 {evaluation.top5:.2%}")
    rows = sorted(evaluation.by_class(names), key=lambda row: row["top1"])
    for row in rows[:LISTED]:
        taken = "" if row["taken for"] is None else f", most often taken for {row['taken for']}"
        typer.echo(f"  {row['top1']:7.2%}  {row['class']} ({row['images']}){taken}")
    if len(rows) > LISTED:
        typer.echo(f"  ... and {len(rows) - LISTED} classes that are recognised better")
    if other is None:
        return
    differing = evaluation.disagreements(other)
    typer.echo(
        f"against: top-1 {other.top1:.2%}, top-5 {other.top5:.2%}; another answer to {len(differing)} images, "
        f"{len(differing) / len(evaluation.files):.2%}"
    )
    for index in differing[:LISTED]:
        row = _disagreement(evaluation, other, names, index)
        typer.echo(
            f"  {row['image']} ({row['class']}): {row['answer']} {row['probability']:.1%}, "
            f"against {row['against']} {row['against_probability']:.1%}"
        )
    if len(differing) > LISTED:
        typer.echo(f"  ... and {len(differing) - LISTED} more: --json has all")

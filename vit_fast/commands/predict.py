"""`vit-fast predict`: prints the most probable classes of images; `vit-fast evaluate`: measures the accuracy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..cli import ClassNames, DataConfigFile, Device, WeightsFile, WeightsModel, argument, option

if TYPE_CHECKING:
    import numpy as np

    from ..apps.classifiers import Evaluation

BATCH_SIZE = 16
LISTED = 20  # number of disagreements and classes to print; --json prints all


def predict(
    images: Annotated[list[Path], argument("Image files or folders.", metavar="IMAGE...")],
    weights: WeightsFile,
    model: WeightsModel = None,
    classes: ClassNames = None,
    top_k: Annotated[int, option("Number of classes to print per image.", "--top-k")] = 5,
    data_config: DataConfigFile = None,
    out: Annotated[Path | None, option(
        "Write predicted class, probabilities and embedding of each image to this Parquet file. Re-run the command to "
        "resume an interrupted run.")] = None,
    engine: Annotated[str, option("With --out: local, or ray for a Ray cluster (at RAY_ADDRESS).")] = "local",
    workers: Annotated[int | None, option(
        "With --out: number of processes that read images (default: one per core). With --engine ray, they also run "
        "the model.", show_default=False)] = None,
    device: Device = "auto",
    as_json: Annotated[bool, option("Without --out: print JSON to stdout.", "--json")] = False,
) -> None:  # fmt: skip
    """Classify images: print the most probable classes, or write predictions and embeddings to a Parquet file."""
    from ..apps.classifiers import class_names_for, open_classifier, read_class_names
    from ..apps.data import ImageError, find_images
    from ..errors import check_integer
    from ..files import encodable

    check_integer("--top-k", top_k, 1)
    if workers is not None:
        check_integer("--workers", workers, 0)
    for name, value in (("--workers", workers), ("--engine", None if engine == "local" else engine)):
        if value is not None and out is None:
            raise ValueError(f"{name} {value} requires --out")
    files = find_images(images)
    given = None if classes is None else read_class_names(classes)
    if out is not None:
        if weights.endswith(".onnx"):
            raise ValueError(f"--out requires PyTorch weights, got {weights}: ONNX files output no embeddings")
        if data_config is not None:
            raise ValueError("--data-config requires an ONNX file, and --out does not support ONNX files")
        from ..apps.prediction import predict_to_parquet

        # workers of a cluster copy the model to their device
        opened = open_classifier(weights, model, "cpu" if engine == "ray" else device)
        done = predict_to_parquet(
            opened, files, out, class_names=class_names_for(opened.config.num_classes, given, opened.class_names),
            engine=engine, device=device, workers=os.cpu_count() if workers is None and engine == "local" else workers,
            on_part=lambda images: typer.echo(f"{images} of {len(files)} images", err=True),
        )  # fmt: skip
        for reason in done.lost:
            typer.echo(f"started new workers, because {reason}", err=True)
        list_unreadable([reason for _, reason in done.bad])
        resumed = f", {done.resumed} of them from an earlier run" if done.resumed else ""
        typer.echo(f"wrote {out}: {done.images} images{resumed}, {len(done.bad)} unreadable")
        return
    _check_options([weights], model, data_config)
    count, known, rows = _classify(files, weights, model, device, data_config)
    names = class_names_for(count, given, known)
    results: list[dict[str, Any]] = []
    bad: list[str] = []
    for file, probabilities in zip(files, rows, strict=True):
        if isinstance(probabilities, str):
            bad.append(probabilities)
            results.append({"image": encodable(file), "top": [], "error": probabilities})
            continue
        best = (-probabilities).argsort(kind="stable")[:top_k].tolist()
        top = [{"index": i, "class": names[i], "probability": float(probabilities[i])} for i in best]
        results.append({"image": encodable(file), "top": top})
        if not as_json:
            typer.echo("\n".join([encodable(file), *(f"  {row['probability']:7.2%}  {row['class']}" for row in top)]))
    if len(bad) == len(files):
        raise ImageError(f"no image can be read: {'; '.join(bad[:3])}")
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    list_unreadable(bad)
    if bad:
        typer.echo(f"{len(files)} images, {len(bad)} unreadable", err=True)


def list_unreadable(reasons: Sequence[str]) -> None:
    for reason in reasons:
        typer.echo(f"unreadable image: {reason}", err=True)


def _check_options(requested: Sequence[str], model: str | None, data_config: Path | None) -> None:
    got = " and ".join(requested)
    if data_config is not None and not any(name.endswith(".onnx") for name in requested):
        raise ValueError(f"--data-config requires an ONNX file, got {got}")
    if model is not None and all(name.endswith(".onnx") for name in requested):
        raise ValueError(f"--model {model} requires PyTorch weights, got {got}")


def _classify(
    files: Sequence[Path], weights: str, model: str | None, device: str, data_config: Path | None
) -> tuple[int, Sequence[str] | None, Iterator[np.ndarray | str]]:
    """Opens weights or an ONNX file; returns number and names of its classes, and the probabilities of each image.

    For an unreadable image, the iterator returns the reason.
    """
    import numpy as np

    from ..apps.classifiers import open_classifier, rows
    from ..apps.data import ImageError, read_image, reason
    from ..errors import pair
    from ..files import read_object

    if not weights.endswith(".onnx"):
        opened = open_classifier(weights, model, device)
        count = opened.config.num_classes
        found = rows(opened, files, [""] * count)
        return count, opened.class_names, (row["error"] if "error" in row else row["probabilities"] for row in found)

    from ..export import OnnxRunner

    given = {} if data_config is None else read_object(data_config)
    image_hw = pair("img_size", given.pop("img_size")) if "img_size" in given else None
    runner = OnnxRunner(weights, device, data_config=given or None, image_hw=image_hw)

    def classify(chunk: Sequence[Path]) -> Sequence[np.ndarray | str]:
        try:
            return list(runner.probabilities([read_image(file) for file in chunk]))
        except ImageError as error:
            return [reason(chunk[0], error)] if len(chunk) == 1 else [classify([file])[0] for file in chunk]

    def by_onnx() -> Iterator[np.ndarray | str]:
        for start in range(0, len(files), BATCH_SIZE):
            chunk = files[start : start + BATCH_SIZE]
            for file, row in zip(chunk, classify(chunk), strict=True):
                if not isinstance(row, str) and not np.isfinite(row).all():
                    raise ValueError(f"{file}: the model's logits are not finite")
                yield row

    return runner.probabilities([]).shape[1], runner.class_names, by_onnx()


def evaluate(
    folder: Annotated[Path, argument("Folder with one subfolder of images per class.")],
    weights: WeightsFile,
    model: WeightsModel = None,
    against: Annotated[str | None, option(
        "Weights of a second model: also list the images with different predictions.")] = None,
    classes: ClassNames = None,
    data_config: DataConfigFile = None,
    confusion: Annotated[Path | None, option("Draw the confusion matrix to this .png, .svg or .pdf file.")] = None,
    device: Device = "auto",
    as_json: Annotated[bool, option(
        "Print JSON with complete lists. Without --json, each list ends after 20 rows.", "--json")] = False,
) -> None:  # fmt: skip
    """Measure top-1, top-5 and per-class accuracy of a model on labeled images, or compare it with a second model."""
    from ..apps.classifiers import class_names_for, draw_confusion, labeled_images, read_class_names
    from ..apps.classifiers import evaluate as collect
    from ..apps.data import ImageError, ImageFolder
    from ..files import check_replaceable, file_aside

    if confusion is not None:
        check_replaceable(confusion)
    requested = [weights] if against is None else [weights, against]
    _check_options(requested, model, data_config)
    names: Sequence[str] | None = None if classes is None else read_class_names(classes)
    files = [file for file, _ in ImageFolder(folder).files]
    evaluations: list[Evaluation] = []
    for each in requested:
        count, known, rows = _classify(files, each, model, device, data_config)
        labels = dict(labeled_images(folder, count, names or known))
        names = class_names_for(count, names, known)
        evaluations.append(collect([(file, labels[file]) for file in files], rows))
        files = evaluations[0].files  # both models must be measured on the same images
        if len(evaluations) > 1 and evaluations[-1].unreadable:
            raise ImageError(evaluations[-1].unreadable[0])
    evaluation, *others = evaluations
    assert names is not None
    list_unreadable(evaluation.unreadable)
    disagreements = evaluation.disagreements(others[0], names) if others else []
    if as_json:
        summaries = [
            {"images": len(one.files), "top1": one.top1, "top5": one.top5, "classes": one.by_class(names)}
            for one in evaluations
        ]
        content = summaries[0] | {"confusion": evaluation.confusion.tolist(), "unreadable": evaluation.unreadable}
        if others:
            content |= {"against": summaries[1], "disagreements": disagreements}
        typer.echo(json.dumps(content, indent=2))
    else:
        _print(evaluations, names, disagreements)
    if confusion is not None:  # last, so that the result is printed even if this fails
        with file_aside(confusion) as aside:
            draw_confusion(evaluation, names, aside)


def _print(evaluations: Sequence[Evaluation], names: Sequence[str], disagreements: Sequence[dict[str, Any]]) -> None:
    evaluation, *others = evaluations
    count = len(evaluation.files)
    skipped = f" ({len(evaluation.unreadable)} others are unreadable)" if evaluation.unreadable else ""
    typer.echo(f"{count} images{skipped}: top-1 {evaluation.top1:.2%}, top-5 {evaluation.top5:.2%}")
    rows = sorted(evaluation.by_class(names), key=lambda row: row["top1"])
    for row in rows[:LISTED]:
        confused = "" if row["confused_with"] is None else f", most often confused with {row['confused_with']}"
        typer.echo(f"  {row['top1']:7.2%}  {row['class']} ({row['images']} images){confused}")
    if len(rows) > LISTED:
        typer.echo(f"  ... and {len(rows) - LISTED} classes with higher accuracy")
    for other in others:
        typer.echo(
            f"against: top-1 {other.top1:.2%}, top-5 {other.top5:.2%}; "
            f"the models disagree on {len(disagreements)} images ({len(disagreements) / count:.2%})"
        )
    for row in disagreements[:LISTED]:
        typer.echo(
            f"  {row['image']} ({row['class']}): {row['predicted']} {row['probability']:.1%}, "
            f"against {row['against']} {row['against_probability']:.1%}"
        )
    if len(disagreements) > LISTED:
        typer.echo(f"  ... and {len(disagreements) - LISTED} more: use --json to list all")

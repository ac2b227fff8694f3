"""`vit-fast predict`: prints the most probable classes of images."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .words import AsJson, Backend, ClassNames, DataConfigFile, WeightsFile, WeightsModel

if TYPE_CHECKING:
    import numpy as np

    from ..model import VisionTransformer

BATCH_SIZE = 16


def predict(
    images: Annotated[list[Path], typer.Argument(help="Image files or folders.", metavar="IMAGE...")],
    weights: WeightsFile,
    model: WeightsModel = None,
    classes: ClassNames = None,
    top_k: Annotated[int, typer.Option("--top-k", help="Number of classes per image.")] = 5,
    backend: Backend = "auto",
    data_config: DataConfigFile = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write predicted class, probabilities and embedding of each image to this Parquet file. Re-run the "
            "command to resume an interrupted run."
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help="With --out: local, or ray for a Ray cluster (RAY_ADDRESS)."),
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(
            help="With --out: processes that read images; with ray, they also run the model (default: one per core).",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Classify images: print the most probable classes, or write predictions and embeddings to a Parquet file."""
    from ..apps.classifiers import class_names_for, open_classifier, read_class_names
    from ..apps.data import find_images

    if top_k < 1:
        raise ValueError(f"--top-k must be an integer >= 1, got {top_k}")
    if workers is not None and (out is None or workers < 0):
        raise ValueError(f"--workers requires --out and an integer >= 0, got {workers}")
    if engine != "local" and out is None:
        raise ValueError(f"--engine {engine} requires --out")
    files = find_images(images)
    given = None if classes is None else read_class_names(classes)
    if out is not None:
        if weights.endswith(".onnx") or data_config is not None:
            raise ValueError("--out requires PyTorch weights, because an ONNX file outputs no embeddings")
        here = "cpu" if engine == "ray" else device  # workers of the cluster copy the model to their device
        _to_parquet(open_classifier(weights, model, backend, here), files, out, given, workers, engine, device)
        return
    known, rows = classify(files, weights, model, backend, device, data_config)
    results = []
    for file, probabilities in zip(files, rows):
        names = class_names_for(len(probabilities), given, known)
        best = (-probabilities).argsort(kind="stable")[:top_k].tolist()
        top = [{"index": i, "class": names[i], "probability": float(probabilities[i])} for i in best]
        results.append({"image": str(file), "top": top})
        if not as_json:
            typer.echo(f"{file}")
            for row in top:
                typer.echo(f"  {row['probability']:7.2%}  {row['class']}")
    if as_json:
        typer.echo(json.dumps(results, indent=2))


def _to_parquet(
    model: VisionTransformer, files: list[Path], out: Path, names: Sequence[str] | None, workers: int | None,
    engine: str, device: str,
) -> None:  # fmt: skip
    from ..apps.classifiers import class_names_for
    from ..apps.prediction import predict_to_parquet

    class_names = class_names_for(model.config.num_classes, names, model.class_names)
    done = predict_to_parquet(
        model, files, out, class_names=class_names, engine=engine, device=device,
        workers=os.cpu_count() if workers is None and engine == "local" else workers,
        on_part=lambda images: typer.echo(f"{images} of {len(files)} images", err=True),
    )  # fmt: skip
    for reason in done.lost:
        typer.echo(f"continued after the last complete part: {reason}", err=True)
    for path, reason in done.bad:
        typer.echo(f"unreadable image: {reason if path in reason else f'{path}: {reason}'}", err=True)
    taken = f", {done.taken} of them from an earlier run" if done.taken else ""
    typer.echo(f"wrote {out}: {done.images} images{taken}, {len(done.bad)} unreadable")


def classify(
    files: Sequence[Path],
    weights: str,
    model: str | None = None,
    backend: str = "auto",
    device: str = "auto",
    data_config: Path | None = None,
) -> tuple[Sequence[str] | None, Iterator[np.ndarray]]:
    """Opens weights or an ONNX file and classifies images.

    Returns:
        The class names of the file, and an iterator over the probabilities of each image. The iterator raises
        ImageError if an image cannot be read, and ValueError if its logits are not finite.
    Raises:
        ValueError: an option does not apply to this kind of file; see also open_classifier.
        ModelFileError: the ONNX file cannot be run.
    """
    if weights.endswith(".onnx"):
        if model is not None:
            raise ValueError(f"--model {model} cannot be combined with an ONNX file")
        return _classify_by_onnx(files, Path(weights), device, data_config)
    if data_config is not None:
        raise ValueError(f"--data-config requires an ONNX file, got --weights {weights}")
    from ..apps.classifiers import open_classifier, rows
    from ..apps.data import ImageError

    opened = open_classifier(weights, model, backend, device)

    def probabilities() -> Iterator[np.ndarray]:
        for row in rows(opened, files, [""] * opened.config.num_classes):
            if "error" in row:
                raise ImageError(row["error"])
            yield row["probabilities"]

    return opened.class_names, probabilities()


def _classify_by_onnx(
    files: Sequence[Path], path: Path, device: str, data_config: Path | None
) -> tuple[Sequence[str] | None, Iterator[np.ndarray]]:
    import numpy as np

    from ..apps.data import read_image
    from ..arguments import pair
    from ..export import OnnxRunner

    try:
        given = {} if data_config is None else json.loads(data_config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--data-config must be a JSON file, got {data_config}: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"--data-config must contain a JSON object, got {data_config} with a {type(given).__name__}")
    image_hw = pair("img_size", given.pop("img_size")) if "img_size" in given else None
    runner = OnnxRunner(path, device, data_config=given or None, image_hw=image_hw)

    def probabilities() -> Iterator[np.ndarray]:
        for start in range(0, len(files), BATCH_SIZE):
            chunk = files[start : start + BATCH_SIZE]
            for file, row in zip(chunk, runner.probabilities([read_image(file) for file in chunk])):
                if not np.isfinite(row).all():
                    raise ValueError(f"{file}: the model's logits are not finite")
                yield row

    return runner.class_names, probabilities()

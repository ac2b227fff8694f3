"""`vit-fast predict`: the most probable classes of images."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import Tensor

    from ..model import VisionTransformer

BATCH_SIZE = 16  # bounds memory however many images a folder holds


@dataclass(frozen=True)
class Classifier:
    """What predict needs of a model, whatever runs it.

    Attributes:
        prepare: An image file -> its input [in_chans, height, width].
        logits: A batch of inputs [B, in_chans, height, width] -> [B, classes].
        class_names: Of the outputs, where they are known.
    """

    prepare: Callable[[Path], Tensor]
    logits: Callable[[Tensor], Tensor]
    class_names: Sequence[str] | None


def register(app: typer.Typer) -> None:
    app.command(name="predict")(predict)


def predict(
    images: Annotated[list[Path], typer.Argument(help="Image files or folders.", metavar="IMAGE...")],
    weights: Annotated[str | None, typer.Option(help="A weights file, a folder, or a Hugging Face Hub id.")] = None,
    onnx: Annotated[Path | None, typer.Option(help="An ONNX file instead, run by ONNX Runtime.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The variant, where the weights do not say what shape they are for.")
    ] = None,
    classes: Annotated[
        Path | None, typer.Option(help="Class names: one a line, or JSON (a list, or an object from index to name).")
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", help="How many classes an image.")] = 5,
    backend: Annotated[str, typer.Option(help="auto, eager, sdpa or triton.")] = "auto",
    data_config: Annotated[
        Path | None,
        typer.Option(help="JSON with mean, std, crop_pct, interpolation, for an ONNX file that does not say them."),
    ] = None,
    img_size: Annotated[
        int | None, typer.Option(help="Height and width in pixels, for an ONNX file that leaves them open.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A Parquet file to write instead: label, probabilities and embedding of each image. An image that "
            "cannot be read is listed in it; a run that was killed goes on where it was."
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="With --out, local, or ray: the cluster that Ray finds (RAY_ADDRESS), where the images lie under the "
            "same paths."
        ),
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(
            help="With --out, processes that read images (ray: and run the model); default: one a core.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda, cuda:1.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Classifies images: the most probable classes with their probabilities, which sum to one over all classes."""
    from ..apps.data import find_images

    if top_k < 1:
        raise ValueError(f"--top-k={top_k}: accepted is an integer >= 1")
    if workers is not None and (out is None or workers < 0):
        raise ValueError(f"--workers={workers}: accepted is an integer >= 0, with --out")
    if engine != "local" and out is None:
        raise ValueError(f"--engine {engine}: accepted with --out")
    files = find_images(images)
    names_given = None if classes is None else read_class_names(classes)
    if onnx is not None:
        if weights is not None or model is not None:
            raise ValueError("--onnx with --weights or --model: accepted is one or the other")
        if out is not None:
            raise ValueError("--onnx with --out: accepted is --weights, whose model gives embeddings, too")
        names_known, rows = onnx_predictions(onnx, files, data_config, img_size, device)
    else:
        if img_size is not None:
            raise ValueError("--img-size: accepted with --onnx only")
        if weights is None or data_config is not None:
            raise ValueError("predict needs --weights, or --onnx (with --data-config where the file lacks it)")
        if out is not None:
            here = "cpu" if engine == "ray" else device  # the workers of a cluster get a copy each
            _to_parquet(
                classifying_model(weights, model, backend, here), files, out, names_given, workers, engine, device
            )
            return
        classifier = torch_classifier(weights, model, backend, device)
        names_known, rows = classifier.class_names, predictions(classifier, files)
    results = []
    for file, probabilities in rows:
        names = class_names_for(len(probabilities), names_given, names_known)
        best = sorted(range(len(probabilities)), key=probabilities.__getitem__, reverse=True)[:top_k]
        top = [{"index": i, "class": names[i], "probability": probabilities[i]} for i in best]
        results.append({"image": str(file), "top": top})
        if not as_json:
            typer.echo(f"{file}")
            for row in top:
                typer.echo(f"  {row['probability']:7.2%}  {row['class']}")
    if as_json:
        typer.echo(json.dumps(results, indent=2))


def _to_parquet(
    model: VisionTransformer,
    files: list[Path],
    out: Path,
    names: Sequence[str] | None,
    workers: int | None,
    engine: str,
    device: str,
) -> None:
    from ..apps.prediction import predict_to_parquet

    class_names = class_names_for(model.config.num_classes, names, model.class_names)
    done = predict_to_parquet(
        model, files, out, class_names=class_names, engine=engine, device=device,
        workers=os.cpu_count() if workers is None and engine == "local" else workers,
        on_part=lambda images: typer.echo(f"{images} of {len(files)} images", err=True),
    )  # fmt: skip
    for reason in done.lost:
        typer.echo(f"begun again behind the last whole part: {reason}", err=True)
    for path, reason in done.bad:
        typer.echo(f"not an image: {reason if path in reason else f'{path}: {reason}'}", err=True)
    taken = f", {done.taken} of them by an earlier run" if done.taken else ""
    typer.echo(f"wrote {out}: {done.images} images{taken}, {len(done.bad)} could not be read")


def classifying_model(weights: str, model_name: str | None, backend: str, device: str) -> VisionTransformer:
    """A model that gives each image one row of logits.

    Raises:
        ValueError: the weights do not say what they are for and no model is named, the model has no head, or there is
            no such device.
    """
    import torch

    model = _model(weights, model_name, backend)
    config = model.config
    if config.global_pool == "":
        raise ValueError(f"{weights}: global_pool='' gives logits for every token, accepted is a model that pools")
    if config.num_classes == 0:
        raise ValueError(f"{weights}: has no classification head, it makes features")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch's, of a name it does not know or a device that is not there
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None


def torch_classifier(weights: str, model_name: str | None, backend: str, device: str = "auto") -> Classifier:
    """A model in PyTorch.

    Raises:
        ValueError: see classifying_model.
    """
    import torch

    from ..apps.data import make_transform, read_image

    model = classifying_model(weights, model_name, backend, device)
    config, parameter = model.config, next(model.parameters())
    transform = make_transform(model.data_config, config.image_hw, config.in_chans)

    @torch.inference_mode()
    def logits(batch: Tensor) -> Tensor:
        return model(batch.to(parameter.device, parameter.dtype))

    return Classifier(lambda file: transform(read_image(file)), logits, model.class_names)


def predictions(classifier: Classifier, files: Sequence[Path]) -> Iterator[tuple[Path, list[float]]]:
    """Each file with the probabilities of all classes, softmax in fp64 so that they sum to one.

    Raises:
        ImageError: a file cannot be read.
        ValueError: the logits of an image are not finite.
    """
    import torch

    for start in range(0, len(files), BATCH_SIZE):
        chunk = files[start : start + BATCH_SIZE]
        logits = classifier.logits(torch.stack([classifier.prepare(file) for file in chunk]))
        for file, row in zip(chunk, logits.double().cpu()):
            if not row.isfinite().all():
                raise ValueError(f"{file}: the model's logits are not finite")
            yield file, row.softmax(dim=-1).tolist()


def onnx_predictions(
    path: Path, files: Sequence[Path], data_config: Path | None, img_size: int | None = None, device: str = "auto"
) -> tuple[Sequence[str] | None, Iterator[tuple[Path, list[float]]]]:
    """The class names that an ONNX file holds, and each image with its probabilities; nothing but the file is needed.

    Raises:
        ModelFileError: the file cannot be run.
        ImageError: an image cannot be read.
    """
    from ..apps.data import read_image
    from ..export import OnnxRunner

    try:
        given = None if data_config is None else json.loads(data_config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--data-config {data_config}: accepted is a file of JSON: {error}") from None
    runner = OnnxRunner(path, device, data_config=given, image_hw=None if img_size is None else (img_size, img_size))

    def rows() -> Iterator[tuple[Path, list[float]]]:
        for start in range(0, len(files), BATCH_SIZE):
            chunk = files[start : start + BATCH_SIZE]
            for file, row in zip(chunk, runner.probabilities([read_image(file) for file in chunk])):
                yield file, _finite(file, row.tolist())

    return runner.class_names, rows()


def _finite(file: Path, probabilities: list[float]) -> list[float]:
    if not all(math.isfinite(p) for p in probabilities):
        raise ValueError(f"{file}: the model's logits are not finite")
    return probabilities


def class_names_for(count: int, given: Sequence[str] | None, known: Sequence[str] | None) -> Sequence[str]:
    """The names given, else those that came with the weights, else numbered ones.

    Raises:
        ValueError: another number of names is given than there are classes.
    """
    if given is not None and len(given) != count:
        raise ValueError(f"--classes holds {len(given)} names: accepted are {count}, as the model has classes")
    return given or known or [f"class {i}" for i in range(count)]


def read_class_names(path: Path) -> list[str]:
    """Names from a text file with one a line, or from JSON: a list, or an object from index to name.

    Raises:
        ValueError: it holds something else.
        OSError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() != ".json":
            return [line.strip() for line in text.splitlines() if line.strip()]
        content: Any = json.loads(text)
        if isinstance(content, Mapping):
            by_index = {int(index): name for index, name in content.items()}
            content = [by_index[i] for i in range(len(by_index))]
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file of class names") from None
    except (ValueError, KeyError) as error:  # not UTF-8, not JSON, or indices that are no 0 .. n-1
        raise ValueError(f"{path}: cannot be read as class names: {error}") from None
    if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path}: accepted is a JSON list of names, or an object from index to name")
    return content


def _model(weights: str, model_name: str | None, backend: str) -> VisionTransformer:
    from ..factory import create_model
    from ..weights import load
    from ..weights.hub import open_source

    if model_name is not None:
        return create_model(model_name, weights=weights, backend=backend)
    source = open_source(weights)
    if source.config is None:
        raise ValueError(f"{weights}: does not say what shape it is for: name the variant by --model")
    return load(source, backend=backend)

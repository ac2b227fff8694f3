"""Classifies image files: yields one row per image with the output of the model, or with the reason for a failure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import VitFastError
from ..model import VisionTransformer
from ..weights import load
from ..weights.factory import create_model
from ..weights.source import open_source
from .data import ImageError, batches_of, make_transform, read_image

BATCH_SIZE = 32


class PredictionError(VitFastError, RuntimeError):
    """Prediction cannot continue."""


def open_classifier(weights: str, model_name: str | None, backend: str, device: str) -> VisionTransformer:
    """Builds a model that returns one row of logits per image.

    Args:
        weights: A weights file, a folder, or a Hugging Face Hub id.
        model_name: One of list_models(), for weights without a config.
        backend: See create_model.
        device: "auto", or a device of torch.
    Raises:
        ValueError: the weights have no config and model_name is None, the model has no head or does not pool, or the
            device does not exist.
    """
    if model_name is not None:
        model = create_model(model_name, weights=weights, backend=backend)
    elif (source := open_source(weights)).config is None:
        raise ValueError(f"{weights}: has no config: pass the name of the model with --model")
    else:
        model = load(source, backend=backend)
    if model.config.global_pool == "":
        raise ValueError(f"{weights}: global_pool must not be '', which gives logits per token")
    if model.config.num_classes == 0:
        raise ValueError(f"{weights}: must be of a model with a classification head, got num_classes=0")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:  # unknown name or missing device
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None
    if model.head.weight.is_meta:
        raise ValueError(f"--device {device}: must not be the meta device, which computes nothing")
    return model


def class_names_for(count: int, given: Sequence[str] | None, known: Sequence[str] | None) -> Sequence[str]:
    """Returns the given names, otherwise the names stored with the weights, otherwise "class 0", "class 1", ...

    Raises:
        ValueError: the number of given names differs from the number of classes.
    """
    if given is not None and len(given) != count:
        raise ValueError(f"--classes must contain {count} names, one per class of the model, got {len(given)}")
    return given or known or [f"class {i}" for i in range(count)]


def read_class_names(path: Path) -> list[str]:
    """Reads class names from a text file (one per line) or from JSON (a list, or an object from index to name).

    Raises:
        ValueError: the file has another structure.
        OSError: the file cannot be read.
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
    except (ValueError, KeyError, RecursionError) as error:  # not UTF-8, not JSON, or indices other than 0 to n-1
        raise ValueError(f"{path}: cannot be read as class names: {error}") from None
    if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path}: must be a JSON list of names, or an object from index to name")
    return content


class _Files(Dataset[tuple[Tensor, str]]):
    """Pairs of a model input and "", or of zeros and the reason why the image is unreadable."""

    def __init__(self, files: Sequence[Path], model: VisionTransformer) -> None:
        self.files, self.shape = files, (model.config.in_chans, *model.config.image_hw)
        self.transform = make_transform(model.data_config, model.config.image_hw, model.config.in_chans)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        try:
            return self.transform(read_image(self.files[index])), ""
        except ImageError as error:
            return torch.zeros(self.shape), str(error)


def schema() -> Any:
    """Returns the schema: path, label, index, probability, probabilities, embedding, error."""
    import pyarrow as pa

    text, vector = pa.string(), pa.list_(pa.float32())
    kinds = {"path": text, "label": text, "index": pa.int32(), "probability": pa.float64()}
    return pa.schema(kinds | {"probabilities": vector, "embedding": vector, "error": text})


def tables(
    model: VisionTransformer, files: Sequence[Path], class_names: Sequence[str], size: int, workers: int = 0
) -> Generator[Any]:
    """Yields the output of `rows` as tables of `size` rows; the last table may be shorter."""
    import pyarrow as pa

    with contextlib.closing(rows(model, files, class_names, workers)) as stream:
        for start in range(0, len(files), size):
            yield pa.Table.from_pylist([_as_fp32(next(stream)) for _ in files[start : start + size]], schema=schema())


def _as_fp32(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.astype(np.float32) if isinstance(value, np.ndarray) else value for name, value in row.items()}


@torch.inference_mode()
def rows(
    model: VisionTransformer, files: Sequence[Path], class_names: Sequence[str], workers: int = 0
) -> Generator[dict[str, Any]]:
    """Yields one row per file, in the order of `files`.

    A row contains path, label, index, probability, `probabilities` (softmax in fp64) and `embedding` (the input of the
    head), the last two as arrays. The row of an unreadable image contains only path and error.

    Args:
        workers: Additional processes that read images.
    Raises:
        ValueError: the logits of an image are not finite.
        ReaderLostError: a worker ended early.
    """
    parameter = next(model.parameters())
    order = iter(files)
    for images, errors in batches_of(DataLoader(_Files(files, model), BATCH_SIZE, num_workers=workers)):
        tokens = model.forward_features(images.to(parameter.device, parameter.dtype))
        logits, embeddings = (model.forward_head(tokens, pre_logits=pre_logits) for pre_logits in (False, True))
        assert isinstance(logits, Tensor) and isinstance(embeddings, Tensor)  # in evaluation mode
        for error, row, embedding in zip(errors, logits.double().cpu(), embeddings.float().cpu()):
            file = next(order)
            if error:
                yield {"path": str(file), "error": error}
                continue
            if not row.isfinite().all():
                raise ValueError(f"{file}: the model's logits are not finite")
            probabilities = row.softmax(dim=0)
            best = int(probabilities.argmax())
            answer = {"label": class_names[best], "index": best, "probability": probabilities[best].item()}
            vectors = {"probabilities": probabilities.numpy(), "embedding": embedding.numpy()}
            yield {"path": str(file)} | answer | vectors

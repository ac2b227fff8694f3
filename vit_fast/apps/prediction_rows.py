"""A row an image: what a model says of it, or why it could not be read. Wherever the model is run, by this code."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import VitFastError
from ..model import VisionTransformer
from .data import ImageError, make_transform, read_image
from .readers import batches_of

BATCH_SIZE = 32  # images at once


class PredictionError(VitFastError, RuntimeError):
    """A run that cannot go on."""


class _Files(Dataset[tuple[Tensor, str]]):
    """Each file as a model's input and "", or, where it is no image, as zeros and the reason."""

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
    """The columns: path, label, index, probability, probabilities, embedding, error."""
    import pyarrow as pa

    return pa.schema(
        [
            ("path", pa.string()),
            ("label", pa.string()),
            ("index", pa.int32()),
            ("probability", pa.float64()),
            ("probabilities", pa.list_(pa.float32())),
            ("embedding", pa.list_(pa.float32())),
            ("error", pa.string()),
        ]
    )


def tables(
    model: VisionTransformer, files: Sequence[Path], class_names: Sequence[str], workers: int, size: int
) -> Generator[Any]:
    """The rows of files, in their order, as tables of `size` rows; the last one holds what is left.

    Args:
        model: In evaluation mode, where it is.
        files: Images, or what should be some.
        class_names: Of the model's outputs.
        workers: Processes that read images beside this one: one stream over all tables, they never wait for one.
        size: Rows a table.
    Raises:
        ValueError: an image's logits are not finite.
        ReaderLostError: such a process ended before its work did.
    """
    import pyarrow as pa

    with contextlib.closing(_rows(model, files, class_names, workers)) as rows:
        for start in range(0, len(files), size):
            yield pa.Table.from_pylist([next(rows) for _ in files[start : start + size]], schema=schema())


@torch.inference_mode()
def _rows(
    model: VisionTransformer, files: Sequence[Path], class_names: Sequence[str], workers: int
) -> Generator[dict[str, Any]]:
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
            yield {
                "path": str(file),
                "label": class_names[best],
                "index": best,
                "probability": probabilities[best].item(),
                "probabilities": probabilities.float().numpy(),
                "embedding": embedding.numpy(),
            }

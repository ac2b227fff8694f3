"""What a model says of many images, as one Parquet file; a run that was killed goes on where it was.

The images are taken in parts of PART. Each part becomes a file of its own beside the result, under its final name only
when it is whole; what a killed run left is taken as it is. The result is written from the parts, one after the other,
and the parts go last: at no time is an image twice in what counts, and none is missing from it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .data import ImageError, make_transform, read_image
from .errors import MissingPackageError, VitFastError
from .files import check_replaceable
from .model import VisionTransformer

BATCH_SIZE, PART = 32, 512  # images at once, and images a part: what a kill can cost
_TASK = "task.json"


class PredictionError(VitFastError, RuntimeError):
    """A run that cannot go on."""


@dataclass(frozen=True)
class Predicted:
    """What was written.

    Attributes:
        images: Rows of the file.
        bad: Images that could not be read, with the reason.
        taken: Images that an earlier run had done.
    """

    images: int
    bad: tuple[tuple[str, str], ...]
    taken: int


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


def predict_to_parquet(
    model: VisionTransformer,
    files: Sequence[Path],
    out: Path,
    *,
    class_names: Sequence[str],
    workers: int = 0,
    on_part: Callable[[int], None] = lambda images: None,
) -> Predicted:
    """Writes a row an image: path, label, probability, index, probabilities, embedding, error.

    An image that cannot be read has its row, too: nothing but path and error. The embedding is what the head sees.

    Args:
        model: Pools, and has a head; where it is.
        files: Images, each once.
        out: The Parquet file to write; the parts lie in OUT.parts until it is whole.
        class_names: Of the model's outputs.
        workers: Processes that read images beside this one.
        on_part: Called with the number of images done so far.
    Returns:
        What was written.
    Raises:
        MissingPackageError: pyarrow is not installed.
        PredictionError: OUT.parts is of another run.
        ValueError: an image's logits are not finite, or a name is given twice.
        OSError: it cannot be written.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingPackageError("pyarrow not installed: pip install 'vit-fast[predict]'")
    if len(set(files)) < len(files):
        raise ValueError("images: accepted is each file once")
    check_replaceable(out)
    parts = out.with_name(f"{out.name}.parts")
    _begin(parts, _task(model, files, class_names))
    chunks = [files[start : start + PART] for start in range(0, len(files), PART)]
    names = [parts / f"{i:08}.parquet" for i in range(len(chunks))]
    missing = [i for i, name in enumerate(names) if not name.is_file()]
    wanted = [file for i in missing for file in chunks[i]]
    rows = _rows(model, wanted, class_names, workers)  # one stream over all parts, so that workers never wait for one
    done = len(files) - len(wanted)
    for i in missing:
        _write_part(names[i], [next(rows) for _ in chunks[i]])
        done += len(chunks[i])
        on_part(done)
    bad = _merge(names, out)
    for path in (*names, parts / _TASK):  # what the parts are of goes last: as long as there is one, it is known
        path.unlink()
    shutil.rmtree(parts)
    return Predicted(len(files), bad, len(files) - len(wanted))


def _task(model: VisionTransformer, files: Sequence[Path], class_names: Sequence[str]) -> str:
    """What the answers depend on; a run is gone on with only where all of it is as it was."""
    parameters = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        parameters.update(name.encode())
        parameters.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    listed = hashlib.sha256("\0".join(map(str, files)).encode())
    facts = {
        "model": model.config.to_dict(),
        "parameters": parameters.hexdigest(),
        "data_config": model.data_config.to_dict(),
        "class_names": list(class_names),
        "images": len(files),
        "files": listed.hexdigest(),
        "part": PART,
    }
    return json.dumps(facts, indent=2)


def _begin(parts: Path, task: str) -> None:
    """Makes the folder of the parts, with what they are of, or finds it."""
    if (parts / _TASK).is_file():
        if (parts / _TASK).read_text(encoding="utf-8") != task:
            raise PredictionError(
                f"{parts}: holds parts of a run with another model or other images: accepted is the same again, or no "
                "such folder"
            )
        return
    if parts.exists() and any(path.name != f".{_TASK}.partial" for path in parts.iterdir()):
        raise PredictionError(f"{parts}: holds something else than a run's parts: accepted is no such folder")
    parts.mkdir(parents=True, exist_ok=True)
    _whole(parts / _TASK, lambda path: path.write_text(task, encoding="utf-8"))


def _whole(path: Path, write: Callable[[Path], Any]) -> None:
    """A file that appears whole or not at all; a killed run's is overwritten."""
    beside = path.with_name(f".{path.name}.partial")
    write(beside)
    beside.replace(path)


@torch.inference_mode()
def _rows(
    model: VisionTransformer, files: Sequence[Path], class_names: Sequence[str], workers: int
) -> Iterator[dict[str, Any]]:
    parameter = next(model.parameters())
    order = iter(files)
    for images, errors in DataLoader(_Files(files, model), BATCH_SIZE, num_workers=workers):
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


def _schema() -> Any:
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


def _write_part(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows, schema=_schema())
    _whole(path, lambda beside: pq.write_table(table, beside))


def _merge(names: Sequence[Path], out: Path) -> tuple[tuple[str, str], ...]:
    """The result from the parts, one in memory at a time; the images that could not be read."""
    import pyarrow.parquet as pq

    bad: list[tuple[str, str]] = []

    def write(beside: Path) -> None:
        with pq.ParquetWriter(beside, _schema()) as writer:
            for name in names:
                table = pq.read_table(name)
                writer.write_table(table)
                rows = zip(table.column("path").to_pylist(), table.column("error").to_pylist())
                bad.extend((path, error) for path, error in rows if error is not None)

    _whole(out, write)
    return tuple(bad)

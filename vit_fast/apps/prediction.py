"""What a model says of many images, as one Parquet file; a run that was killed goes on where it was.

The images are taken in parts of PART. Each part becomes a file of its own beside the result, under its final name only
when it is whole; what a killed run left is taken as it is. The result is written from the parts, one after the other,
and the parts go last: at no time is an image twice in what counts, and none is missing from it. Who computes the rows,
this process or a cluster, does not matter to that: a run of the one is gone on with by the other.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MissingPackageError
from ..files import check_replaceable, file_aside
from ..model import VisionTransformer
from ..tuning.answers import weights_digest
from .classifiers import PredictionError, schema, tables
from .prediction_ray import joined_cluster
from .readers import ReaderLostError

__all__ = ["ENGINES", "Predicted", "PredictionError", "predict_to_parquet"]

ENGINES = ("local", "ray")
PART = 512  # images a part: what a kill can cost
_TASK = "task.json"


@dataclass(frozen=True)
class Predicted:
    """What was written.

    Attributes:
        images: Rows of the file.
        bad: Images that could not be read, with the reason.
        taken: Images that an earlier run had done.
        lost: Of each process that ended before its work did, after which others went on: how it ended.
    """

    images: int
    bad: tuple[tuple[str, str], ...]
    taken: int
    lost: tuple[str, ...]


def predict_to_parquet(
    model: VisionTransformer,
    files: Sequence[Path],
    out: Path,
    *,
    class_names: Sequence[str],
    workers: int | None = 0,
    engine: str = "local",
    device: str = "auto",
    on_part: Callable[[int], None] = lambda images: None,
) -> Predicted:
    """Writes a row an image: path, label, probability, index, probabilities, embedding, error.

    An image that cannot be read has its row, too: nothing but path and error. The embedding is what the head sees.

    Args:
        model: Pools, and has a head; where it is.
        files: Images, each once.
        out: The Parquet file to write; the parts lie in OUT.parts until it is whole.
        class_names: Of the model's outputs.
        workers: Processes that read images beside this one; with ray, that read them and run the model, None: one a
            core of the cluster.
        engine: "local", or "ray": the workers of a cluster, see prediction_ray.joined_cluster.
        device: With ray, where the workers run the model: "cpu", "cuda", or "auto".
        on_part: Called with the number of images done so far.
    Returns:
        What was written.
    Raises:
        MissingPackageError: pyarrow, or for its engine ray, is not installed.
        PredictionError: OUT.parts is of another run; processes ended again and again over the same images; or, with
            ray, what workers raised. What was done is kept.
        ValueError: an image's logits are not finite, a name is given twice, or there is no such engine or device, or
            not as many workers.
        OSError: it cannot be written.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingPackageError("pyarrow not installed: pip install 'vit-fast[predict]'")
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r}: accepted are {', '.join(ENGINES)}")
    if len(set(files)) < len(files):
        raise ValueError("images: accepted is each file once")
    check_replaceable(out)
    parts = out.with_name(f"{out.name}.parts")
    chunks = [files[start : start + PART] for start in range(0, len(files), PART)]
    names = [parts / f"{i:08}.parquet" for i in range(len(chunks))]
    lost: list[str] = []
    with joined_cluster(workers, device) if engine == "ray" else contextlib.nullcontext() as cluster:

        def rows(wanted: Sequence[Path]) -> Generator[Any]:
            if cluster is not None:
                return cluster.tables(model, wanted, class_names, PART)
            return tables(model, wanted, class_names, workers or 0, PART)

        _begin(parts, _task(model, files, class_names))
        try:
            taken = _compute(rows, chunks, names, on_part, lost)
        finally:
            if not any(name.is_file() for name in names):
                shutil.rmtree(parts, ignore_errors=True)  # no part is worth resuming
    bad = _merge(names, out)
    for path in (*names, parts / _TASK):  # what the parts are of goes last: as long as there is one, it is known
        path.unlink()
    shutil.rmtree(parts)
    return Predicted(len(files), bad, taken, tuple(lost))


def _compute(
    rows: Callable[[Sequence[Path]], Generator[Any]],
    chunks: Sequence[Sequence[Path]],
    names: Sequence[Path],
    on_part: Callable[[int], None],
    lost: list[str],
) -> int:
    """Writes the parts that are not there; says how many images an earlier run had done.

    Args:
        rows: A table of each part of these images.
        chunks, names: The images of each part, and its file.
        on_part: As of predict_to_parquet.
        lost: Gets how each process ended that did before its work.
    """
    missing = [i for i, name in enumerate(names) if not name.is_file()]
    done = taken = sum(map(len, chunks)) - sum(len(chunks[i]) for i in missing)
    last_lost_at = -1
    import pyarrow.parquet as pq

    while missing:
        try:
            with contextlib.closing(rows([file for i in missing for file in chunks[i]])) as stream:
                for table in stream:
                    if table.column("path").to_pylist() != list(map(str, chunks[missing[0]])):
                        raise PredictionError(f"the rows of part {missing[0]} are not those of its images")
                    with file_aside(names[missing[0]]) as aside:
                        pq.write_table(table, aside)
                    done += len(chunks[missing.pop(0)])
                    on_part(done)
        except ReaderLostError as error:
            if done == last_lost_at:
                chunk = chunks[missing[0]]
                raise PredictionError(
                    f"{error}; for the second time between {chunk[0]} and {chunk[-1]}. What was done before is kept: "
                    "the same again goes on from there"
                ) from None
            last_lost_at = done
            lost.append(str(error))
    return taken


def _task(model: VisionTransformer, files: Sequence[Path], class_names: Sequence[str]) -> str:
    """What the answers depend on; a run is gone on with only where all of it is as it was."""
    listed = hashlib.sha256("\0".join(map(str, files)).encode())
    facts = {
        "model": model.config.to_dict(),
        "parameters": weights_digest(model),
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
    if parts.is_dir() and any(not path.name.startswith(".") for path in parts.iterdir()):
        raise PredictionError(f"{parts}: must be a new or empty folder, or hold the parts of this run; remove it")
    with file_aside(parts / _TASK) as aside:
        aside.write_text(task, encoding="utf-8")


def _merge(names: Sequence[Path], out: Path) -> tuple[tuple[str, str], ...]:
    """The result from the parts, one in memory at a time; the images that could not be read."""
    import pyarrow.parquet as pq

    bad: list[tuple[str, str]] = []

    with file_aside(out) as aside, pq.ParquetWriter(aside, schema()) as writer:
        for name in names:
            table = pq.read_table(name)
            writer.write_table(table)
            rows = zip(table.column("path").to_pylist(), table.column("error").to_pylist())
            bad.extend((path, error) for path, error in rows if error is not None)
    return tuple(bad)

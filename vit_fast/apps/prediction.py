"""Classifies many images and writes one Parquet file; an interrupted run can be resumed.

A run writes one file per PART images into OUT.parts, atomically. A resumed run reuses these files. At the end, the run
merges and removes them. Local runs and runs on a cluster can resume each other.
"""

from __future__ import annotations

import contextlib
import functools
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
from ..weights.source import weights_digest
from .classifiers import PredictionError, schema, tables
from .data import ReaderLostError
from .prediction_ray import joined_cluster

__all__ = ["ENGINES", "Predicted", "PredictionError", "predict_to_parquet"]

ENGINES = ("local", "ray")
PART = 512  # images that an interruption repeats at most
_TASK = "task.json"


@dataclass(frozen=True)
class Predicted:
    """Summary of predict_to_parquet.

    Attributes:
        images: Number of rows in the file.
        bad: Path and reason of each unreadable image.
        taken: Number of images that an earlier run had processed.
        lost: One message per worker that died and was replaced.
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
    """Writes one row per image: path, label, probability, index, probabilities, embedding, error.

    The row of an unreadable image contains only path and error. The embedding is the input of the head.

    Args:
        model: A model that pools and has a head. The local engine runs it on its device.
        files: Image files without duplicates.
        out: Parquet file to write. Until it is complete, OUT.parts contains the finished parts.
        class_names: Names of the model's outputs.
        workers: Additional processes that read images. With "ray", processes that read images and run the model; None
            means one per core of the cluster.
        engine: "local", or "ray" for a Ray cluster.
        device: Device of the workers with "ray": "cpu", "cuda" or "auto".
        on_part: Called with the number of images processed so far.
    Returns:
        A summary.
    Raises:
        MissingPackageError: pyarrow is not installed, or Ray with engine="ray".
        PredictionError: OUT.parts belongs to another run, two local workers died at the same images, or the cluster
            failed. Finished parts remain.
        ValueError: the logits of an image are not finite, a file is given twice, or engine, device or workers are
            invalid.
        OSError: the file cannot be written.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingPackageError("pyarrow not installed: pip install 'vit-fast[predict]'")
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if len(set(files)) < len(files):
        raise ValueError("files must not contain duplicates")
    check_replaceable(out)
    parts = out.with_name(f"{out.name}.parts")
    chunks = [files[start : start + PART] for start in range(0, len(files), PART)]
    names = [parts / f"{i:08}.parquet" for i in range(len(chunks))]
    here = contextlib.nullcontext(functools.partial(tables, workers=workers or 0))
    with joined_cluster(workers, device) if engine == "ray" else here as rows_of:

        def rows(wanted: Sequence[Path]) -> Generator[Any]:
            return rows_of(model, wanted, class_names, PART)

        _begin(parts, _task(model, files, class_names))
        try:
            taken, lost = _compute(rows, chunks, names, on_part)
        finally:
            if not any(name.is_file() for name in names):
                shutil.rmtree(parts, ignore_errors=True)  # there is nothing to resume
    bad = _merge(names, out)
    for path in (*names, parts / _TASK):  # the task last, because it describes the parts
        path.unlink()
    shutil.rmtree(parts)
    return Predicted(len(files), bad, taken, tuple(lost))


def _compute(
    rows: Callable[[Sequence[Path]], Generator[Any]],
    chunks: Sequence[Sequence[Path]],
    names: Sequence[Path],
    on_part: Callable[[int], None],
) -> tuple[int, list[str]]:
    """Writes the missing parts; returns the number of images in existing parts, and a message per lost worker."""
    import pyarrow.parquet as pq

    missing = [i for i, name in enumerate(names) if not name.is_file()]
    done = taken = sum(map(len, chunks)) - sum(len(chunks[i]) for i in missing)
    lost: list[str] = []
    lost_at = None  # the part that the last lost worker was reading
    while missing:
        try:
            with contextlib.closing(rows([file for i in missing for file in chunks[i]])) as stream:
                for i, table in zip(list(missing), stream, strict=True):
                    if table.column("path").to_pylist() != list(map(str, chunks[i])):
                        raise PredictionError(f"part {i} has rows of other images")
                    with file_aside(names[i]) as aside:
                        pq.write_table(table, aside)
                    done += len(chunks[missing.pop(0)])
                    on_part(done)
        except ReaderLostError as error:
            if missing[:1] == [lost_at]:
                between = f"between {chunks[missing[0]][0]} and {chunks[missing[0]][-1]}"
                raise PredictionError(f"{error}, for the second time {between}: re-run the command to resume") from None
            lost_at = missing[0] if missing else None
            lost.append(str(error))
    return taken, lost


def _task(model: VisionTransformer, files: Sequence[Path], class_names: Sequence[str]) -> str:
    """Describes everything that affects the predictions as JSON. A run can be resumed only if this is unchanged."""
    listed = hashlib.sha256("\0".join(map(str, files)).encode())
    facts = {
        "model": model.config.to_dict(), "parameters": weights_digest(model),
        "data_config": model.data_config.to_dict(), "class_names": list(class_names), "images": len(files),
        "files": listed.hexdigest(), "part": PART,
    }  # fmt: skip
    return json.dumps(facts, indent=2)


def _begin(parts: Path, task: str) -> None:
    if (parts / _TASK).is_file():
        if (parts / _TASK).read_text(encoding="utf-8") != task:
            belongs = "contains parts of a run with another model or other images"
            raise PredictionError(f"{parts}: {belongs}: finish that run, or remove the folder")
        return
    if parts.is_dir() and any(not path.name.startswith(".") for path in parts.iterdir()):
        raise PredictionError(f"{parts}: must be new, empty, or contain the parts of this run: remove the folder")
    with file_aside(parts / _TASK) as aside:
        aside.write_text(task, encoding="utf-8")


def _merge(names: Sequence[Path], out: Path) -> tuple[tuple[str, str], ...]:
    """Merges the parts into the result, and returns the unreadable images."""
    import pyarrow.parquet as pq

    bad: list[tuple[str, str]] = []
    with file_aside(out) as aside, pq.ParquetWriter(aside, schema()) as writer:
        for name in names:
            try:
                table = pq.read_table(name, schema=schema())
            except (ValueError, OSError) as error:  # base classes of pyarrow's errors
                raise PredictionError(f"{name}: is damaged: {error}: remove it and re-run the command") from None
            writer.write_table(table)
            rows = zip(table.column("path").to_pylist(), table.column("error").to_pylist())
            bad.extend((path, error) for path, error in rows if error is not None)
    return tuple(bad)

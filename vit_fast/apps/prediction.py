"""Classifies many images and writes one Parquet file; an interrupted run can be resumed.

A run writes one file per PART images into OUT.parts, atomically. A resumed run reuses these files. At the end, the run
merges and removes these files. A local run can be resumed on a cluster, and vice versa.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import VitFastError, check_choice, require_packages
from ..files import check_replaceable, encodable, file_aside
from ..model import VisionTransformer
from ..weights.source import weights_digest
from .classifiers import BATCH_SIZE, rows
from .data import ReaderLostError

ENGINES, DEVICES = ("local", "ray"), ("auto", "cpu", "cuda")
PART = 512  # images per part
_TASK = "task.json"
_BLOCKS_PER_WORKER, _TRIES = 4, 3  # on a cluster: tasks, to balance the load, and attempts per task


class PredictionError(VitFastError, RuntimeError):
    """Prediction cannot continue."""


@dataclass(frozen=True)
class Predicted:
    """Summary of predict_to_parquet."""

    images: int  # rows in the file
    bad: tuple[tuple[str, str], ...]  # path and reason of each unreadable image
    resumed: int  # images that an earlier run had processed
    lost: tuple[str, ...]  # one message per worker that died and was replaced


def predict_to_parquet(
    model: VisionTransformer, files: Sequence[Path], out: Path, *, class_names: Sequence[str], workers: int | None = 0,
    engine: str = "local", device: str = "auto", on_part: Callable[[int], None] = lambda images: None,
) -> Predicted:  # fmt: skip
    """Writes a Parquet file of one row per image: path, label, index, probability, probabilities, embedding, error.

    A path that is not valid UTF-8 is stored as a `file:` URI. The row of an unreadable image contains only path and
    error. The embedding is the input of the head.

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
    Raises:
        MissingPackageError: pyarrow is not installed, or Ray with engine="ray".
        PredictionError: OUT.parts belongs to another run, workers died repeatedly at the same images, or a task of the
            cluster failed. Finished parts remain.
        ValueError: the logits of an image are not finite, a file is given twice, or another argument is invalid.
        OSError: the file cannot be written.
    """
    require_packages("predict", "pyarrow")
    check_choice("engine", engine, ENGINES)
    if twice := next((file for file, count in Counter(files).items() if count > 1), None):
        raise ValueError(f"each image must be given once, got {twice} more than once")
    check_replaceable(out)
    import pyarrow as pa
    import pyarrow.parquet as pq

    def compute(paths: Sequence[Path]) -> Generator[dict[str, Any]]:
        if engine == "ray":
            return _rows_by_ray(model, paths, class_names, workers, device)
        return rows(model, paths, class_names, workers or 0)

    text, vector = pa.string(), pa.list_(pa.float32())
    kinds = {"path": text, "label": text, "index": pa.int32(), "probability": pa.float64()}
    schema = pa.schema(kinds | {"probabilities": vector, "embedding": vector, "error": text})
    parts = out.with_name(f"{out.name}.parts")
    chunks = {parts / f"{i // PART:08}.parquet": files[i : i + PART] for i in range(0, len(files), PART)}
    missing = {name: chunk for name, chunk in chunks.items() if not name.is_file()}
    resumed = len(files) - sum(map(len, missing.values()))
    # everything that affects the predictions: a run can be resumed only if this is unchanged
    facts = {
        "model": model.config.to_dict(), "parameters": weights_digest(model),
        "data_config": model.data_config.to_dict(), "class_names": list(class_names), "images": len(files),
        "files": hashlib.sha256("\0".join(map(str, files)).encode(errors="surrogateescape")).hexdigest(), "part": PART,
    }  # fmt: skip
    _begin(parts, json.dumps(facts, indent=2))
    lost: dict[int, str] = {}  # number of missing parts -> why a worker was lost
    try:
        while missing:
            try:
                with contextlib.closing(compute(list(itertools.chain(*missing.values())))) as predicted:
                    for name, chunk in list(missing.items()):
                        found = list(itertools.islice(predicted, len(chunk)))
                        assert [row["path"] for row in found] == list(map(encodable, chunk))
                        for row in found:
                            if "probabilities" in row:  # pyarrow copies fp32, and converts fp64 one number at a time
                                row["probabilities"] = np.float32(row["probabilities"])
                        # pyarrow opens only paths that are valid UTF-8
                        with file_aside(name) as aside, aside.open("wb") as file:
                            pq.write_table(pa.Table.from_pylist(found, schema=schema), file)
                        del missing[name]
                        on_part(len(files) - sum(map(len, missing.values())))
            except ReaderLostError as error:
                if len(missing) in lost:  # at the same images again
                    first = next(iter(missing.values()))
                    raise PredictionError(f"{first[0]} to {first[-1]}: {error}: re-run to resume") from None
                lost[len(missing)] = str(error)
    finally:
        if not any(name.is_file() for name in chunks):
            shutil.rmtree(parts, ignore_errors=True)  # there is nothing to resume

    bad = _merge(chunks, out, schema)
    for path in (*chunks, parts / _TASK):  # the task last, because it describes the parts
        path.unlink()
    shutil.rmtree(parts)
    return Predicted(len(files), tuple(bad), resumed, tuple(lost.values()))


def _merge(parts: Iterable[Path], out: Path, schema: Any) -> list[tuple[str, str]]:
    """Writes all parts to one file; returns path and reason of each unreadable image."""
    import pyarrow.parquet as pq

    bad: list[tuple[str, str]] = []
    with file_aside(out) as aside, aside.open("wb") as file, pq.ParquetWriter(file, schema) as writer:
        for name in parts:
            try:
                table = pq.read_table(io.BytesIO(name.read_bytes()), schema=schema)
            except (ValueError, OSError) as error:  # base classes of pyarrow's errors
                raise PredictionError(f"{name}: damaged: {error}: remove it and re-run the command") from None
            writer.write_table(table)
            bad += [(row["path"], row["error"]) for row in table.select(["path", "error"]).to_pylist() if row["error"]]
    return bad


def _begin(parts: Path, task: str) -> None:
    if (parts / _TASK).is_file():
        if (parts / _TASK).read_text(encoding="utf-8") != task:
            belongs = "contains results of an interrupted run with another model, class names or images"
            raise PredictionError(f"{parts}: {belongs}: finish that run, or remove the folder")
        return
    if parts.is_dir() and any(not path.name.startswith(".") for path in parts.iterdir()):
        raise PredictionError(f"{parts}: must be empty, because this run saves its progress there: remove the folder")
    with file_aside(parts / _TASK) as aside:
        aside.write_text(task, encoding="utf-8")


def _rows_by_ray(
    model: VisionTransformer, files: Sequence[Path], class_names: Sequence[str], workers: int | None, device: str
) -> Generator[dict[str, Any]]:
    """Yields the rows of the images, computed by tasks on the Ray cluster that `ray.init()` finds or starts.

    Each node needs this package, and the files under the same paths. Ray restarts a worker that dies and repeats its
    task, at most twice, because the images may have caused the crash.
    """
    require_packages("ray", "ray")
    check_choice("device with engine ray", device, DEVICES)
    import ray
    import ray.exceptions

    starts = not ray.is_initialized()
    if starts:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    tasks: list[Any] = []
    try:
        count, gpus = _share(ray.cluster_resources(), workers, device)
        size = min(PART, max(BATCH_SIZE, math.ceil(len(files) / (_BLOCKS_PER_WORKER * count))))
        blocks = [files[i : i + size] for i in range(0, len(files), size)]
        place, shared = "cuda" if gpus else "cpu", ray.put(model)
        running: list[Any] = []

        def predict(model: VisionTransformer, block: Sequence[Path]) -> list[dict[str, Any]]:
            return list(rows(model.to(place), block, class_names))

        remote = ray.remote(max_retries=_TRIES - 1, num_gpus=gpus)(predict)
        for i, block in enumerate(blocks):
            while True:
                for each in blocks[len(tasks) : len(tasks) + count - len(running)]:
                    tasks.append(remote.remote(shared, each))
                    running.append(tasks[-1])
                if tasks[i] not in running:
                    break
                running = ray.wait(running)[1]
            try:
                yield from ray.get(tasks[i])
            except ray.exceptions.RayTaskError as error:
                raise PredictionError(str(error.cause)) from None
            except ray.exceptions.WorkerCrashedError:
                raise PredictionError(f"{_TRIES} workers died while processing {block[0]} to {block[-1]}") from None
            tasks[i] = None  # frees its rows
    except ray.exceptions.RayError as error:
        raise PredictionError(f"ray: {' '.join(str(error).split())}") from None
    finally:
        for task in tasks:
            if task is not None:
                ray.cancel(task)
        if starts:
            ray.shutdown()


def _share(resources: dict[str, float], workers: int | None, device: str) -> tuple[int, float]:
    """Returns the number of workers, by default one per core, and the fraction of a GPU for each."""
    cores, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    if device == "cuda" and not gpus:
        raise ValueError("device must be cpu or auto, got cuda: the cluster has no GPU")
    count = cores if workers is None else workers
    if not 1 <= count <= cores:
        raise ValueError(f"workers must be between 1 and {cores}, the number of cores of the cluster, got {workers}")
    return count, 0.0 if device == "cpu" or not gpus else 1 / math.ceil(count / gpus)

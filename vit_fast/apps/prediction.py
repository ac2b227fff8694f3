"""Classifies many images and writes one Parquet file; an interrupted run can be resumed.

A run writes one file per PART images into OUT.parts, atomically. A resumed run reuses these files. At the end, the run
merges and removes them. Local runs and runs on a cluster can resume each other.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import importlib.util
import itertools
import json
import logging
import math
import shutil
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MissingPackageError, VitFastError
from ..files import check_replaceable, file_aside
from ..model import VisionTransformer
from ..weights.source import weights_digest
from .classifiers import BATCH_SIZE, rows
from .data import ReaderLostError

__all__ = ["ENGINES", "Predicted", "PredictionError", "predict_to_parquet"]

ENGINES, DEVICES = ("local", "ray"), ("auto", "cpu", "cuda")
PART = 512  # images per part
_TASK = "task.json"
_BLOCKS_PER_WORKER, _TRIES = 4, 3  # on a cluster: blocks of images, to balance the load, and attempts per block


class PredictionError(VitFastError, RuntimeError):
    """Prediction cannot continue."""


@dataclass(frozen=True)
class Predicted:
    """Summary of predict_to_parquet.

    Attributes:
        images: Number of rows in the file.
        bad: Path and reason of each unreadable image.
        resumed: Number of images that an earlier run had processed.
        lost: One message per worker that died and was replaced.
    """

    images: int
    bad: tuple[tuple[str, str], ...]
    resumed: int
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
        PredictionError: OUT.parts belongs to another run, workers died repeatedly at the same images, the cluster
            failed, or with Ray, the logits of an image are not finite. Finished parts remain.
        ValueError: the logits of an image are not finite (without Ray), a file is given twice, or engine, device or
            workers are invalid.
        OSError: the file cannot be written.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingPackageError("pyarrow not installed: pip install 'vit-fast[predict]'")
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if len(set(files)) < len(files):
        raise ValueError("files must not contain duplicates")
    check_replaceable(out)

    options = (class_names, workers, device) if engine == "ray" else (class_names, workers or 0)
    compute = _on_cluster if engine == "ray" else _on_this_machine
    parts = out.with_name(f"{out.name}.parts")
    chunks = {parts / f"{i // PART:08}.parquet": files[i : i + PART] for i in range(0, len(files), PART)}
    missing = {name: chunk for name, chunk in chunks.items() if not name.is_file()}
    resumed = len(files) - sum(map(len, missing.values()))
    _begin(parts, _task(model, files, class_names))
    try:
        lost = _compute(missing, lambda paths: compute(model, paths, *options), lambda left: on_part(len(files) - left))
    finally:
        if not any(name.is_file() for name in chunks):
            shutil.rmtree(parts, ignore_errors=True)  # there is nothing to resume
    bad = _merge(chunks, out)
    for path in (*chunks, parts / _TASK):  # the task last, because it describes the parts
        path.unlink()
    shutil.rmtree(parts)
    return Predicted(len(files), tuple(bad), resumed, tuple(lost))


def _compute(
    missing: dict[Path, Sequence[Path]], tables: Callable[[Sequence[Path]], Generator[Any]], on_left: Callable[..., Any]
) -> list[str]:
    """Writes the missing parts, and removes them from `missing`; returns a message per lost worker."""
    import pyarrow.parquet as pq

    lost: list[str] = []
    left_when_lost = None  # the number of missing parts when the last worker was lost
    while missing:
        try:
            with contextlib.closing(tables(list(itertools.chain(*missing.values())))) as stream:
                for (name, chunk), table in zip(list(missing.items()), stream, strict=True):
                    assert table.column("path").to_pylist() == list(map(str, chunk))
                    with file_aside(name) as aside:
                        pq.write_table(table, aside)
                    del missing[name]
                    on_left(sum(map(len, missing.values())))
        except ReaderLostError as error:
            if len(missing) == left_when_lost:  # at the same images again
                first = next(iter(missing.values()))
                raise PredictionError(f"{error} between {first[0]} and {first[-1]}: re-run to resume") from None
            left_when_lost = len(missing)
            lost.append(str(error))
    return lost


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


def _merge(names: Iterable[Path], out: Path) -> list[tuple[str, str]]:
    """Merges the parts into the result, and returns the unreadable images."""
    import pyarrow.parquet as pq

    bad: list[tuple[str, str]] = []
    with file_aside(out) as aside, pq.ParquetWriter(aside, _schema()) as writer:
        for name in names:
            try:
                table = pq.read_table(name, schema=_schema())
            except (ValueError, OSError) as error:  # base classes of pyarrow's errors
                raise PredictionError(f"{name}: damaged: {error}: remove it and re-run the command") from None
            writer.write_table(table)
            bad += [(row["path"], row["error"]) for row in table.select(["path", "error"]).to_pylist() if row["error"]]
    return bad


def _schema() -> Any:
    import pyarrow as pa

    text, vector = pa.string(), pa.list_(pa.float32())
    kinds = {"path": text, "label": text, "index": pa.int32(), "probability": pa.float64()}
    return pa.schema(kinds | {"probabilities": vector, "embedding": vector, "error": text})


def _on_this_machine(
    model: VisionTransformer, files: Sequence[Path], class_names: Sequence[str], workers: int
) -> Generator[Any]:
    """Yields tables of PART rows; the last table may be shorter."""
    predicted = rows(model, files, class_names, workers)
    while chunk := list(itertools.islice(predicted, PART)):
        yield _table(chunk)


def _table(rows: Iterable[dict[str, Any]]) -> Any:
    import pyarrow as pa

    fp32 = ({name: np.float32(v) if isinstance(v, np.ndarray) else v for name, v in row.items()} for row in rows)
    return pa.Table.from_pylist(list(fp32), schema=_schema())


class _Attempts:
    """Ray actor that counts the attempts per block. It survives the workers."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    def begin(self, block: str) -> int:
        self.counts[block] += 1
        return self.counts[block]


class _Worker:
    """Ray actor with its own copy of the model."""

    def __init__(self, model: VisionTransformer, class_names: Sequence[str], device: str, attempts: Any) -> None:
        self.model, self.class_names, self.attempts = model.to(device), class_names, attempts

    def __call__(self, files: Any) -> Any:
        """Returns one row per file, or one row without a path whose error ends the run."""
        import ray

        paths = [Path(file) for file in files.column("file").to_pylist()]
        try:
            if ray.get(self.attempts.begin.remote(str(paths[0]))) > _TRIES:  # Ray itself retries forever
                raise PredictionError(f"{_TRIES} workers died between {paths[0]} and {paths[-1]}")
            return _table(rows(self.model, paths, self.class_names))
        except (VitFastError, ValueError) as error:  # Ray would replace the message of an exception by a traceback
            return _table([{"error": str(error)}])


def _on_cluster(
    model: VisionTransformer, files: Sequence[Path], class_names: Sequence[str], workers: int | None, device: str
) -> Generator[Any]:
    """Yields the tables of `_on_this_machine`, computed by Ray Data on the cluster that `ray.init()` finds or starts.

    Each node needs this package, and the files under the same paths. Ray restarts a worker that dies and repeats its
    images, at most twice, because the images may have caused the crash.
    """
    if any(importlib.util.find_spec(name) is None for name in ("ray", "pandas")):  # Ray Data needs pandas
        raise MissingPackageError("ray[data] not installed: pip install 'vit-fast[ray]'")
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)} with engine='ray', got {device!r}")
    import ray
    import ray.data
    import ray.exceptions

    starts = not ray.is_initialized()
    if starts:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    try:
        count, gpus = _share(ray.cluster_resources(), workers, device)
        blocks = max(math.ceil(len(files) / PART), min(math.ceil(len(files) / BATCH_SIZE), _BLOCKS_PER_WORKER * count))
        attempts = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Attempts).remote()
        with ray.data.DataContext.current(context):
            items = ray.data.from_items([{"file": str(file)} for file in files], override_num_blocks=blocks)
            predicted = items.map_batches(
                _Worker,
                fn_constructor_args=(model, list(class_names), "cuda" if gpus else "cpu", attempts),
                batch_size=None,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(size=count),
                num_cpus=1,
                num_gpus=gpus,
            )
            for table in predicted.iter_batches(batch_size=PART, batch_format="pyarrow"):
                paths = table.column("path").to_pylist()
                if None in paths:
                    raise PredictionError(table.column("error")[paths.index(None)].as_py())
                yield table.cast(_schema())
    except ray.exceptions.RayError as error:
        raise PredictionError(f"ray: {' '.join(str(error).split())}") from None
    finally:
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

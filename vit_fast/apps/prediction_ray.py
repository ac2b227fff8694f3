"""Classifies images on a cluster with Ray Data.

Each worker reads images and runs the model with the code of classifiers.py. The driver receives the rows in the order
of the images. Ray restarts a worker that dies and repeats its images, at most three times, because an image may have
caused the crash.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import importlib.util
import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import MissingPackageError, VitFastError
from ..model import VisionTransformer
from .classifiers import BATCH_SIZE, PredictionError, schema, tables

DEVICES = ("auto", "cpu", "cuda")
_PIECES, _TRIES = 4, 3  # blocks per worker, for load balancing; attempts per block


class _Tries:
    """Ray actor that counts the attempts per block. It survives the workers."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    def begin(self, piece: str) -> int:
        self.counts[piece] += 1
        return self.counts[piece]


class _Worker:
    """Ray actor with its own copy of the model."""

    def __init__(self, model: VisionTransformer, class_names: Sequence[str], device: str, tries: Any) -> None:
        self.model, self.class_names, self.tries = model.to(device), class_names, tries

    def __call__(self, files: Any) -> Any:
        """Returns one row per entry of the column "file", or one row with an error in the column "failed"."""
        import pyarrow as pa
        import ray

        paths = [Path(file) for file in files.column("file").to_pylist()]
        try:
            if ray.get(self.tries.begin.remote(str(paths[0]))) > _TRIES:  # Ray itself retries forever
                raise PredictionError(f"{_TRIES} workers died between {paths[0]} and {paths[-1]}")
            (table,) = tables(self.model, paths, self.class_names, len(paths))
        except (VitFastError, ValueError) as error:  # an exception would print Ray's long traceback
            return pa.Table.from_pylist([{"failed": str(error)}], schema=_schema())
        return table.append_column("failed", pa.nulls(len(paths), pa.string()))


@contextlib.contextmanager
def joined_cluster(workers: int | None, device: str) -> Iterator[Callable[..., Generator[Any]]]:
    """Connects to the cluster that `ray.init()` finds, or starts Ray on this machine.

    Yields a function like classifiers.tables that runs on the cluster. Its model must be on the CPU. It raises
    PredictionError if the cluster fails, if workers die repeatedly at the same images, or if logits are not finite.

    Each node needs this package, and the files under the same paths. Each worker gets one core and an equal share of
    the GPUs; None means one worker per core.

    Raises:
        MissingPackageError: Ray is not installed.
        ValueError: the cluster does not have the device, or has fewer cores than workers.
    """
    if any(importlib.util.find_spec(name) is None for name in ("ray", "pandas")):  # Ray Data needs pandas
        raise MissingPackageError("ray[data] not installed: pip install 'vit-fast[ray]'")
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)} with engine='ray', got {device!r}")
    import ray
    import ray.data

    context = copy.deepcopy(ray.data.DataContext.get_current())
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    logger = logging.getLogger("ray.data")
    level, joined_before = logger.level, ray.is_initialized()
    logger.setLevel(logging.ERROR)
    if not joined_before:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        with ray.data.DataContext.current(context):
            yield functools.partial(_tables, *_share(ray.cluster_resources(), workers, device))
    finally:
        logger.setLevel(level)
        if not joined_before:
            ray.shutdown()


def _tables(
    workers: int, gpus: float, model: VisionTransformer, files: Sequence[Path], class_names: Sequence[str], size: int
) -> Generator[Any]:
    import ray
    import ray.data
    import ray.exceptions

    tries = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Tries).remote()
    pieces = max(math.ceil(len(files) / size), min(math.ceil(len(files) / BATCH_SIZE), _PIECES * workers))
    rows = ray.data.from_items([{"file": str(file)} for file in files], override_num_blocks=pieces).map_batches(
        _Worker,
        fn_constructor_args=(model, list(class_names), "cuda" if gpus else "cpu", tries),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=1,
        num_gpus=gpus,
    )
    try:
        for table in rows.iter_batches(batch_size=size, batch_format="pyarrow"):
            table = table.cast(_schema())
            for failed in table.column("failed").drop_null().to_pylist():
                raise PredictionError(failed)
            yield table.drop_columns(["failed"])
    except ray.exceptions.RayError as error:
        raise PredictionError(f"ray: {' '.join(str(error).split())}") from None


def _schema() -> Any:
    import pyarrow as pa

    return schema().append(pa.field("failed", pa.string()))


def _share(resources: dict[str, float], workers: int | None, device: str) -> tuple[int, float]:
    """Returns the number of workers, and the fraction of a GPU for each."""
    cores, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    if device == "cuda" and not gpus:
        raise ValueError("device must be cpu or auto, got cuda: the cluster has no GPU")
    count = cores if workers is None else workers
    if not 1 <= count <= cores:
        raise ValueError(f"workers must be between 1 and {cores}, the number of cores of the cluster, got {workers}")
    return count, 0.0 if device == "cpu" or not gpus else 1 / math.ceil(count / gpus)

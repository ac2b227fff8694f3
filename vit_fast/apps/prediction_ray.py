"""The rows of many images from a cluster, by Ray Data.

Every worker reads images and runs the model, by the code of classifiers.py; the rows come back in the images'
order, to the process that writes them. A worker that dies is started again by Ray, and what it had begun is done again,
three times at most: an image may be what kills it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import importlib.util
import logging
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MissingPackageError, VitFastError
from ..model import VisionTransformer
from .classifiers import BATCH_SIZE, PredictionError, schema, tables

DEVICES = ("auto", "cpu", "cuda")
_PIECES, _TRIES = 4, 3  # pieces of work for each worker, so that none is waited for long; of each piece


class _Tries:
    """How often each piece of work was begun, counted where no worker's death reaches."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    def begin(self, piece: str) -> int:
        self.counts[piece] += 1
        return self.counts[piece]


class _Worker:
    """One process of the cluster, with its own copy of the model."""

    def __init__(self, model: VisionTransformer, class_names: Sequence[str], device: str, tries: Any) -> None:
        self.model, self.class_names, self.tries = model.to(device), class_names, tries

    def __call__(self, files: Any) -> Any:
        """A table with the column "file" -> a row for each; or one row that says why not, in the column "failed"."""
        import pyarrow as pa
        import ray

        paths = [Path(file) for file in files.column("file").to_pylist()]
        try:
            if ray.get(self.tries.begin.remote(str(paths[0]))) > _TRIES:  # Ray itself would begin it without an end
                raise PredictionError(f"{_TRIES} workers died between {paths[0]} and {paths[-1]}")
            (table,) = tables(self.model, paths, self.class_names, 0, len(paths))
        except (VitFastError, ValueError) as error:  # Ray would make a page of it
            return pa.Table.from_pylist([{"failed": str(error)}], schema=_schema())
        return table.append_column("failed", pa.nulls(len(paths), pa.string()))


@dataclass(frozen=True)
class Cluster:
    """Part of a cluster that was joined.

    Attributes:
        workers: Processes, each with a core.
        gpus: Each one's share of a GPU.
    """

    workers: int
    gpus: float

    def tables(
        self, model: VisionTransformer, files: Sequence[Path], class_names: Sequence[str], size: int
    ) -> Generator[Any]:
        """The rows of files, as classifiers.tables gives them.

        Args:
            model: On the CPU; each worker gets a copy.
            files: Images, or what should be some.
            class_names: Of the model's outputs.
            size: Rows a table.
        Raises:
            PredictionError: workers died again and again over the same images, or the cluster did; or an image's
                logits are not finite.
        """
        import ray
        import ray.data
        import ray.exceptions

        tries = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Tries).remote()
        pieces = max(math.ceil(len(files) / size), min(math.ceil(len(files) / BATCH_SIZE), _PIECES * self.workers))
        rows = ray.data.from_items([{"file": str(file)} for file in files], override_num_blocks=pieces).map_batches(
            _Worker,
            fn_constructor_args=(model, list(class_names), "cuda" if self.gpus else "cpu", tries),
            batch_size=None,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=self.workers),
            num_cpus=1,
            num_gpus=self.gpus,
        )
        try:
            for table in rows.iter_batches(batch_size=size, batch_format="pyarrow"):
                table = table.cast(_schema())
                for failed in table.column("failed").drop_null().to_pylist():
                    raise PredictionError(failed)
                yield table.drop_columns(["failed"])
        except ray.exceptions.RayError as error:
            raise PredictionError(f"ray: {' '.join(str(error).split())}") from None


@contextlib.contextmanager
def joined_cluster(workers: int | None, device: str) -> Iterator[Cluster]:
    """The cluster that Ray finds, or this machine.

    A cluster is found as `ray.init()` does: one that is joined already, the environment's RAY_ADDRESS, one that
    `ray start` began on this machine. Its nodes need this package, and the files under the same paths.

    Args:
        workers: Processes in the whole cluster, each with a core, and with its share of the GPUs where those are used;
            None: one a core.
        device: "cpu", "cuda", or "auto": the GPUs where the cluster has some.
    Raises:
        MissingPackageError: ray is not installed.
        ValueError: no such device in this cluster, or fewer cores than workers.
    """
    if any(importlib.util.find_spec(name) is None for name in ("ray", "pandas")):  # Ray Data needs the second
        raise MissingPackageError("ray[data] not installed: pip install 'vit-fast[ray]'")
    if device not in DEVICES:
        raise ValueError(f"device={device!r}: accepted with the engine ray are {', '.join(DEVICES)}")
    import ray
    import ray.data

    with _joined(ray):
        yield Cluster(*_share(ray.cluster_resources(), workers, device))


def _schema() -> Any:
    import pyarrow as pa

    return schema().append(pa.field("failed", pa.string()))


def _share(resources: dict[str, float], workers: int | None, device: str) -> tuple[int, float]:
    """How many workers, each with a core, and each one's share of a GPU."""
    cores, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    if device == "cuda" and not gpus:
        raise ValueError("device='cuda': the cluster has no GPU: accepted are cpu and auto")
    count = cores if workers is None else workers
    if not 1 <= count <= cores:
        raise ValueError(f"workers={workers}: the cluster has {cores} cores: accepted is 1 to as many")
    return count, 0.0 if device == "cpu" or not gpus else 1 / math.ceil(count / gpus)


@contextlib.contextmanager
def _joined(ray: Any) -> Iterator[None]:
    """Part of a cluster, quietly, with rows in order; it is left where it was not joined before."""
    context = copy.deepcopy(ray.data.DataContext.get_current())
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    logger = logging.getLogger("ray.data")
    level, joined = logger.level, ray.is_initialized()
    logger.setLevel(logging.ERROR)
    if not joined:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        with ray.data.DataContext.current(context):
            yield
    finally:
        logger.setLevel(level)
        if not joined:
            ray.shutdown()

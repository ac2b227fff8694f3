"""How long a file takes on this machine: percentiles by batch and threads, taken in turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vit_fast.config import Size

from .runner import OnnxRunner

PERCENTILES = (50, 95, 99)
WARM_UP = 3


@dataclass(frozen=True)
class Latency:
    """Of one batch size with one number of threads, in milliseconds.

    Attributes:
        batch: Images a call.
        threads: Of ONNX Runtime; None where it chose.
        p50: Half of the calls took no longer; p95, p99 accordingly.
        images_per_second: By the median.
    """

    batch: int
    threads: int | None
    p50: float
    p95: float
    p99: float
    images_per_second: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_latency(
    path: str | Path,
    batches: Sequence[int] = (1,),
    threads: Sequence[int | None] = (None,),
    *,
    device: str = "auto",
    runs: int = 100,
    image_hw: Size | None = None,
) -> list[Latency]:
    """Times a file, every combination in turn, so that what else the machine does falls on all alike.

    Args:
        path: The .onnx file.
        batches: Images a call. A file with a fixed batch takes that alone.
        threads: Threads of ONNX Runtime's CPU provider; None leaves them to it.
        device: As OnnxRunner takes it.
        runs: Calls of each combination.
        image_hw: Height and width, where the file leaves them open.
    Raises:
        ValueError: an argument is not one of those accepted.
        ModelFileError, ProviderError: see OnnxRunner.
    """
    if runs < 1 or not batches or min(batches) < 1:
        raise ValueError(f"runs={runs}, batches={list(batches)}: accepted are integers >= 1")
    generator = np.random.default_rng(0)
    cases: list[tuple[int, int | None, OnnxRunner, np.ndarray]] = []
    for count in threads:
        runner = OnnxRunner(path, device, threads=count, max_batch=max(batches), image_hw=image_hw)
        for batch in batches:
            if runner.max_batch < batch:
                raise ValueError(f"batches={list(batches)}: accepted is {runner.max_batch}, as the file is fixed")
            cases.append((batch, count, runner, runner.example(batch, generator)))
    for _, _, runner, images in cases:
        for _ in range(WARM_UP):
            runner(images)
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(runs):
        for taken, (_, _, runner, images) in zip(times, cases):
            start = time.perf_counter()
            runner(images)
            taken.append((time.perf_counter() - start) * 1e3)
    rows = []
    for taken, (batch, count, _, _) in zip(times, cases):
        p50, p95, p99 = (float(value) for value in np.percentile(taken, PERCENTILES))
        rows.append(Latency(batch, count, p50, p95, p99, batch / p50 * 1e3))
    return rows


def draw_latency(rows: Sequence[Latency], path: Path, title: str) -> None:
    """A picture: time a call by batch, a line for each number of threads, its band from the median to p99.

    Args:
        path: What matplotlib can write, by suffix: .png, .svg, .pdf.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="images a call", ylabel="milliseconds a call", title=title)
    for threads in dict.fromkeys(row.threads for row in rows):
        of_these = sorted((row for row in rows if row.threads == threads), key=lambda row: row.batch)
        x = [row.batch for row in of_these]
        label = "threads chosen by ONNX Runtime" if threads is None else f"{threads} threads"
        (line,) = axes.plot(x, [row.p50 for row in of_these], marker="o", label=f"{label}: median, band to p99")
        p50, p99 = [row.p50 for row in of_these], [row.p99 for row in of_these]
        axes.fill_between(x, p50, p99, color=line.get_color(), alpha=0.2)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)

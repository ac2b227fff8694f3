"""Search the attention kernels' configurations on this machine's GPU and write what was fastest into the table.

Run by a person (`vit-fast kernels --tune`), never at a call. A candidate counts only when it compiles, runs, and gives
the result that the configuration chosen by rule gives; the fastest by median device time is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton.testing

from ..attention.attention import problem_of
from ..attention.attention_backward import dkdv_launch, dq_launch
from ..attention.attention_forward import forward_launch
from ..attention.attention_policy import (
    MAX_ROW_KEYS,
    ROW_CHUNKS,
    TABLE_PATH,
    BackwardConfig,
    ForwardConfig,
    Problem,
    dkdv_config,
    dq_config,
    forward_config,
)
from ..launch import Launch

Config = ForwardConfig | BackwardConfig

# One shape for each class of the table that ViTs meet: (batch, tokens, heads, head_dim).
SHAPES = (
    (256, 197, 12, 64),
    (64, 577, 16, 64),
    (64, 256, 16, 80),
    (64, 257, 16, 80),
    (32, 256, 16, 72),
    (32, 729, 16, 72),
    (64, 197, 12, 32),
    (64, 577, 12, 128),
)
_TOLERANCE = 2e-2  # bf16 results of two tilings of one sum, of order one


@dataclass(frozen=True)
class Task:
    """One kernel at one shape: how to launch a configuration, what it writes, which it would use by rule."""

    kernel: str
    problem: Problem
    by_rule: Config
    launch: Callable[[Any], Launch]
    outputs: tuple[torch.Tensor, ...]


def candidates(task: Task) -> Iterator[Config]:
    """The configurations worth trying, the one by rule first."""
    yield task.by_rule
    tma = task.problem.uses_tma
    if task.kernel != "forward":
        for block_m, block_n in ((64, 64), (128, 64), (64, 128), (64, 32), (32, 64)):
            for num_warps in (4, 8):
                for num_stages in (1, 2, 3):
                    yield BackwardConfig(block_m, block_n, num_warps, num_stages, tma)
        return
    if task.problem.n_kv <= MAX_ROW_KEYS:
        for largest, chunks in ROW_CHUNKS:
            for tiles in (1, 2, 4):
                for num_stages in (1, 2):
                    for maxnreg in (None, 168):
                        yield ForwardConfig("row", 64, largest, tiles, chunks, 4, num_stages, tma, maxnreg)
    for block_m, block_n, num_warps in ((64, 128, 4), (64, 64, 4), (128, 128, 8), (128, 64, 8), (128, 64, 4)):
        for num_stages in (2, 3):
            yield ForwardConfig("looped", block_m, block_n, num_warps=num_warps, num_stages=num_stages, tma=tma)


def fastest(task: Task, measure: Callable[[Launch], float]) -> tuple[Config, float]:
    """The fastest configuration that gives the right result, and its time.

    Args:
        measure: The time of a launch; whatever it raises rules the candidate out.
    Raises:
        RuntimeError: not even the configuration by rule runs.
    """
    best: tuple[Config, float] | None = None
    right: list[torch.Tensor] | None = None
    for config in candidates(task):
        try:
            for output in task.outputs:
                output.fill_(torch.nan)
            task.launch(config).run()
            if right is None:
                right = [output.clone() for output in task.outputs]
            if not all(
                torch.allclose(output, expected, atol=_TOLERANCE, rtol=_TOLERANCE)
                for output, expected in zip(task.outputs, right)
            ):
                continue
            ms = measure(task.launch(config))
        except Exception:  # too much shared memory, a compiler that gives up: this candidate is none
            if right is None:
                raise RuntimeError(f"the {task.kernel} configuration by rule does not run: {config}") from None
            continue
        if best is None or ms < best[1]:
            best = (config, ms)
    if best is None:
        raise RuntimeError(f"no {task.kernel} configuration gives a finite result")
    return best


def tasks(batch: int, tokens: int, heads: int, head_dim: int, device: torch.device) -> Iterator[Task]:
    """The three kernels at one shape, on random data."""
    shape = (batch, tokens, 3, heads, head_dim)
    packed = torch.randn(shape, device=device, dtype=torch.bfloat16)
    gradients = torch.empty_like(packed)
    q, k, v = packed.transpose(1, 3).unbind(2)
    dq, dk, dv = gradients.transpose(1, 3).unbind(2)
    o, do = (torch.randn(batch, tokens, heads, head_dim, device=device).bfloat16().transpose(1, 2) for _ in range(2))
    lse, delta = torch.empty(2, batch, heads, tokens, device=device)
    scale = head_dim**-0.5
    problem = problem_of(q, k, v, o, do, dq)
    yield Task("forward", problem, forward_config(problem), lambda c: forward_launch(q, k, v, o, lse, scale, c), (o,))
    forward_launch(q, k, v, o, lse, scale, forward_config(problem)).run()
    yield Task("dq", problem, dq_config(problem), lambda c: dq_launch(q, k, v, o, do, lse, dq, delta, scale, c), (dq,))
    dq_launch(q, k, v, o, do, lse, dq, delta, scale, dq_config(problem)).run()
    yield Task(
        "dkdv",
        problem,
        dkdv_config(problem),
        lambda c: dkdv_launch(q, k, v, do, lse, delta, dk, dv, scale, c),
        (dk, dv),
    )


def tune(
    shapes: Iterable[tuple[int, int, int, int]] = SHAPES, path: Path = TABLE_PATH, report: Callable[[str], None] = print
) -> None:
    """Measure every shape on the current GPU and write the table, shape by shape.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("tuning measures on a GPU: this machine has none")
    for shape in shapes:
        for task in tasks(*shape, device=torch.device("cuda")):
            config, ms = fastest(task, _measure)
            write_entry(path, task.problem, task.kernel, config)
            report(f"{shape} {task.kernel}: {ms:.4f} ms with {config}")


def _measure(launch: Launch) -> float:
    """Median device time in ms; the cache is emptied between calls."""
    return float(triton.testing.do_bench(launch.run, warmup=10, rep=60, return_mode="median"))


def write_entry(path: Path, problem: Problem, kernel: str, config: Config) -> None:
    """Put one measured configuration into the table, written beside and renamed."""
    table = json.loads(path.read_text())
    classes = table["architectures"].setdefault(problem.arch, {})
    classes.setdefault(problem.shape_class, {})[kernel] = asdict(config)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(table, indent=2) + "\n")
    beside.replace(path)

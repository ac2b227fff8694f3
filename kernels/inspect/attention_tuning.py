"""Measures configurations of the attention kernels on the current GPU; writes the fastest to attention_table.json.

`vit-fast kernels --tune` calls `tune`. The default configuration is the one that `attention_policy.py` chooses. A
candidate must compile, run, and match the output of the default. The candidate with the lowest median device time wins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench

from ..attention import attention_policy as policy
from ..attention.attention_backward import backward_launches
from ..attention.attention_forward import forward_launch
from ..attention.attention_launch import AttentionCall
from ..attention.attention_policy import TABLE_PATH, AttentionConfig, Problem
from ..launch import Launch

# (batch, tokens, heads, head_dim) of ViTs. For shapes of equal `Problem.shape_class`, only the last result is stored.
SHAPES = (
    (256, 197, 12, 64), (64, 577, 16, 64), (64, 256, 16, 80), (64, 257, 16, 80), (32, 256, 16, 72), (32, 729, 16, 72),
    (64, 197, 12, 32), (64, 577, 12, 128),
)  # fmt: skip
_TOLERANCE = 5e-3  # absolute and relative; the bf16 outputs are about 0.1


@dataclass(frozen=True)
class Task:
    """A kernel to tune for a problem. `by_rule` is the default; `launch` returns the launch of a configuration."""

    kernel: str
    problem: Problem
    by_rule: AttentionConfig
    launch: Callable[[Any], Launch]
    outputs: tuple[torch.Tensor, ...]


def candidates(task: Task) -> Iterator[AttentionConfig]:
    """Yields configurations to measure; the first one is the default."""
    yield task.by_rule
    tma = task.problem.uses_tma
    if task.kernel != "forward":
        tiles = ((64, 64), (128, 64), (64, 128), (64, 32), (32, 64))
        for (block_m, block_n), num_warps, num_stages in product(tiles, (4, 8), (1, 2, 3)):
            yield AttentionConfig(block_m, block_n, num_warps, num_stages, tma)
        return
    if task.problem.n_kv <= policy.MAX_ROW_KEYS:
        choices = product(policy.ROW_CHUNKS, (1, 2, 4), (1, 2), (None, 168))
        for (largest, chunks), per_program, num_stages, maxnreg in choices:
            config = AttentionConfig(64, largest, 4, num_stages, tma, maxnreg, chunks, per_program)
            yield policy.with_early_start(task.problem, config)
    warps = ((64, 128, 4), (64, 64, 4), (128, 128, 8), (128, 64, 8), (128, 64, 4))
    for (block_m, block_n, num_warps), num_stages in product(warps, (2, 3)):
        config = AttentionConfig(block_m, block_n, num_warps, num_stages, tma)
        yield policy.with_early_start(task.problem, config)


def fastest(task: Task, measure: Callable[[Launch], float]) -> tuple[AttentionConfig, float]:
    """Returns the fastest configuration whose output matches the output of the default, and its time in ms.

    `measure` returns the time of a launch in ms. Candidates that raise an exception are skipped; the default must run.
    """
    times: dict[AttentionConfig, float] = {}
    expected: list[torch.Tensor] = []
    for config in candidates(task):
        try:
            for output in task.outputs:
                output.fill_(torch.nan)
            task.launch(config).run()
            expected = expected or [output.clone() for output in task.outputs]
            pairs = zip(task.outputs, expected)
            if all(torch.allclose(*pair, atol=_TOLERANCE, rtol=_TOLERANCE) for pair in pairs):
                times[config] = measure(task.launch(config))
        except Exception as error:  # e.g. a compiler error, or too much shared memory
            if not expected:
                raise RuntimeError(f"the default configuration of {task.kernel} does not run: {config}") from error
    return min(times.items(), key=lambda item: item[1])


def tasks(batch: int, tokens: int, heads: int, head_dim: int, device: torch.device) -> Iterator[Task]:
    """Yields a task for each of the three attention kernels, with random inputs."""
    packed = torch.randn(batch, tokens, 3, heads, head_dim, device=device, dtype=torch.bfloat16)
    q, k, v = packed.transpose(1, 3).unbind(2)
    dq, dk, dv = torch.empty_like(packed).transpose(1, 3).unbind(2)
    o, do = torch.randn(2, batch, tokens, heads, head_dim, device=device).bfloat16().transpose(2, 3)
    lse, delta = torch.empty(2, batch, heads, tokens, device=device)
    call = AttentionCall(q, k, v, lse, head_dim**-0.5)
    problem, forward = call.problem(o, do, dq), partial(forward_launch, call, o)

    def backward(config: AttentionConfig) -> tuple[Launch, Launch]:
        return backward_launches(call, o, do, dq, dk, dv, delta, config, config)

    by_rule, dq_by_rule = policy.forward_config(problem), policy.dq_config(problem)
    yield Task("forward", problem, by_rule, forward, (o,))
    forward(by_rule).run()
    yield Task("dq", problem, dq_by_rule, lambda config: backward(config)[0], (dq,))
    backward(dq_by_rule)[0].run()
    yield Task("dkdv", problem, policy.dkdv_config(problem), lambda config: backward(config)[1], (dk, dv))


def tune(
    shapes: Iterable[tuple[int, int, int, int]] = SHAPES, path: Path = TABLE_PATH, report: Callable[[str], None] = print
) -> None:
    """Finds the fastest configuration per kernel and shape on the current GPU, and writes each one to the table."""
    if not torch.cuda.is_available():
        raise RuntimeError("tuning requires a CUDA GPU, but torch.cuda.is_available() is False")
    for shape in shapes:
        for task in tasks(*shape, device=torch.device("cuda")):
            config, ms = fastest(task, lambda launch: do_bench(launch.run, warmup=10, rep=60, return_mode="median"))
            write_entry(path, task.problem, task.kernel, config)
            report(f"{shape} {task.kernel}: {ms:.4f} ms with {config}")


def write_entry(path: Path, problem: Problem, kernel: str, config: AttentionConfig) -> None:
    table = policy.tuned_table(path) | {f"{problem.shape_class}/{kernel}": config}
    aside = path.with_suffix(".new")  # a process that is killed here leaves the old table
    aside.write_text(json.dumps({key: asdict(each) for key, each in table.items()}, indent=2) + "\n")
    aside.replace(path)
    policy.tuned_table.cache_clear()

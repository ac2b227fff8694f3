"""A small run of the bench: its configuration, a listener, and what its rows hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vit_fast.benchmarks import candidates, machine, runner
from vit_fast.benchmarks.candidates import get_candidate
from vit_fast.benchmarks.configuration import Configuration, make_configuration
from vit_fast.benchmarks.models import Task, resolve, weights_of
from vit_fast.benchmarks.records import SPEED_FIELDS
from vit_fast.measure import clock
from vit_fast.measure.candidate import Candidate
from vit_fast.measure.clock import Protocol

QUICK = Protocol(repeats=4, seconds=60.0, least_repeats=3, warmup_repeats=1)


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Makes ceilings and resampling small, as the fixture `small_ceilings`."""
    patch.setitem(machine.MATMUL_SIZE, "cpu", 64)
    patch.setitem(machine.COPY_BYTES, "cpu", 2**16)
    patch.setattr(runner, "release_memory", lambda *_, **__: None)
    patch.setattr(clock, "RESAMPLES", 200)


def named(name: str, build: Callable[[Task], Any], **fields: Any) -> Candidate:
    """A candidate that a function of the task builds."""
    return Candidate(base=name, builder=lambda _, task: build(task), **fields)


def build(name: str, task: Task) -> nn.Module:
    """Our model or operator as a candidate of this name, also for a single block."""
    return candidates.build(get_candidate(name), task)


def task_of(word: str, dtype: torch.dtype = torch.float32, training: bool = False, batch: int = 5) -> Task:
    """The task of a model or operator on the CPU."""
    (model,) = resolve(word)(None)
    return Task(model, weights_of(model, dtype), dtype, torch.device("cpu"), batch, training)


def breaking(error: Callable[[], None], after: int = 9, above: int = 0) -> Callable[[Task], Callable[[Tensor], Tensor]]:
    """A candidate that calls `error` after so many calls, on batches above a size; 9 calls are before the timing."""

    def make(task: Task) -> Callable[[Tensor], Tensor]:
        model, calls = build("sdpa", task), itertools.count()

        def forward(images: Tensor) -> Tensor:
            if next(calls) >= after and len(images) > above:
                error()
            return model(images)

        return forward

    return make


def plan(*names: str, batch_sizes: tuple[int, ...] = (2,), **fields: object) -> Configuration:
    return make_configuration(
        models=["vit_test"],
        batch_sizes=batch_sizes,
        dtypes=["fp32"],
        candidates=names,
        device="cpu",
        protocol=QUICK,
        **fields,
    )


def measure(model: str, *names: str, **fields: object) -> dict:
    """The record of a model at batch size 2."""
    fields = {"batch_sizes": [2], "device": "cpu", "protocol": QUICK} | fields
    return runner.run(make_configuration(models=[model], candidates=names or None, **fields))


def rows_by_candidate(record: dict) -> dict[str, dict]:
    return {row["candidate"]: row for row in record["rows"]}


def assert_no_speed(row: dict) -> None:
    assert all(row[field] is None for field in SPEED_FIELDS), row

"""A small run of the bench: its configuration, candidates, and what its rows hold."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vit_fast.benchmarks import candidates, records, runner
from vit_fast.benchmarks.configuration import Configuration, make_configuration
from vit_fast.benchmarks.gpu_check import Job
from vit_fast.benchmarks.models import Group, resolve, weights_of
from vit_fast.measure import clock
from vit_fast.measure.candidate import Candidate
from vit_fast.measure.clock import Protocol

QUICK = Protocol(repeats=4, seconds=60.0, least_repeats=3, warmup_repeats=1)


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Makes ceilings and resampling small, as the fixture `small_ceilings`."""
    patch.setitem(runner.MATMUL_SIZE, "cpu", 64)
    patch.setitem(runner.COPY_BYTES, "cpu", 2**16)
    patch.setattr(torch.compiler, "reset", lambda: None)
    patch.setattr(clock, "free_memory", lambda device: None)
    patch.setattr(clock, "RESAMPLES", 200)


def named(name: str, build: Callable[[Group], Any], **fields: Any) -> Candidate:
    """A candidate that a function of the group builds."""
    return Candidate(base=name, builder=lambda _, group: build(group), **fields)


def build(name: str, group: Group) -> nn.Module:
    """Our model or operator as a candidate of this name, also for a single block."""
    return candidates.build(candidates.CANDIDATES[name], group)


def group_of(word: str, dtype: str = "fp32", training: bool = False, batch: int = 5) -> Group:
    (model,) = resolve(word)(None)
    return Group(model, dtype, batch, training)


def with_weights(group: Group, weights: Mapping[str, Tensor]) -> Group:
    """The group with some weights of its model replaced."""
    model = dataclasses.replace(group.model, weights={**weights_of(group.model, group.dtype), **weights})
    return dataclasses.replace(group, model=model)


class NoisyClock:
    """A simulated clock that calls advance: with noise, drift of the clock frequency, and bursts of other processes."""

    def __init__(
        self, seed: int = 0, noise: float = 0.01, drift: float = 0.0, bursts: float = 0.0, slowness: float = 1.0
    ) -> None:
        self.random, self.noise, self.drift, self.bursts = random.Random(seed), noise, drift, bursts
        self.slowness, self.now_s, self.burst_until_s = slowness, 0.0, 0.0

    def spend(self, seconds: float) -> float:
        """Lets a call of so many seconds, on a quiet machine, pass; returns its duration on this one."""
        if self.now_s > self.burst_until_s and self.random.random() < self.bursts:
            self.burst_until_s = self.now_s + self.random.uniform(0.1, 2)
        seconds *= self.random.uniform(1.3, 2) if self.now_s < self.burst_until_s else 1.0
        seconds *= 1 + self.drift * math.sin(self.now_s / 7)
        seconds *= self.slowness * self.random.lognormvariate(0, self.noise)
        self.now_s += seconds
        return seconds

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def perf_counter(self) -> float:
        return self.now_s

    def perf_counter_ns(self) -> int:
        return int(self.now_s * 1e9)


def breaking(
    error: Callable[[], None], after: int = 9, above: int = 0
) -> Callable[[Group], Callable[[Tensor], Tensor]]:
    """A candidate that calls `error` after so many calls, on batches above a size; 9 calls are before the timing."""

    def make(group: Group) -> Callable[[Tensor], Tensor]:
        model, calls = build("sdpa", group), itertools.count()

        def forward(images: Tensor) -> Tensor:
            if next(calls) >= after and len(images) > above:
                error()
            return model(images)

        return forward

    return make


def plan(*names: str, batch_sizes: tuple[int, ...] = (2,), **fields: object) -> Configuration:
    fields = {"models": ["vit_test"], "dtypes": ["fp32"], "device": "cpu", "protocol": QUICK} | fields
    return make_configuration(batch_sizes=batch_sizes, candidates=names or None, **fields)


def measure(model: str, *names: str, **fields: object) -> dict:
    """The record of a model at batch size 2."""
    return runner.run(plan(*names, **{"models": [model], "dtypes": None, "batch_sizes": [2]} | fields))


def rows_by_candidate(record: dict) -> dict[str, dict]:
    return {row["candidate"]: row for row in record["rows"]}


def assert_no_speed(row: dict) -> None:
    assert all(row[field] is None for field in records.SPEED_FIELDS), row


def shortened(job: Job) -> Job:
    """Replaces models and batch sizes by small ones; `kernel_execution` selects few cases of tests."""
    small = {"attention": "attention:5x2x16", "mlp": "mlp:5x16x32", "block": "block:vit_test"}
    kinds = [run["models"][0].partition(":")[0] for run in job.runs]
    changes = [{"models": [small.get(kind, "vit_test")], "batch_sizes": [2]} for kind in kinds]
    tests = tuple("2" if word == "8" else word for word in job.tests)  # processes
    return dataclasses.replace(job, tests=tests, runs=tuple(map(dict.__or__, job.runs, changes)))

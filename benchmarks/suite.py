"""pytest-benchmark suite: `make bench-suite` times the default candidates of `vit-fast bench`.

An incorrect output of ours fails, one of a peer is an expected failure. VIT_FAST_SUITE_MODEL selects another model.
"""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import pytest

from vit_fast.apps.data import sample_image
from vit_fast.benchmarks.candidates import parse_candidate
from vit_fast.benchmarks.configuration import Group, make_configuration
from vit_fast.benchmarks.preparation import Problem, make_problem, prepare
from vit_fast.measure.clock import synchronise
from vit_fast.variants import get_variant

DEFAULT = make_configuration()
NAME = os.environ.get("VIT_FAST_SUITE_MODEL", DEFAULT.models[0].name)
CONFIG = get_variant(NAME).config
MODELS = (
    f"attention:{CONFIG.seqlen}x{CONFIG.num_heads}x{CONFIG.head_dim}",
    f"mlp:{CONFIG.seqlen}x{CONFIG.embed_dim}x{CONFIG.hidden_dim}:gelu_tanh", f"block:{NAME}", NAME,
)  # fmt: skip
RUNS = [
    make_configuration(models=MODELS, dtypes=DEFAULT.dtypes[:1], batch_sizes=sizes, train=train)
    for sizes, train in ((DEFAULT.batch_sizes, False), (DEFAULT.batch_sizes[-1:], True))
]
CASES = [
    pytest.param(group, candidate.name, id=f"{group}-{candidate.name}")
    for made in RUNS
    for group in made.groups()
    for candidate in made.candidates[group.model.kind]
]


@functools.cache
def problem_of(group: Group) -> Problem:
    return make_problem(group, [sample_image()], DEFAULT.device)


@pytest.mark.parametrize(("group", "name"), CASES)
def test_candidate(benchmark: Any, group: Group, name: str) -> None:
    """Times inference; for training, the backward of an operator or a block, and the whole step of a model."""
    candidate, numbers = parse_candidate(name), itertools.count()
    if missing := candidate.missing_packages():
        pytest.skip(f"not installed: {', '.join(missing)}")
    ready, row = prepare(candidate, group, problem_of(group))
    if row["status"] == "unsupported":
        pytest.skip(row["reason"])
    if row["status"] == "incorrect" and row["peer"]:
        pytest.xfail(row["reason"])
    assert ready is not None, row["reason"]
    call, benchmark.group = ready.call, str(group)

    def timed() -> None:
        call(next(numbers))
        synchronise(DEFAULT.device)

    benchmark(timed)

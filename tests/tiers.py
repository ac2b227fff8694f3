"""Decides which tests `make test` runs; `make test-full` (--slow) runs all of them.

A test marked `slow` is left out; with slow(minutes=True) also where a folder changed and with the oldest versions.
Of the cases of a parametrized test, three markers leave out all but some:

    pairwise           the fewest cases in which every pair of parameter values occurs
    each_value         the fewest cases in which every parameter value occurs
    fast_cases(*ids)   the cases with these ids
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations, groupby

import pytest
import torch

PLAIN = (str, int, float, bool, type(None), torch.dtype)


def covering(cases: Sequence[dict[str, Hashable]], strength: int) -> list[int]:
    """Returns the positions of few cases that hold every combination of `strength` values that occurs in any case.

    Greedy and deterministic: always the first case that adds most, of these the one whose values were chosen least.
    """
    held = [set(combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    missing = set().union(*held)
    chosen: list[int] = []
    times: Counter[tuple[str, Hashable]] = Counter()

    def gain(position: int) -> tuple[int, int]:
        return len(held[position] & missing), -sum(times[value] for value in cases[position].items())

    while missing:
        best = max(range(len(cases)), key=gain)
        chosen.append(best)
        missing -= held[best]
        times.update(cases[best].items())
    return sorted(chosen)


def _values(item: pytest.Function) -> dict[str, Hashable]:
    """A case's parameters: what they print where that tells values apart, otherwise which objects they are."""
    return {
        name: repr(value) if isinstance(value, PLAIN) else id(value) for name, value in item.callspec.params.items()
    }


def _left_out(cases: Sequence[pytest.Function]) -> Iterator[pytest.Item]:
    """Those of one test function that its markers leave out."""
    if not cases or not hasattr(cases[0], "callspec"):
        return
    first = cases[0]
    if named := first.get_closest_marker("fast_cases"):
        unknown = set(named.args) - {item.callspec.id for item in cases}
        if unknown and not any("::" in argument for argument in first.config.args):  # which may name one case alone
            raise pytest.UsageError(f"{first.nodeid}: fast_cases must be ids of cases, got {sorted(unknown)}")
        yield from (item for item in cases if item.callspec.id not in named.args)
        return
    strength = 2 if first.get_closest_marker("pairwise") else 1 if first.get_closest_marker("each_value") else 0
    if strength:
        chosen = set(covering([_values(item) for item in cases], strength))
        yield from (item for position, item in enumerate(cases) if position not in chosen)


def left_out(items: Sequence[pytest.Item], *, cases: bool = True) -> set[pytest.Item]:
    """Returns the tests that `make test` does not run; without `cases` those alone that are marked slow."""
    found = {item for item in items if item.get_closest_marker("slow")}
    for _, group in groupby(items, key=lambda item: (item.path, getattr(item, "originalname", item.name))):
        if cases:
            found.update(_left_out([item for item in group if item not in found]))
    return found


def takes_minutes(item: pytest.Item) -> bool:
    """Returns True for a test that only `make test-full` runs."""
    return any(mark.kwargs.get("minutes", False) for mark in item.iter_markers("slow"))

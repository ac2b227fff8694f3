"""Decides which tests `make test` runs; `make test-full` (--slow) runs all of them.

`make test` skips tests marked `slow`. `make test-changed`, `make test-oldest` and `make test-newest` skip
slow(minutes=True). Three other markers select the cases of a parametrized test that `make test` runs:

    pairwise           a small set of cases that contains every pair of parameter values
    each_value         a small set of cases that contains every parameter value
    fast_cases(*ids)   the cases with these ids

The PTX emulator runs each case under several schedules: either all schedules of a case run, or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations, groupby

import pytest
import torch

SCHEDULE = "schedule"  # the emulator's plugin adds this parameter to each test
PLAIN = (str, int, float, bool, type(None), torch.dtype)


def covering(cases: Sequence[dict[str, Hashable]], strength: int) -> list[int]:
    """Returns the positions of a small set of cases that contains every combination of `strength` values of all cases.

    Greedy and deterministic: adds the case with the most new combinations. Of equal cases, adds the first one whose
    values were chosen least often.
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
    """Returns the parameters of a case: the repr of plain values, the id of other objects."""
    return {
        name: repr(value) if isinstance(value, PLAIN) else id(value)
        for name, value in item.callspec.params.items()
        if name != SCHEDULE
    }


def _id(item: pytest.Item) -> str:
    """Returns the id of a case without the emulator's schedule; empty if the test is not parametrized."""
    if not hasattr(item, "callspec"):
        return ""
    id_: str = item.callspec.id
    return id_.removeprefix(str(item.callspec.params.get(SCHEDULE))).removeprefix("-")


def _left_out(cases: Sequence[pytest.Function]) -> Iterator[pytest.Item]:
    """Yields the cases of one test function that its markers exclude."""
    if not cases or not hasattr(cases[0], "callspec"):
        return
    first = cases[0]
    if named := first.get_closest_marker("fast_cases"):
        unknown = set(named.args) - {_id(item) for item in cases}
        if unknown and not any("::" in argument for argument in first.config.args):  # a node id may name one case
            raise pytest.UsageError(f"{first.nodeid}: fast_cases must be ids of cases, got {sorted(unknown)}")
        yield from (item for item in cases if _id(item) not in named.args)
        return
    strength = 2 if first.get_closest_marker("pairwise") else 1 if first.get_closest_marker("each_value") else 0
    if strength:
        yield from _uncovering(cases, strength)


def _uncovering(cases: Sequence[pytest.Function], strength: int) -> Iterator[pytest.Item]:
    """Yields the cases that `covering` does not choose."""
    values = [frozenset(_values(item).items()) for item in cases]
    several = list(dict.fromkeys(values))
    chosen = {several[position] for position in covering([dict(case) for case in several], strength)}
    yield from (item for item, case in zip(cases, values, strict=True) if case not in chosen)


def left_out(items: Sequence[pytest.Item], *, cases: bool = True) -> set[pytest.Item]:
    """Returns the tests that `make test` does not run; without `cases`, only those marked slow."""
    found = {item for item in items if item.get_closest_marker("slow")}
    for _, group in groupby(items, key=_function):
        if cases:
            found.update(_left_out([item for item in group if item not in found]))
    return found


def share(items: Sequence[pytest.Item], number: int, of: int) -> set[pytest.Item]:
    """Returns every `of`-th test, starting at `number` % `of`; all schedules of a case count as one test."""
    names = [(*_function(item), _id(item)) for item in items]
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return {item for item, name in zip(items, names, strict=True) if places[name] % of == number % of}


def each_value(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Returns a small set of cases of each test function that contains every parameter value, with all schedules."""
    found = set(items)
    for _, group in groupby(items, key=_function):
        found.difference_update(_uncovering([item for item in group if hasattr(item, "callspec")], 1))
    return found


def _function(item: pytest.Item) -> tuple[object, str]:
    return item.path, getattr(item, "originalname", item.name)


def keep(config: pytest.Config, items: list[pytest.Item], kept: set[pytest.Item]) -> None:
    """Deselects all tests except `kept`."""
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def takes_minutes(item: pytest.Item) -> bool:
    """Returns True for a test that only `make test-full` runs."""
    return any(mark.kwargs.get("minutes", False) for mark in item.iter_markers("slow"))

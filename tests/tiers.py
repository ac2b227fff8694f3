"""Decides which tests `make test` runs; `make test-full` (--slow) runs all of them.

A test marked `slow` is left out; with slow(minutes=True) also where a folder changed and with the oldest versions.
Of the cases of a parametrized test, three markers leave out all but some:

    pairwise           the fewest cases in which every pair of parameter values occurs
    each_value         the fewest cases in which every parameter value occurs
    fast_cases(*ids)   the cases with these ids

On the PTX emulator a case runs under several schedules, which are no values of the test: all run, or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations, groupby

import pytest
import torch

SCHEDULE = "schedule"  # the emulator's plugin parametrizes each test by it
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
        name: repr(value) if isinstance(value, PLAIN) else id(value)
        for name, value in item.callspec.params.items()
        if name != SCHEDULE
    }


def _id(item: pytest.Item) -> str:
    """The id of a case as without the emulator; of a test without cases nothing."""
    if not hasattr(item, "callspec"):
        return ""
    id_: str = item.callspec.id
    return id_.removeprefix(str(item.callspec.params.get(SCHEDULE))).removeprefix("-")


def _left_out(cases: Sequence[pytest.Function]) -> Iterator[pytest.Item]:
    """Those of one test function that its markers leave out."""
    if not cases or not hasattr(cases[0], "callspec"):
        return
    first = cases[0]
    if named := first.get_closest_marker("fast_cases"):
        unknown = set(named.args) - {_id(item) for item in cases}
        if unknown and not any("::" in argument for argument in first.config.args):  # which may name one case alone
            raise pytest.UsageError(f"{first.nodeid}: fast_cases must be ids of cases, got {sorted(unknown)}")
        yield from (item for item in cases if _id(item) not in named.args)
        return
    strength = 2 if first.get_closest_marker("pairwise") else 1 if first.get_closest_marker("each_value") else 0
    if strength:
        values = [frozenset(_values(item).items()) for item in cases]
        several = list(dict.fromkeys(values))
        chosen = {several[position] for position in covering([dict(case) for case in several], strength)}
        yield from (item for item, case in zip(cases, values, strict=True) if case not in chosen)


def left_out(items: Sequence[pytest.Item], *, cases: bool = True) -> set[pytest.Item]:
    """Returns the tests that `make test` does not run; without `cases` those alone that are marked slow."""
    found = {item for item in items if item.get_closest_marker("slow")}
    for _, group in groupby(items, key=lambda item: (item.path, getattr(item, "originalname", item.name))):
        if cases:
            found.update(_left_out([item for item in group if item not in found]))
    return found


def share(items: Sequence[pytest.Item], number: int, of: int) -> set[pytest.Item]:
    """Returns a share of tests, dealt out one after another; a case with all its schedules is one."""
    names = [(item.path, getattr(item, "originalname", item.name), _id(item)) for item in items]
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return {item for item, name in zip(items, names, strict=True) if places[name] % of == number % of}


def keep(config: pytest.Config, items: list[pytest.Item], kept: set[pytest.Item]) -> None:
    """Deselects the other tests."""
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def takes_minutes(item: pytest.Item) -> bool:
    """Returns True for a test that only `make test-full` runs."""
    return any(mark.kwargs.get("minutes", False) for mark in item.iter_markers("slow"))

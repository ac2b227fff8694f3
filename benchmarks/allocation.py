"""Allocates the time of a run before anything is built: the candidates that fit, and when each timing ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vit_fast.work import total

from .rows import Group
from .subjects import Selection

Planned = dict[Group, list[Selection]]

# On two quiet cores, in seconds: to compile a model in a mode, for each batch size and dtype.
COMPILING_S = {"none": 0.0, "default": 25.0, "freezing": 25.0, "reduce-overhead": 30.0, "max-autotune": 240.0}
# What is timed of a candidate at the least, so that it can be ranked on a quiet machine.
TIMED_S, ROUNDS = 1.5, 20
# Calls before a candidate is timed; what images and reference in fp64 of a group take, in calls of one image.
CALLS_BEFORE, REFERENCE_CALLS = 6, 50
CEILINGS_S = 1.0
# Of the matmul ceiling, what a model reaches; a model that nobody counts takes so long for an image.
SHARE, OTHER_SHARE, UNKNOWN_CALL_S = {"fp32": 0.6}, 0.4, 0.1
# Of the budget, the rest being for a machine that gets slower.
PLANNED_SHARE = 0.88
OF_FP32 = 0.7  # of the time in fp32, what a narrower dtype takes at the least: not all of a model is products
ALWAYS = 2  # candidates that are planned however long they take


def call_s(group: Group, ceilings: Mapping[str, Any]) -> float:
    """About how long a call of a group takes."""
    flop, reached = total(group.least().values()).flop, ceilings.get("matmul_TFLOP_per_s", {})
    if not flop or group.dtype_name not in reached:
        return UNKNOWN_CALL_S * group.batch_size
    seconds = {name: flop / (SHARE.get(name, OTHER_SHARE) * most * 1e12) for name, most in reached.items()}
    return max(seconds[group.dtype_name], OF_FP32 * seconds.get("fp32", 0.0))


class Allocation:
    """The candidates of a run, and its time.

    Args:
        groups: The candidates of each group, the ones to be measured first before the others.
        budget_s: Seconds from the start of the run; infinite plans every candidate.
        ceilings: See machine.measure_ceilings.
        left_out: What not to plan, of a run that is resumed; None means what does not fit.
    Attributes:
        planned: The candidates of each group that fit. Each is measured in all groups of a dtype or in none of them.
        left_out: The others, with their dtype.
    """

    def __init__(
        self,
        groups: Planned,
        budget_s: float = math.inf,
        ceilings: Mapping[str, Any] | None = None,
        left_out: Sequence[str] | None = None,
    ) -> None:
        self._budget_s, self._calls = budget_s, {group: call_s(group, ceilings or {}) for group in groups}
        self._timed = {group: max(TIMED_S, ROUNDS * call) for group, call in self._calls.items()}
        self._first: dict[tuple[str, str], Group] = {}
        self.left_out: list[str] = [] if left_out is None else list(left_out)
        self.planned: Planned = {group: [] for group in groups}
        needed = sum(self._fixed_s(group) for group in groups)
        every = [(s.label, group.dtype_name) for group, found in groups.items() for s in found]
        labels = list(dict.fromkeys(label for label, _ in every))
        for label, dtype in sorted(dict.fromkeys(every), key=lambda one: labels.index(one[0])):
            chosen = [
                (group, s)
                for group, found in groups.items()
                for s in found
                if (s.label, group.dtype_name) == (label, dtype)
            ]
            name, seconds = f"{label} ({dtype})", sum(self.preparing_s(*pair) + self._timed[pair[0]] for pair in chosen)
            fits = label in labels[:ALWAYS] or needed + seconds <= PLANNED_SHARE * budget_s
            if name in self.left_out or (left_out is None and not fits):
                self.left_out += [name] * (left_out is None)
                continue
            needed += seconds
            for group, selection in chosen:
                self.planned[group].append(selection)

    def preparing_s(self, group: Group, selection: Selection) -> float:
        """About how long a candidate takes until it is timed; what a dtype's first group makes serves the others."""
        first = self._first.setdefault((selection.label, group.dtype_name), group)
        if selection.subject.missing_packages():
            return 0.0
        building_s = selection.subject.seconds if first is group else 0.0
        return building_s + COMPILING_S[selection.mode] + CALLS_BEFORE * self._calls[group]

    def _fixed_s(self, group: Group) -> float:
        """The reference, and the control: the best candidate, timed twice."""
        return CEILINGS_S + REFERENCE_CALLS * self._calls[group] / group.batch_size + self._timed[group]

    def prepared_s(self, group: Group) -> float:
        """About how long a group takes until its candidates can be timed."""
        return sum(self.preparing_s(group, s) for s in self.planned[group]) + self._fixed_s(group) - self._timed[group]

    def end_of_timing_s(self, group: Group, now_s: float, slowness: float) -> float:
        """When the timing of a group must end, in seconds from the start of the run.

        What the groups after it leave free is divided by what each has to time.

        Args:
            group: It; its candidates are prepared.
            now_s: Seconds since the start of the run.
            slowness: How many times as long as assumed the preparations took so far.
        """
        after = list(self.planned)[list(self.planned).index(group) :]
        free_s = self._budget_s - now_s - slowness * sum(map(self.prepared_s, after[1:]))
        weights = [(len(self.planned[each]) + 1) * self._timed[each] for each in after]
        return now_s + max(free_s, 0.0) * weights[0] / sum(weights)

"""The time of a run: allocated to candidates before anything is built, and given to each timing round by round."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from vit_fast.measure import clock, resolution
from vit_fast.measure.clock import Samples, Timing, percentile
from vit_fast.work import total

from .candidates import NamedCandidate
from .preparation import Prepared
from .rows import Group

Planned = dict[Group, list[NamedCandidate]]

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

    def preparing_s(self, group: Group, selection: NamedCandidate) -> float:
        """About how long a candidate takes until it is timed; what a dtype's first group makes serves the others."""
        first = self._first.setdefault((selection.label, group.dtype_name), group)
        if selection.missing_packages():
            return 0.0
        building_s = selection.seconds if first is group else 0.0
        return building_s + COMPILING_S[selection.mode] + CALLS_BEFORE * self._calls[group]

    def _fixed_s(self, group: Group) -> float:
        return CEILINGS_S + REFERENCE_CALLS * self._calls[group] / group.batch_size + self._timed[group]

    def prepared_s(self, group: Group) -> float:
        """About how long a group takes until its candidates can be timed."""
        return sum(self.preparing_s(group, s) for s in self.planned[group]) + self._fixed_s(group) - self._timed[group]

    def end_of_timing_s(self, group: Group, now_s: float, slowness: float) -> float:
        """Returns when the timing of a group must end, in seconds from the start of the run.

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


# Under this name the best call of a group, at its full precision, is timed a second time.
AGAIN = "again"
# A measurement cut short, by Ctrl-C or the time budget, still counts when it reaches MEASURE's floor.
FLOOR_REPEATS, FLOOR_MS, FLOOR_LEAST_REPEATS = 50, 200.0, 3
# The share of a group's time that goes to all of its candidates before noise narrows them down, and after how many
# rounds it is checked again whether they can be ranked.
SHARE_OF_ALL, ROUNDS_BETWEEN = 0.4, 5


class Listener(Protocol):
    """Receives the progress of a run."""

    def start(self, steps: int) -> None:
        """The run has about this many steps."""

    def now(self, what: str) -> None:
        """This is being done."""

    def done(self, steps: float) -> None:
        """Reports finished steps."""

    def say(self, text: str) -> None:
        """Something the reader should know."""


class Watch:
    """Decides after every round which candidates to go on with; see clock.time_interleaved.

    A quiet machine times all of them until the protocol is satisfied. Where noise leaves nothing to rank, the rest of
    the time that was allocated is spent on the best of ours and the best of the peers.

    Args:
        protocol: When a measurement is long enough.
        listener: Told how far the timing is, in candidates, and whether any are dropped.
        now_s: The clock.
        end_s: When the timing must end, by this clock.
        allocated: True if the time until then is this timing's own.
        prepared: The candidates.
        best: The one that is timed twice.
    Attributes:
        again: Called after every round.
    """

    def __init__(
        self, protocol: clock.Protocol, listener: Listener, now_s: Callable[[], float], end_s: float,
        allocated: bool, prepared: Mapping[str, Prepared], best: str,
    ) -> None:  # fmt: skip
        self._protocol, self._listener, self._now_s, self._end_s = protocol, listener, now_s, end_s
        self._allocated, self._prepared, self._best = allocated, prepared, best
        self._start_s, self._told = now_s(), 0.0
        self._samples: Mapping[str, Samples] = {}
        self._narrowed: set[str] = set()
        self.again: Callable[[], None] = lambda: None

    def __call__(self, number: int, samples: Mapping[str, Samples]) -> Collection[str]:
        self._samples = samples
        self.again()
        going_on = self._decide(number)
        share = min(map(self._protocol.share_of, samples.values())) if going_on else 1.0
        self._listener.done(share * len(self._prepared) - self._told)
        self._told = share * len(self._prepared)
        return going_on

    def _decide(self, number: int) -> Collection[str]:
        samples, now_s = self._samples, self._now_s()
        long_enough = self._protocol.is_satisfied(samples)
        if long_enough and not self._allocated:
            return ()
        if len(self.timings()) < len(samples):
            return samples
        check = long_enough or now_s >= self._start_s + (self._end_s - self._start_s) * SHARE_OF_ALL
        if now_s >= self._end_s:
            return ()
        if self._narrowed:
            return () if number % ROUNDS_BETWEEN == 0 and self._can_rank() else self._narrowed
        if not (check and self._allocated) or (number % ROUNDS_BETWEEN and not long_enough):
            return samples
        if self._can_rank():
            return () if long_enough else samples
        self._narrowed = {self._best, AGAIN, *self._best_of_each_side()}
        self._listener.say(f"noisy: going on with {', '.join(sorted(self._narrowed - {AGAIN}))}")
        return self._narrowed

    def _can_rank(self) -> bool:
        found = resolution.control(self._samples[self._best], self._samples[AGAIN])
        return bool(found["resolution"] <= resolution.UNRANKABLE)

    def _best_of_each_side(self) -> Iterator[str]:
        for side in (True, False):
            names = [name for name, ready in self._prepared.items() if ready.row["peer"] == side]
            yield from sorted(names, key=lambda name: percentile(self._samples[name], 0.5))[:1]

    def timings(self) -> dict[str, Timing]:
        """Returns those of the candidates that have reached the floor."""
        return {
            name: taken.timing()
            for name, taken in self._samples.items()
            if len(taken) >= FLOOR_REPEATS or (len(taken) >= FLOOR_LEAST_REPEATS and sum(taken) >= FLOOR_MS)
        }

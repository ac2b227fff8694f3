"""Follows the timing of a group round by round, and decides when it ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

from vit_fast.measuring import resolution, timing
from vit_fast.measuring.timing import Samples, Timing, percentile

from .preparation import Prepared

# Under this name the best call of a group, at its full precision, is timed a second time.
AGAIN = "again"
# A measurement cut short, by Ctrl-C or the time budget, still counts when it reaches MEASURE's floor.
FLOOR_REPEATS, FLOOR_MS, FLOOR_LEAST_REPEATS = 50, 200.0, 3
# The share of a group's time that goes to all of its candidates before noise narrows them down, and after how many
# rounds it is checked again whether they can be ranked.
SHARE_OF_ALL, ROUNDS_BETWEEN = 0.4, 5


class Listener(Protocol):
    """Who is told how a run goes on."""

    def start(self, steps: int) -> None:
        """The run has about this many steps."""

    def now(self, what: str) -> None:
        """This is being done."""

    def done(self, steps: float) -> None:
        """So many steps are behind us."""

    def say(self, text: str) -> None:
        """Something the reader should know."""


class Watch:
    """Decides after every round which candidates to go on with; see timing.time_interleaved.

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
        self, protocol: timing.Protocol, listener: Listener, now_s: Callable[[], float], end_s: float,
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

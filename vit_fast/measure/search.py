"""The search: cheap and likely candidates first, losers dropped early, the rest measured in turns until one is left.

1. Scouting: each candidate is prepared (built, compiled, checked) and called a few times, in the order given, while the
   budget lasts; what is far behind by then is dropped.
2. Variations of the fastest: as above; then of what was faster among these, while there is any.
3. Successive halving: those that are left are called in turns, for twice as many rounds each time, and the slower half
   of what is clearly behind is dropped. What was given stays to the end, and the fastest is measured under a second
   name, too: what lies between its two names is what this machine does to identical code, the resolution.

What was given is beaten only by more than the resolution, at an interval that leaves 1 out; among candidates that
cannot be told apart, the plainest is taken. Nothing here knows what a candidate is, nor reads a clock of its own.

Source: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", 2016, for the
halving.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from .clock import percentile
from .resolution import control, ratio_interval

Objective = Literal["throughput", "latency"]
# The share of calls that take at most what is compared: of all together the median says how many a second there are.
SHARE = {"throughput": 0.5, "latency": 0.9}

SCOUTING_CALLS, FIRST_ROUNDS = 3, 4
# Rounds that suffice where identical code differs by no more than FINE, and those that do in any case.
ENOUGH_ROUNDS, MOST_ROUNDS, FINE = 60, 240, 0.02
# Candidates in a row that variations are tried of, each the fastest of the last one's.
MOST_VARIED = 8
# As quickly prepared as what was given: in so many times its seconds.
QUICK = 4
FAR_BEHIND, BEHIND = 1.5, 1.05
# Of the budget, after which nothing more is prepared, and after which no variation is.
SCOUTING_SHARE, VARYING_SHARE = 0.6, 0.75


class Comparable(Protocol):
    """A hashable candidate of the search."""

    @property
    def plainness(self) -> int:
        """The number of changes; among equals the lowest is taken, 0 is the given one."""


C = TypeVar("C", bound=Comparable)


class Refused(Exception):
    """A candidate cannot be taken; the message says why."""


class OutOfTime(Refused):
    """A candidate was not prepared within its time limit."""


class Shop(Protocol[C]):
    """Prepares candidates and times them."""

    def elapsed_s(self) -> float:
        """Seconds since the search began."""

    def seconds(self, candidate: C) -> float:
        """About how long it takes to prepare a candidate, by what is known so far."""

    def prepare(self, candidate: C, seconds: float) -> None:
        """Builds and checks a candidate, or raises Refused; OutOfTime after so many seconds."""

    def call_ms(self, candidate: C, number: int) -> float:
        """Times one call of a prepared candidate in the round of this number, or raises Refused."""

    def compare(self, candidates: Sequence[C]) -> None:
        """Receives the prepared candidates that are timed from now on."""

    def release(self, candidate: C) -> None:
        """A prepared candidate is not needed any more."""

    def variations(self, candidate: C) -> Sequence[C]:
        """Returns variations of the fastest."""


@dataclass
class Trial(Generic[C]):
    """The outcome of a candidate.

    Attributes:
        candidate: It.
        samples_ms: Its calls; those of the same place in two trials' last samples were taken in the same round.
        reason: Why it was not tried, refused, dropped or not taken; None of the one that was.
    """

    candidate: C
    samples_ms: list[float] = field(default_factory=list)
    reason: str | None = None


@dataclass(frozen=True)
class Found(Generic[C]):
    """The result of a search.

    Attributes:
        chosen: The best, or what was given.
        trials: Of every candidate, what was given first.
        resolution: Below which share of difference nothing can be told here; None where that was not reached.
        interrupted: Whether it was ended early by Ctrl-C.
        tried: Candidates that the budget sufficed for, what was given among them.
        finish_s: About which budget finishes this search; None if this one did.
    """

    chosen: C
    trials: tuple[Trial[C], ...]
    resolution: float | None
    interrupted: bool
    tried: int
    finish_s: float | None

    def of(self, candidate: C) -> Trial[C]:
        return next(trial for trial in self.trials if trial.candidate == candidate)


def paired(one: Sequence[float], other: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The samples of two trials from the rounds that both were in: each trial's last ones."""
    count = min(len(one), len(other))
    return one[len(one) - count :], other[len(other) - count :]


def search(
    shop: Shop[C], given: C, candidates: Sequence[C], *, budget_s: float, objective: Objective = "throughput"
) -> Found[C]:
    """Finds the fastest candidate within a budget.

    Args:
        shop: Prepares, times and releases candidates; has a clock.
        given: What the others are compared to, prepared first; what it raises is the caller's.
        candidates: In the order in which to try them.
        budget_s: Seconds, measured by the shop's clock. A candidate or a round that does not fit is not begun.
        objective: "throughput" compares medians, "latency" what nine of ten calls stay below.
    Returns:
        The best, never slower than what was given as far as can be told; with all that was tried. Ctrl-C gives the
        best so far.
    """
    return _Search(shop, given, budget_s, SHARE[objective]).run(candidates)


class _Search(Generic[C]):
    def __init__(self, shop: Shop[C], given: C, budget_s: float, share: float) -> None:
        self.shop, self.budget_s, self.share = shop, budget_s, share
        self.given: Trial[C] = Trial(given)
        self.trials = [self.given]
        self.leader = self.given
        self.again: list[float] = []  # the leader's calls under its second name
        self.running: list[Trial[C]] = []  # prepared, and not dropped
        self.rounds = 0
        self.untried, self.lacking_s = 0, 0.0  # candidates that were cut off, and the seconds for these and more rounds

    def run(self, candidates: Sequence[C]) -> Found[C]:
        interrupted = False
        self._prepare(self.given, self.budget_s)
        try:
            self._scout(candidates, SCOUTING_SHARE)
            self._vary()
            self._halve()
        except KeyboardInterrupt:
            interrupted = True
        return self._verdict(interrupted)

    def _cost(self, trial: Trial[C]) -> float:
        return percentile(trial.samples_ms, self.share)

    def _best(self) -> Trial[C]:
        return min((trial for trial in self.running if trial.samples_ms), key=self._cost, default=self.given)

    def _left_s(self, share: float = 1.0) -> float:
        return self.budget_s * share - self.shop.elapsed_s()

    def _prepare(self, trial: Trial[C], seconds: float) -> None:
        self.shop.prepare(trial.candidate, seconds)
        self.running.append(trial)
        for number in range(SCOUTING_CALLS):
            trial.samples_ms.append(self.shop.call_ms(trial.candidate, number))
            if self._left_s() < trial.samples_ms[-1] / 1e3:
                return

    def _drop(self, trial: Trial[C], reason: str) -> None:
        trial.reason = reason
        if trial in self.running:
            self.running.remove(trial)
            self.shop.release(trial.candidate)

    def _scout(self, candidates: Sequence[C], share: float) -> None:
        known = {trial.candidate for trial in self.trials}
        for candidate in candidates:
            if candidate in known:
                continue
            known.add(candidate)
            trial = Trial(candidate)
            self.trials.append(trial)
            needed, left = self.shop.seconds(candidate), self._left_s(share)
            if needed > left:
                trial.reason = f"not tried: takes about {needed:.2g} s, which the budget does not hold"
                self._lack(needed)
                continue
            try:
                self._prepare(trial, left)
            except Refused as error:
                if isinstance(error, OutOfTime):
                    self._lack(left)  # and what it has taken: twice as long
                self._drop(trial, str(error))
                continue
            self._drop_far_behind()

    def _lack(self, seconds: float) -> None:
        self.untried, self.lacking_s = self.untried + 1, self.lacking_s + seconds

    def _vary(self) -> None:
        """Tries variations of the fastest, then of the faster one among these, and so on.

        What was given may be the fastest only until two things are changed: then the next one that is as quickly
        prepared is varied as well.
        """
        varied: list[Trial[C]] = []
        for _ in range(MOST_VARIED):
            best, given_s = self._best(), self.shop.seconds(self.given.candidate)
            chosen = [best]
            if best is self.given:
                others = (trial for trial in self.running if trial is not best and trial.samples_ms)
                quick = [trial for trial in others if self.shop.seconds(trial.candidate) <= QUICK * given_s]
                chosen += [min(quick, key=self._cost)] if quick else []
            chosen = [trial for trial in chosen if trial not in varied]
            if not chosen:
                return
            if self._left_s(VARYING_SHARE) <= 0:
                self.lacking_s += self.shop.seconds(chosen[0].candidate)  # for one variation, at least
                return
            for trial in chosen:
                varied.append(trial)
                self._scout(self.shop.variations(trial.candidate), VARYING_SHARE)

    def _drop_far_behind(self) -> None:
        """Compares the fastest calls: other load on the machine makes calls longer, never shorter.

        The second stays, however far behind: memory may run out for the first.
        """
        first, *rest = sorted(self.running, key=lambda trial: min(trial.samples_ms))
        quickest = min(first.samples_ms)
        for trial in [trial for trial in rest if trial is not self.given][first is not self.given :]:
            if min(trial.samples_ms) > FAR_BEHIND * quickest:
                self._drop(trial, f"{min(trial.samples_ms) / quickest:.1f} times as long as the fastest")

    def _halve(self) -> None:
        rounds = FIRST_ROUNDS
        self.shop.compare([trial.candidate for trial in self.running])
        while self.rounds < ENOUGH_ROUNDS or (self.rounds < MOST_ROUNDS and (self._resolution() or FINE) >= FINE):
            if (leader := self._best()) is not self.leader or leader not in self.running:
                self.leader = leader
                self.again.clear()
            for _ in range(rounds):
                round_s = sum(trial.samples_ms[-1] for trial in (*self.running, self.leader)) / 1e3
                if self._left_s() < round_s:
                    if len(self.running) > 1:
                        self.lacking_s += round_s * max(ENOUGH_ROUNDS - self.rounds, 0)
                    return
                self._round()
            self._drop_the_slower()
            rounds = min(2 * rounds, ENOUGH_ROUNDS // 2)

    def _round(self) -> None:
        """One call of each, and a second one of the leader, in an order of the round's own."""
        turns: list[Trial[C] | None] = [*self.running, None]
        random.Random(self.rounds).shuffle(turns)
        for trial in turns:
            timed = self.leader if trial is None else trial
            if timed not in self.running:
                continue
            try:
                ms = self.shop.call_ms(timed.candidate, self.rounds)
            except Refused as error:
                if timed is self.given:
                    raise
                self._drop(timed, str(error))
                continue
            (self.again if trial is None else timed.samples_ms).append(ms)
        self.rounds += 1

    def _drop_the_slower(self) -> None:
        best = self._best()
        rest = sorted((t for t in self.running if t not in (best, self.given)), key=self._cost)
        for trial in rest[len(rest) // 2 :]:
            factor = self._cost(trial) / self._cost(best)
            if factor > BEHIND and self._lead(best, trial) > 1:
                self._drop(trial, f"{factor:.2f} times as long as the fastest")

    def _resolution(self) -> float | None:
        """Returns the difference between the leader's two names; None before there are enough samples."""
        if len(self.again) < FIRST_ROUNDS:
            return None
        found: float = control(*paired(self.leader.samples_ms, self.again), share=self.share)["resolution"]
        return found

    def _verdict(self, interrupted: bool) -> Found[C]:
        best, chosen = self._best(), self.given
        resolution = self._resolution()
        needed = 1 + (resolution or 0.0)
        equals = [trial for trial in self.running if trial is best or self._lead(best, trial) <= needed]
        for trial in sorted(equals, key=lambda trial: trial.candidate.plainness):
            if trial is self.given or self._lead(trial, self.given) > needed:
                chosen = trial
                break
        for trial in self.running:
            if trial is not chosen:
                behind = self._cost(trial) / self._cost(chosen) if trial.samples_ms else float("inf")
                trial.reason = f"{behind:.2f} times as long" if behind > needed else "no faster, and less plain"
        for trial in self.trials:
            if trial is not chosen and trial.reason is None:
                trial.reason = "interrupted while it was prepared"
        # what is prepared last has to fit into the share that scouting gets
        finish_s = (self.shop.elapsed_s() + self.lacking_s) / SCOUTING_SHARE if self.lacking_s else None
        tried = len(self.trials) - self.untried
        return Found(chosen.candidate, tuple(self.trials), resolution, interrupted, tried, finish_s)

    def _lead(self, one: Trial[C], other: Trial[C]) -> float:
        if not one.samples_ms or not other.samples_ms:
            return 0.0
        first, second = paired(other.samples_ms, one.samples_ms)
        if len(first) < FIRST_ROUNDS:  # the slowest call of the one against the quickest of the other
            return min(first) / max(second)
        return ratio_interval(first, second, paired=True, share=self.share)[0]

"""The search of `optimize`: scouting, variations, successive halving.

1. Scouting: each candidate is prepared (built, compiled, checked), which times its first calls. Candidates that are
   much slower than the fastest are dropped; one very slow call is enough.
2. Variations of the fastest candidate are scouted, then variations of the fastest variation, and so on. Scouting ends
   early enough to time the original and the two fastest candidates interleaved.
3. Successive halving: the remaining candidates are timed interleaved, with twice as many rounds each time. From the
   slower half, clearly slower candidates are dropped. The fastest candidate is timed twice per round. The difference
   between its two timings is the resolution.

A candidate replaces the original only if the interval of its speedup exceeds the ratio between the leader's two
timings. Among equally fast candidates, the candidate with the fewest changes is chosen.

Source of the halving: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization".
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .clock import control, format_number, percentile, ratio, ratio_interval

Objective = Literal["throughput", "latency"]
# The quantile of the durations that each objective compares.
SHARE = {"throughput": 0.5, "latency": 0.9}

FIRST_ROUNDS = 4
# Rounds of halving: ENOUGH_ROUNDS, or up to MOST_ROUNDS while the resolution is FINE or worse.
ENOUGH_ROUNDS, MOST_ROUNDS, FINE = 60, 240, 0.02
# Maximum number of candidates whose variations are tried.
MOST_VARIED = 8
# Slowdowns at which a candidate is dropped: after one call, after scouting, and in halving.
HOPELESS, FAR_BEHIND, BEHIND = 3.0, 1.5, 1.05
# Maximum duration of a preparation, relative to the estimate and to the budget; the larger one counts.
LATE, LONG = 4, 0.25
# Rounds of halving that scouting leaves time for, and their maximum share of the budget. Slow candidates are dropped
# before halving if the rounds would not fit. With 5 rounds, the resolution was 15 % on two Zen 3 cores (2026-11), so
# that the original was chosen although a candidate was 1.11x faster.
RESERVED_ROUNDS, RESERVE = 12, 0.3
LONG_MS = 250.0  # calls of at least this duration are timed only by their preparation before halving


class Refused(Exception):
    """A candidate is not available, or fails the check; the message is the reason. `calls_ms` are its calls, if any."""

    def __init__(self, reason: str, calls_ms: Sequence[float] = ()) -> None:
        super().__init__(reason)
        self.calls_ms = calls_ms


class OutOfTime(Refused):
    """A candidate was not prepared within its time limit."""


@dataclass
class Trial:
    """A candidate with its samples; the last samples of all running trials are from the same rounds."""

    candidate: Any
    samples_ms: list[float] = field(default_factory=list)
    round_s: float = math.inf  # seconds of a timed call, with its untimed calls
    reason: str | None = None  # why it was not chosen


@dataclass(frozen=True)
class Found:
    """The result of a search: the fastest candidate, and all of them, the original first."""

    chosen: Any
    trials: tuple[Trial, ...]
    resolution: float | None  # the smallest difference that can be measured; None: no time to measure it
    interrupted: bool
    tried: int
    finish_s: float | None  # estimated budget to finish the search; None: the search is finished


def paired(one: Sequence[float], other: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Returns the last samples of two trials, from the rounds in which both trials were timed."""
    count = min(len(one), len(other))
    return one[len(one) - count :], other[len(other) - count :]


def search(
    bench: Any, original: Any, candidates: Sequence[Any], *, budget_s: float, objective: Objective = "throughput"
) -> Found:
    """Finds the fastest candidate within a budget; tries `candidates` in order. `bench` is a trials.Trials."""
    run = _Search(bench, original, budget_s, SHARE[objective])
    run.prepare(run.original, budget_s)
    interrupted = False
    try:
        run.scout(candidates)
        varied: list[Trial] = []
        while (best := run.best()) not in varied and len(varied) < MOST_VARIED:
            varied.append(best)
            run.scout(bench.variations(best.candidate))
        run.halve()
    except KeyboardInterrupt:
        interrupted = True
    return run.conclude(interrupted)


class _Search:
    def __init__(self, bench: Any, original: Any, budget_s: float, share: float) -> None:
        self.bench, self.budget_s, self.share = bench, budget_s, share
        self.original = self.leader = Trial(original)
        self.trials = [self.original]
        self.again: list[float] = []  # samples of the leader's second timing
        self.running: list[Trial] = []  # prepared and not dropped
        self.rounds = 0
        self.untried, self.lacking_s = 0, 0.0  # untried candidates, and the seconds that they need

    def prepare(self, trial: Trial, seconds: float) -> None:
        trial.samples_ms += self.bench.prepare(trial.candidate, seconds, HOPELESS * self._fastest_ms())
        self.running.append(trial)
        trial.round_s = 2 * min(trial.samples_ms) / 1e3
        if min(trial.samples_ms) < LONG_MS and self.left_s() > trial.round_s:
            self._time(trial, trial.samples_ms, len(trial.samples_ms))

    def _time(self, trial: Trial, samples: list[float], number: int) -> None:
        start = self.bench.elapsed_s()
        samples.append(self.bench.call_ms(trial.candidate, number))
        trial.round_s = min(trial.round_s, self.bench.elapsed_s() - start)

    def _fastest_ms(self) -> float:
        """Returns the duration of the shortest call. Other load affects the shortest call least."""
        return min((min(trial.samples_ms) for trial in self.running), default=math.inf)

    def _losing(self) -> list[Trial]:
        """Returns all but the original, the fastest, and the second-fastest trial, in case the fastest fails."""
        first, *rest = sorted(self.running, key=lambda trial: min(trial.samples_ms))
        return [trial for trial in rest if trial is not self.original][first is not self.original :]

    def _round_s(self, without: Sequence[Trial] = ()) -> float:
        """Returns the seconds of one interleaved round, in which the fastest trial is timed twice."""
        return self.best().round_s + sum(trial.round_s for trial in self.running if trial not in without)

    def scout(self, candidates: Sequence[Any]) -> None:
        """Prepares the candidates in order; those that do not fit later, because others may make them cheaper."""
        known = [trial.candidate for trial in self.trials]
        pending = [candidate for candidate in candidates if candidate not in known]
        while pending:
            left = self.left_s() - min(RESERVED_ROUNDS * self._round_s(self._losing()), RESERVE * self.budget_s)
            needed = [self.bench.seconds(candidate) for candidate in pending]
            at = next((index for index, seconds in enumerate(needed) if seconds <= left), None)
            if at is None:
                break
            trial, limit = Trial(pending.pop(at)), min(left, max(LATE * needed[at], LONG * self.budget_s))
            self.trials.append(trial)
            try:
                self.prepare(trial, limit)
            except Refused as error:
                trial.samples_ms += error.calls_ms
                self._drop(trial, str(error))
                if isinstance(error, OutOfTime):  # it needs at least its limit again
                    self._lack(limit)
            for trial in self._losing():
                if (factor := min(trial.samples_ms) / self._fastest_ms()) > FAR_BEHIND:
                    self._drop(trial, f"{factor:.1f}x slower than the fastest")
        for candidate in pending:
            seconds = self.bench.seconds(candidate)
            reason = f"not tried: needs about {format_number(seconds, 2)} s, more than the budget allows"
            self.trials.append(Trial(candidate, reason=reason))
            self._lack(seconds)

    def _lack(self, seconds: float) -> None:
        self.untried, self.lacking_s = self.untried + 1, self.lacking_s + seconds

    def halve(self) -> None:
        rounds = FIRST_ROUNDS
        while (losing := self._losing()) and RESERVED_ROUNDS * self._round_s() > self.left_s():
            factor = min(losing[-1].samples_ms) / self._fastest_ms()
            self._drop(losing[-1], f"{factor:.2f}x slower than the fastest; no time for more calls")
        self.bench.tell(f"timing {len(self.running)} candidates, interleaved")
        while self.rounds < ENOUGH_ROUNDS or (self.rounds < MOST_ROUNDS and (self._resolution() or FINE) >= FINE):
            if (best := self.best()) is not self.leader:
                self.leader, self.again = best, []
            for _ in range(rounds):
                if self.left_s() < self._round_s():
                    if len(self.running) > 1:
                        self.lacking_s += self._round_s() * max(ENOUGH_ROUNDS - self.rounds, 0)
                    return
                self._round()
            best = self.best()
            rest = sorted((t for t in self.running if t not in (best, self.original)), key=self._cost)
            for trial in rest[len(rest) // 2 :]:
                factor = self._cost(trial) / self._cost(best)
                if factor > BEHIND and self._lead(best, trial) > 1:
                    self._drop(trial, f"{factor:.2f}x slower than the fastest")
            rounds = min(2 * rounds, ENOUGH_ROUNDS // 2)

    def _round(self) -> None:
        """Times each candidate once, and the leader twice, in random order."""
        each = [(trial, trial.samples_ms) for trial in self.running] + [(self.leader, self.again)]
        random.Random(self.rounds).shuffle(each)
        for trial, samples in each:
            if trial in self.running:
                try:
                    self._time(trial, samples, self.rounds)
                except Refused as error:
                    if trial is self.original:
                        raise
                    self._drop(trial, str(error))
        self.rounds += 1

    def conclude(self, interrupted: bool) -> Found:
        best, resolution = self.best(), self._resolution()
        needed = 1 + (resolution or 0.0)
        close = (trial for trial in self.running if self._cost(trial) <= BEHIND * self._cost(best))
        equals = [trial for trial in close if trial is best or self._lead(best, trial) <= needed]
        simplest = sorted(equals, key=lambda trial: (trial.candidate.changes, self._cost(trial)))
        gaining = (t for t in simplest if t is self.original or self._lead(t, self.original) > self._bias())
        chosen = next(gaining, self.original)
        for trial in self.trials:
            if trial is not chosen and trial in self.running and trial.samples_ms:
                behind = self._cost(trial) / self._cost(chosen)
                is_simpler = trial.candidate.changes <= chosen.candidate.changes
                equal = "not measurably faster" if is_simpler else "equally fast, but less simple"
                trial.reason = f"{behind:.2f}x slower" if behind > needed else equal
            elif trial is not chosen and trial.reason is None:
                trial.reason = "interrupted"
        finish_s = self.bench.elapsed_s() + self.lacking_s if self.lacking_s else None
        tried = len(self.trials) - self.untried
        return Found(chosen.candidate, tuple(self.trials), resolution, interrupted, tried, finish_s)

    def _cost(self, trial: Trial) -> float:
        return percentile(trial.samples_ms, self.share)

    def best(self) -> Trial:
        return min((trial for trial in self.running if trial.samples_ms), key=self._cost, default=self.original)

    def left_s(self) -> float:
        return self.budget_s - float(self.bench.elapsed_s())

    def _drop(self, trial: Trial, reason: str) -> None:
        trial.reason = reason
        if trial in self.running:
            self.running.remove(trial)
            self.bench.release(trial.candidate)

    def _resolution(self) -> float | None:
        """Returns the difference between the leader's two timings; None if there are too few samples."""
        if len(self.again) < FIRST_ROUNDS:
            return None
        return float(control(*paired(self.leader.samples_ms, self.again), share=self.share)["resolution"])

    def _bias(self) -> float:
        """Returns the ratio of the leader's two timings, at least 1, without the noise that `_lead` contains, too."""
        found = 1.0
        if len(self.again) >= FIRST_ROUNDS:
            found = ratio(*paired(self.leader.samples_ms, self.again), paired=True, share=self.share)
        return max(found, 1 / found)

    def _lead(self, one: Trial, other: Trial) -> float:
        """Returns the lower end of the interval of the speedup of `one` over `other`."""
        first, second = paired(other.samples_ms, one.samples_ms)
        if not first:
            return 0.0
        if len(first) < FIRST_ROUNDS:  # too few samples for an interval: use the slowest of `one`
            return min(first) / max(second)
        return ratio_interval(first, second, paired=True, share=self.share)[0]

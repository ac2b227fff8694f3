"""The search of `optimize`: scouting, variations, successive halving.

1. Scouting: each candidate is prepared (built, compiled, checked) and called a few times. Candidates that are much
   slower than the fastest are dropped.
2. Variations of the fastest candidate are scouted, then variations of the fastest variation, and so on.
3. Successive halving: the remaining candidates are timed interleaved, with twice as many rounds each time. From the
   slower half, clearly slower candidates are dropped. The fastest candidate is timed twice per round. The difference
   between its two timings is the resolution.

A candidate replaces the original only if it is faster by more than the resolution. Among equally fast candidates, the
candidate with the fewest changes is chosen.

Source of the halving: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization".
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .clock import control, format_number, percentile, ratio_interval

Objective = Literal["throughput", "latency"]
# The quantile of the durations that each objective compares.
SHARE = {"throughput": 0.5, "latency": 0.9}

SCOUTING_CALLS, FIRST_ROUNDS = 3, 4
# Rounds of halving: ENOUGH_ROUNDS, or up to MOST_ROUNDS while the resolution is FINE or worse.
ENOUGH_ROUNDS, MOST_ROUNDS, FINE = 60, 240, 0.02
# Maximum number of candidates whose variations are tried.
MOST_VARIED = 8
FAR_BEHIND, BEHIND = 1.5, 1.05
# Shares of the budget after which no candidate or no variation is prepared.
SCOUTING_SHARE, VARYING_SHARE = 0.6, 0.75


class Refused(Exception):
    """A candidate is not available, or fails the check; the message is the reason."""


class OutOfTime(Refused):
    """A candidate was not prepared within its time limit."""


@dataclass
class Trial:
    """A candidate with its samples; the last samples of all running trials are from the same rounds."""

    candidate: Any
    samples_ms: list[float] = field(default_factory=list)
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
        run.scout(candidates, SCOUTING_SHARE)
        varied: list[Trial] = []
        while (best := run.best()) not in varied and len(varied) < MOST_VARIED:
            if run.left_s(VARYING_SHARE) <= 0:
                run.lacking_s += bench.seconds(best.candidate)  # for one variation, at least
                break
            varied.append(best)
            run.scout(bench.variations(best.candidate), VARYING_SHARE)
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
        self.bench.prepare(trial.candidate, seconds)
        self.running.append(trial)
        for number in range(SCOUTING_CALLS):
            trial.samples_ms.append(self.bench.call_ms(trial.candidate, number))
            if self.left_s() < trial.samples_ms[-1] / 1e3:
                return

    def scout(self, candidates: Sequence[Any], share: float) -> None:
        for candidate in candidates:
            if any(candidate == trial.candidate for trial in self.trials):
                continue
            trial = Trial(candidate)
            self.trials.append(trial)
            needed, left = self.bench.seconds(candidate), self.left_s(share)
            try:
                if needed > left:
                    raise OutOfTime(f"skipped: needs about {format_number(needed, 2)} s, more than the budget allows")
                self.prepare(trial, left)
            except Refused as error:
                self._drop(trial, str(error))
                if isinstance(error, OutOfTime):  # a timed-out candidate needs at least its limit again
                    self.untried, self.lacking_s = self.untried + 1, self.lacking_s + max(needed, left)
                continue
            # Other load affects the shortest call least. The second-fastest trial stays, in case the fastest fails.
            first, *rest = sorted(self.running, key=lambda trial: min(trial.samples_ms))
            rest = [trial for trial in rest if trial is not self.original][first is not self.original :]
            for trial in rest:
                if (factor := min(trial.samples_ms) / min(first.samples_ms)) > FAR_BEHIND:
                    self._drop(trial, f"{factor:.1f}x slower than the fastest")

    def halve(self) -> None:
        rounds = FIRST_ROUNDS
        self.bench.tell(f"timing {len(self.running)} candidates, interleaved")
        while self.rounds < ENOUGH_ROUNDS or (self.rounds < MOST_ROUNDS and (self._resolution() or FINE) >= FINE):
            if (best := self.best()) is not self.leader:
                self.leader, self.again = best, []
            for _ in range(rounds):
                round_s = sum(trial.samples_ms[-1] for trial in (*self.running, self.leader)) / 1e3
                if self.left_s() < round_s:
                    if len(self.running) > 1:
                        self.lacking_s += round_s * max(ENOUGH_ROUNDS - self.rounds, 0)
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
                    samples.append(self.bench.call_ms(trial.candidate, self.rounds))
                except Refused as error:
                    if trial is self.original:
                        raise
                    self._drop(trial, str(error))
        self.rounds += 1

    def conclude(self, interrupted: bool) -> Found:
        best, resolution = self.best(), self._resolution()
        needed = 1 + (resolution or 0.0)
        equals = [trial for trial in self.running if trial is best or self._lead(best, trial) <= needed]
        simplest = sorted(equals, key=lambda trial: trial.candidate.changes)
        gaining = (t for t in simplest if t is self.original or self._lead(t, self.original) > needed)
        chosen = next(gaining, self.original)
        for trial in self.trials:
            if trial is not chosen and trial in self.running and trial.samples_ms:
                behind = self._cost(trial) / self._cost(chosen)
                is_simpler = trial.candidate.changes <= chosen.candidate.changes
                equal = "not measurably faster" if is_simpler else "equally fast, but less simple"
                trial.reason = f"{behind:.2f}x slower" if behind > needed else equal
            elif trial is not chosen and trial.reason is None:
                trial.reason = "interrupted"
        # the last candidate must be scouted within SCOUTING_SHARE
        finish_s = (self.bench.elapsed_s() + self.lacking_s) / SCOUTING_SHARE if self.lacking_s else None
        tried = len(self.trials) - self.untried
        return Found(chosen.candidate, tuple(self.trials), resolution, interrupted, tried, finish_s)

    def _cost(self, trial: Trial) -> float:
        return percentile(trial.samples_ms, self.share)

    def best(self) -> Trial:
        return min((trial for trial in self.running if trial.samples_ms), key=self._cost, default=self.original)

    def left_s(self, share: float = 1.0) -> float:
        return self.budget_s * share - float(self.bench.elapsed_s())

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

    def _lead(self, one: Trial, other: Trial) -> float:
        """Returns the lower end of the interval of the speedup of `one` over `other`."""
        first, second = paired(other.samples_ms, one.samples_ms)
        if not first:
            return 0.0
        if len(first) < FIRST_ROUNDS:  # too few samples for an interval: use the slowest of `one`
            return min(first) / max(second)
        return ratio_interval(first, second, paired=True, share=self.share)[0]

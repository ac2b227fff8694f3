"""Run of a configuration: builds and checks each candidate, times the correct ones interleaved, returns the record.

A candidate that is missing, unsupported, incorrect, broken or too large becomes a row with the reason and does not
affect the others. After Ctrl-C, the record contains what was measured. If the process is killed, the journal does.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from vit_fast.measure import clock
from vit_fast.measure.candidate import Candidate, at_most, describe_error, is_out_of_memory
from vit_fast.measure.clock import Call, Samples, Timing, percentile, time_interleaved
from vit_fast.version import __version__

from . import preparation
from .configuration import Allocation, Configuration, Planned
from .correctness import describe_rule
from .machine import Conditions, best_ceilings, describe, joules_of, measure_ceilings, products_in
from .preparation import Prepared, Problem, cold_start, make_problem, prepare, release_memory
from .records import FORMAT, Findings, Journal
from .rows import Group, Record, Row, Status, add_timing, finish, is_lower, key_of, make_control, make_row, may_gain

# The second name of the fastest full-precision candidate of a group.
AGAIN = "again"
# A measurement that is cut short counts with FLOOR_REPEATS repeats, or with FLOOR_LEAST_REPEATS that took FLOOR_MS.
FLOOR_REPEATS, FLOOR_MS, FLOOR_LEAST_REPEATS = 50, 200.0, 3
# On a noisy machine, all candidates get this share of a group's time, and the best ones the rest. The noise is checked
# every ROUNDS_BETWEEN rounds.
SHARE_OF_ALL, ROUNDS_BETWEEN = 0.4, 5


class Listener(Protocol):
    """Receives the progress of a run: the number of steps, the current step, finished steps, and messages."""

    def start(self, steps: int) -> None: ...
    def now(self, what: str) -> None: ...
    def done(self, steps: float) -> None: ...
    def say(self, text: str) -> None: ...


class Silent:
    """Ignores the progress of a run."""

    start = now = done = say = staticmethod(lambda _: None)


class Watch:
    """Decides after every round which candidates to continue with; see clock.time_interleaved.

    On a quiet machine, all candidates are timed until the protocol is satisfied. If noise prevents a ranking and this
    timing has its own share of the time (`allocated`), the best of vit-fast and the best peer get the rest until end_s.

    Attributes:
        best: The fastest candidate at full precision, which is timed twice, and compared with the others.
        calls: The calls to time, with the second name of `best`.
        running: The name of the candidate that was called last.
        again: Called after every round.
    """

    def __init__(
        self, prepared: Mapping[str, Prepared], protocol: clock.Protocol, listener: Listener,
        now_s: Callable[[], float], end_s: float, allocated: bool,
    ) -> None:  # fmt: skip
        self._protocol, self._listener, self._now_s, self._end_s = protocol, listener, now_s, end_s
        self._allocated, self._start_s, self._reported, self.running = allocated, now_s(), 0.0, ""
        alike = [name for name, ready in prepared.items() if not is_lower(ready.row)] or list(prepared)
        self._peers = {name: bool(prepared[name].row["peer"]) for name in alike}
        self.best = min(alike, key=lambda name: prepared[name].call_s)
        self.calls = {name: self._tracked(name, ready.call) for name, ready in prepared.items()}
        self.calls[AGAIN] = self._tracked(self.best, prepared[self.best].call)
        self._remaining: Collection[str] = ()
        self._samples: Mapping[str, Samples] = {}
        self.again: Callable[[], None] = lambda: None

    def __call__(self, number: int, samples: Mapping[str, Samples]) -> Collection[str]:
        self._samples = samples
        self.again()
        self._remaining = self._remaining or list(samples)
        going_on = self._decide(number)
        share = min(map(self._protocol.share_of, samples.values())) if going_on else 1.0
        self._listener.done((share - self._reported) * (len(samples) - 1))
        self._reported = share
        return going_on

    def _decide(self, number: int) -> Collection[str]:
        now_s, long_enough = self._now_s(), self._protocol.is_satisfied(self._samples)
        narrowed = len(self._remaining) < len(self._samples)
        if long_enough and not self._allocated:
            return ()
        if len(self.timings()) < len(self._samples):
            return self._remaining
        if now_s >= self._end_s:
            return ()
        late = now_s >= self._start_s + SHARE_OF_ALL * (self._end_s - self._start_s)
        if number % ROUNDS_BETWEEN or not (self._allocated and (long_enough or late)):
            return self._remaining
        if clock.control(self._samples[self.best], self._samples[AGAIN])["resolution"] <= clock.UNRANKABLE:
            return () if long_enough or narrowed else self._remaining
        sides = [[name for name in self._peers if self._peers[name] is peer] for peer in set(self._peers.values())]
        fastest = [min(names, key=lambda name: percentile(self._samples[name], 0.5)) for names in sides]
        fewer = {self.best, AGAIN, *fastest}
        if not narrowed and len(fewer) < len(self._samples):
            self._remaining = fewer
            self._listener.say(f"noisy machine: continuing with {', '.join(sorted(fewer - {AGAIN}))}")
        return self._remaining

    def _tracked(self, name: str, call: Call) -> Call:
        def run_it(number: int) -> object:
            self.running = name
            return call(number)

        return run_it

    def timings(self) -> dict[str, Timing]:
        """Returns the timings of candidates with enough repeats."""
        return {
            name: taken.timing()
            for name, taken in self._samples.items()
            if len(taken) >= FLOOR_REPEATS or (len(taken) >= FLOOR_LEAST_REPEATS and sum(taken) >= FLOOR_MS)
        }


def run(configuration: Configuration, listener: Listener | None = None, journal: Journal | None = None) -> Record:
    """Runs a configuration, and returns the record: plain data with a row per candidate and group.

    A journal stores rows as they are measured. Rows that it contains are not measured again.
    """
    machine = describe(configuration.device) if journal is None else journal.header["machine"]
    return _Run(configuration, listener or Silent(), journal or Findings()).record(machine)


class _Run:
    def __init__(self, configuration: Configuration, listener: Listener, findings: Findings) -> None:
        self.configuration, self.listener, self.findings = configuration, listener, findings
        self.rows: list[Row] = findings.found["row"]
        self.start = time.perf_counter()
        self.groups = {group: configuration.candidates_of(group) for group in configuration.groups()}
        self.allocation = Allocation(self.groups)
        self.preparing_s = self.assumed_s = 0.0

    def record(self, machine: dict[str, Any]) -> Record:
        configuration, found = self.configuration, self.findings.found
        interrupted = False
        try:
            self._take_ceilings()
            planned = self._allocate()
            for group in list(planned):
                if configuration.search and not may_gain(group, self.rows):
                    del planned[group]
                elif (remaining := self._remaining(group)) and not self._is_too_late(()):
                    self._run_group(group, remaining)
                    self._take_ceilings()
        except KeyboardInterrupt:
            interrupted = True
            self.listener.say("interrupted: writing what was measured")
        planned = self.allocation.planned
        why_not: tuple[Status, str] = ("interrupted", "not started") if interrupted else ("skipped", "out of time")
        for group in planned:
            self._refuse(group, self._remaining(group), *why_not)
        order = [(group.key, candidate.name) for group, candidates in planned.items() for candidate in candidates]
        self.rows.sort(key=lambda row: order.index((key_of(row), row["candidate"])))
        ceilings, controls = best_ceilings(found["ceilings"]), found["control"]
        finish(self.rows, ceilings, controls)
        return {
            "format": FORMAT,
            "vit_fast": __version__,
            "machine": machine,
            "ceilings": ceilings,
            "controls": controls,
            "busy": list(dict.fromkeys(reason for control in controls for reason in control["conditions"]["busy"])),
            "configuration": configuration.to_dict(),
            "correctness_rule": describe_rule(),
            "rows": self.rows,
            "interrupted": interrupted,
            "skipped": self.allocation.skipped,
            "seconds": round(time.perf_counter() - self.start, 1),
        }

    def _refuse(self, group: Group, candidates: Sequence[Candidate], status: Status, reason: str) -> None:
        for candidate in candidates:
            self.findings.add("row", make_row(group, candidate, status, reason))

    def _remaining(self, group: Group) -> list[Candidate]:
        """Returns the allocated candidates of a group that have no row yet."""
        known = {row["candidate"] for row in self.rows if key_of(row) == group.key}
        return [candidate for candidate in self.allocation.planned[group] if candidate.name not in known]

    def _allocate(self) -> Planned:
        configuration, before = self.configuration, self.findings.found["skipped"]
        skipped = before[0]["candidates"] if before else None if configuration.is_default else ()
        ceilings = self.findings.found["ceilings"][-1]
        self.allocation = Allocation(self.groups, configuration.time_budget_s, ceilings, skipped)
        if not before:
            self.findings.add("skipped", {"candidates": self.allocation.skipped})
        planned = self.allocation.planned
        self.listener.start(sum(2 * len(self._remaining(group)) + 1 for group in planned) + 1)
        return planned

    def _take_ceilings(self) -> None:
        """Measures the ceilings, which other load lowers: before, between and after the groups."""
        self.listener.now("ceilings of the machine")
        self.findings.add("ceilings", measure_ceilings(self.configuration.device, self.configuration.product_dtypes()))
        self.listener.done(1)

    def _run_group(self, group: Group, candidates: Sequence[Candidate]) -> None:
        try:
            with products_in(group.dtype_name):
                too_large = self._measure_group(group, candidates)
        finally:
            release_memory(self.configuration.device)
        if not too_large:
            return
        names = ", ".join(candidate.name for candidate in too_large)
        if group.batch_size == 1:
            self.listener.say(f"{group}: out of memory: {names}")
            self._refuse(group, too_large, "out of memory", "batch 1 does not fit into memory")
            return
        half = dataclasses.replace(group, batch_size=group.batch_size // 2)
        self.listener.say(f"{group}: out of memory, retrying with batch {half.batch_size}: {names}")
        self._run_group(half, too_large)

    def _measure_group(self, group: Group, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Adds a row for every candidate; returns those that did not fit into memory."""
        configuration, start_s = self.configuration, self.elapsed_s()
        self.listener.now(f"{group}: images and the fp64 reference")
        try:
            problem = make_problem(group, configuration.images, configuration.device)
        except Exception as error:  # e.g. a dtype that an operator does not support
            if is_out_of_memory(error):
                return list(candidates)
            self.listener.say(f"{group}: the reference FAILED: {describe_error(error)}")
            self._refuse(group, candidates, "failed", f"reference: {describe_error(error)}")
            return []
        prepared: dict[str, Prepared] = {}
        too_large = []
        for candidate in candidates:
            self.listener.now(f"{group}: {candidate.name}")
            ready, row = self._prepare(candidate, group, problem, list(prepared.values()))
            if ready is not None:
                prepared[candidate.name] = ready
            else:
                release_memory(configuration.device, forget_compiled=False)
                if row["status"] == "out of memory":
                    too_large.append(candidate)
                else:
                    self.findings.add("row", row)
            self.listener.done(2 if ready is None else 1)  # 2: it is not timed
        self.preparing_s += self.elapsed_s() - start_s
        self.assumed_s += self.allocation.prepared_s(group.as_requested)
        return too_large + self._time(group, prepared)

    def _prepare(
        self, candidate: Candidate, group: Group, problem: Problem, others: Sequence[Prepared]
    ) -> tuple[Prepared | None, Row]:
        if missing := candidate.missing_packages():
            return None, make_row(group, candidate, "not installed", f"pip install {' '.join(missing)}")
        if self._is_too_late(others):
            return None, make_row(group, candidate, "skipped", "out of time")
        begun = [*group.key, candidate.name]
        if self.findings.has_ended(*begun):
            return None, make_row(group, candidate, "failed", "the process ended twice while preparing this candidate")
        self.findings.add("begun", begun)
        ready, row = prepare(candidate, group, problem, explained=self.configuration.explain)
        if ready is not None and self.configuration.cold:
            row.update(cold_start(self.configuration.request, group, candidate.name))
        if row["status"] in ("incorrect", "failed"):
            self.listener.say(f"{group}: {candidate.name} is {row['status'].upper()}: {row['reason'][:200]}")
        return ready, row

    def _time(self, group: Group, prepared: dict[str, Prepared]) -> list[Candidate]:
        too_large: list[Candidate] = []
        while prepared:
            self.listener.now(f"{group}: timing {len(prepared)} candidates, interleaved")
            end_s, conditions = self._end_of_timing_s(group), Conditions(self.configuration.device)
            protocol = dataclasses.replace(self.configuration.protocol, launch=group.launch)
            watch = Watch(prepared, protocol, self.listener, self.elapsed_s, end_s, self.configuration.is_default)
            add = functools.partial(self._add_timed, group, prepared, watch.best, conditions)
            try:
                with conditions.watch(), at_most(preparation.CANDIDATE_SECONDS) as watch.again:
                    timings = time_interleaved(watch.calls, self.configuration.device, protocol, on_round=watch)
            except KeyboardInterrupt:
                add(watch.timings(), "interrupted")
                raise
            except Exception as error:
                broken = prepared.pop(watch.running)
                if is_out_of_memory(error):
                    too_large.append(broken.candidate)
                else:
                    broken.row.update(status="failed", reason=f"during timing: {describe_error(error)}")
                    self.findings.add("row", broken.row)
            else:
                add(timings, "skipped")
                break
            # Outside of the handler, in which the exception keeps tensors alive.
            release_memory(self.configuration.device, forget_compiled=False)
        return too_large

    def _add_timed(
        self, group: Group, prepared: Mapping[str, Prepared], best: str, conditions: Conditions,
        timings: Mapping[str, Timing], otherwise: Status,
    ) -> None:  # fmt: skip
        if best in timings and AGAIN in timings:
            control = make_control(group, best, timings[best], timings[AGAIN], conditions.summary())
            self.findings.add("control", control)
        for name, ready in prepared.items():
            if name in timings:
                add_timing(ready.row, timings[name], group)
                joules = joules_of(ready.call, timings[name].ms, self.configuration.device)
                if joules is not None and group.model.data is not None:
                    ready.row["J_per_image"] = joules / group.batch_size
            else:
                ready.row.update(status=otherwise, reason="too few repeats")
            self.findings.add("row", ready.row)

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    def _is_too_late(self, others: Sequence[Prepared]) -> bool:
        """True if the prepared candidates need the rest of the time."""
        ahead = sum(other.call_s for other in others) * FLOOR_LEAST_REPEATS
        return self.elapsed_s() + ahead > self.configuration.time_budget_s

    def _end_of_timing_s(self, group: Group) -> float:
        if not self.configuration.is_default:
            return self.configuration.time_budget_s
        slowness = max(1.0, self.preparing_s / self.assumed_s)
        return self.allocation.end_of_timing_s(group.as_requested, self.elapsed_s(), slowness)

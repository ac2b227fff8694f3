"""Run of a configuration: builds and checks each candidate, times the correct ones interleaved, returns the record.

A candidate that is missing, unsupported, incorrect, broken or too large becomes a row with the reason and does not
affect the others. After Ctrl-C, the record contains what was measured. If the process is killed, the journal does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from vit_fast.measure import clock
from vit_fast.measure.candidate import Candidate, Prepared, at_most, describe_error, is_out_of_memory
from vit_fast.measure.clock import Call, Samples, Timing, time_interleaved
from vit_fast.version import __version__

from . import preparation, records
from .configuration import Configuration
from .machine import Conditions, best_ceilings, describe, measure_ceilings, products_in
from .models import Group
from .preparation import Problem, cold_start, describe_rule, make_problem, prepare
from .records import Journal, Record, Row, Status, key_of, make_row

# The second name of the fastest full-precision candidate of a group.
AGAIN = "again"
# A measurement that is cut short counts with FLOOR_REPEATS repeats, or with FLOOR_LEAST_REPEATS that took FLOOR_MS.
FLOOR_REPEATS, FLOOR_MS, FLOOR_LEAST_REPEATS = 50, 200.0, 3
ROUNDS_BETWEEN = 5  # between two checks of the noise
SHARES = 1.3  # of its estimated share of the time that preparing a group may take


class Watch:
    """Decides after every round if the timing of a group goes on; see clock.time_interleaved.

    It ends when the protocol is satisfied, or at the end of the group's time if there are enough repeats. If the group
    has its own share of the time, it goes on while noise prevents a ranking. The fastest candidate at full precision
    (`best`) is timed twice. `running` is the candidate that was called last; `again` is called after every round.
    """

    def __init__(self, run: _Run, prepared: Mapping[str, Prepared], protocol: clock.Protocol) -> None:
        self._whole_run, self._protocol = run, protocol
        alike = [name for name, ready in prepared.items() if not records.is_lower(ready.row)] or list(prepared)
        self.best = min(alike, key=lambda name: prepared[name].call_s)
        self.calls = {name: functools.partial(self._call, name, ready.call) for name, ready in prepared.items()}
        self.calls[AGAIN] = self.calls[self.best]
        self.running, self._samples = "", dict[str, Samples]()
        self.again: Callable[[], None] = lambda: None

    def _call(self, name: str, call: Call, number: int) -> object:
        self.running = name
        return call(number)

    def __call__(self, number: int, samples: Mapping[str, Samples]) -> Collection[str]:
        self._samples = dict(samples)
        self.again()
        is_done = self._protocol.is_satisfied(samples)
        if is_done and self._whole_run.configuration.is_default:
            is_done = number % ROUNDS_BETWEEN == 0
            is_done &= clock.control(samples[self.best], samples[AGAIN])["resolution"] <= clock.UNRANKABLE
        is_late = self._whole_run.elapsed_s() >= self._whole_run.end_s
        return () if is_done or (is_late and len(self.timings()) == len(samples)) else list(samples)

    def timings(self) -> dict[str, Timing]:
        """Returns the timings of candidates with enough repeats."""
        return {
            name: taken.timing()
            for name, taken in self._samples.items()
            if len(taken) >= FLOOR_REPEATS or (len(taken) >= FLOOR_LEAST_REPEATS and sum(taken) >= FLOOR_MS)
        }


def run(
    configuration: Configuration, tell: Callable[[str], object] = lambda step: None, journal: Journal | None = None
) -> Record:
    """Runs a configuration, and returns the record: plain data with a row per candidate and group.

    `tell` is called with the name of each step. Rows that the journal contains are not measured again.
    """
    return _Run(configuration, tell, journal or Journal()).record()


class _Run:
    def __init__(self, configuration: Configuration, tell: Callable[[str], object], journal: Journal) -> None:
        self.configuration, self.tell, self.journal = configuration, tell, journal
        self.start = time.perf_counter()
        self.planned, self.skipped = configuration.plan()
        self.latest_s = self.end_s = configuration.time_budget_s

    def record(self) -> Record:
        configuration, journal, interrupted = self.configuration, self.journal, False
        try:
            self._take_ceilings()
            for group in list(self.planned):
                if configuration.search and not records.may_gain(group, journal.found("row")):
                    del self.planned[group]
                elif (remaining := self._remaining(group)) and not self._is_too_late(()):
                    self._run_group(group, remaining)
                    self._take_ceilings()
        except KeyboardInterrupt:
            interrupted = True
            self.tell("interrupted: writing what was measured")
        why_not: tuple[Status, str] = ("interrupted", "not started") if interrupted else ("skipped", "out of time")
        for group in self.planned:
            self._refuse(group, self._remaining(group), *why_not)
        order = [(group.key, candidate.name) for group, found in self.planned.items() for candidate in found]
        rows = sorted(journal.found("row"), key=lambda row: order.index((key_of(row), row["candidate"])))
        ceilings, controls = best_ceilings(journal.found("ceilings")), journal.found("control")
        records.finish(rows, ceilings, controls)
        return {
            "format": records.FORMAT,
            "vit_fast": __version__,
            "machine": journal.header.get("machine") or describe(configuration.device),
            "ceilings": ceilings,
            "controls": controls,
            "busy": list(dict.fromkeys(reason for control in controls for reason in control["conditions"]["busy"])),
            "configuration": configuration.to_dict(),
            "correctness_rule": describe_rule(),
            "rows": rows,
            "interrupted": interrupted,
            "skipped": self.skipped,
            "seconds": round(self.elapsed_s(), 1),
        }

    def _refuse(self, group: Group, candidates: Sequence[Candidate], status: Status, reason: str) -> None:
        for candidate in candidates:
            self.journal.add("row", make_row(group, candidate, status, reason))

    def _remaining(self, group: Group) -> list[Candidate]:
        """Returns the planned candidates of a group that have no row yet."""
        known = {row["candidate"] for row in self.journal.found("row") if key_of(row) == group.key}
        return [candidate for candidate in self.planned[group] if candidate.name not in known]

    def _take_ceilings(self) -> None:
        """Measures the ceilings, which other load lowers: before, between and after the groups."""
        self.tell("ceilings of the machine")
        self.journal.add("ceilings", measure_ceilings(self.configuration.device, self.configuration.product_dtypes()))

    def _run_group(self, group: Group, candidates: Sequence[Candidate]) -> None:
        try:
            with products_in(group.dtype_name):
                too_large = self._measure_group(group, candidates)
        finally:
            torch.compiler.reset()
            clock.free_memory(self.configuration.device)
        if not too_large:
            return
        if group.batch_size == 1:
            self._refuse(group, too_large, "out of memory", "batch 1 does not fit into memory")
            return
        half = dataclasses.replace(group, batch_size=group.batch_size // 2)
        self.tell(f"{group}: out of memory, retrying with batch {half.batch_size}")
        self._run_group(half, too_large)

    def _measure_group(self, group: Group, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Adds a row for every candidate; returns those that did not fit into memory."""
        configuration = self.configuration
        self.latest_s, self.end_s = self._ends_s(group)
        self.tell(f"{group}: images and the fp64 reference")
        try:
            problem = make_problem(group, configuration.images)
        except Exception as error:  # e.g. a dtype that an operator does not support
            if is_out_of_memory(error):
                return list(candidates)
            self._refuse(group, candidates, "failed", f"reference: {describe_error(error)}")
            return []
        prepared: dict[str, Prepared] = {}
        too_large = []
        for candidate in candidates:
            self.tell(f"{group}: {candidate.name}")
            ready, row = self._prepare(candidate, group, problem, list(prepared.values()))
            if ready is not None:
                prepared[candidate.name] = ready
            else:
                clock.free_memory(configuration.device)
                if row["status"] == "out of memory":
                    too_large.append(candidate)
                else:
                    self.journal.add("row", row)
        return too_large + self._time(group, prepared)

    def _prepare(
        self, candidate: Candidate, group: Group, problem: Problem, others: Sequence[Prepared]
    ) -> tuple[Prepared | None, Row]:
        if missing := candidate.missing_packages():
            return None, make_row(group, candidate, "not installed", f"pip install {' '.join(missing)}")
        needed_s = self.configuration.preparing_s(group, [candidate]) if self.configuration.is_default else 0.0
        if self._is_too_late(others) or self.elapsed_s() + needed_s > self.latest_s:
            return None, make_row(group, candidate, "skipped", "out of time")
        begun = [*group.key, candidate.name]
        if self.journal.has_ended(*begun):
            return None, make_row(group, candidate, "failed", "the process ended twice while preparing this candidate")
        self.journal.add("begun", begun)
        ready, row = prepare(candidate, group, problem, explained=self.configuration.explain)
        if ready is not None and self.configuration.cold:
            row.update(cold_start(self.configuration.request, group, candidate.name))
        return ready, row

    def _time(self, group: Group, prepared: dict[str, Prepared]) -> list[Candidate]:
        too_large: list[Candidate] = []
        while prepared:
            self.tell(f"{group}: timing {len(prepared)} candidates, interleaved")
            conditions = Conditions(self.configuration.device)
            protocol = dataclasses.replace(self.configuration.protocol, launch=group.launch)
            watch = Watch(self, prepared, protocol)
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
                    self.journal.add("row", broken.row)
            else:
                add(timings, "skipped")
                break
            # Outside of the handler, in which the exception keeps tensors alive.
            clock.free_memory(self.configuration.device)
        return too_large

    def _add_timed(
        self, group: Group, prepared: Mapping[str, Prepared], best: str, conditions: Conditions,
        timings: Mapping[str, Timing], otherwise: Status,
    ) -> None:  # fmt: skip
        if best in timings and AGAIN in timings:
            control = records.make_control(group, best, timings[best], timings[AGAIN], conditions.summary())
            self.journal.add("control", control)
        for name, ready in prepared.items():
            if name in timings:
                records.add_timing(ready.row, timings[name], group)
            else:
                ready.row.update(status=otherwise, reason="too few repeats")
            self.journal.add("row", ready.row)

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    def _is_too_late(self, others: Sequence[Prepared]) -> bool:
        """True if the prepared candidates need the rest of the time."""
        ahead = sum(other.call_s for other in others) * FLOOR_LEAST_REPEATS
        return self.elapsed_s() + ahead > self.configuration.time_budget_s

    def _ends_s(self, group: Group) -> tuple[float, float]:
        """Returns when to stop preparing and timing a group: the groups share the time in proportion to estimates."""
        configuration = self.configuration
        if not configuration.is_default:
            return configuration.time_budget_s, configuration.time_budget_s
        following = list(itertools.dropwhile(lambda one: one.key != group.key, self.planned))
        preparing_s = [configuration.preparing_s(one, self._remaining(one)) for one in following]
        timing_s = [configuration.timed_s(one) * (1 + len(self._remaining(one))) for one in following]
        now_s = self.elapsed_s()
        share = (configuration.time_budget_s - now_s) / sum(preparing_s + timing_s)
        return now_s + SHARES * share * preparing_s[0], now_s + share * (preparing_s[0] + timing_s[0])

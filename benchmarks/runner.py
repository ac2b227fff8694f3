"""Run of a configuration: builds and checks each candidate, times the correct ones interleaved, returns the record.

A candidate that is missing, unsupported, incorrect, broken or too large becomes a row with the reason and does not
affect the others. After Ctrl-C, the record contains what was measured. If the process is killed, the journal does.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from vit_fast.measure import clock
from vit_fast.measure.candidate import Candidate, Prepared, at_most, describe_error, is_out_of_memory
from vit_fast.measure.clock import Call, Samples, time_interleaved
from vit_fast.version import __version__

from . import preparation, records
from .configuration import Configuration
from .machine import Conditions, best_ceilings, describe, measure_ceilings, products_in
from .models import Group
from .preparation import RULE, cold_start, make_problem, prepare
from .records import Journal, Record, Status, key_of, make_row

# The second name of the fastest full-precision candidate of a group.
AGAIN = "again"
# A measurement that is cut short counts with FLOOR_REPEATS repeats, or with FLOOR_LEAST_REPEATS that took FLOOR_MS.
FLOOR_REPEATS, FLOOR_MS, FLOOR_LEAST_REPEATS = 50, 200.0, 3
ROUNDS_BETWEEN = 5  # between two checks of the noise
SHARES = 1.3  # of its estimated share of the time that preparing a group may take


def run(
    configuration: Configuration, tell: Callable[[str], object] = lambda step: None, journal: Journal | None = None
) -> Record:
    """Runs a configuration, and returns the record: plain data with a row per candidate and group.

    `tell` is called with the name of each step. Rows that the journal contains are not measured again.
    """
    return _Run(configuration, tell, journal or Journal()).record()


class _Run:
    def __init__(self, configuration: Configuration, tell: Callable[[str], object], journal: Journal) -> None:
        self.configuration, self.tell, self.journal, self.device = configuration, tell, journal, configuration.device
        self.start = time.perf_counter()
        self.planned, self.skipped = configuration.plan()

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    def record(self) -> Record:
        configuration, journal, interrupted = self.configuration, self.journal, False
        try:
            self._take_ceilings()
            for group in list(self.planned):
                if configuration.search and not records.may_gain(group, journal.found("row")):
                    del self.planned[group]
                elif (remaining := self._remaining(group)) and self.elapsed_s() <= configuration.time_budget_s:
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
            "machine": journal.header.get("machine") or describe(self.device),
            "ceilings": ceilings,
            "controls": controls,
            "busy": list(dict.fromkeys(reason for control in controls for reason in control["conditions"]["busy"])),
            "configuration": configuration.to_dict(),
            "correctness_rule": RULE,
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
        self.journal.add("ceilings", measure_ceilings(self.device, self.configuration.product_dtypes()))

    def _run_group(self, group: Group, candidates: Sequence[Candidate]) -> None:
        """Adds a row for every candidate; halves the batch for those that do not fit into memory."""
        try:
            with products_in(group.dtype_name):
                too_large = self._measure_group(group, candidates)
        finally:
            torch.compiler.reset()
            clock.free_memory(self.device)
        if too_large and group.batch_size == 1:
            self._refuse(group, too_large, "out of memory", "batch 1 does not fit into memory")
        elif too_large:
            half = dataclasses.replace(group, batch_size=group.batch_size // 2)
            self.tell(f"{group}: out of memory, retrying with batch {half.batch_size}")
            self._run_group(half, too_large)

    def _measure_group(self, group: Group, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Adds a row for every candidate; returns those that did not fit into memory."""
        latest_s, end_s = self._ends_s(group)
        self.tell(f"{group}: images and the fp64 reference")
        try:
            problem = make_problem(group, self.configuration.images)
        except Exception as error:  # e.g. a dtype that an operator does not support
            if is_out_of_memory(error):
                return list(candidates)
            self._refuse(group, candidates, "failed", f"reference: {describe_error(error)}")
            return []
        prepared: dict[str, Prepared] = {}
        too_large = []
        for candidate in candidates:
            self.tell(f"{group}: {candidate.name}")
            needed_s = self.configuration.preparing_s(group, [candidate]) if self.configuration.is_default else 0.0
            ahead_s = sum(ready.call_s for ready in prepared.values()) * FLOOR_LEAST_REPEATS
            is_late = self.elapsed_s() + ahead_s > self.configuration.time_budget_s
            begun = [*group.key, candidate.name]
            ready = None
            if missing := candidate.missing_packages():
                row = make_row(group, candidate, "not installed", f"pip install {' '.join(missing)}")
            elif is_late or self.elapsed_s() + needed_s > latest_s:
                row = make_row(group, candidate, "skipped", "out of time")
            elif self.journal.has_ended(*begun):
                row = make_row(group, candidate, "failed", "the process ended twice while preparing this candidate")
            else:
                self.journal.add("begun", begun)
                ready, row = prepare(candidate, group, problem, explained=self.configuration.explain)
            if ready is not None:
                prepared[candidate.name] = ready
                if self.configuration.cold:
                    row.update(cold_start(self.configuration.request, group, candidate.name))
                continue
            clock.free_memory(self.device)
            if row["status"] == "out of memory":
                too_large.append(candidate)
            else:
                self.journal.add("row", row)
        return too_large + self._time(group, prepared, end_s)

    def _time(self, group: Group, prepared: dict[str, Prepared], end_s: float) -> list[Candidate]:
        too_large: list[Candidate] = []
        # one image waits for the host to launch its kernels, as a request does
        launch: Any = "counted" if group.batch_size == 1 and group.model.data is not None else "hidden"
        protocol = dataclasses.replace(self.configuration.protocol, launch=launch)
        while prepared:
            self.tell(f"{group}: timing {len(prepared)} candidates, interleaved")
            conditions = Conditions(self.device)
            watch = Watch(prepared, protocol, self.configuration.is_default, lambda: self.elapsed_s() >= end_s)
            add = partial(self._add_timed, group, prepared, watch.best, conditions)
            try:
                with conditions.watch(), at_most(preparation.CANDIDATE_SECONDS) as watch.again:
                    timings = time_interleaved(watch.calls, self.device, protocol, on_round=watch)
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
            clock.free_memory(self.device)  # outside of the handler, in which the exception keeps tensors alive
        return too_large

    def _add_timed(
        self, group: Group, prepared: Mapping[str, Prepared], best: str, conditions: Conditions,
        timings: Mapping[str, Samples], otherwise: Status,
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


class Watch:
    """Decides after every round if the timing of a group goes on; see clock.time_interleaved.

    It ends when the protocol is satisfied, or late if there are enough repeats. If the group has its own share of the
    time (`allocated`), it goes on while noise prevents a ranking. The fastest candidate at full precision (`best`) is
    timed twice. `running` is the candidate that was called last; `again` is called after every round.
    """

    def __init__(
        self, prepared: Mapping[str, Prepared], protocol: clock.Protocol, allocated: bool, is_late: Callable[[], bool]
    ) -> None:
        self._protocol, self._allocated, self._is_late = protocol, allocated, is_late
        alike = [name for name, ready in prepared.items() if not records.is_lower(ready.row)] or list(prepared)
        self.best = min(alike, key=lambda name: prepared[name].call_s)
        self.calls = {name: partial(self._call, name, ready.call) for name, ready in prepared.items()}
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
        if is_done and self._allocated:
            is_done = number % ROUNDS_BETWEEN == 0
            is_done &= clock.control(samples[self.best], samples[AGAIN])["resolution"] <= clock.UNRANKABLE
        return () if is_done or (self._is_late() and len(self.timings()) == len(samples)) else list(samples)

    def timings(self) -> dict[str, Samples]:
        """Returns the timings of candidates with enough repeats."""
        return {
            name: taken
            for name, taken in self._samples.items()
            if len(taken) >= FLOOR_REPEATS or (len(taken) >= FLOOR_LEAST_REPEATS and sum(taken) >= FLOOR_MS)
        }

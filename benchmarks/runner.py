"""Runs a plan: builds each candidate, checks it, then times those that are right in turns. Gives the record.

Nothing that goes wrong with one candidate loses another: what is missing, refused, wrong, broken or too large becomes a
row that says so. Ctrl-C keeps what was measured, and a journal keeps it when the process is killed.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vit_fast.measure.clock import Call, Timing, time_interleaved
from vit_fast.measure.limits import at_most, describe_error, is_out_of_memory

from . import preparation
from .allocation import AGAIN, FLOOR_LEAST_REPEATS, Allocation, Listener, Planned, Watch
from .candidates import NamedCandidate
from .conditions import Conditions, joules_of
from .correctness import describe_rule
from .machine import best_ceilings, describe, measure_ceilings, products_in
from .plan import Plan
from .preparation import Posed, Prepared, TooLarge, cold_start, pose, prepare
from .records import FORMAT, Journal
from .rows import Group, Row, Status, add_timing, contest, finish, is_lower, make_control, make_row

GAIN = 1.03  # by which a batch must be better than all smaller ones for a search to go on


class Silent:
    """A listener that is not interested."""

    def start(self, steps: int) -> None: ...
    def now(self, what: str) -> None: ...
    def done(self, steps: float) -> None: ...
    def say(self, text: str) -> None: ...


def run(plan: Plan, listener: Listener | None = None, journal: Journal | None = None) -> dict[str, Any]:
    """Does what the plan says.

    Args:
        plan: See make_plan.
        listener: Told about progress; None means nobody.
        journal: Where rows are put down as they come; what it holds already is not measured again.
    Returns:
        The record: plain data for JSON, with machine, ceilings, controls, plan and one row for each selection of each
        group.
    """
    return _Run(plan, listener or Silent(), journal).record()


class _Findings:
    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        found = [] if journal is None else journal.entries
        self.rows, self.controls, self.ceilings, self.left_out = (
            [value for kind, value in found if kind == wanted] for wanted in ("row", "control", "ceilings", "left out")
        )
        begun = [
            tuple(a) for (kind, a), (after, _) in itertools.pairwise(found) if (kind, after) == ("begun", "resumed")
        ]
        self._ended = Counter(begun)

    def begin(self, group: Group, selection: NamedCandidate) -> None:
        """Puts down what is begun, in case it takes the process with it."""
        if self._journal is not None:
            self._journal.add("begun", [*group.contest, selection.label])

    def has_ended(self, group: Group, selection: NamedCandidate) -> bool:
        """True if the process ended twice while this was prepared; once may have been for another reason."""
        return self._ended[(*group.contest, selection.label)] > 1

    def add(self, kind: str, value: Row) -> None:
        """Puts a finding down; what only was not reached stays out of the journal."""
        found = {"row": self.rows, "control": self.controls, "ceilings": self.ceilings, "left out": self.left_out}
        found[kind].append(value)
        if self._journal is not None and value.get("status") not in ("skipped", "interrupted"):
            self._journal.add(kind, value)

    def left(self, group: Group, selections: Sequence[NamedCandidate]) -> list[NamedCandidate]:
        """Returns the candidates without a row in this group."""
        there = {row["subject"] for row in self.rows if contest(row) == group.contest}
        return [selection for selection in selections if selection.label not in there]


class _Run:
    def __init__(self, plan: Plan, listener: Listener, journal: Journal | None) -> None:
        self.plan, self.listener, self.journal = plan, listener, journal
        self.found = _Findings(journal)
        self.start = time.perf_counter()
        self.allocation = Allocation({group: plan.selections_of(group) for group in plan.groups()})
        self.preparing_s = self.assumed_s = 0.0

    def record(self) -> dict[str, Any]:
        plan = self.plan
        machine = describe(plan.device) if self.journal is None else self.journal.header["machine"]
        interrupted = False
        try:
            self._take_ceilings()
            planned = self._allocate()
            for group in list(planned):
                if self.plan.search and not _may_pay(group, self.found.rows):
                    del planned[group]
                elif left := self.found.left(group, planned[group]):
                    self._run_group(group, left)
                    self._take_ceilings()
        except KeyboardInterrupt:
            interrupted = True
            self.listener.say("interrupted: keeping what was measured")
        self._account_for_the_rest(self.allocation.planned, interrupted)
        self.found.rows.sort(key=functools.partial(_planned_place, self.allocation.planned))
        return _finished(plan, machine, self.found) | {
            "interrupted": interrupted,
            "left_out": self.allocation.left_out,
            "seconds": round(time.perf_counter() - self.start, 1),
        }

    def _allocate(self) -> Planned:
        plan, before = self.plan, self.found.left_out
        self.allocation = Allocation(
            {group: plan.selections_of(group) for group in plan.groups()},
            plan.time_budget_s,
            self.found.ceilings[-1],
            before[0]["labels"] if before else None if plan.is_default else (),
        )
        if not before:
            self.found.add("left out", {"labels": self.allocation.left_out})
        planned = self.allocation.planned
        steps = [2 * len(self.found.left(group, selections)) for group, selections in planned.items()]
        self.listener.start(sum(steps) + 1 + len(planned))
        return planned

    def _take_ceilings(self) -> None:
        """Measures the ceilings: before, between and after the groups, as the load of the machine changes."""
        self.listener.now("the machine's ceilings")
        self.found.add("ceilings", measure_ceilings(self.plan.device, self.plan.product_dtypes()))
        self.listener.done(1)

    def _run_group(self, group: Group, selections: Sequence[NamedCandidate]) -> None:
        try:
            with products_in(group.dtype_name):
                too_large = self._measure_group(group, selections)
        except TooLarge:
            too_large = list(selections)
        finally:
            _release_memory(self.plan.device)
        if not too_large:
            return
        names = ", ".join(selection.label for selection in too_large)
        if group.batch_size == 1:
            self.listener.say(f"{group}: out of memory: {names}")
            for selection in too_large:
                self.found.add("row", make_row(group, selection, "out of memory", "batch 1 does not fit"))
            return
        half = dataclasses.replace(group, batch_size=group.batch_size // 2)
        self.listener.say(f"{group}: out of memory, going on with batch {half.batch_size}: {names}")
        self._run_group(half, too_large)

    def _measure_group(self, group: Group, selections: Sequence[NamedCandidate]) -> list[NamedCandidate]:
        """Adds a row for every selection but those that did not fit, which are returned."""
        plan = self.plan
        start_s = self.elapsed_s()
        self.listener.now(f"{group}: images and the fp64 reference")
        try:
            posed = pose(group, plan.images, plan.device)
        except TooLarge:
            raise
        except Exception as error:  # eager itself cannot do this here, such as a dtype that an operator lacks
            self.listener.say(f"{group}: the definition FAILED: {describe_error(error)}")
            for selection in selections:
                self.found.add("row", make_row(group, selection, "failed", f"definition: {describe_error(error)}"))
            return []
        prepared: dict[str, Prepared] = {}
        too_large = []
        for selection in selections:
            self.listener.now(f"{group}: {selection.label}")
            try:
                ready = self._prepare(selection, group, posed, list(prepared.values()))
            except TooLarge:
                too_large.append(selection)
                ready = None
            if selection in too_large:
                _release_memory(plan.device, forget_compiled=False)
            if ready is not None:
                prepared[selection.label] = ready
            self.listener.done(1 if ready is not None else 2)  # 2: there is nothing to time
        self.preparing_s += self.elapsed_s() - start_s
        self.assumed_s += self.allocation.prepared_s(group.whole)
        too_large += self._time(group, prepared)
        return too_large

    def _prepare(
        self, selection: NamedCandidate, group: Group, posed: Posed, others: Sequence[Prepared]
    ) -> Prepared | None:
        if missing := selection.missing_packages():
            self.found.add("row", make_row(group, selection, "not installed", f"pip install {' '.join(missing)}"))
            return None
        if self._is_too_late(others):
            self.found.add("row", make_row(group, selection, "skipped", "the time budget is spent"))
            return None
        if self.found.has_ended(group, selection):
            reason = "the process ended while this was prepared, twice"
            self.found.add("row", make_row(group, selection, "failed", reason))
            return None
        self.found.begin(group, selection)
        ready, row = prepare(selection, group, posed, explained=self.plan.explain)
        if ready is not None and self.plan.cold:
            row.update(cold_start(self.plan.request, group, selection.label))
        if ready is None:
            self.found.add("row", row)
            if row["status"] in ("wrong", "failed"):
                self.listener.say(f"{group}: {selection.label} is {row['status'].upper()}: {row['reason'][:200]}")
        return ready

    def _time(self, group: Group, prepared: dict[str, Prepared]) -> list[NamedCandidate]:
        too_large: list[NamedCandidate] = []
        while prepared:
            self.listener.now(f"{group}: timing {len(prepared)} candidates, interleaved")
            running = ""

            def tracked(name: str, call: Call) -> Call:
                def run_it(number: int) -> object:
                    nonlocal running
                    running = name
                    return call(number)

                return run_it

            # of those that ratios are about: a runtime in fewer bits may be as unsteady as none of the others
            alike = [name for name, ready in prepared.items() if not is_lower(ready.row)] or list(prepared)
            best = min(alike, key=lambda name: prepared[name].call_s)
            end_s, conditions = self._end_of_timing_s(group), Conditions(self.plan.device)
            clock = self.elapsed_s, end_s, self.plan.is_default
            watch = Watch(self.plan.protocol, self.listener, *clock, prepared, best)
            add = functools.partial(_add_timed, self.found, self.plan.device, group, prepared, best)
            calls = {name: tracked(name, ready.call) for name, ready in prepared.items()}
            calls[AGAIN] = tracked(best, prepared[best].call)
            try:
                with conditions.watch(), at_most(preparation.CANDIDATE_SECONDS) as watch.again:
                    protocol = dataclasses.replace(self.plan.protocol, launch=group.launch)
                    timings = time_interleaved(calls, self.plan.device, protocol, on_round=watch)
            except KeyboardInterrupt:
                _add_timed(
                    self.found, self.plan.device, group, prepared, best, watch.timings(), conditions, "interrupted"
                )
                raise
            except Exception as error:
                broken = prepared.pop(running)
                if is_out_of_memory(error):
                    too_large.append(broken.selection)
                else:
                    broken.row.update(status="failed", reason=f"while it was timed: {describe_error(error)}")
                    self.found.add("row", broken.row)
            else:
                add(timings, conditions, "skipped")
                break
            # Not inside the handler, where the exception still holds the frames and their tensors.
            _release_memory(self.plan.device, forget_compiled=False)
        return too_large

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    def _is_too_late(self, others: Sequence[Prepared]) -> bool:
        """True if the time is spent, with the timing of those prepared before; a compilation may exceed it."""
        ahead = sum(other.call_s for other in others) * FLOOR_LEAST_REPEATS
        return self.elapsed_s() + ahead > self.plan.time_budget_s

    def _end_of_timing_s(self, group: Group) -> float:
        if not self.plan.is_default:
            return self.plan.time_budget_s
        slowness = max(1.0, self.preparing_s / self.assumed_s)
        return self.allocation.end_of_timing_s(group.whole, self.elapsed_s(), slowness)

    def _account_for_the_rest(self, planned: Planned, interrupted: bool) -> None:
        for group, selections in planned.items():
            for selection in self.found.left(group, selections):
                status: Status = "interrupted" if interrupted else "skipped"
                self.found.add("row", make_row(group, selection, status, "not reached"))


def _add_timed(
    found: _Findings, device: torch.device, group: Group, prepared: Mapping[str, Prepared], best: str,
    timings: Mapping[str, Timing], conditions: Conditions, otherwise: Status,
) -> None:  # fmt: skip
    if best in timings and AGAIN in timings:
        found.add("control", make_control(group, best, timings[best], timings[AGAIN], conditions.summary()))
    for name, ready in prepared.items():
        if name in timings:
            add_timing(ready.row, timings[name], group)
            whole = group.model.data is not None
            if whole and (joules := joules_of(ready.call, timings[name].ms, device)) is not None:
                ready.row["J_per_image"] = joules / group.batch_size
        else:
            ready.row.update(status=otherwise, reason="before there were enough repeats")
        found.add("row", ready.row)


def _finished(plan: Plan, machine: dict[str, Any], found: _Findings) -> dict[str, Any]:
    from vit_fast import __version__

    ceilings = best_ceilings(found.ceilings)
    finish(found.rows, ceilings, found.controls)
    busy = dict.fromkeys(reason for control in found.controls for reason in control["conditions"]["busy"])
    return {
        "format": FORMAT,
        "vit_fast": __version__,
        "machine": machine,
        "ceilings": ceilings,
        "controls": found.controls,
        "busy": list(busy),
        "plan": plan.to_dict(),
        "correctness_rule": describe_rule(),
        "rows": found.rows,
    }


def _may_pay(group: Group, rows: Sequence[Row]) -> bool:
    """True if the previous batch size of a search had a higher throughput for any candidate than all before it."""
    rates: dict[str, list[float]] = {}
    for row in rows:
        if (row["model"], row["dtype"], *row["img_size"]) == (group.model.name, group.dtype_name, *group.sizes):
            whole = row["batch"] == row["requested_batch"]
            rates.setdefault(row["subject"], []).append((row["images_per_s"] or 0.0) if whole else 0.0)
    most = max(map(len, rates.values()), default=0)
    tried = [found for found in rates.values() if len(found) == most]
    return most < 2 or any(found[-1] > GAIN * max(found[:-1]) for found in tried)


def _planned_place(planned: Planned, row: Row) -> tuple[int, int]:
    number = [group.contest for group in planned].index(contest(row))
    return number, [selection.label for selection in [*planned.values()][number]].index(row["subject"])


def _release_memory(device: torch.device, forget_compiled: bool = True) -> None:
    if forget_compiled:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

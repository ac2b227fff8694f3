"""Runs a plan: builds each subject, checks it, then times those that are right in turns. Gives the record.

Nothing that goes wrong with one subject loses another: what is missing, refused, wrong, broken or too large becomes a
row that says so. Ctrl-C keeps what was measured, and a journal keeps it when the process is killed.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from vit_fast.measuring.limits import at_most, describe_error, is_out_of_memory
from vit_fast.measuring.timing import Call, Samples, Timing, time_interleaved

from . import preparation
from .cold import cold_start
from .conditions import Conditions, joules_of
from .correctness import describe_rule
from .machine import best_ceilings, describe, measure_ceilings, products_in
from .plan import Plan
from .preparation import Posed, Prepared, TooLarge, pose, prepare
from .records import FORMAT, Journal
from .rows import Group, Row, Status, add_timing, contest, finish, is_lower, make_control, make_row
from .subjects import Selection

# Under this name the best call of a group, at its full precision, is timed a second time.
AGAIN = "again"
# A measurement cut short, by Ctrl-C or the time budget, still counts when it reaches MEASURE's floor.
GAIN = 1.03  # by which a batch must be better than all smaller ones for a search to go on
FLOOR_REPEATS, FLOOR_MS, FLOOR_LEAST_REPEATS = 50, 200.0, 3


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
    """What a run has found, here and in its journal; with a journal of before, also what was found then."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        found = [] if journal is None else journal.entries
        self.rows, self.controls, self.ceilings = (
            [value for kind, value in found if kind == wanted] for wanted in ("row", "control", "ceilings")
        )
        begun = [
            tuple(a) for (kind, a), (after, _) in itertools.pairwise(found) if (kind, after) == ("begun", "resumed")
        ]
        self._ended = Counter(begun)

    def begin(self, group: Group, selection: Selection) -> None:
        """Puts down what is begun, in case it takes the process with it."""
        if self._journal is not None:
            self._journal.add("begun", [*group.contest, selection.label])

    def has_ended(self, group: Group, selection: Selection) -> bool:
        """Whether the process ended twice while this was prepared; once may have been for another reason."""
        return self._ended[(*group.contest, selection.label)] > 1

    def add(self, kind: str, value: Row) -> None:
        """Puts a finding down; what only was not reached stays out of the journal."""
        {"row": self.rows, "control": self.controls, "ceilings": self.ceilings}[kind].append(value)
        if self._journal is not None and value.get("status") not in ("skipped", "interrupted"):
            self._journal.add(kind, value)

    def left(self, group: Group, selections: Sequence[Selection]) -> list[Selection]:
        """Those without a row in this group."""
        there = {row["subject"] for row in self.rows if contest(row) == group.contest}
        return [selection for selection in selections if selection.label not in there]


class _Run:
    def __init__(self, plan: Plan, listener: Listener, journal: Journal | None) -> None:
        self.plan, self.listener, self.journal = plan, listener, journal
        self.found = _Findings(journal)
        self.start = time.perf_counter()
        self.group_deadline_s = plan.time_budget_s

    def record(self) -> dict[str, Any]:
        plan = self.plan
        machine = describe(plan.device) if self.journal is None else self.journal.header["machine"]
        groups = plan.groups()
        left = {group: self.found.left(group, plan.selections[group.model.kind]) for group in groups}
        self.listener.start(2 * sum(map(len, left.values())) + 1 + len(groups))
        interrupted = False
        try:
            self._take_ceilings()
            for number, group in enumerate(list(groups)):
                if self.plan.search and not _may_pay(group, self.found.rows):
                    groups.remove(group)
                    continue
                self._give_share(len(groups) - number)
                if left[group]:
                    self._run_group(group, left[group])
                self._take_ceilings()
        except KeyboardInterrupt:
            interrupted = True
            self.listener.say("interrupted: keeping what was measured")
        self._account_for_the_rest(groups, interrupted)
        self.found.rows.sort(key=functools.partial(_planned_place, plan))
        return _finished(plan, machine, self.found) | {
            "interrupted": interrupted,
            "seconds": round(time.perf_counter() - self.start, 1),
        }

    def _take_ceilings(self) -> None:
        """Before, between and after the groups, as what else runs on the machine comes and goes."""
        self.listener.now("the machine's ceilings")
        self.found.add("ceilings", measure_ceilings(self.plan.device, self.plan.product_dtypes()))
        self.listener.done(1)

    def _run_group(self, group: Group, selections: Sequence[Selection]) -> None:
        """Prepares, checks and times; what did not fit is done again with half of the batch."""
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

    def _measure_group(self, group: Group, selections: Sequence[Selection]) -> list[Selection]:
        """Adds a row for every selection but those that did not fit, which are returned."""
        plan = self.plan
        self.listener.now(f"{group}: images and the fp64 definition")
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
        too_large += self._time(group, prepared)
        return too_large

    def _prepare(self, selection: Selection, group: Group, posed: Posed, others: Sequence[Prepared]) -> Prepared | None:
        """Builds, compiles and checks a subject; a row that says why when there is nothing to time."""
        subject = selection.subject
        if missing := subject.missing_packages():
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

    def _time(self, group: Group, prepared: dict[str, Prepared]) -> list[Selection]:
        """Times the prepared subjects in turns and adds their rows; returns those that ran out of memory now."""
        too_large: list[Selection] = []
        while prepared:
            self.listener.now(f"{group}: timing {len(prepared)} subjects in turns")
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
            watch, conditions = _Watch(self, len(prepared)), Conditions(self.plan.device)
            calls = {name: tracked(name, ready.call) for name, ready in prepared.items()}
            calls[AGAIN] = tracked(best, prepared[best].call)
            try:
                with conditions.watch(), at_most(preparation.SUBJECT_SECONDS) as watch.again:
                    protocol = dataclasses.replace(self.plan.protocol, launch=group.launch)
                    timings = time_interleaved(calls, self.plan.device, protocol, on_round=watch)
            except KeyboardInterrupt:
                self._add_timed(group, prepared, best, watch.timings(), conditions, "interrupted")
                raise
            except Exception as error:
                broken = prepared.pop(running)
                if is_out_of_memory(error):
                    too_large.append(broken.selection)
                else:
                    broken.row.update(status="failed", reason=f"while it was timed: {describe_error(error)}")
                    self.found.add("row", broken.row)
            else:
                self._add_timed(group, prepared, best, timings, conditions, "skipped")
                break
            # Not inside the handler, where the exception still holds the frames and their tensors.
            _release_memory(self.plan.device, forget_compiled=False)
        return too_large

    def _add_timed(
        self, group: Group, prepared: Mapping[str, Prepared], best: str, timings: Mapping[str, Timing],
        conditions: Conditions, otherwise: Status,
    ) -> None:  # fmt: skip
        if best in timings and AGAIN in timings:
            self.found.add("control", make_control(group, best, timings[best], timings[AGAIN], conditions.summary()))
        for name, ready in prepared.items():
            if name in timings:
                add_timing(ready.row, timings[name], group)
                whole = group.model.data is not None
                if whole and (joules := joules_of(ready.call, timings[name].ms, self.plan.device)) is not None:
                    ready.row["J_per_image"] = joules / group.batch_size
            else:
                ready.row.update(status=otherwise, reason="before there were enough repeats")
            self.found.add("row", ready.row)

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    def _give_share(self, groups_left: int) -> None:
        """Gives the next group twice as much of the time that is left as each of those after it."""
        left_s = self.plan.time_budget_s - self.elapsed_s()
        self.group_deadline_s = self.elapsed_s() + left_s * 2 / (groups_left + 1)

    def _is_too_late(self, others: Sequence[Prepared]) -> bool:
        """Whether the group's time is spent, with the timing of those prepared before; a compilation may exceed it."""
        ahead = sum(other.call_s for other in others) * FLOOR_LEAST_REPEATS
        return self.elapsed_s() + ahead > self.group_deadline_s

    def _account_for_the_rest(self, groups: Sequence[Group], interrupted: bool) -> None:
        """A row for everything that was planned and never came to be."""
        for group in groups:
            for selection in self.found.left(group, self.plan.selections[group.model.kind]):
                status: Status = "interrupted" if interrupted else "skipped"
                self.found.add("row", make_row(group, selection, status, "not reached"))


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


class _Watch:
    """Follows a timing round by round: progress, the time budget, and the samples should they be needed early."""

    def __init__(self, owner: _Run, subjects: int) -> None:
        self.owner, self.subjects = owner, subjects
        self.samples: Mapping[str, Samples] = {}
        self.again: Callable[[], None] = lambda: None
        self.told = 0.0

    def __call__(self, number: int, samples: Mapping[str, Samples]) -> bool:
        self.samples = samples
        self.again()
        share = min(map(self.owner.plan.protocol.share_of, samples.values())) * self.subjects
        self.owner.listener.done(share - self.told)
        self.told = share
        late = self.owner.elapsed_s() > self.owner.plan.time_budget_s
        return not (late and len(self.timings()) == len(samples))

    def timings(self) -> dict[str, Timing]:
        """Of the subjects that have reached the floor."""
        return {
            name: taken.timing()
            for name, taken in self.samples.items()
            if len(taken) >= FLOOR_REPEATS or (len(taken) >= FLOOR_LEAST_REPEATS and sum(taken) >= FLOOR_MS)
        }


def _may_pay(group: Group, rows: Sequence[Row]) -> bool:
    """In a search, whether the batch before this one gave any subject more images a second than all before it."""
    rates: dict[str, list[float]] = {}
    for row in rows:
        if (row["model"], row["dtype"], *row["img_size"]) == (group.model.name, group.dtype_name, *group.sizes):
            whole = row["batch"] == row["requested_batch"]
            rates.setdefault(row["subject"], []).append((row["images_per_s"] or 0.0) if whole else 0.0)
    most = max(map(len, rates.values()), default=0)
    tried = [found for found in rates.values() if len(found) == most]
    return most < 2 or any(found[-1] > GAIN * max(found[:-1]) for found in tried)


def _planned_place(plan: Plan, row: Row) -> tuple[int, int]:
    groups = plan.groups()
    number = [group.contest for group in groups].index(contest(row))
    selections = plan.selections[groups[number].model.kind]
    return number, [selection.label for selection in selections].index(row["subject"])


def _release_memory(device: torch.device, forget_compiled: bool = True) -> None:
    if forget_compiled:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

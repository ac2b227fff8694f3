"""Runs a plan: builds each subject, checks it, then times those that are right in turns. Gives the record.

Nothing that goes wrong with one subject loses another: what is missing, refused, wrong, broken or too large becomes a
row that says so. Ctrl-C keeps what was measured.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import UnsupportedInputError
from ..variants import get_variant
from .correctness import Expected, Verdict, describe_rule, expect, judge
from .inputs import MAX_VIEWS, image_views, random_weights, rotating_batches, rounded
from .machine import describe, measure_ceilings, short_name
from .plan import Plan
from .rows import Group, Row, Status, add_ratios, add_timing, add_verdict, make_row
from .subjects import Selection, Task, compile_selection
from .timing import Call, Timing, peak_memory_of_call, synchronise, time_interleaved

FORMAT = "vit-fast-bench/1"

# A measurement cut short, by Ctrl-C or the time budget, still counts when it reaches MEASURE's floor.
FLOOR_REPEATS, FLOOR_MS, FLOOR_LEAST_REPEATS = 50, 200.0, 3

GRAPH_MODES = ("reduce-overhead", "max-autotune")


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


@dataclass
class _Prepared:
    """A subject that was built, gave the right outputs, and is warm."""

    selection: Selection
    call: Call
    row: Row
    call_s: float


class _TooLarge(Exception):
    """A subject, or the inputs themselves, did not fit into memory."""


def run(plan: Plan, listener: Listener | None = None) -> dict[str, Any]:
    """Does what the plan says.

    Args:
        plan: See make_plan.
        listener: Told about progress; None means nobody.
    Returns:
        The record: plain data for JSON, with machine, ceilings, plan and one row for each selection of each group.
    """
    return _Run(plan, Silent() if listener is None else listener).record()


class _Run:
    def __init__(self, plan: Plan, listener: Listener) -> None:
        self.plan, self.listener = plan, listener
        self.rows: list[Row] = []
        self.start = time.perf_counter()
        self.longest_compilation_s = 0.0
        self.group_deadline_s = plan.time_budget_s
        self.ceilings: dict[str, Any] = {}

    def record(self) -> dict[str, Any]:
        from .. import __version__

        plan = self.plan
        machine = describe(plan.device)
        groups = _groups(plan)
        self.listener.start(2 * len(groups) * len(plan.selections) + 1)
        interrupted = False
        try:
            self.listener.now("the machine's ceilings")
            self.ceilings = measure_ceilings(plan.device, plan.dtypes)
            self.listener.done(1)
            for number, group in enumerate(groups):
                self._give_share(len(groups) - number)
                self._run_group(group, plan.selections)
        except KeyboardInterrupt:
            interrupted = True
            self.listener.say("interrupted: keeping what was measured")
        self._account_for_the_rest(groups, interrupted)
        add_ratios(self.rows)
        return {
            "format": FORMAT,
            "vit_fast": __version__,
            "machine": machine,
            "ceilings": self.ceilings,
            "plan": plan.to_dict(),
            "correctness_rule": describe_rule(),
            "interrupted": interrupted,
            "seconds": round(time.perf_counter() - self.start, 1),
            "rows": self.rows,
        }

    def _run_group(self, group: Group, selections: Sequence[Selection]) -> None:
        """Prepares, checks and times; what did not fit is done again with half of the batch."""
        too_large: list[Selection] = []
        try:
            too_large = self._measure_group(group, selections)
        except _TooLarge:
            too_large = list(selections)
        finally:
            _release_memory(self.plan.device)
        if not too_large:
            return
        names = ", ".join(selection.label for selection in too_large)
        if group.batch_size == 1:
            self.listener.say(f"{group}: out of memory: {names}")
            self.rows += [make_row(group, s, "out of memory", "batch 1 does not fit") for s in too_large]
            return
        half = Group(group.model, group.config, group.dtype, group.batch_size // 2, group.requested_batch_size)
        self.listener.say(f"{group}: out of memory, going on with batch {half.batch_size}: {names}")
        self._run_group(half, too_large)

    def _measure_group(self, group: Group, selections: Sequence[Selection]) -> list[Selection]:
        """Adds a row for every selection but those that did not fit, which are returned."""
        plan, variant = self.plan, get_variant(group.model)
        self.listener.now(f"{group}: images and the fp64 definition")
        weights = rounded(random_weights(group.config), group.dtype)
        task = Task(group.model, group.config, variant.data, weights, group.dtype, plan.device, group.batch_size)
        views = image_views(plan.images, variant.data, group.config, max(8, min(group.batch_size, MAX_VIEWS)))
        batches, expected = _or_too_large(lambda: _inputs(task, views))
        prepared: dict[str, _Prepared] = {}
        too_large = []
        for selection in selections:
            self.listener.now(f"{group}: {selection.label}")
            try:
                ready = self._prepare(selection, group, task, batches, expected, list(prepared.values()))
            except _TooLarge:
                too_large.append(selection)
                continue
            finally:
                self.listener.done(1)
            if ready is None:
                self.listener.done(1)  # there is nothing to time
            else:
                prepared[selection.label] = ready
        too_large += self._time(group, prepared)
        return too_large

    def _prepare(
        self,
        selection: Selection,
        group: Group,
        task: Task,
        batches: list[Tensor],
        expected: Expected,
        others: Sequence[_Prepared],
    ) -> _Prepared | None:
        """Builds, compiles and checks a subject; a row that says why when there is nothing to time."""
        subject = selection.subject
        if missing := subject.missing_packages():
            self.rows.append(make_row(group, selection, "not installed", f"pip install {' '.join(missing)}"))
            return None
        if self._is_too_late(selection, others):
            self.rows.append(make_row(group, selection, "skipped", "the time budget is spent"))
            return None
        try:
            return self._build_and_check(selection, group, task, batches, expected)
        except UnsupportedInputError as error:
            row = make_row(group, selection, "unsupported", f"{error.what}: {'; '.join(error.reasons)}")
        except Exception as error:  # a subject may fail in any way it likes; the others are measured all the same
            if _is_out_of_memory(error):
                raise _TooLarge from error
            text = " ".join(str(error).split())
            if "No available kernel" in text or "No viable backend" in text:
                row = make_row(group, selection, "unsupported", "torch has no such attention kernel here")
            else:
                row = make_row(group, selection, "failed", f"{type(error).__name__}: {text}"[:500])
                self.listener.say(f"{group}: {selection.label} failed: {row['reason'][:200]}")
        self.rows.append(row)
        return None

    def _build_and_check(
        self, selection: Selection, group: Group, task: Task, batches: list[Tensor], expected: Expected
    ) -> _Prepared | None:
        device, subject = self.plan.device, selection.subject
        before = _allocated(device)
        function = subject.build(task)
        compiled = compile_selection(selection, function)

        def call(number: int) -> Tensor:
            with torch.inference_mode(), subject.context():
                if selection.mode in GRAPH_MODES:
                    # Without this, calls of several graphed models in turn would be recorded as one long iteration.
                    torch.compiler.cudagraph_mark_step_begin()
                return compiled(batches[number % len(batches)])

        start = time.perf_counter()
        call(0)
        synchronise(device)
        first_call_s = time.perf_counter() - start
        # A CUDA graph replays from its third call on: this one is checked, after another batch went through.
        call(1)
        start = time.perf_counter()
        outputs = call(0)
        synchronise(device)
        call_s = time.perf_counter() - start
        if selection.mode != "none":
            self.longest_compilation_s = max(self.longest_compilation_s, first_call_s)
        verdict = judge(subject, task, expected, outputs)
        del outputs
        row = make_row(group, selection, "measured" if verdict.passed else "wrong", verdict.reason)
        add_verdict(row, verdict)
        row["first_call_s"] = round(first_call_s, 3)
        if not verdict.passed:
            self._refuse_speed(group, selection, verdict)
            self.rows.append(row)
            return None
        resident = _allocated(device) - before if device.type == "cuda" else _parameter_bytes(function)
        if resident is not None:
            row["peak_MiB"] = round((resident + peak_memory_of_call(lambda: call(1), device)) / 2**20, 1)
        return _Prepared(selection, call, row, call_s)

    def _refuse_speed(self, group: Group, selection: Selection, verdict: Verdict) -> None:
        self.listener.say(f"{group}: {selection.label} is WRONG, its speed is not measured: {verdict.reason}")

    def _time(self, group: Group, prepared: dict[str, _Prepared]) -> list[Selection]:
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

            watch = _Watch(self, len(prepared))
            calls = {name: tracked(name, ready.call) for name, ready in prepared.items()}
            try:
                timings = time_interleaved(calls, self.plan.device, self.plan.protocol, on_round=watch)
            except KeyboardInterrupt:
                self._add_timed(group, prepared, watch.timings(), "interrupted")
                raise
            except Exception as error:
                if not _is_out_of_memory(error):
                    raise
                too_large.append(prepared.pop(running).selection)
                _release_memory(self.plan.device, forget_compiled=False)
                continue
            self._add_timed(group, prepared, timings, "skipped")
            break
        return too_large

    def _add_timed(
        self, group: Group, prepared: Mapping[str, _Prepared], timings: Mapping[str, Timing], otherwise: Status
    ) -> None:
        for name, ready in prepared.items():
            if name in timings:
                add_timing(ready.row, timings[name], group, self.ceilings)
            else:
                ready.row.update(status=otherwise, reason="before there were enough repeats")
            self.rows.append(ready.row)

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    def _give_share(self, groups_left: int) -> None:
        """Lets the next group spend time on autotuning, which takes minutes, but leave some for the groups after it."""
        left_s = self.plan.time_budget_s - self.elapsed_s()
        self.group_deadline_s = self.elapsed_s() + left_s * 2 / (groups_left + 1)

    def _is_too_late(self, selection: Selection, others: Sequence[_Prepared]) -> bool:
        """Whether this selection, with the timing of those prepared before it, would end after its time is spent."""
        deadline_s = self.group_deadline_s if selection.mode == "max-autotune" else self.plan.time_budget_s
        ahead = sum(other.call_s for other in others) * self.plan.protocol.least_repeats
        if selection.mode != "none":
            ahead += self.longest_compilation_s
        return self.elapsed_s() + ahead > deadline_s

    def _account_for_the_rest(self, groups: Sequence[Group], interrupted: bool) -> None:
        """A row for everything that was planned and never came to be."""
        for group in groups:
            there = {
                row["subject"]
                for row in self.rows
                if (row["model"], row["dtype"], row["requested_batch"])
                == (group.model, short_name(group.dtype), group.batch_size)
            }
            for selection in self.plan.selections:
                if selection.label not in there:
                    status: Status = "interrupted" if interrupted else "skipped"
                    self.rows.append(make_row(group, selection, status, "not reached"))


class _Watch:
    """Follows a timing round by round: progress, the time budget, and the samples should they be needed early."""

    def __init__(self, owner: _Run, subjects: int) -> None:
        self.owner, self.subjects = owner, subjects
        self.samples: Mapping[str, Sequence[float]] = {}
        self.told = 0.0

    def __call__(self, number: int, samples: Mapping[str, Sequence[float]]) -> bool:
        self.samples = samples
        protocol = self.owner.plan.protocol
        slowest = min(
            max(
                len(taken) / protocol.repeats,
                min(len(taken) / protocol.least_repeats, sum(taken) / 1e3 / max(protocol.seconds, 1e-9)),
            )
            for taken in samples.values()
        )
        share = min(slowest, 1.0) * self.subjects
        self.owner.listener.done(share - self.told)
        self.told = share
        late = self.owner.elapsed_s() > self.owner.plan.time_budget_s
        return not (late and len(self.timings()) == len(samples))

    def timings(self) -> dict[str, Timing]:
        """Of the subjects that have reached the floor."""
        return {
            name: Timing.from_samples(taken)
            for name, taken in self.samples.items()
            if len(taken) >= FLOOR_REPEATS or (len(taken) >= FLOOR_LEAST_REPEATS and sum(taken) >= FLOOR_MS)
        }


def _groups(plan: Plan) -> list[Group]:
    return [
        Group(model, get_variant(model).config, dtype, batch_size, batch_size)
        for model in plan.models
        for dtype in plan.dtypes
        for batch_size in plan.batch_sizes
    ]


def _inputs(task: Task, views: Tensor) -> tuple[list[Tensor], Expected]:
    batches = rotating_batches(views, task.batch_size, task.dtype, task.device)
    return batches, expect(task, batches[0], views)


def _or_too_large(make: Callable[[], tuple[list[Tensor], Expected]]) -> tuple[list[Tensor], Expected]:
    try:
        return make()
    except Exception as error:
        if _is_out_of_memory(error):
            raise _TooLarge from error
        raise


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, also where a compiler or a runtime wrapped the exception in its own."""
    while error is not None:
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
            return True
        if "CUDA out of memory" in text or "CUDA error: out of memory" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def _allocated(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def _parameter_bytes(function: object) -> int | None:
    if not isinstance(function, nn.Module):
        return None
    return sum(t.numel() * t.element_size() for t in [*function.parameters(), *function.buffers()])


def _release_memory(device: torch.device, forget_compiled: bool = True) -> None:
    if forget_compiled:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

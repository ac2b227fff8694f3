"""Before a subject is timed: it is built, compiled, called, and held against what is expected."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vit_fast.errors import UnsupportedInputError
from vit_fast.measuring.limits import at_most, describe_error, is_out_of_memory
from vit_fast.measuring.timing import Call, peak_memory_of_call, synchronise

from .correctness import MAX_CHECKED_IMAGES, Expected, checked_rows, expect, judge, stepper
from .explain import explain
from .inputs import MAX_VIEWS, image_views, rotating_batches, weights_of
from .rows import Group, Row, Status, add_verdict, make_row
from .subjects import Selection, Task, compile_selection

# For building, compiling and checking one subject, and for one round of timing; autotuning takes minutes.
SUBJECT_SECONDS = 900.0
Result = TypeVar("Result")
GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class Posed:
    """What all subjects of a group are asked: the task, batches where its data is, what the first must give."""

    task: Task
    batches: list[Tensor]
    expected: Expected


def pose(group: Group, images: Sequence[Path], device: torch.device) -> Posed:
    """Makes weights, batches and the definition's answer.

    Raises:
        TooLarge: memory ran out.
        Exception: the definition cannot do this, such as a dtype that an operator lacks.
    """
    with out_of_memory_is_too_large():
        task, batches = ask(group, images, device)
        # so many that agreement is of as many images as of a large batch
        few = math.ceil(MAX_CHECKED_IMAGES / task.batch_size) if task.whole and not task.training else 1
        return Posed(task, batches, expect(task, *(batch.to(device) for batch in batches[:few])))


def ask(group: Group, images: Sequence[Path], device: torch.device) -> tuple[Task, list[Tensor]]:
    """A group's task, and its batches in turns: on the device, or pinned on the host, where no copy is waited for."""
    weights = weights_of(group.model, group.dtype)
    task = Task(group.model, weights, group.dtype, device, group.batch_size, group.training, group.dtype_name == "amp")
    views = image_views(images, group.model, max(8, min(group.batch_size, MAX_VIEWS)))
    host = group.data == "host"
    batches = rotating_batches(views, task.batch_size, task.dtype, torch.device("cpu") if host else device)
    return task, [batch.pin_memory() for batch in batches] if host else batches


@dataclass
class Prepared:
    """A subject that was built, gave the right outputs, and is warm.

    Attributes:
        selection: The subject in its compile mode.
        call: Computes the batch of this number.
        row: Its row so far, without figures.
        call_s: How long a call takes, roughly.
    """

    selection: Selection
    call: Call
    row: Row
    call_s: float


class TooLarge(Exception):
    """A subject, or the inputs themselves, did not fit into memory."""


def prepare(
    selection: Selection, group: Group, posed: Posed, *, explained: bool = False
) -> tuple[Prepared | None, Row]:
    """Builds a subject, checks it, and profiles it where it is to be explained, too.

    Returns:
        What can be timed, or None, and the row; without anything to time, the row says why.
    Raises:
        TooLarge: memory ran out.
    """

    def build_and_explain() -> tuple[Prepared | None, Row]:
        ready, row = _build_and_check(selection, group, posed)
        if ready is not None and explained:
            row["explained"] = explain(ready.call, posed.task.device, group)
        return ready, row

    found, why_not = _attempt(selection, group, build_and_explain)
    return found or (None, why_not)


def _attempt(selection: Selection, group: Group, action: Callable[[], Result]) -> tuple[Result | None, Row]:
    """What an action gives; or None, and the row that says why: a subject may fail in any way it likes.

    Raises:
        TooLarge: memory ran out.
    """
    status: Status = "failed"
    try:
        with out_of_memory_is_too_large(), at_most(SUBJECT_SECONDS):
            return action(), {}
    except TooLarge:
        raise
    except UnsupportedInputError as error:
        status, reason = "unsupported", f"{error.what}: {'; '.join(error.reasons)}"
    except Exception as error:
        reason = describe_error(error)
        if any(sign in reason for sign in ("No available kernel", "No viable backend")):
            status, reason = "unsupported", "torch has no such attention kernel here"
    return None, make_row(group, selection, status, reason)


def _build_and_check(selection: Selection, group: Group, posed: Posed) -> tuple[Prepared | None, Row]:
    task, expected, device = posed.task, posed.expected, posed.task.device
    before = _allocated(device)
    start = time.perf_counter()
    function, call, check = _callers(selection, task, posed.batches)
    build_s = time.perf_counter() - start
    first: list[object] = []
    first_call_s = _seconds(lambda: first.append(check()), device)
    # A CUDA graph replays from its third call on: in inference that one is checked, after another batch went through.
    call(1)
    last: list[object] = []
    call_s = _seconds(lambda: last.append(call(0)), device)
    verdict = judge(selection.subject, task, expected, (first if task.training else last).pop())
    row = make_row(group, selection, "measured" if verdict.passed else "wrong", verdict.reason)
    if verdict.agreement is not None and expected.classes:
        shares = [_share_alike(call(place), best) for place, best in enumerate(expected.classes, 1)]
        verdict = dataclasses.replace(verdict, agreement=statistics.fmean([verdict.agreement, *shares]))
    add_verdict(row, verdict)
    row.update(build_s=round(build_s, 3), first_call_s=round(first_call_s, 3))
    if not verdict.passed:
        return None, row
    resident = _allocated(device) - before if device.type == "cuda" else _parameter_bytes(function)
    if resident is not None:
        row["peak_MiB"] = round((resident + peak_memory_of_call(lambda: call(1), device)) / 2**20, 1)
    return Prepared(selection, call, row, call_s), row


def _share_alike(outputs: Any, classes: Tensor) -> float:
    return float((outputs.argmax(-1) == classes).double().mean())


def first_answer(selection: Selection, group: Group, images: Sequence[Path], device: torch.device) -> Row:
    """Builds a subject before anything else, and checks its first answer: when that was, or status and reason."""

    def answer() -> Row:
        if missing := selection.subject.missing_packages():
            raise UnsupportedInputError(selection.label, [f"not installed: {' '.join(missing)}"])
        task, batches = ask(group, images, device)
        _, _, check = _callers(selection, task, batches)
        outputs = [check()]
        synchronise(device)
        answered = time.monotonic()
        verdict = judge(selection.subject, task, expect(task, batches[0].to(device)), outputs.pop())
        return {"answered": answered} if verdict.passed else {"status": "wrong", "reason": verdict.reason}

    found, why_not = _attempt(selection, group, answer)
    return found or {name: why_not[name] for name in ("status", "reason")}


def _callers(selection: Selection, task: Task, batches: list[Tensor]) -> tuple[object, Call, Callable[[], object]]:
    """A subject as it was built, as a call on the batch of a number, and what it gives that is checked."""
    function = selection.subject.make(task)
    compiled = compile_selection(selection, function)
    if task.training:
        if not isinstance(function, nn.Module):
            raise UnsupportedInputError(selection.label, ["only modules of torch are trained"])
        step = stepper(task, function, compiled)

    def call(number: int) -> object:
        batch = batches[number % len(batches)].to(task.device, non_blocking=True)  # itself where it lies there
        with torch.inference_mode(not task.training), selection.subject.context():
            if task.training:
                return step(batch)
            if selection.mode in GRAPH_MODES:
                # Without this, calls of several graphed models in turn would be recorded as one long iteration.
                torch.compiler.cudagraph_mark_step_begin()
            return compiled(batch)

    def check() -> object:
        if not task.training:
            return call(0)
        with selection.subject.context():
            return step.gradients(batches[0].to(task.device), checked_rows(task), range(len(batches[0])))

    return function, call, check


@contextlib.contextmanager
def out_of_memory_is_too_large() -> Iterator[None]:
    """Turns whatever a library raises when memory runs out into TooLarge; other exceptions go through."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise TooLarge from error
        raise


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    action()
    synchronise(device)
    return time.perf_counter() - start


def _allocated(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def _parameter_bytes(function: object) -> int | None:
    if not isinstance(function, nn.Module):
        return None
    return sum(t.numel() * t.element_size() for t in [*function.parameters(), *function.buffers()])

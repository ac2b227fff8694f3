"""Before a subject is timed: it is built, compiled, called, and held against what is expected."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor, nn

from vit_fast.errors import UnsupportedInputError

from .correctness import Expected, judge
from .explain import explain
from .rows import Group, Row, add_verdict, make_row
from .subjects import Selection, Task, compile_selection
from .timing import Call, peak_memory_of_call, synchronise
from .training import TrainingStep

# For building, compiling and checking one subject, and for one round of timing; autotuning takes minutes.
SUBJECT_SECONDS = 900.0
GRAPH_MODES = ("reduce-overhead", "max-autotune")


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


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[Callable[[], None]]:
    """Ends what hangs, wherever Python gets to run; outside the main thread, where no signal comes, nothing is ended.

    Yields:
        What gives as much time again.
    Raises:
        TimeoutError: in the block, after so many seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    def again() -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    before = signal.signal(signal.SIGALRM, end)
    again()
    try:
        yield again
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class TooLarge(Exception):
    """A subject, or the inputs themselves, did not fit into memory."""


def prepare(
    selection: Selection, group: Group, task: Task, batches: list[Tensor], expected: Expected, *, explained: bool
) -> tuple[Prepared | None, Row]:
    """Builds a subject, checks it, and profiles it where it is to be explained, too.

    Returns:
        What can be timed, or None, and the row; without anything to time, the row says why.
    Raises:
        TooLarge: memory ran out.
    """
    try:
        with out_of_memory_is_too_large(), at_most(SUBJECT_SECONDS):
            ready, row = _build_and_check(selection, group, task, batches, expected)
            if ready is not None and explained:
                row["explained"] = explain(ready.call, task.device, group)
            return ready, row
    except TooLarge:
        raise
    except UnsupportedInputError as error:
        return None, make_row(group, selection, "unsupported", f"{error.what}: {'; '.join(error.reasons)}")
    except Exception as error:  # a subject may fail in any way it likes; the others are measured all the same
        if any(sign in str(error) for sign in ("No available kernel", "No viable backend")):
            return None, make_row(group, selection, "unsupported", "torch has no such attention kernel here")
        return None, make_row(group, selection, "failed", describe_error(error))


def _build_and_check(
    selection: Selection, group: Group, task: Task, batches: list[Tensor], expected: Expected
) -> tuple[Prepared | None, Row]:
    device, subject = task.device, selection.subject
    before = _allocated(device)
    function = subject.build(task)
    compiled = compile_selection(selection, function)
    outputs: list[object] = []
    if task.training:
        call, check = _trainer(selection, function, compiled, batches, task, expected.rows)
        outputs.append(check())
    else:
        call = _caller(selection, compiled, batches)
    first_call_s = _seconds(lambda: call(0), device)
    # A CUDA graph replays from its third call on: this one is checked, after another batch went through.
    call(1)
    last: list[object] = []
    call_s = _seconds(lambda: last.append(call(0)), device)
    outputs = outputs or last
    verdict = judge(subject, task, expected, outputs.pop())
    row = make_row(group, selection, "measured" if verdict.passed else "wrong", verdict.reason)
    add_verdict(row, verdict)
    row["first_call_s"] = round(first_call_s, 3)
    if not verdict.passed:
        return None, row
    resident = _allocated(device) - before if device.type == "cuda" else _parameter_bytes(function)
    if resident is not None:
        row["peak_MiB"] = round((resident + peak_memory_of_call(lambda: call(1), device)) / 2**20, 1)
    return Prepared(selection, call, row, call_s), row


def _caller(selection: Selection, compiled: Callable[[Tensor], Tensor], batches: list[Tensor]) -> Call:
    def call(number: int) -> Tensor:
        with torch.inference_mode(), selection.subject.context():
            if selection.mode in GRAPH_MODES:
                # Without this, calls of several graphed models in turn would be recorded as one long iteration.
                torch.compiler.cudagraph_mark_step_begin()
            return compiled(batches[number % len(batches)])

    return call


def _trainer(
    selection: Selection,
    function: object,
    compiled: Callable[[Tensor], Tensor],
    batches: list[Tensor],
    task: Task,
    rows: list[int],
) -> tuple[Call, Callable[[], object]]:
    """A training step on the batch of a number, and the gradients that are checked."""
    if not isinstance(function, nn.Module):
        raise UnsupportedInputError(selection.label, ["only modules of torch are trained"])
    step = TrainingStep(function, compiled, amp=task.amp)

    def call(number: int) -> None:
        with selection.subject.context():
            step(batches[number % len(batches)])

    def check() -> object:
        with selection.subject.context():
            return step.gradients(batches[0], rows)

    return call, check


@contextlib.contextmanager
def out_of_memory_is_too_large() -> Iterator[None]:
    """Turns whatever a library raises when memory runs out into TooLarge; other exceptions go through."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise TooLarge from error
        raise


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, also where a compiler or a runtime wrapped the exception in its own."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        text = str(error)
        if any(sign in text for sign in ("can't allocate memory", "CUDA out of memory", "CUDA error: out of memory")):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_error(error: Exception) -> str:
    """An exception in one line of reasonable length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


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

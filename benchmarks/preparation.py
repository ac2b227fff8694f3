"""Preparation of a candidate before it is timed: build, compile, call and compare with the reference."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vit_fast.errors import UnsupportedInputError
from vit_fast.measure.build import compile_function
from vit_fast.measure.clock import Call, peak_memory_of_call, synchronise
from vit_fast.measure.limits import at_most, describe_error, is_out_of_memory

from .candidates import NamedCandidate, Task
from .correctness import MAX_CHECKED_IMAGES, Expected, checked_rows, expect, judge_outputs, stepper
from .explain import explain
from .inputs import MAX_VIEWS, image_views, rotating_batches, weights_of
from .machine import products_in
from .rows import Group, Row, Status, add_verdict, make_row

# For building, compiling and checking one candidate, and for one round of timing; autotuning takes minutes.
CANDIDATE_SECONDS = 900.0
Result = TypeVar("Result")
GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class Posed:
    """The task of a group, its batches where its data is, and the outputs of the first."""

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
    """A candidate that was built, gave the right outputs, and is warm.

    Attributes:
        selection: The candidate in its compile mode.
        call: Computes the batch of this number.
        row: Its row so far, without figures.
        call_s: How long a call takes, roughly.
    """

    selection: NamedCandidate
    call: Call
    row: Row
    call_s: float


class TooLarge(Exception):
    """A candidate, or the inputs themselves, did not fit into memory."""


def prepare(
    selection: NamedCandidate, group: Group, posed: Posed, *, explained: bool = False
) -> tuple[Prepared | None, Row]:
    """Builds a candidate, checks it, and profiles it where it is to be explained, too.

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


def _attempt(selection: NamedCandidate, group: Group, action: Callable[[], Result]) -> tuple[Result | None, Row]:
    status: Status = "failed"
    try:
        with out_of_memory_is_too_large(), at_most(CANDIDATE_SECONDS):
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


def _build_and_check(selection: NamedCandidate, group: Group, posed: Posed) -> tuple[Prepared | None, Row]:
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
    verdict = judge_outputs(selection, task, expected, (first if task.training else last).pop())
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


def first_answer(selection: NamedCandidate, group: Group, images: Sequence[Path], device: torch.device) -> Row:
    """Builds a candidate before anything else, and checks its first answer: when that was, or status and reason."""

    def answer() -> Row:
        if missing := selection.missing_packages():
            raise UnsupportedInputError(selection.label, [f"not installed: {' '.join(missing)}"])
        task, batches = ask(group, images, device)
        _, _, check = _callers(selection, task, batches)
        outputs = [check()]
        synchronise(device)
        answered = time.monotonic()
        verdict = judge_outputs(selection, task, expect(task, batches[0].to(device)), outputs.pop())
        return {"answered": answered} if verdict.passed else {"status": "wrong", "reason": verdict.reason}

    found, why_not = _attempt(selection, group, answer)
    return found or {name: why_not[name] for name in ("status", "reason")}


def _callers(selection: NamedCandidate, task: Task, batches: list[Tensor]) -> tuple[object, Call, Callable[[], object]]:
    function = selection.make(task)
    compiled = compile_function(function, selection.mode, fullgraph=selection.fullgraph)
    if task.training:
        if not isinstance(function, nn.Module):
            raise UnsupportedInputError(selection.label, ["only modules of torch are trained"])
        step = stepper(task, function, compiled)

    def call(number: int) -> object:
        batch = batches[number % len(batches)].to(task.device, non_blocking=True)  # itself where it lies there
        with torch.inference_mode(not task.training), selection.context():
            if task.training:
                return step(batch)
            if selection.mode in GRAPH_MODES:
                # Without this, calls of several graphed models in turn would be recorded as one long iteration.
                torch.compiler.cudagraph_mark_step_begin()
            return compiled(batch)

    def check() -> object:
        if not task.training:
            return call(0)
        with selection.context():
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


LIMIT_S = 900.0


def cold_start(request: Mapping[str, Any], group: Group, label: str) -> Row:
    """One candidate of a group in a fresh process.

    Args:
        request: The plan's, as plain data.
        group: What it computes.
        label: The candidate.
    Returns:
        cold_s, seconds, and cold_MiB, the process's peak memory on the host, where the answer was right; else
        cold_failed, why not.
    """
    asked = dict(request) | {"models": [group.model.source or group.model.name], "batch_sizes": [group.batch_size]}
    asked |= {"img_size": None if group.model.data is None else group.model.image_hw, "latency": False}
    asked |= {"dtypes": None if group.dtype_name == "amp" else [group.dtype_name], "candidates": [label]}
    command = [sys.executable, "-c", f"from {__name__} import answer; answer()", json.dumps(asked)]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"cold_failed": f"more than {LIMIT_S:g} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"cold_failed": last[:500]}
    found = json.loads(done.stdout.splitlines()[-1])
    if "answered" not in found:
        return {"cold_failed": f"{found['status']}: {found['reason']}"}
    return {"cold_s": round(found["answered"] - started, 2), "cold_MiB": found["peak_MiB"]}


def answer() -> None:
    """Prints the time of the first output, and whether it is correct, as JSON; runs in the fresh process."""
    from .plan import make_plan
    from .preparation import first_answer

    plan = make_plan(**json.loads(sys.argv[1]))
    (group,) = plan.groups()
    ((selection,),) = plan.selections.values()
    with products_in(group.dtype_name):
        found = first_answer(selection, group, plan.images, plan.device)
    found["peak_MiB"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    print(json.dumps(found))

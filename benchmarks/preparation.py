"""Preparation of a candidate before it is timed: build, compile, call, compare with eager in fp64.

Weights and images are first rounded to the dtype, so only errors of the computation count. Eager's own error is also
measured on random images, because its error on similar images varies by chance.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR, NOISE, Measure, error_of, size_of
from vit_fast.errors import UnsupportedInputError
from vit_fast.measure import clock
from vit_fast.measure.candidate import (
    MEASURES,
    Candidate,
    Reference,
    Verdict,
    at_most,
    describe_error,
    errors_of,
    is_out_of_memory,
    judge,
    same_class,
)
from vit_fast.measure.clock import Call, synchronize

from .candidates import build_reference, make
from .configuration import Group, make_configuration
from .machine import products_in, profile
from .models import MAX_VIEWS, Task, image_views, rotating_batches, weights_of
from .records import Row, Status, make_row

# Time limit of each of these: preparing a candidate, a round of timing, a cold start.
CANDIDATE_SECONDS = 900.0
GRAPH_MODES = ("reduce-overhead", "max-autotune")
MAX_CHECKED_IMAGES = 8
# The allowed error of an ONNX file, which a runtime rewrites, as a share of the outputs of the unchanged file.
ONNX_TOLERANCE = 0.01
LEARNING_RATE = 1e-6
Function = Callable[[Tensor], Tensor]


class TrainingStep:
    """Forward, cross-entropy, backward and AdamW of a model without dropout; or the backward alone of a part of it."""

    def __init__(self, task: Task, model: nn.Module, function: Function) -> None:
        self.task, self.function = task, function
        self.parameters = list(model.train().requires_grad_(True).parameters())
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        if task.whole:
            self.optimizer = torch.optim.AdamW(self.parameters, LEARNING_RATE, fused=task.device.type == "cuda")
        else:
            from torch._functorch import config

            # The backward runs again and again, so it must not reuse the memory of its inputs; decided at compilation.
            config.donated_buffer = False
        self._forwards: dict[int, tuple[Tensor, list[Tensor], Tensor]] = {}

    def __call__(self, x: Tensor) -> object:
        if self.task.whole:
            self.optimizer.zero_grad()
            self._losses(x, torch.arange(len(x), device=x.device)).mean().backward()
            return self.optimizer.step()
        if id(x) not in self._forwards:
            leaf = x.detach().requires_grad_()
            out = self.function(leaf)
            self._forwards[id(x)] = out, [leaf, *self.parameters], self._gradient_of(out)
        out, leaves, gradient = self._forwards[id(x)]
        return torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    def gradients(self, x: Tensor, rows: Sequence[int], places: Sequence[int]) -> list[Tensor]:
        """Computes gradients of the input [B, ...], and of each parameter: for a whole model only their norm [1]."""
        leaf = x.detach().clone().requires_grad_()
        if self.task.whole:
            losses = self._losses(leaf, torch.tensor(places, device=x.device))
        else:
            out = self.function(leaf)
            losses = (out * self._gradient_of(out)).flatten(1).sum(1)
        leaves = [leaf, *self.parameters]
        own, *others = torch.autograd.grad(losses[rows].sum(), leaves, allow_unused=self.task.whole)
        if not self.task.whole:
            return [own, *others]
        squares = [gradient.double().square().sum() for gradient in others if gradient is not None]
        return [own, torch.stack(squares).sum().sqrt().reshape(1).to(x.dtype)]

    def _losses(self, images: Tensor, places: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.task.amp):
            outputs = self.function(images).flatten(1)
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        return F.cross_entropy(outputs, places % outputs.shape[1], reduction="none")

    @staticmethod
    def _gradient_of(out: Tensor) -> Tensor:
        one = torch.randn(out[:1].shape, generator=torch.Generator().manual_seed(1))
        return one.to(out).repeat(len(out), *[1] * (out.ndim - 1))


@dataclass(frozen=True)
class Expected(Reference):
    """The expected output, or in training gradients; `others` are of the batches after the first, for agreement."""

    others: Sequence[Tensor] = ()


def expect(task: Task, images: Tensor, *others: Tensor) -> Expected:
    """Computes the fp64 reference of a batch, eager's error in the task's dtype, and the outputs of other batches."""
    rows = checked_rows(task)
    if task.model.onnx is not None:
        from vit_fast.measure.runtimes import open_reference

        outputs = open_reference(task.model.onnx, task.model.image_hw)(images[rows].float()).double()
        return _expected(task, rows, [outputs], [{m: ONNX_TOLERANCE * size_of(outputs, m) for m in MEASURES}])
    weights = None if task.weights is None else {name: tensor.double() for name, tensor in task.weights.items()}
    exact_task = dataclasses.replace(task, weights=weights, dtype=torch.float64, amp=False)
    exact_model, eager_model = build_reference(exact_task), build_reference(task)
    chosen = images[rows]
    noise = torch.randn((MAX_CHECKED_IMAGES, *images.shape[1:]), generator=torch.Generator().manual_seed(0))
    if task.training:
        steps = TrainingStep(exact_task, exact_model, exact_model), TrainingStep(task, eager_model, eager_model)
        return _expect_gradients(task, *steps, chosen, rows, noise.to(images) if task.whole else noise[:0])
    if task.whole:
        chosen = torch.cat([chosen, noise.to(images)])
    with torch.inference_mode():
        exact = exact_model(chosen.double()).cpu()
        errors = errors_of(eager_model(chosen), exact)
        further = [exact_model(batch.double()).cpu() for batch in others]
    return _expected(task, rows, [exact[: len(rows)]], [errors], further)


def _expected(
    task: Task, rows: list[int], exact: list[Tensor], errors: list[dict[Measure, float]], others: Sequence[Tensor] = ()
) -> Expected:
    first, *parameters = exact
    shapes = [(task.batch_size, *first.shape[1:]), *(tuple(gradient.shape) for gradient in parameters)]
    dtypes = [torch.bfloat16 if task.amp else task.dtype] * len(exact)
    what = " of the norm of all parameters' gradients" if task.whole else " of a parameter's gradient"
    return Expected(exact, errors, dtypes, shapes, rows, ["", *(what for _ in parameters)], others)


def _expect_gradients(
    task: Task, exact_step: TrainingStep, eager_step: TrainingStep, images: Tensor, rows: list[int], noise: Tensor
) -> Expected:
    """Computes gradients of these images; random images show how much the error of a norm varies by chance."""
    each = range(len(rows))
    exact, eager = exact_step.gradients(images.double(), each, rows), eager_step.gradients(images, each, rows)
    errors: list[dict[Measure, float]] = [errors_of(eager[0], exact[0])]
    errors += [{"largest": error_of(*pair)} for pair in zip(eager[1:], exact[1:], strict=True)]
    for image in noise.split(1) if len(noise) else ():
        norm, exact_norm = eager_step.gradients(image, [0], [0])[1], exact_step.gradients(image.double(), [0], [0])[1]
        relative = error_of(norm, exact_norm) / size_of(exact_norm)
        errors[1]["largest"] = max(errors[1]["largest"], relative * size_of(exact[1]))
    return _expected(task, rows, [exact[0].cpu(), *exact[1:]], errors)


def checked_rows(task: Task) -> list[int]:
    """Returns the indices of the images of a batch to check: evenly spaced, with the first and the last."""
    operator, count = task.model.operator, task.batch_size
    most = MAX_CHECKED_IMAGES if operator is None else operator.checked
    return [round(i * (count - 1) / (most - 1)) for i in range(most)] if count > most else list(range(count))


def judge_outputs(candidate: Candidate, task: Task, expected: Expected, outputs: object) -> Verdict:
    """Checks a candidate's outputs, or in training its gradients, for a whole batch."""
    factor = GRADIENT_FACTOR if task.training else FORWARD_FACTOR
    leaves: Any = outputs if task.training else [outputs]
    return judge(leaves, expected, factor, candidate.tolerance)


def describe_rule() -> str:
    """Returns the rule in words, for the record."""
    return (
        f"error against eager in fp64 <= {FORWARD_FACTOR} x (gradients: {GRADIENT_FACTOR} x)"
        " eager's error in that dtype + eps(dtype) / 2 x the outputs' size, for root mean squares and,"
        f" with {NOISE:g} more, for the largest; on up to {MAX_CHECKED_IMAGES} images of the batch; all outputs finite"
    )


@dataclass(frozen=True)
class Problem:
    """The task of a group, its batches, and the expected outputs of the first batch."""

    task: Task
    batches: list[Tensor]
    expected: Expected


def make_problem(group: Group, images: Sequence[Path], device: torch.device) -> Problem:
    """Makes weights, batches and the reference of a group; raises whatever the reference raises."""
    task, batches = make_task(group, images, device)
    # as many batches as agreement needs images
    few = math.ceil(MAX_CHECKED_IMAGES / task.batch_size) if task.whole and not task.training else 1
    return Problem(task, batches, expect(task, *(batch.to(device) for batch in batches[:few])))


def make_task(group: Group, images: Sequence[Path], device: torch.device) -> tuple[Task, list[Tensor]]:
    """Makes the task of a group, and its rotating batches: on the device, or in pinned memory."""
    weights = weights_of(group.model, group.dtype)
    task = Task(group.model, weights, group.dtype, device, group.batch_size, group.training, group.dtype_name == "amp")
    views = image_views(images, group.model, max(8, min(group.batch_size, MAX_VIEWS)))
    host = group.data == "host"
    batches = rotating_batches(views, task.batch_size, task.dtype, torch.device("cpu") if host else device)
    return task, [batch.pin_memory() for batch in batches] if host else batches


@dataclass
class Prepared:
    """A candidate that is built, correct and warm: its call of a batch's number, its row, and seconds of a call."""

    candidate: Candidate
    call: Call
    row: Row
    call_s: float


def prepare(
    candidate: Candidate, group: Group, problem: Problem, *, explained: bool = False
) -> tuple[Prepared | None, Row]:
    """Builds and checks a candidate; returns it if it is correct, and its row with status and reason."""
    status: Status
    try:
        with at_most(CANDIDATE_SECONDS):
            ready, row = _build_and_check(candidate, group, problem)
            if ready is not None and explained:
                row["explained"] = profile(ready.call, problem.task.device, group.least(), group.dtype.itemsize)
            return ready, row
    except UnsupportedInputError as error:
        status, reason = "unsupported", f"{error.what}: {'; '.join(error.reasons)}"
    except Exception as error:
        status, reason = "out of memory" if is_out_of_memory(error) else "failed", describe_error(error)
        if any(sign in reason for sign in ("No available kernel", "No viable backend")):
            status, reason = "unsupported", "torch has no such attention kernel on this device"
    return None, make_row(group, candidate, status, reason)


def _build_and_check(candidate: Candidate, group: Group, problem: Problem) -> tuple[Prepared | None, Row]:
    task, expected, device = problem.task, problem.expected, problem.task.device
    on_gpu = device.type == "cuda"
    before, start = torch.cuda.memory_allocated(device) if on_gpu else 0, time.perf_counter()
    function, call, check = _callers(candidate, task, problem.batches)
    build_s = time.perf_counter() - start
    first_call_s, first = _timed(check, device)
    # A CUDA graph is replayed from the third call on: in inference, check that call, after one with another batch.
    call(1)
    call_s, last = _timed(lambda: call(0), device)
    verdict = judge_outputs(candidate, task, expected, first if task.training else last)
    row = make_row(group, candidate, "measured" if verdict.passed else "incorrect", verdict.reason)
    agreement = None
    if verdict.passed and task.whole and not task.training:
        # one by one: the next call of a CUDA graph overwrites the output
        outputs: Any = itertools.chain([last], map(call, range(1, 1 + len(expected.others))))
        exact = [expected.exact[0], *expected.others]
        same = [same_class(output[[*expected.rows]].cpu(), one) for output, one in zip(outputs, exact, strict=True)]
        agreement = float(torch.cat(same).double().mean())
        del outputs
    del first, last  # not to count their memory
    row.update(
        max_error=verdict.max_error if math.isfinite(verdict.max_error) else None,  # because of JSON
        allowed_error=verdict.allowed_error,
        agreement=agreement,
        build_s=round(build_s, 3),
        first_call_s=round(first_call_s, 6),
    )
    if not verdict.passed:
        return None, row
    if on_gpu or isinstance(function, nn.Module):
        weights = [*function.parameters(), *function.buffers()] if isinstance(function, nn.Module) else []
        on_cpu = sum(tensor.numel() * tensor.element_size() for tensor in weights)
        resident = torch.cuda.memory_allocated(device) - before if on_gpu else on_cpu
        row["peak_MiB"] = round((resident + clock.peak_memory_of_call(lambda: call(1), device)) / 2**20, 1)
    return Prepared(candidate, call, row, call_s), row


def _timed(action: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    synchronize(device)
    start = time.perf_counter()
    output = action()
    synchronize(device)
    return time.perf_counter() - start, output


def _callers(candidate: Candidate, task: Task, batches: list[Tensor]) -> tuple[object, Call, Callable[[], object]]:
    function = make(candidate, task)
    compiled = candidate.compiled(function, fullgraph=candidate.fullgraph)
    if task.training:
        if not isinstance(function, nn.Module):
            raise UnsupportedInputError(candidate.name, ["training needs an nn.Module"])
        step = TrainingStep(task, function, compiled)

    def call(number: int) -> object:
        batch = batches[number % len(batches)].to(task.device, non_blocking=True)  # no copy if it is there
        with torch.inference_mode(not task.training), candidate.context():
            if task.training:
                return step(batch)
            if candidate.compile_mode in GRAPH_MODES:
                # Otherwise, interleaved calls of several CUDA graphs would be recorded as one iteration.
                torch.compiler.cudagraph_mark_step_begin()
            return compiled(batch)

    def check() -> object:
        if not task.training:
            return call(0)
        with candidate.context():
            return step.gradients(batches[0].to(task.device), checked_rows(task), range(len(batches[0])))

    return function, call, check


def cold_start(request: Mapping[str, Any], group: Group, name: str) -> Row:
    """Measures the seconds of a new process to its first correct output, and its peak host memory."""
    asked = dict(request) | {"models": [group.model.source or group.model.name], "batch_sizes": [group.batch_size]}
    asked |= {"img_size": None if group.model.data is None else group.model.image_hw, "latency": False}
    asked |= {"dtypes": None if group.dtype_name == "amp" else [group.dtype_name], "candidates": [name]}
    code = f"from {__name__} import print_first_output; print_first_output()"
    command = [sys.executable, "-c", code, json.dumps(asked)]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CANDIDATE_SECONDS)
    except subprocess.TimeoutExpired:
        return {"cold_failed": f"more than {CANDIDATE_SECONDS:g} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"cold_failed": last[:500]}
    found = json.loads(done.stdout.splitlines()[-1])
    return {"cold_s": round(found["done"] - started, 2), "cold_MiB": found["peak_MiB"]}


def print_first_output() -> None:
    """Prints the time of the first output and the peak memory as JSON, if the output is correct; see cold_start."""
    configuration = make_configuration(**json.loads(sys.argv[1]))
    (group,) = configuration.groups()
    ((candidate,),) = configuration.candidates.values()
    try:
        with products_in(group.dtype_name):
            task, batches = make_task(group, configuration.images, configuration.device)
            _, _, check = _callers(candidate, task, batches)
            outputs = [check()]
            synchronize(task.device)
            done = time.monotonic()
            verdict = judge_outputs(candidate, task, expect(task, batches[0].to(task.device)), outputs.pop())
    except Exception as error:  # whatever a candidate raises
        sys.exit(describe_error(error))
    if verdict.reason is not None:
        sys.exit(f"incorrect: {verdict.reason}")
    print(json.dumps({"done": done, "peak_MiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)}))


def release_memory(device: torch.device, forget_compiled: bool = True) -> None:
    if forget_compiled:
        torch.compiler.reset()
    clock.free_memory(device)

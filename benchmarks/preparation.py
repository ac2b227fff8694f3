"""Preparation of a candidate before it is timed: build, compile, call, compare with eager in fp64.

Weights and images are first rounded to the dtype, so only errors of the computation count. Eager's error is also
measured on random images, because the error on a few similar images varies by chance.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType

from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR, NOISE, Measure, error_of, size_of
from vit_fast.apps.data import spread
from vit_fast.errors import UnsupportedInputError
from vit_fast.measure import candidate as measuring
from vit_fast.measure.candidate import MEASURES, Candidate, Prepared, Reference, Verdict, describe_error
from vit_fast.measure.clock import Call, Protocol, begin, synchronize, time_interleaved
from vit_fast.measure.limits import at_most
from vit_fast.work import Work

from .candidates import build_reference, make
from .configuration import make_configuration
from .models import MAX_VIEWS, Group, image_views, rotating_batches
from .records import Row, add_timing, make_row

# Time limit for preparing a candidate, for a round of timing, and for a cold start.
CANDIDATE_SECONDS = 900.0
OUT_OF_TIME = "out of time: pass --time-budget 0 to measure all"
MAX_CHECKED_IMAGES = 8
ALONE = Protocol(repeats=50, seconds=0.2, least_repeats=3, warmup_repeats=1, launch="hidden")
# The allowed error for an ONNX file, as a share of the output without graph optimizations.
ONNX_TOLERANCE = 0.01
LEARNING_RATE = 1e-6
RULE = (  # in words, for the record
    f"error <= {FORWARD_FACTOR} x eager's error in the same dtype (gradients: {GRADIENT_FACTOR} x) + eps(dtype) / 2 x "
    f"size of the output; an error is the difference from eager in fp64; the rule must hold for root mean squares and "
    f"largest magnitudes (limit + {NOISE:g}), on up to {MAX_CHECKED_IMAGES} images of the batch; all outputs must be "
    f"finite"
)


class TrainingStep:
    """Forward, cross-entropy, backward and AdamW of a model without dropout; for a part, only the backward."""

    def __init__(self, group: Group, model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        self.group, self.function, self.whole = group, function, group.model.is_whole
        model.train()
        self.parameters = list(model.requires_grad_(True).parameters())
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        if self.whole:
            self.optimizer = torch.optim.AdamW(self.parameters, LEARNING_RATE, fused=group.device.type == "cuda")
        self._forwards: dict[int, tuple[Tensor, list[Tensor], Tensor]] = {}

    def forward(self, x: Tensor) -> None:
        """Runs the forward of a part; the next call with the same tensor runs its backward."""
        leaf = x.detach().requires_grad_()
        out = self.function(leaf)
        self._forwards[id(x)] = out, [leaf, *self.parameters], self._gradient_of(out)

    def __call__(self, x: Tensor) -> object:
        if self.whole:
            self.optimizer.zero_grad()
            self._losses(x, torch.arange(len(x), device=x.device)).mean().backward()
            return self.optimizer.step()
        if id(x) not in self._forwards:
            self.forward(x)
        out, leaves, gradient = self._forwards.pop(id(x))
        return torch.autograd.grad(out, leaves, gradient)

    def gradients(self, x: Tensor, rows: Sequence[int], places: Sequence[int]) -> list[Tensor]:
        """Returns the gradient of the input [B, ...], then of each parameter.

        For a whole model, returns the losses [B], and of the parameters' gradients the norm [1] and the sum of their
        products with the magnitudes of the parameters [1], which also depends on the signs. The input needs no gradient
        there, as in a training step: torch.compile would compile another graph for it.
        """
        if not self.whole:
            leaf = x.detach().clone().requires_grad_()
            losses = self._losses(leaf, torch.tensor(places, device=x.device))
            return [*torch.autograd.grad(losses[rows].sum(), [leaf, *self.parameters])]
        losses = self._losses(x, torch.tensor(places, device=x.device))
        found = torch.autograd.grad(losses[rows].sum(), self.parameters, allow_unused=True)
        pairs = [(one.double(), own.detach().double()) for one, own in zip(found, self.parameters) if one is not None]
        square = torch.stack([one.square().sum() for one, _ in pairs]).sum()
        product = torch.stack([(one * own.abs()).sum() for one, own in pairs]).sum()
        return [losses.detach().to(x.dtype), *(one.reshape(1).to(x.dtype) for one in (square.sqrt(), product))]

    def _losses(self, x: Tensor, places: Tensor) -> Tensor:
        amp = self.group.dtype_name == "amp" and self.whole and x.dtype != torch.float64
        with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
            out = self.function(x)
        if not self.whole:
            return (out * self._gradient_of(out)).flatten(1).sum(1)
        logits = out.flatten(1).to(torch.promote_types(out.dtype, torch.float32))
        return F.cross_entropy(logits, places % logits.shape[1], reduction="none")

    @staticmethod
    def _gradient_of(out: Tensor) -> Tensor:
        one = torch.randn(out[:1].shape, generator=torch.Generator().manual_seed(1))
        return one.to(out).repeat(len(out), *[1] * (out.ndim - 1))


def _expect_gradients(
    group: Group, exact_model: nn.Module, eager_model: nn.Module, images: Tensor, rows: list[int], noise: Tensor
) -> tuple[list[Tensor], list[dict[Measure, float]]]:
    """Returns fp64 gradients of images, and eager's errors, for a whole model also on the random images `noise`."""
    exact_step, step = TrainingStep(group, exact_model, exact_model), TrainingStep(group, eager_model, eager_model)
    each = range(len(rows))
    exact, eager = exact_step.gradients(images.double(), each, rows), step.gradients(images, each, rows)
    errors: list[dict[Measure, float]] = [{"largest": error_of(*pair)} for pair in zip(eager, exact, strict=True)]
    if not group.model.is_whole:
        errors[0] = measuring.errors_of(eager[0], exact[0])
    for image in noise.split(1) if group.model.is_whole else ():
        found = zip(step.gradients(image, [0], [0]), exact_step.gradients(image.double(), [0], [0]), exact, errors)
        for one, right, expected, error in found:
            error["largest"] = max(error["largest"], error_of(one, right) / size_of(right) * size_of(expected))
    return [exact[0].cpu(), *exact[1:]], errors


class Problem(NamedTuple):
    """The rotating batches of a group, on the device or in pinned memory, and the reference of the first batch."""

    batches: list[Tensor]
    reference: Reference


def make_problem(group: Group, images: Sequence[Path]) -> Problem:
    """Makes batches and the reference of a group; raises any error of the reference."""
    batches = make_batches(group, images)
    # enough batches to measure agreement on MAX_CHECKED_IMAGES images
    few = math.ceil(MAX_CHECKED_IMAGES / group.batch_size) if group.model.is_whole and not group.training else 1
    return Problem(batches, expect(group, *(batch.to(group.device) for batch in batches[:few])))


def checked_rows(group: Group) -> list[int]:
    """Returns indices of images to check: all for an MLP, two for attention, which is large in fp64."""
    most = {"attention": 2, "mlp": group.batch_size}
    return spread(group.batch_size, most.get(group.model.kind, MAX_CHECKED_IMAGES))


def make_batches(group: Group, images: Sequence[Path]) -> list[Tensor]:
    views, host = image_views(images, group.model, max(8, min(group.batch_size, MAX_VIEWS))), group.data == "host"
    batches = rotating_batches(views, group.batch_size, group.dtype, torch.device("cpu") if host else group.device)
    return [batch.pin_memory() for batch in batches] if host else batches


def expect(group: Group, images: Tensor, *others: Tensor) -> Reference:
    """Returns the reference of a batch: fp64 outputs or gradients, and limits. `others` serve to measure agreement."""
    whole, rows, outputs = group.model.is_whole, checked_rows(group), list[Tensor]()
    chosen, errors = images[rows], list[dict[Measure, float]]()
    if group.model.onnx is not None:
        from vit_fast.measure.runtimes import open_reference

        exact = outputs = [open_reference(group.model.onnx, group.model.image_hw)(chosen.float()).double()]
        errors = [{measure: ONNX_TOLERANCE * size_of(exact[0], measure) for measure in MEASURES}]
    else:
        exact_model, eager_model = build_reference(group).double(), build_reference(group)
        noise = torch.randn((MAX_CHECKED_IMAGES, *images.shape[1:]), generator=torch.Generator().manual_seed(0))
        noise = noise.to(images)
        if group.training:
            exact, errors = _expect_gradients(group, exact_model, eager_model, chosen, rows, noise)
        else:
            chosen = torch.cat([chosen, noise]) if whole else chosen
            with torch.inference_mode():
                found = exact_model(chosen.double()).cpu()
                exact, errors = [found[: len(rows)]], [measuring.errors_of(eager_model(chosen), found)]
                outputs = [*exact, *(exact_model(batch.double()).cpu() for batch in others)] if whole else []
    shapes = [(group.batch_size, *exact[0].shape[1:]), *(tuple(gradient.shape) for gradient in exact[1:])]
    dtype = torch.bfloat16 if group.dtype_name == "amp" else group.dtype
    names = [""] + [" of a parameter's gradient"] * (len(exact) - 1)
    if whole and group.training:
        names = [f" of {what}" for what in ("the losses", "the gradients' norm", "the gradients' sum with signs")]
    factor, kind = (GRADIENT_FACTOR, list) if group.training else (FORWARD_FACTOR, Tensor)
    limits = [measuring.limits_of(error, one, dtype, factor) for error, one in zip(errors, exact, strict=True)]
    return Reference(exact, limits, shapes, names, rows, outputs, kind)


def prepare(
    candidate: Candidate, group: Group, problem: Problem, *, explained: bool = False,
    seconds: float = CANDIDATE_SECONDS,
) -> tuple[Prepared | None, Row]:  # fmt: skip
    """Builds and checks a candidate; returns it if it is correct, and its row with status and reason.

    On a GPU, also times the candidate alone, because its process may end before it is timed interleaved.
    """
    device = group.device
    try:
        with at_most(seconds):
            build = functools.partial(callers, candidate, group, problem.batches)
            ready = measuring.prepare(candidate, build, problem.reference, device, candidate.tolerance)
            verdict = ready.verdict
            row = make_row(group, candidate, "incorrect" if verdict.reason else "measured", verdict.reason)
            row.update(
                max_error=verdict.max_error if math.isfinite(verdict.max_error) else None,  # because of JSON
                allowed_error=verdict.allowed_error,
                agreement=ready.agreement,
                build_s=round(ready.build_s, 3),
                first_call_s=round(ready.first_call_s, 6),
            )
            if ready.call_bytes is None:
                return None, row
            ready.row = row
            if device.type == "cuda" or isinstance(ready.function, nn.Module):
                own_bytes = ready.own_bytes
                if device.type == "cpu":
                    weights = [*ready.function.parameters(), *ready.function.buffers()]
                    own_bytes = sum(tensor.nbytes for tensor in weights)
                row["peak_MiB"] = round((own_bytes + ready.call_bytes) / 2**20, 1)
            if device.type == "cuda":
                add_timing(row, time_interleaved({"": ready.call}, device, ALONE)[""], group)
            if explained:
                row["explained"] = profile(ready.call, device, group.least(), group.dtype.itemsize)
            return ready, row
    except Exception as error:  # a candidate may raise any type
        is_late = isinstance(error, TimeoutError) and seconds < CANDIDATE_SECONDS
        return None, make_row(group, candidate, *(("skipped", OUT_OF_TIME) if is_late else measuring.why_failed(error)))


def callers(
    candidate: Candidate, group: Group, batches: Sequence[Tensor]
) -> tuple[object, Call, Callable[[], object] | None]:
    """Builds a candidate; returns it, a call that takes a batch number, and in training a function for gradients."""
    function = make(candidate, group)
    compiled = candidate.compiled(function, fullgraph=candidate.fullgraph)

    step: Any = None
    if group.training:
        if not isinstance(function, nn.Module):
            raise UnsupportedInputError(candidate.name, ["only an nn.Module can be trained"])
        step = TrainingStep(group, function, compiled)

    def call(number: int) -> object:
        batch = batches[number % len(batches)].to(group.device, non_blocking=True)  # no copy if the batch is there
        with torch.inference_mode(step is None), candidate.context():
            if step is not None:
                return step(batch)
            if candidate.engine in measuring.GRAPH_MODES:
                # Otherwise, torch would count interleaved calls of several CUDA graphs as one iteration.
                torch.compiler.cudagraph_mark_step_begin()
            return compiled(batch)

    def begin(number: int) -> None:
        with candidate.context():
            step.forward(batches[number % len(batches)])

    if step is not None and not step.whole:
        call.begin = begin  # type: ignore[attr-defined]  # see clock.begin

    def gradients() -> object:
        with candidate.context():
            return step.gradients(batches[0].to(group.device), checked_rows(group), range(group.batch_size))

    return function, call, None if step is None else gradients


@contextlib.contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Allows TF32 matmuls for tf32, and uses torch's setting for other names of DTYPES."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


COMPILED, REST = "compiled, fused", "other"
# Parts of a model, with a pattern for names of operators and kernels. The first match counts.
PARTS = {
    "attention": "attention|attn|flash|fmha|softmax|bmm",
    "embedding": "conv(?!ert)",
    COMPILED: "^triton_(?!tem)|cpp_fused|compiled|inductor|torchdynamo",
    "linears": "addmm|::mm|linear|mlp|matmul|gemm|nvjet|triton_tem",
    "norms": "layer_?norm|group_?norm|statistics",
    "activations": "gelu|silu|relu|sigmoid|tanh|erf",
}
PROFILED_CALLS = 3


def part_of(name: str) -> str:
    """Returns the part of a model that an operator or a kernel belongs to."""
    return next((part for part, words in PARTS.items() if re.search(words, name.lower())), REST)


def profile(call: Call, device: torch.device, least: dict[str, Work], itemsize: int) -> dict[str, Any]:
    """Returns "kernels" [part, name, calls, ms] per call, longest first, and "least" [operations, bytes] per part."""
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    for number in range(PROFILED_CALLS):
        begin(call, number)
    with torch.profiler.profile(activities=activities) as profiler:
        for number in range(PROFILED_CALLS):
            call(number)
        synchronize(device)
    kernels = []
    for event in profiler.key_averages():
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if us and (event.device_type == DeviceType.CUDA) == on_gpu:
            kernels.append([part_of(event.key), event.key, event.count / PROFILED_CALLS, us / 1e3 / PROFILED_CALLS])
    # the kernels of one call in order, for the comparison with `vit-fast kernels --model`
    events = [event for event in profiler.events() if on_gpu and event.device_type == DeviceType.CUDA]
    events = sorted(events, key=lambda event: event.time_range.start)[-(len(events) // PROFILED_CALLS) :]
    launches = [[event.name, event.self_device_time_total] for event in events]
    if "head" in least:  # the profiler cannot tell the head from other linear layers
        least["linears"] += least.pop("head")
    moved = {part: [some.flop, some.elements * itemsize] for part, some in least.items()}
    return {"kernels": sorted(kernels, key=lambda kernel: -kernel[3]), "least": moved, "launches": launches}


def cold_start(request: Mapping[str, Any], group: Group, name: str, seconds: float = CANDIDATE_SECONDS) -> Row:
    """Measures the seconds of a new process to its first correct output, and its peak host memory."""
    asked = dict(request) | {"models": [group.model.source or group.model.name], "batch_sizes": [group.batch_size]}
    asked |= {"img_size": None if group.model.data is None else group.model.image_hw, "latency": False}
    asked |= {"dtypes": [group.dtype_name], "candidates": [name]}
    command = [sys.executable, "-c", f"from {__name__} import print_first_output as run; run()", json.dumps(asked)]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    except subprocess.TimeoutExpired:
        return {"cold_failed": f"more than {seconds:g} s"}
    except subprocess.CalledProcessError as error:
        return {"cold_failed": (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1][:500]}
    found = json.loads(done.stdout.splitlines()[-1])
    return {"cold_s": round(found["done"] - started, 2), "cold_MiB": found["peak_MiB"]}


def print_first_output() -> None:
    """Prints the time of the first output and the peak memory as JSON, if the output is correct; see cold_start."""
    configuration = make_configuration(**json.loads(sys.argv[1]))
    (group,), ((candidate,),) = configuration.groups(), configuration.candidates.values()
    try:
        with matmul_precision(group.dtype_name):
            done, verdict = check_once(candidate, group, make_batches(group, configuration.images))
    except Exception as error:  # a candidate may raise any type
        sys.exit(describe_error(error))
    if verdict.reason is not None:
        sys.exit(f"incorrect: {verdict.reason}")
    print(json.dumps({"done": done, "peak_MiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)}))


def check_once(candidate: Candidate, group: Group, batches: Sequence[Tensor]) -> tuple[float, Verdict]:
    """Builds a candidate and calls it once; returns the time of the output, and its comparison with the reference."""
    _, call, gradients = callers(candidate, group, batches)
    output = call(0) if gradients is None else gradients()
    synchronize(group.device)
    done = time.monotonic()
    return done, measuring.judge(output, expect(group, batches[0].to(group.device)), candidate.tolerance)

"""Preparation of a candidate before it is timed: weights, images, build, compile, call, compare with the reference."""

from __future__ import annotations

import functools
import json
import math
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType

from vit_fast.apps.data import make_transform, random_crop, read_image
from vit_fast.config import ViTConfig
from vit_fast.errors import UnsupportedInputError
from vit_fast.measure import clock
from vit_fast.measure.candidate import Candidate, at_most, describe_error, is_out_of_memory
from vit_fast.measure.clock import Call, cold_copies, synchronise
from vit_fast.model import VisionTransformer

from .candidates import make
from .correctness import MAX_CHECKED_IMAGES, Expected, checked_rows, expect, judge_outputs, stepper
from .machine import products_in
from .models import MAX_VIEWS, Model, Task
from .rows import PARTS, REST, Group, Row, Status, make_row

# Time limit of each of these: preparing a candidate, a round of timing, a cold start.
CANDIDATE_SECONDS = 900.0
GRAPH_MODES = ("reduce-overhead", "max-autotune")
PROFILED_CALLS = 3


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
                row["explained"] = profile(ready.call, problem.task.device, group)
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
    del first, last  # not to count their memory
    row = make_row(group, candidate, "measured" if verdict.passed else "incorrect", verdict.reason)
    agreement = verdict.agreement
    if agreement is not None and expected.classes:
        shares = [agreement]
        for place, classes in enumerate(expected.classes, 1):
            outputs: Any = call(place)
            shares.append(float((outputs.argmax(-1) == classes).double().mean()))
        agreement = statistics.fmean(shares)
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
    synchronise(device)
    start = time.perf_counter()
    output = action()
    synchronise(device)
    return time.perf_counter() - start, output


def _callers(candidate: Candidate, task: Task, batches: list[Tensor]) -> tuple[object, Call, Callable[[], object]]:
    function = make(candidate, task)
    compiled = candidate.compiled(function, fullgraph=candidate.fullgraph)
    if task.training:
        if not isinstance(function, nn.Module):
            raise UnsupportedInputError(candidate.name, ["training needs an nn.Module"])
        step = stepper(task, function, compiled)

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
    """Measures cold_s, seconds of a new process to its first correct output, and cold_MiB, its peak host memory.

    Returns the reason as cold_failed if that fails.
    """
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
    from .configuration import make_configuration

    configuration = make_configuration(**json.loads(sys.argv[1]))
    (group,) = configuration.groups()
    ((candidate,),) = configuration.candidates.values()
    try:
        with products_in(group.dtype_name):
            task, batches = make_task(group, configuration.images, configuration.device)
            _, _, check = _callers(candidate, task, batches)
            outputs = [check()]
            synchronise(task.device)
            done = time.monotonic()
            verdict = judge_outputs(candidate, task, expect(task, batches[0].to(task.device)), outputs.pop())
    except Exception as error:  # whatever a candidate raises
        sys.exit(describe_error(error))
    if verdict.reason is not None:
        sys.exit(f"incorrect: {verdict.reason}")
    print(json.dumps({"done": done, "peak_MiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)}))


def part_of(name: str) -> str:
    """Returns the part of a model that an operator or a kernel belongs to."""
    return next((part for part, words in PARTS.items() if re.search(words, name.lower())), REST)


def profile(call: Call, device: torch.device, group: Group) -> dict[str, Any]:
    """Returns kernels, [part, name, calls, ms] per call, the longest first; and least, [operations, bytes] per part.

    Kernel names decide the part on a GPU, operator names on a CPU. Eager attention's matmuls on a GPU count as linears.
    """
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    with clock.without_profiler_chatter(), torch.profiler.profile(activities=activities) as profiler:
        for number in range(PROFILED_CALLS):
            call(number)
        synchronise(device)
    kernels = []
    for event in profiler.key_averages():
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if us and (event.device_type == DeviceType.CUDA) == on_gpu:
            kernels.append([part_of(event.key), event.key, event.count / PROFILED_CALLS, us / 1e3 / PROFILED_CALLS])
    least = group.least()
    if "head" in least:  # the profiler cannot tell it from other linears
        least["linears"] += least.pop("head")
    moved = {part: [some.flop, some.elements * group.dtype.itemsize] for part, some in least.items()}
    return {"kernels": sorted(kernels, key=lambda kernel: -kernel[3]), "least": moved}


def release_memory(device: torch.device, forget_compiled: bool = True) -> None:
    if forget_compiled:
        torch.compiler.reset()
    clock.free_memory(device)


def random_weights(config: ViTConfig, seed: int = 0) -> dict[str, Tensor]:
    """Draws parameters under our names in fp32 on the CPU, none of them zero or alike.

    A fresh model has zero biases, unit norms and near-zero tokens, so a candidate that ignores one of them would pass.
    Here every parameter changes the logits, attention is far from uniform (queries and keys are doubled), and tokens
    and positions are small enough that the logits depend on the image: between two images they differ by about ten
    times the allowed error in bf16.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = VisionTransformer(config)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            owner = model.get_submodule(name.rpartition(".")[0])
            parameter.copy_(_draw(name, parameter, owner, generator))
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _draw(name: str, parameter: Tensor, owner: nn.Module, generator: torch.Generator) -> Tensor:
    noise = torch.randn(parameter.shape, generator=generator)
    if isinstance(owner, nn.LayerNorm | nn.GroupNorm):
        return 1 + 0.2 * noise if name.endswith("weight") else 0.2 * noise
    if name.endswith("gamma"):
        return 0.5 + 0.2 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    if isinstance(owner, nn.Linear | nn.Conv2d):
        weight = noise / math.sqrt(parameter[0].numel())
        if name.endswith("attn.qkv.weight"):
            weight[: 2 * weight.shape[1]] *= 2
        return weight
    return 0.3 * noise


@functools.lru_cache(maxsize=2)
def weights_of(model: Model, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Returns a model's parameters, its own or random ones, in a dtype; None for a model with weights inside."""
    weights = model.weights if model.operator is None else model.operator.weights()
    if weights is None and model.config is not None:
        weights = random_weights(model.config)
    return None if weights is None else rounded(weights, dtype)


def rounded(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Converts weights to a dtype: every candidate and the fp64 reference start from these numbers."""
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def image_views(paths: Sequence[Path], model: Model, count: int, seed: int = 0) -> Tensor:
    """Prepares views of images [count, *model.shape] in fp32 on the CPU, or random numbers for other inputs.

    The first ones are the whole images, further ones random crops, so that large batches consist of different images.
    """
    if model.data is None:
        return torch.randn(count, *model.shape, generator=torch.Generator().manual_seed(seed))
    transform = make_transform(model.data, model.image_hw, model.in_chans)
    images = [read_image(path) for path in paths[:count]]
    generator = np.random.default_rng(seed)
    views = []
    for number in range(count):
        image = images[number % len(images)]
        views.append(transform(image if number < len(images) else random_crop(image, generator)))
    return torch.stack(views)


def rotating_batches(views: Tensor, batch_size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Makes different batches of views on a device, enough that the next one is never in the cache."""
    nbytes = batch_size * views[0].numel() * dtype.itemsize
    on_device = views.to(device=device, dtype=dtype)
    batches = []
    for number in range(cold_copies(nbytes, device)):
        rows = (torch.arange(batch_size, device=device) + number * (batch_size + 1)) % len(views)
        batches.append(on_device[rows])
    return batches

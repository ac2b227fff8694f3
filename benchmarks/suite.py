"""pytest-benchmark suite over the tasks and entrants of the other benchmarks: `make bench-suite`.

Operators, blocks, models, training steps, export, cold start. What gives a wrong answer fails, what cannot run here is
skipped with the reason. On a GPU pytest-benchmark's own timer is one of device events, so that its statistics,
--benchmark-compare and --benchmark-compare-fail are about the device; calls are timed on inputs that the cache has
lost. VIT_FAST_SUITE_MODEL names another model. Figures taken in turns, with their resolution: `vit-fast bench`.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vit_fast
from vit_fast import accuracy
from vit_fast.benchmarks.correctness import Expected, expect, judge
from vit_fast.benchmarks.device_clock import Instant
from vit_fast.benchmarks.inputs import image_views, random_weights, rotating_batches, rounded
from vit_fast.benchmarks.models import find_models
from vit_fast.benchmarks.operators import Attention, LayerNormMlp, Operator, call, check
from vit_fast.benchmarks.roofline import total, work
from vit_fast.benchmarks.subjects import DEFAULT_LABELS, Selection, Task, compile_selection, parse_label
from vit_fast.benchmarks.timing import Call, cold_copies
from vit_fast.benchmarks.training import TrainingStep
from vit_fast.data import default_photograph
from vit_fast.errors import UnsupportedInputError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DEFAULT_MODEL, DTYPE, BATCH_SIZES = {
    "cpu": ("vit_tiny_patch16_224", torch.float32, (1, 4)),
    "cuda": ("vit_base_patch16_224", torch.bfloat16, (1, 64)),
}[DEVICE.type]
NAME = os.environ.get("VIT_FAST_SUITE_MODEL", DEFAULT_MODEL)
(MODEL,), BATCH = find_models(NAME, None), BATCH_SIZES[-1]
assert MODEL.config is not None, "accepted is one of our variants"
CONFIG = MODEL.config
OPERATORS: tuple[Operator, ...] = (
    Attention(NAME, BATCH, CONFIG.seqlen, CONFIG.num_heads, CONFIG.head_dim),
    LayerNormMlp(NAME, BATCH * CONFIG.seqlen, CONFIG.embed_dim, CONFIG.hidden_dim, "gelu_tanh"),
)
BLOCKS = ("eager", "sdpa", "triton", "timm", "timm+fused")  # whose blocks are model.blocks
DIRECTIONS = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
# Seconds by the device's own clock on a GPU.
pytestmark = pytest.mark.benchmark(timer=Instant if DEVICE.type == "cuda" else time.perf_counter)
ON_THE_HOST = pytest.mark.benchmark(timer=time.perf_counter, warmup=False)


def measure(benchmark: Any, group: str, run: Call, flop: int) -> None:
    """Lets pytest-benchmark time a call, on other inputs each time."""
    numbers = itertools.count()
    run(0)
    benchmark.group = f"{group}, {DTYPE}, {DEVICE}"
    benchmark(lambda: run(next(numbers)))
    if benchmark.stats is not None:  # None under --benchmark-disable
        benchmark.extra_info["TFLOP_per_s"] = flop / benchmark.stats.stats.median / 1e12


def skip_what_cannot_run(function: Callable[[], Any]) -> Any:
    """What the function gives; the test is skipped when it says that it cannot."""
    try:
        return function()
    except UnsupportedInputError as refusal:
        pytest.skip(str(refusal))
    except RuntimeError as failure:
        if "No available kernel" in str(failure) or "No viable backend" in str(failure):
            pytest.skip("torch has no such attention kernel here")
        raise


@DIRECTIONS
@pytest.mark.parametrize(
    ("task", "entrant"),
    [pytest.param(task, name, id=f"{task.part}-{name}") for task in OPERATORS for name in task.entrants()],
)
def test_operator(benchmark: Any, task: Operator, entrant: str, backward: bool) -> None:
    if DEVICE.type == "cpu" and "cuBLASLt" in entrant:
        pytest.skip("on a CPU it computes another function, exact GELU")
    if DEVICE.type == "cpu" and entrant == "flex" and backward:
        pytest.skip("FlexAttention has no backward on a CPU")
    found = skip_what_cannot_run(lambda: check(task, entrant, backward, DEVICE, DTYPE))
    assert found["correct"], found["correctness"]
    leaves, grad = task.leaves(DEVICE, DTYPE), task.grad(DEVICE, DTYPE)
    copies = cold_copies(leaves[0].nbytes, DEVICE)
    inputs = [([torch.randn_like(leaves[0]), *leaves[1:]], torch.randn_like(grad)) for _ in range(copies)]
    run = call(task.entrants()[entrant], inputs, backward)
    measure(benchmark, f"{task.name} {'backward' if backward else 'forward'}", run, task.flop_of(backward))


@DIRECTIONS
@pytest.mark.parametrize("label", BLOCKS)
def test_block(benchmark: Any, label: str, backward: bool) -> None:
    """The first block; the backward is timed with its forward."""
    task = task_of(BATCH)
    block = built(label, task)[1].blocks[0].train(backward).requires_grad_(backward)
    eager = built("eager", task)[1].blocks[0]
    x = torch.randn(BATCH, CONFIG.seqlen, CONFIG.embed_dim, device=DEVICE, dtype=DTYPE)
    with torch.no_grad():
        found = skip_what_cannot_run(lambda: block(x))
        verdict = accuracy.judge(found, eager(x), eager.double()(x.double()))
    assert verdict.passed, verdict
    inputs = [torch.randn_like(x).requires_grad_(backward) for _ in range(cold_copies(x.nbytes, DEVICE))]
    grad = torch.randn_like(x)

    def run(number: int) -> object:
        leaf = inputs[number % len(inputs)]
        with torch.set_grad_enabled(backward):
            out = block(leaf)
            return torch.autograd.grad(out, [leaf, *block.parameters()], grad) if backward else out

    parts = work(CONFIG, BATCH)
    flop = (parts["linears"].flop + parts["attention"].flop) // CONFIG.depth
    direction = "forward + backward" if backward else "forward"
    measure(benchmark, f"block of {NAME} batch {BATCH} {direction}", run, flop * (3 if backward else 1))


@pytest.mark.parametrize("batch", BATCH_SIZES)
@pytest.mark.parametrize("label", DEFAULT_LABELS[DEVICE.type])
def test_model(benchmark: Any, label: str, batch: int) -> None:
    task, (images, expected) = task_of(batch), images_of(batch)
    selection, function = built(label, task)

    def run(number: int) -> Tensor:
        with torch.inference_mode(), selection.subject.context():
            return function(images[number % len(images)])

    verdict = judge(selection.subject, task, expected, run(0))
    assert verdict.passed, verdict.reason
    flop = total(work(CONFIG, batch).values()).flop
    measure(benchmark, f"{NAME} batch {batch}", run, flop)
    if benchmark.stats is not None:
        benchmark.extra_info["images_per_s"] = batch / benchmark.stats.stats.median


@pytest.mark.parametrize("label", BLOCKS)
def test_training_step(benchmark: Any, label: str) -> None:
    model, images = built(label, task_of(BATCH))[1], images_of(BATCH)[0]
    step = TrainingStep(model, model, amp=False)
    skip_what_cannot_run(lambda: step(images[0]))
    flop = 3 * total(work(CONFIG, BATCH).values()).flop
    group = f"training step of {NAME} batch {BATCH}"
    measure(benchmark, group, lambda number: step(images[number % len(images)]), flop)


@ON_THE_HOST
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_export(benchmark: Any, precision: Any, tmp_path: Path) -> None:
    """To ONNX, held against the model in ONNX Runtime and in fp64."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = vit_fast.create_model(NAME, backend="sdpa").eval()
    calibration = [default_photograph()] if precision == "int8" else None
    benchmark.group = f"export of {NAME}"

    def export() -> Any:
        return vit_fast.export.export_onnx(model, tmp_path / "m.onnx", precision=precision, calibration=calibration)

    assert benchmark.pedantic(export, rounds=1).verified


@ON_THE_HOST
@pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])
def test_cold_start(benchmark: Any, backend: str) -> None:
    """From the start of a process to its first answer, compiling included."""
    code = (
        f"import torch, vit_fast; device = {str(DEVICE)!r}\n"
        f"model = vit_fast.create_model({NAME!r}, backend={backend!r}).eval().to(device)\n"
        f"images = torch.zeros(1, {CONFIG.in_chans}, *model.config.image_hw, device=device)\n"
        "with torch.inference_mode(): assert model(images).isfinite().all()"
    )
    if backend == "triton" and DEVICE.type == "cpu":
        pytest.skip("triton: needs a GPU")
    benchmark.group = f"cold start of {NAME}"
    benchmark.pedantic(lambda: subprocess.run([sys.executable, "-c", code], check=True), rounds=1)


@functools.cache
def task_of(batch: int) -> Task:
    return Task(MODEL, rounded(random_weights(CONFIG), DTYPE), DTYPE, DEVICE, batch)


@functools.cache
def images_of(batch: int) -> tuple[list[Tensor], Expected]:
    """Batches in turns, and what the first must give."""
    views = image_views([default_photograph()], MODEL, max(8, batch))
    batches = rotating_batches(views, batch, DTYPE, DEVICE)
    return batches, expect(task_of(batch), batches[0])


def built(label: str, task: Task) -> tuple[Selection, Any]:
    """The subject of this label, in its compile mode a function of images."""
    selection = parse_label(label)
    if missing := selection.subject.missing_packages():
        pytest.skip(f"{label}: not installed: {', '.join(missing)}")
    function = skip_what_cannot_run(lambda: selection.subject.build(task))
    return selection, compile_selection(selection, function)

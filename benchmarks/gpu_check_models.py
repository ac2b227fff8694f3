"""Whole models in the gpu-check, bf16: throughput, one image, a training step; with peak memory of each subject.

Ours is served by CUDA graphs, beside it runs eagerly; peers are timm and our own model on the sdpa backend and, in rows
of their own, the first of them compiled (at batch 1 with CUDA graphs, as ours). Large batches are timed with hidden
launches, as in a loop that never waits; one image with the host's share, as an answer is awaited.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vit_fast.accuracy import FORWARD_FACTOR

from .gpu_check_rows import KERNEL_S, Context, Cost, Found, Row, judge, measure
from .timing import Call, Protocol
from .training import TrainingStep

THROUGHPUT = Protocol(repeats=10, seconds=0.5, launch="hidden")
LATENCY = Protocol(repeats=50, seconds=0.5, launch="counted")
# Assumed: seconds to compile a whole ViT's inference, and its training.
COMPILED_S, COMPILED_TRAINING_S = 18.0, 40.0
_NO_MAX_AUTOTUNE = "not measured: autotuning every matmul takes longer than this check has"


def row(
    model: str, batch: int, *, kernels: int, training: bool = False, compiled: bool = False, important: bool = False
) -> Row:
    """A model's forward, or forward, backward and AdamW step; `kernels` are ours that no earlier row compiles."""
    what = "training step" if training else "inference"
    own = (COMPILED_TRAINING_S if training else COMPILED_S) if compiled else kernels * KERNEL_S
    name = f"{model} B{batch} {what}{', compiled peer' if compiled else ''}"
    fill = partial(_fill, model, batch, training, compiled)
    return Row("models", name, Cost(own, 2.0, 6.0 if training else 3.0), fill, important=important)


def served(model: nn.Module, images: Tensor) -> Callable[[Tensor], Tensor]:
    """The model as it should be served for one shape: what can be done once, before the first answer, is done here."""
    from vit_fast import GraphRunner

    return GraphRunner(model, images, batch_sizes=(len(images),))


def _fill(name: str, batch: int, training: bool, compiled: bool, context: Context) -> Found:
    import vit_fast
    from vit_fast.runtime import CompileMode

    with context.device:  # drawing the weights takes a CPU seconds
        ours, reference = (vit_fast.create_model(name, backend=backend) for backend in ("triton", "sdpa"))
        images = torch.randn(batch, 3, *ours.config.image_hw).to(context.dtype)
    reference.load_state_dict(ours.state_dict())
    with torch.no_grad():
        exact = reference.double()(images[:2].double())
        eager = reference.to(context.dtype)(images[:2])
        # ours at the timed batch: the batch decides which kernels run
        found = judge([ours.to(context.dtype)(images)[:2]], [eager], [exact], FORWARD_FACTOR, "rms")
        runner = ours if training else served(ours, images)
        if found["correct"]:
            found = judge([runner(images)[:2]], [eager], [exact], FORWARD_FACTOR, "rms")
    if not found["correct"]:
        return found
    call: Callable[[Any, Tensor], Call] = _training if training else _inference
    makers: dict[str, Callable[[], Call]] = {"ours": lambda: call(runner, images)}
    if not training:
        makers["ours eager"] = lambda: call(ours, images)
    peers: dict[str, Callable[[], nn.Module]] = {"timm": lambda: _timm_model(name, context), "sdpa": lambda: reference}
    if compiled:
        peer = "timm" if importlib.util.find_spec("timm") else "sdpa"
        mode: CompileMode = "reduce-overhead" if batch == 1 else "default"
        makers[f"{peer} compiled"] = lambda: call(vit_fast.compile(peers[peer](), mode), images)
    else:
        makers |= {"timm": lambda: call(peers["timm"](), images), "sdpa": lambda: call(peers["sdpa"](), images)}
    flop = ours.config.flops_per_image() * batch * (3 if training else 1)
    weight_bytes = 2 * sum(parameter.numel() for parameter in ours.parameters())
    found |= measure(makers, context, LATENCY if batch == 1 else THROUGHPUT, flop=flop, moved=weight_bytes)
    if compiled:
        found["missing"]["timm max-autotune"] = _NO_MAX_AUTOTUNE
    return found | {"images_per_s": 1000 * batch / found["ms"]}


def _timm_model(name: str, context: Context) -> nn.Module:
    import timm

    with context.device:
        created: nn.Module = timm.create_model(name)
    return created.to(context.dtype)


def _inference(model: Callable[[Tensor], Tensor], images: Tensor) -> Call:
    if isinstance(model, nn.Module):
        model.eval()

    def infer(_: int) -> object:
        with torch.no_grad():
            return model(images)

    return infer


def _training(model: nn.Module, images: Tensor) -> Call:
    step = TrainingStep(model, model, amp=False)
    return lambda _: step(images)

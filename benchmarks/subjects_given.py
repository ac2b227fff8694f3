"""A model that was given by id, file or function, as a subject: as it is, and with our operators inside."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vit_fast.errors import UnsupportedInputError
from vit_fast.fusion import fuse

from . import subjects_ours
from .subjects import Subject, Task, get_subject, register

# Share of the largest output: bf16 in place of fp32 is another precision, and the rule for fp32 says nothing about it.
BF16_BUDGET = 0.15


def build(task: Task) -> nn.Module:
    """The model itself on the task's device, in its dtype.

    Raises:
        UnsupportedInputError: the task is one of our own shapes.
    """
    if task.model.make is None:
        raise UnsupportedInputError("given", [f"{task.model.name} is no model that was given as a module"])
    return task.model.make().to(task.device, task.dtype).requires_grad_(False)


def define(task: Task) -> nn.Module:
    """What a task is held against: our eager model or operator; of a model that was given, itself."""
    made = build(task) if task.model.kind == "given" else get_subject("eager").make(task)
    assert isinstance(made, nn.Module)
    return made


def build_fused(task: Task) -> nn.Module:
    """The same after vit_fast.fuse; what could not be fused stays as it was.

    Raises:
        UnsupportedInputError: nothing in it could be fused; all reasons.
    """
    model = build(task)
    report = fuse(model)
    if not report.fused:
        report.require_all()
    return model


class _InBf16(nn.Module):
    """A model that computes in bf16 between images and outputs of another dtype."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.to(torch.bfloat16)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.model(images.bfloat16())
        return outputs.to(images.dtype)


def build_in_bf16(build_model: Callable[[Task], nn.Module], task: Task) -> nn.Module:
    """A model in bf16 for a task in fp32.

    Raises:
        UnsupportedInputError: the task is another, or this CPU computes bf16 only by way of fp32.
    """
    reasons = []
    if task.dtype != torch.float32 or task.training:
        reasons.append("it replaces fp32 in inference; accepted elsewhere is --dtypes bf16")
    if task.device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        reasons.append("this CPU has no products in bf16")
    if reasons:
        raise UnsupportedInputError("bf16", reasons)
    return _InBf16(build_model(task))


register(Subject("given", "the model as it was given", build, peer=True))
register(Subject("given+fused", "the model as it was given after vit_fast.fuse", build_fused))
for name, what, build_model in (
    ("sdpa", "our model", functools.partial(subjects_ours.build, "sdpa")),
    ("given", "the model as it was given", build),
):
    register(
        Subject(
            f"{name}-bf16",
            f"{what}, parameters and products in bf16",
            functools.partial(build_in_bf16, build_model),
            budget=lambda eager_error, largest: BF16_BUDGET * largest,
            precision="bf16",
            trainable=False,
        )
    )

"""The check of every candidate before it is timed: its outputs, or gradients, against eager in fp64.

Weights and images are first rounded to the dtype, and the fp64 reference starts from these numbers, so only errors of
the computation count. The rule of vit_fast.accuracy applies to the largest error and to the root mean square. Eager's
own error is also measured on random images, because its error on similar images varies by chance.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR, NOISE, Measure, allowed_error, error_of, size_of
from vit_fast.measure.candidate import MEASURES, Candidate, Reference, Verdict, errors_of, judge, same_class

from .candidates import build_reference
from .models import Task

MAX_CHECKED_IMAGES = 8
# The allowed error of an ONNX file, which a runtime rewrites, as a share of the outputs of the unchanged file.
ONNX_TOLERANCE = 0.01
LEARNING_RATE = 1e-6
Function = Callable[[Tensor], Tensor]


class TrainingStep:
    """Forward, cross-entropy, backward and AdamW of a model, with labels that depend on the place in the batch.

    `function` is the model or its compiled form. Dropout is set to zero, so that gradients can be compared.
    """

    def __init__(self, model: nn.Module, function: Function, *, amp: bool) -> None:
        self.model, self.function, self.amp = model.train().requires_grad_(True), function, amp
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        parameters = list(model.parameters())
        fused = parameters[0].device.type == "cuda"
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=fused)

    def __call__(self, images: Tensor) -> None:
        self.optimizer.zero_grad()
        self._loss(images, torch.arange(len(images), device=images.device)).mean().backward()
        self.optimizer.step()

    def gradients(self, images: Tensor, rows: Sequence[int], places: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Computes the gradient of each image [B, C, H, W] and the norm of all parameters' gradients [1].

        The loss is the sum over some images (rows) of the batch; their places decide the labels.
        """
        self.optimizer.zero_grad()
        leaf = images.detach().clone().requires_grad_()
        self._loss(leaf, torch.tensor(places, device=images.device))[rows].sum().backward()
        squares = [p.grad.double().square().sum() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        assert leaf.grad is not None
        return leaf.grad, [torch.stack(squares).sum().sqrt().reshape(1).to(images.dtype)]

    def _loss(self, images: Tensor, places: Tensor) -> Tensor:
        context = torch.autocast(images.device.type, torch.bfloat16) if self.amp else contextlib.nullcontext()
        with context:
            outputs = self.function(images).flatten(1)
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        losses: Tensor = F.cross_entropy(outputs, places % outputs.shape[1], reduction="none")
        return losses


class Backward:
    """The backward alone of a part of a model, or of its compiled form; its forward runs once for each batch."""

    def __init__(self, model: nn.Module, function: Function) -> None:
        from torch._functorch import config as functorch_config

        # The backward runs again and again, so it must not reuse the memory of its inputs; decided at compilation.
        functorch_config.donated_buffer = False
        self.function, self.parameters = function, list(model.train().requires_grad_(True).parameters())
        self._forwards: dict[int, tuple[Tensor, list[Tensor], Tensor]] = {}

    def __call__(self, x: Tensor) -> object:
        if id(x) not in self._forwards:
            leaf = x.detach().requires_grad_()
            out = self.function(leaf)
            self._forwards[id(x)] = out, [leaf, *self.parameters], self._gradient_of(out)
        out, leaves, gradient = self._forwards[id(x)]
        return torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    def gradients(self, x: Tensor, rows: Sequence[int], places: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Computes gradients of some images of a batch [B, ...]: of the input, and of each parameter."""
        leaf = x.detach().clone().requires_grad_()
        out = self.function(leaf)
        gradient = torch.zeros_like(out)
        gradient[rows] = self._gradient_of(out)[rows]
        own, *others = torch.autograd.grad(out, [leaf, *self.parameters], gradient)
        return own, others

    @staticmethod
    def _gradient_of(out: Tensor) -> Tensor:
        one = torch.randn(out[:1].shape, generator=torch.Generator().manual_seed(1))
        return one.to(out).repeat(len(out), *[1] * (out.ndim - 1))


@dataclass(frozen=True)
class Expected(Reference):
    """The expected outputs of every candidate of a group, or in training the images' gradients.

    Attributes:
        parameters: For training, eager's error and the fp64 value of the norm of all gradients (of a part: of each).
        classes: Classes in fp64 of the batches after the first, to measure agreement.
    """

    parameters: Sequence[tuple[float, Tensor]] = ()
    classes: Sequence[Tensor] = ()


def expect(task: Task, images: Tensor, *others: Tensor) -> Expected:
    """Computes the fp64 reference of a batch, eager's error in the task's dtype, and the classes of other batches."""
    rows = checked_rows(task)
    if task.model.onnx is not None:
        from vit_fast.measure.runtimes import open_reference

        outputs = open_reference(task.model.onnx, task.model.image_hw)(images[rows].float()).double()
        return _expected(task, rows, outputs, {m: ONNX_TOLERANCE * size_of(outputs, m) for m in MEASURES})
    weights = None if task.weights is None else {name: tensor.double() for name, tensor in task.weights.items()}
    exact_task = dataclasses.replace(task, weights=weights, dtype=torch.float64, amp=False)
    exact_model, eager_model = build_reference(exact_task), build_reference(task)
    chosen = images[rows]
    noise = torch.randn((MAX_CHECKED_IMAGES, *images.shape[1:]), generator=torch.Generator().manual_seed(0))
    if task.training:
        steps = stepper(exact_task, exact_model, exact_model), stepper(task, eager_model, eager_model)
        return _expect_gradients(task, *steps, chosen, rows, noise.to(images) if task.whole else noise[:0])
    if task.whole:
        chosen = torch.cat([chosen, noise.to(images)])
    with torch.inference_mode():
        exact = exact_model(chosen.double()).cpu()
        errors = errors_of(eager_model(chosen), exact)
        classes = [exact_model(batch.double()).argmax(-1) for batch in others]
    return _expected(task, rows, exact[: len(rows)], errors, classes=classes)


def _expected(task: Task, rows: list[int], exact: Tensor, errors: dict[Measure, float], **others: Any) -> Expected:
    return Expected([exact], [errors], [_rounding(task)], [(task.batch_size, *exact.shape[1:])], rows, **others)


def _rounding(task: Task) -> torch.dtype:
    return torch.bfloat16 if task.amp else task.dtype


def _expect_gradients(
    task: Task, exact_step: TrainingStep | Backward, eager_step: TrainingStep | Backward, images: Tensor,
    rows: list[int], noise: Tensor,
) -> Expected:  # fmt: skip
    """Computes gradients of these images; random images show how much the error of a norm varies by chance."""
    each = range(len(rows))
    exact, exact_others = exact_step.gradients(images.double(), each, rows)
    eager, eager_others = eager_step.gradients(images, each, rows)
    errors = [error_of(*pair) for pair in zip(eager_others, exact_others, strict=True)]
    for image in noise.split(1) if len(noise) else ():
        (norm,), (exact_norm,) = (
            step.gradients(given, [0], [0])[1] for step, given in ((eager_step, image), (exact_step, image.double()))
        )
        errors = [max(errors[0], error_of(norm, exact_norm) * size_of(exact_others[0]) / size_of(exact_norm))]
    parameters = list(zip(errors, exact_others, strict=True))
    return _expected(task, rows, exact.cpu(), errors_of(eager, exact), parameters=parameters)


def stepper(task: Task, model: nn.Module, function: Function) -> TrainingStep | Backward:
    """Returns the training step of a whole model, or the backward of a part."""
    return TrainingStep(model, function, amp=task.amp) if task.whole else Backward(model, function)


def checked_rows(task: Task) -> list[int]:
    """Returns the indices of the images of a batch to check: evenly spaced, with the first and the last."""
    operator, count = task.model.operator, task.batch_size
    most = MAX_CHECKED_IMAGES if operator is None else operator.checked
    return [round(i * (count - 1) / (most - 1)) for i in range(most)] if count > most else list(range(count))


def judge_outputs(candidate: Candidate, task: Task, expected: Expected, outputs: object) -> Verdict:
    """Checks a candidate's outputs, or in training its gradients, for a whole batch."""
    factor = GRADIENT_FACTOR if task.training else FORWARD_FACTOR
    if task.training and isinstance(outputs, tuple):
        outputs, others = outputs
        what = "the norm of all parameters' gradients" if task.whole else "a parameter's gradient"
        for other, (eager_error, exact) in zip(others, expected.parameters, strict=True):
            dtype = _rounding(task)
            error, allowed = error_of(other.to(dtype), exact), allowed_error(eager_error, exact, dtype, factor)
            if not error <= allowed:
                reason = f"the error of {what} must be at most {allowed:.3g}, got {error:.3g}"
                return Verdict(error, allowed, reason)
    verdict = judge([outputs], expected, factor, candidate.tolerance)
    if not verdict.passed or task.training or not task.whole or not isinstance(outputs, Tensor):
        return verdict
    same = same_class(outputs[[*expected.rows]].cpu(), expected.exact[0])
    return dataclasses.replace(verdict, agreement=float(same.double().mean()))


def describe_rule() -> str:
    """Returns the rule in words, for the record."""
    return (
        f"error against eager in fp64 <= {FORWARD_FACTOR} x (gradients: {GRADIENT_FACTOR} x)"
        " eager's error in that dtype + eps(dtype) / 2 x the outputs' size, for root mean squares and,"
        f" with {NOISE:g} more, for the largest; on up to {MAX_CHECKED_IMAGES} images of the batch; all outputs finite"
    )

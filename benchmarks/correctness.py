"""The gate before every speed row: a candidate's outputs against the eager definition in fp64.

The weights and images are first rounded to the dtype, then the definition computes in fp64 from these very numbers:
what is left is the error of computing, not of storing. The rule is vit_fast.accuracy's, with our eager model as the
yardstick, over the largest error and over the root mean square, which of thousands of outputs is the sharper of the
two. Eager's own error is measured over as many random images beside the checked ones: of photographs that are all
alike there is but one, and how far off eager is there a matter of luck.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vit_fast.accuracy import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    NOISE,
    Measure,
    allowed_error,
    error_of,
    size_of,
)
from vit_fast.measure.check import MEASURES, Reference, Verdict, errors_of, judge, same_answers

from .candidates import NamedCandidate, Task
from .candidates_models import define
from .training import Backward, TrainingStep

MAX_CHECKED_IMAGES = 8
# Of the outputs' size, for a file that ONNX Runtime rewrites, against the same file unchanged.
ONNX_TOLERANCE = 0.01


@dataclass(frozen=True)
class Expected:
    """The outputs that every candidate of a group must give.

    Attributes:
        rows: Which images of the batch are checked, spread over it.
        outputs: The definition's outputs for these, fp64, on the CPU.
        eager_error: Our eager model's error in the group's dtype, by measure.
        parameters: Of a training step, the norm of all parameters' gradients [1]; of a part's backward, each of them.
            Of each, eager's error and what it is in fp64.
        classes: Of the batches after the first, as far as agreement is of them, too: the largest outputs in fp64.
    """

    rows: list[int]
    outputs: Tensor
    eager_error: dict[Measure, float]
    parameters: Sequence[tuple[float, Tensor]] = ()
    classes: Sequence[Tensor] = ()


def expect(task: Task, images: Tensor, *others: Tensor) -> Expected:
    """The definition in fp64 and eager's own error in the task's dtype.

    Args:
        task: What is computed.
        images: The batch that candidates are checked on; at most MAX_CHECKED_IMAGES of it, or as an operator says.
        others: The batches after it, of which a whole model's agreement is, too.
    """
    rows = checked_rows(task)
    if task.model.onnx is not None:
        from vit_fast.measure.runtimes import unrewritten

        outputs = unrewritten(task.model.onnx, task.model.image_hw)(images[rows].float()).double()
        return Expected(rows, outputs, {measure: ONNX_TOLERANCE * size_of(outputs, measure) for measure in MEASURES})
    weights = None if task.weights is None else {name: tensor.double() for name, tensor in task.weights.items()}
    exact_task = dataclasses.replace(task, weights=weights, dtype=torch.float64, amp=False)
    exact_model, eager_model = define(exact_task), define(task)
    chosen = images[rows]
    noise = torch.randn((MAX_CHECKED_IMAGES, *images.shape[1:]), generator=torch.Generator().manual_seed(0))
    if task.training:
        steps = stepper(exact_task, exact_model, exact_model), stepper(task, eager_model, eager_model)
        return _expect_gradients(*steps, chosen, rows, noise[:2].to(images) if task.whole else noise[:0])
    if task.whole:
        chosen = torch.cat([chosen, noise.to(images)])
    with torch.inference_mode():
        exact = exact_model(chosen.double()).cpu()
        eager = eager_model(chosen)
        classes = [exact_model(batch.double()).argmax(-1) for batch in others]
    return Expected(rows, exact[: len(rows)], errors_of(eager, exact), classes=classes)


def _expect_gradients(
    exact_step: TrainingStep | Backward, eager_step: TrainingStep | Backward, images: Tensor, rows: list[int],
    noise: Tensor,
) -> Expected:  # fmt: skip
    """Computes gradients of these images; random images show how much the error of a norm varies by luck."""
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
    return Expected(rows, exact.cpu(), errors_of(eager, exact), parameters)


def stepper(task: Task, model: nn.Module, function: Callable[[Tensor], Tensor]) -> TrainingStep | Backward:
    """Returns a step of a whole model, or the backward of a part."""
    return TrainingStep(model, function, amp=task.amp) if task.whole else Backward(model, function)


def checked_rows(task: Task) -> list[int]:
    """Returns the images of a batch that are checked."""
    operator = task.model.operator
    return spread(task.batch_size, MAX_CHECKED_IMAGES if operator is None else operator.checked)


def spread(count: int, most: int) -> list[int]:
    """Up to `most` indices below count, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def judge_outputs(candidate: NamedCandidate, task: Task, expected: Expected, outputs: object) -> Verdict:
    """Compares a candidate's outputs for a whole batch (in training, its gradients) with what is expected."""
    factor, dtype = GRADIENT_FACTOR if task.training else FORWARD_FACTOR, torch.bfloat16 if task.amp else task.dtype
    if task.training and isinstance(outputs, tuple):
        outputs, others = outputs
        what = "the norm of all parameters' gradients" if task.whole else "a parameter's gradient"
        for other, (eager_error, exact) in zip(others, expected.parameters, strict=True):
            error, allowed = error_of(other.to(dtype), exact), allowed_error(eager_error, exact, dtype, factor)
            if not error <= allowed:
                return Verdict(error, allowed, f"{what} is off by {error:.3g}, allowed is {allowed:.3g}")
    shape = (task.batch_size, *expected.outputs.shape[1:])
    reference = Reference([expected.outputs], [expected.eager_error], [dtype], [shape], expected.rows)
    verdict = judge([outputs], reference, factor, candidate.tolerance)
    if not verdict.passed or task.training or not task.whole or not isinstance(outputs, Tensor):
        return verdict
    same = same_answers(outputs[expected.rows].cpu(), expected.outputs)
    return dataclasses.replace(verdict, agreement=float(same.double().mean()))


def describe_rule() -> str:
    """The rule in words, for the record."""
    return (
        f"error against eager in fp64 <= {FORWARD_FACTOR} x (gradients: {GRADIENT_FACTOR} x)"
        " eager's error in that dtype + eps(dtype) / 2 x the outputs' size, for root mean squares and,"
        f" with {NOISE:g} more, for the largest; on up to {MAX_CHECKED_IMAGES} images of the batch; all outputs finite"
    )

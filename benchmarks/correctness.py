"""The gate before every speed row: a subject's outputs against the eager definition in fp64.

The weights and images are first rounded to the dtype, then the definition computes in fp64 from these very numbers:
what is left is the error of computing, not of storing. A subject may be twice as far off as our eager model is in the
same dtype, and one rounding more. Its root mean square is held to the same rule as its maximum, because over thousands
of outputs that is the sharper of the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .subjects import Subject, Task
from .subjects_ours import build

MAX_CHECKED_IMAGES = 8


@dataclass(frozen=True)
class Expected:
    """What every subject of a group must give.

    Attributes:
        rows: Which images of the batch are checked, spread over it.
        outputs: The definition's outputs for these, fp64, on the CPU.
        eager_error: Largest deviation of our eager model in the group's dtype.
        eager_rms_error: Root mean square of that deviation.
    """

    rows: list[int]
    outputs: Tensor
    eager_error: float
    eager_rms_error: float

    @property
    def largest_output(self) -> float:
        return float(self.outputs.abs().max())


@dataclass(frozen=True)
class Verdict:
    """Whether a subject's outputs are right, by how much they are off, and why they are not right."""

    max_error: float
    allowed_error: float
    reason: str | None

    @property
    def passed(self) -> bool:
        return self.reason is None


def expect(task: Task, images: Tensor, more: Tensor) -> Expected:
    """The definition in fp64 and eager's own error in the task's dtype.

    Args:
        task: What is computed.
        images: The batch that subjects will be checked on; up to MAX_CHECKED_IMAGES of it are.
        more: Images [B, ...] that fill up a smaller batch, so that eager's error is an estimate from as many images.
    """
    rows = spread(len(images), MAX_CHECKED_IMAGES)
    chosen = torch.cat([images[rows], more[: MAX_CHECKED_IMAGES - len(rows)].to(images)])
    with torch.inference_mode():
        outputs = build("eager", _in_fp64(task))(chosen.double()).cpu()
        deviation = build("eager", task)(chosen).double().cpu() - outputs
    return Expected(rows, outputs[: len(rows)], float(deviation.abs().max()), rms(deviation))


def spread(count: int, most: int) -> list[int]:
    """Up to `most` indices below count, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def allowed_error(eager_error: float, output: float, dtype: torch.dtype) -> float:
    """2 x the eager model's error in that dtype + one rounding of an output of this size."""
    return 2 * eager_error + torch.finfo(dtype).eps * output


def judge(subject: Subject, task: Task, expected: Expected, outputs: object) -> Verdict:
    """Holds a subject's outputs for a whole batch against what is expected."""
    limit = allowed_error(expected.eager_error, expected.largest_output, task.dtype)
    if subject.budget is not None:
        limit = subject.budget(expected.eager_error, expected.largest_output)
    shape = (task.batch_size, *expected.outputs.shape[1:])
    if not isinstance(outputs, Tensor) or tuple(outputs.shape) != shape:
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        return Verdict(float("inf"), limit, f"gives {found} instead of {shape}")
    if not bool(torch.isfinite(outputs).all()):
        return Verdict(float("inf"), limit, "gives NaN or infinity")
    deviation = outputs[expected.rows].double().cpu() - expected.outputs
    error, rms_error = float(deviation.abs().max()), rms(deviation)
    if error > limit:
        return Verdict(error, limit, f"off by {error:.3g}, allowed is {limit:.3g}")
    rms_limit = allowed_error(expected.eager_rms_error, rms(expected.outputs), task.dtype)
    if subject.budget is None and rms_error > rms_limit:
        return Verdict(error, limit, f"off by {rms_error:.3g} in root mean square, allowed is {rms_limit:.3g}")
    return Verdict(error, limit, None)


def describe_rule() -> str:
    """The rule in words, for the record."""
    return (
        "max |output - eager in fp64| <= 2 x eager's error in that dtype + eps(dtype) x max |output|, "
        f"and the same for root mean squares, on up to {MAX_CHECKED_IMAGES} images of the batch; all outputs finite"
    )


def _in_fp64(task: Task) -> Task:
    return Task(
        model=task.model,
        config=task.config,
        data_config=task.data_config,
        weights={name: tensor.double() for name, tensor in task.weights.items()},
        dtype=torch.float64,
        device=task.device,
        batch_size=task.batch_size,
    )

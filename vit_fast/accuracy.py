"""The rule of accuracy: what computes in few bits may be twice as far off as plain torch is in the same bits.

    error(result) <= factor x error(eager in the same dtype) + one rounding of the output

Errors are against the eager definition in fp64 on the very same inputs; the factor is 2, and 3 for gradients. Tests of
the kernels, `vit-fast verify`, the benchmarks' gate, `make gpu-check` and the probe behind `auto` all ask it here.

The largest error is held to one thing more, NOISE, below which no summation order can be told from another: sums of
terms of order one that cancel leave it in fp32, and eager may be exactly right there by luck. A root mean square needs
none, as over many elements luck evens out; it is the sharper of the two, and the one for outputs of any scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FORWARD_FACTOR, GRADIENT_FACTOR = 2, 3
NOISE = 2e-6
# So few elements may all be far nearer than a rounding by luck: then eager's error is no yardstick for other roundings.
FEW = 8

Measure = Literal["largest", "rms"]


@dataclass(frozen=True)
class Accuracy:
    """The error of a result, and the allowed error.

    Attributes:
        error: Of the result against fp64; infinite where it holds NaN or infinity.
        eager_error: Of eager in the same dtype.
        allowed: What the rule allows.
    """

    error: float
    eager_error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed

    @property
    def share(self) -> float:
        """The error as a share of the allowed one; infinite for any error where none is allowed."""
        return self.error / self.allowed if self.allowed else (0.0 if self.passed else float("inf"))

    def __str__(self) -> str:
        return f"off by {self.error:.3g}, allowed is {self.allowed:.3g} (eager: {self.eager_error:.3g})"


def judge(
    result: Tensor, eager: Tensor, exact: Tensor, factor: float = FORWARD_FACTOR, measure: Measure = "largest"
) -> Accuracy:
    """Holds a result to the rule.

    Args:
        result: What was computed, in the dtype whose rounding is allowed.
        eager: The definition's answer in that dtype.
        exact: Its answer in fp64, from the same numbers.
        factor: FORWARD_FACTOR or GRADIENT_FACTOR.
        measure: Errors as the largest or as the root mean square over all elements.
    Raises:
        ValueError: the shapes differ.
    """
    if not result.shape == eager.shape == exact.shape:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (result, eager, exact))
        raise ValueError(f"result, eager and exact are {shapes}: expected equal shapes")
    eager_error = error_of(eager, exact, measure)
    return Accuracy(
        error_of(result, exact, measure), eager_error, allowed_error(eager_error, exact, result.dtype, factor, measure)
    )


def allowed_error(
    eager_error: float,
    exact: Tensor,
    dtype: torch.dtype,
    factor: float = FORWARD_FACTOR,
    measure: Measure = "largest",
) -> float:
    """The rule's limit, from eager's own error in `dtype` and the exact output; see judge."""
    rounding = torch.finfo(dtype).eps / 2 * size_of(exact, measure)
    if exact.numel() < FEW:
        eager_error = max(eager_error, 2 * rounding)
    return factor * eager_error + rounding + (NOISE if measure == "largest" else 0.0)


def error_of(result: Tensor, exact: Tensor, measure: Measure = "largest") -> float:
    """Returns the error of a result against the exact one; infinite if it holds NaN or infinity."""
    difference = result.detach().double().cpu() - exact.detach().double().cpu()
    return size_of(difference, measure) if bool(difference.isfinite().all()) else float("inf")


def size_of(values: Tensor, measure: Measure = "largest") -> float:
    """The largest magnitude, or the root mean square; 0 of nothing."""
    if not values.numel():
        return 0.0
    values = values.detach().double()
    return float(values.abs().max() if measure == "largest" else values.square().mean().sqrt())

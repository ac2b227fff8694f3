"""The accuracy rule: an error may be at most twice the error of eager PyTorch in the same dtype, plus rounding.

    error(result) <= factor x error(eager in the same dtype) + one rounding error of the output

An error is the largest or root-mean-square difference from eager PyTorch in fp64 on the same inputs. The factor is 2,
and 3 for gradients. Kernel tests, `vit-fast verify`, `vit-fast bench`, `make gpu-check` and the test kernel of
`backend="auto"` use this rule.

For the largest difference, NOISE is added to the allowed error. In fp32, terms of order one that cancel leave an error
of this size, while eager may be exact by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FORWARD_FACTOR, GRADIENT_FACTOR = 2, 3
NOISE = 2e-6
# With fewer elements, the error of eager may be far below one rounding error by chance.
FEW = 8

Measure = Literal["largest", "rms"]


@dataclass(frozen=True)
class Accuracy:
    """Error of a result, and the allowed error."""

    error: float
    eager_error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        return f"error must be at most {self.allowed:.3g}, got {self.error:.3g} (eager's error: {self.eager_error:.3g})"


def judge(
    result: Tensor, eager: Tensor, exact: Tensor, factor: float = FORWARD_FACTOR, measure: Measure = "largest"
) -> Accuracy:
    """Applies the accuracy rule to a result. `eager` and `exact` are torch's outputs in result.dtype and in fp64."""
    if not result.shape == eager.shape == exact.shape:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (result, eager, exact))
        raise ValueError(f"result, eager and exact must have equal shapes, got {shapes}")
    error, eager_error = error_of(result, exact, measure), error_of(eager, exact, measure)
    return Accuracy(error, eager_error, allowed_error(eager_error, exact, result.dtype, factor, measure))


def allowed_error(
    eager_error: float, exact: Tensor, dtype: torch.dtype, factor: float = FORWARD_FACTOR, measure: Measure = "largest"
) -> float:
    """Returns the largest error that passes, given eager's error in `dtype` and the fp64 output `exact`."""
    rounding = torch.finfo(dtype).eps / 2 * size_of(exact, measure)
    if exact.numel() < FEW:
        eager_error = max(eager_error, 2 * rounding)
    return factor * eager_error + rounding + (NOISE if measure == "largest" else 0.0)


def error_of(result: Tensor, exact: Tensor, measure: Measure = "largest") -> float:
    """Returns the largest or rms difference from `exact`; infinite if the difference contains NaN or infinity."""
    difference = result.detach().double().cpu() - exact.detach().double().cpu()
    return size_of(difference, measure) if bool(difference.isfinite().all()) else float("inf")


def size_of(values: Tensor, measure: Measure = "largest") -> float:
    """Returns the largest magnitude or the root mean square; 0 for an empty tensor."""
    if not values.numel():
        return 0.0
    values = values.detach().double()
    return float(values.abs().max() if measure == "largest" else values.square().mean().sqrt())

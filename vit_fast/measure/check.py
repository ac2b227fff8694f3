"""The check that every candidate passes before it is timed: its outputs against fp64, by the rule of accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..accuracy import FORWARD_FACTOR, Measure, allowed_error, error_of, size_of

MEASURES: tuple[Measure, ...] = ("largest", "rms")
# Outputs without classes agree where they point in the same direction as far as this cosine says.
SAME_DIRECTION = 0.99


@dataclass(frozen=True)
class Reference:
    """The outputs that a candidate must give, leaf by leaf.

    Attributes:
        exact: In fp64, of the checked images.
        eager_errors: The errors of plain torch in the candidate's dtype, by measure.
        dtypes: The dtypes whose rounding is allowed.
        shapes: Those of a whole batch.
        rows: The checked images of a batch.
    """

    exact: Sequence[Tensor]
    eager_errors: Sequence[dict[Measure, float]]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[tuple[int, ...]]
    rows: Sequence[int]

    def errors(self, leaves: Sequence[Tensor]) -> list[dict[Measure, float]]:
        return [
            errors_of(leaf if leaf.shape == exact.shape else leaf[[*self.rows]], exact)
            for leaf, exact in zip(leaves, self.exact, strict=True)
        ]

    def limits(self, factor: float, tolerance: float | None) -> list[dict[Measure, float]]:
        """Returns the largest errors allowed, by the rule of accuracy or as a share of the largest output."""
        if tolerance is not None:
            return [{"largest": tolerance * size_of(exact)} for exact in self.exact]
        each = zip(self.exact, self.eager_errors, self.dtypes, strict=True)
        return [{m: allowed_error(eager[m], exact, dtype, factor, m) for m in MEASURES} for exact, eager, dtype in each]


@dataclass(frozen=True)
class Verdict:
    """The largest error of a candidate, the largest allowed one, and why it fails, if so.

    `agreement` is the share of the images with the reference's answer.
    """

    max_error: float
    allowed_error: float
    reason: str | None
    agreement: float | None = None

    @property
    def passed(self) -> bool:
        return self.reason is None


def judge(
    leaves: Sequence[object], reference: Reference, factor: float = FORWARD_FACTOR, tolerance: float | None = None
) -> Verdict:
    """Compares the outputs of a whole batch with the reference.

    Args:
        leaves: The outputs, leaf by leaf.
        reference: What they must be.
        factor: FORWARD_FACTOR or GRADIENT_FACTOR.
        tolerance: The largest error as a share of the largest output, for candidates in fewer bits; None means the
            rule of vit_fast.accuracy.
    """
    limits = reference.limits(factor, tolerance)
    limit = max(each["largest"] for each in limits)
    found = [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    if found != [*reference.shapes]:
        ours, theirs = (one[0] if len(one) == 1 else one for one in (found, [*reference.shapes]))
        return Verdict(float("inf"), limit, f"gives {ours} instead of {theirs}")
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not all(bool(leaf.isfinite().all()) for leaf in tensors):
        return Verdict(float("inf"), limit, "gives NaN or infinity")
    errors = reference.errors(tensors)
    worst = max(each["largest"] for each in errors)
    for each, allowed in zip(errors, limits, strict=True):
        for measure, most in allowed.items():
            if each[measure] > most:
                in_what = "" if measure == "largest" else " in root mean square"
                reason = f"off by {each[measure]:.3g}{in_what}, allowed is {most:.3g}"
                return Verdict(worst, limit, reason)
    return Verdict(worst, limit, None)


def errors_of(leaf: Tensor, exact: Tensor) -> dict[Measure, float]:
    return {measure: error_of(leaf, exact, measure) for measure in MEASURES}


def same_answers(one: Tensor, other: Tensor) -> Tensor:
    """Compares images [B]: the same largest output or, of outputs without classes, nearly the same direction."""
    one, other = one.float(), other.to(one.device).float()
    if one.dim() == 2 and one.shape[1] > 1:
        return one.argmax(1) == other.argmax(1)
    rows = [value.flatten(1) if value.dim() > 1 else value.reshape(-1, 1) for value in (one, other)]
    return torch.cosine_similarity(rows[0], rows[1]) >= SAME_DIRECTION

"""The check of every candidate before it is timed: its outputs against fp64, by the rule of vit_fast.accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..accuracy import FORWARD_FACTOR, Measure, allowed_error, error_of, size_of

MEASURES: tuple[Measure, ...] = ("largest", "rms")
# Outputs that are no logits agree if their cosine similarity is at least this.
SAME_DIRECTION = 0.99


@dataclass(frozen=True)
class Reference:
    """The expected outputs of a batch, one entry per output tensor.

    `exact` are outputs in fp64 of the checked images, whose indices are `rows`. `shapes` are of the whole batch.
    `eager_errors` are errors of eager in the candidate's dtype. `dtypes` decide the allowed rounding.
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
        """Returns the largest allowed errors, by the accuracy rule or as a share of the largest output."""
        if tolerance is not None:
            return [{"largest": tolerance * size_of(exact)} for exact in self.exact]
        each = zip(self.exact, self.eager_errors, self.dtypes, strict=True)
        return [{m: allowed_error(eager[m], exact, dtype, factor, m) for m in MEASURES} for exact, eager, dtype in each]


@dataclass(frozen=True)
class Verdict:
    """The largest error of a candidate, the allowed error, the reason why it fails, and its top-1 agreement."""

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

    `factor` is FORWARD_FACTOR or GRADIENT_FACTOR. `tolerance` is the largest error as a share of the largest output,
    for lower precision; None means the accuracy rule.
    """
    limits = reference.limits(factor, tolerance)
    limit = max(each["largest"] for each in limits)
    found = [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    if found != [*reference.shapes]:
        ours, theirs = (one[0] if len(one) == 1 else one for one in (found, [*reference.shapes]))
        return Verdict(float("inf"), limit, f"the output must be {theirs}, got {ours}")
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not all(bool(leaf.isfinite().all()) for leaf in tensors):
        return Verdict(float("inf"), limit, "the output contains NaN or infinity")
    errors = reference.errors(tensors)
    worst = max(each["largest"] for each in errors)
    for each, allowed in zip(errors, limits, strict=True):
        for measure, most in allowed.items():
            if each[measure] > most:
                name = "error" if measure == "largest" else "root mean square error"
                return Verdict(worst, limit, f"the {name} must be at most {most:.3g}, got {each[measure]:.3g}")
    return Verdict(worst, limit, None)


def errors_of(leaf: Tensor, exact: Tensor) -> dict[Measure, float]:
    return {measure: error_of(leaf, exact, measure) for measure in MEASURES}


def same_class(one: Tensor, other: Tensor) -> Tensor:
    """Compares images [B]: the same largest logit or, of other outputs, nearly the same direction."""
    one, other = one.float(), other.to(one.device).float()
    if one.dim() == 2 and one.shape[1] > 1:
        return one.argmax(1) == other.argmax(1)
    rows = [value.flatten(1) if value.dim() > 1 else value.reshape(-1, 1) for value in (one, other)]
    return torch.cosine_similarity(rows[0], rows[1]) >= SAME_DIRECTION

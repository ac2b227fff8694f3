"""Loss of a file in eight bits: changed top-1 classes, and errors of the logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vit_fast.libraries.image_model import Output

SURE = 0.1
"""An image whose most probable class leads by this much probability is one that the model is sure of."""
FLIPS = 0.01
"""Share of images, of which the model was sure, whose class may change: none of fewer than 100."""
RMS = 0.05
"""Root mean square of the logits' error, in standard deviations of the logits, that passes."""
BUDGET = f"rms error <= {RMS:g}, no other class on more than {FLIPS:.0%} of the images that the model was sure of"
POINTS = 0.006
"""Share of the images that a file may lose against its model; one image is never too many."""
LEAST_PROBABILITY = 1e-30
"""Probabilities below count as this: fp32 ends near."""


@dataclass(frozen=True)
class Loss:
    """Comparison of a file's output with the model's, per image.

    Attributes:
        images: How many.
        max_error: Largest |file - model|, divided by the largest |model| where that is above 1.
        rms_error: Root mean square of the difference, in standard deviations of the model's output.
        agreement: Share of images with the same most probable class; None for features.
        flips: Images with another class though the model was sure of its own.
    """

    images: int
    max_error: float
    rms_error: float
    agreement: float | None
    flips: int

    def acceptable(self, margin: float = 1.0) -> bool:
        """True if the loss is within the limits; `margin` < 1 makes them stricter."""
        return bool(self.rms_error <= margin * RMS and self.flips <= margin * FLIPS * self.images)

    def line(self) -> str:
        same = "" if self.agreement is None else f"top class the same on {self.agreement:.1%} of {self.images} images, "
        sure = f"changed on {self.flips} that the model was sure of, " if self.flips else ""
        return f"{same}{sure}rms error {self.rms_error:.1e}"


@dataclass(frozen=True)
class Accuracy:
    """Top-1 accuracy of a model and of its exported file.

    Attributes:
        images: Number of labelled images.
        model: Accuracy of the model.
        file: Accuracy of the file.
    """

    images: int
    model: float
    file: float

    @property
    def acceptable(self) -> bool:
        lost = (self.model - self.file) * self.images
        return lost <= max(1.0, POINTS * self.images) + 1e-6

    def line(self) -> str:
        return f"top-1 {self.file:.2%} of {self.images} images, the model's {self.model:.2%}"


def loss_of(got: np.ndarray, expected: np.ndarray, output: Output) -> Loss:
    """Compares outputs [B, classes], or [B, N, classes] of tokens, or features [B, C].

    Probabilities are compared by their logarithms, log max(p, 1e-30): all of them are small numbers, so that two
    unrelated softmaxes over many classes would pass for equal. The log differs from the logits by a constant an image.
    """
    agreement, flips = None, 0
    if output == "probabilities":
        got, expected = _log(got), _log(expected)
    if output != "features":
        ours, theirs = got.argmax(-1), expected.argmax(-1)
        agreement = float((ours == theirs).mean())
        exponents = np.exp(expected - expected.max(-1, keepdims=True))
        probabilities = exponents / exponents.sum(-1, keepdims=True)
        of_theirs, of_ours = (np.take_along_axis(probabilities, each[..., None], -1) for each in (theirs, ours))
        flips = int((of_theirs - of_ours >= SURE).sum())
    difference = got.astype(np.float64) - expected
    return Loss(
        images=len(got),
        max_error=float(np.abs(difference).max() / max(1.0, np.abs(expected).max())),
        rms_error=float(np.sqrt((difference**2).mean()) / max(expected.std(), 1e-12)),
        agreement=agreement,
        flips=flips,
    )


def _log(probabilities: np.ndarray) -> np.ndarray:
    logarithms: np.ndarray = np.log(np.maximum(probabilities.astype(np.float64), LEAST_PROBABILITY))
    return logarithms

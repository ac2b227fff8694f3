"""What an activation looks like on calibration images, and how far it may be taken to reach in eight bits.

"largest" keeps every element; "percentile" leaves out the furthest; "mean square" minimises |x - Q(x)|^2. Which of them
serves best, who knows what reads the activation decides: by what its products lose.

Large channels can be moved out of an activation into the weights that read it: x W = (x / s) (s W).
Source: SmoothQuant, arxiv.org/abs/2211.10438, alpha = 0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (99.99, 99.9)
TOKENS_BY_CHANCE, TOKENS_LARGEST = 8, 4
"""An image's tokens that are kept whole: massive activations sit in a few, which chance would miss."""
MAX_TOKENS = 1536
"""Of one activation that are kept: of more, the furthest third, and others by chance."""
SHRINK = np.linspace(0.2, 1.0, 17)
"""Parts of the largest magnitude among which "mean square" looks."""


@dataclass(frozen=True)
class Observation:
    """One activation over all calibration images.

    Attributes:
        low: Smallest element of each channel [C].
        high: Largest.
        tokens: A sample [T, C].
    """

    low: np.ndarray
    high: np.ndarray
    tokens: np.ndarray

    @property
    def peak(self) -> np.ndarray:
        """Largest magnitude of each channel [C]."""
        return np.maximum(-self.low, self.high)

    def divided(self, scale: np.ndarray) -> Observation:
        """The same where each channel is divided by `scale` [C] > 0."""
        return Observation(self.low / scale, self.high / scale, self.tokens / scale)


@dataclass(frozen=True)
class Range:
    """The range of one activation, and how it was chosen."""

    low: float
    high: float
    method: str


class Observer:
    """Looks at one activation, image by image.

    Args:
        generator: Chooses the tokens that are kept.
    """

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator
        self._low: np.ndarray | None = None
        self._high: np.ndarray | None = None
        self._tokens: list[np.ndarray] = []

    def add(self, rows: np.ndarray) -> bool:
        """The tokens of an image, fp32 [N, C]; False where an element is infinite or undefined."""
        if not np.isfinite(rows).all():
            return False
        low, high = rows.min(axis=0), rows.max(axis=0)
        self._low = low if self._low is None else np.minimum(self._low, low)
        self._high = high if self._high is None else np.maximum(self._high, high)
        self._tokens.append(self._sample(rows, TOKENS_LARGEST, TOKENS_BY_CHANCE))
        if sum(map(len, self._tokens)) > MAX_TOKENS:
            self._tokens = [self._sample(np.concatenate(self._tokens), MAX_TOKENS // 3, MAX_TOKENS // 3)]
        return True

    def seen(self) -> Observation:
        """What was seen of the images so far, at least one."""
        assert self._low is not None and self._high is not None
        return Observation(self._low, self._high, np.concatenate(self._tokens))

    def _sample(self, rows: np.ndarray, largest: int, by_chance: int) -> np.ndarray:
        furthest = np.argsort(np.abs(rows).max(axis=1))[-largest:]
        chance = self._generator.choice(len(rows), min(by_chance, len(rows)), replace=False)
        return rows[np.union1d(furthest, chance)]


def candidate_ranges(seen: Observation, rounded: Callable[[np.ndarray, Range], np.ndarray]) -> list[Range]:
    """Ranges of an activation, the largest first; zero is in each of them.

    Args:
        rounded: Elements after a way through eight bits of that range and back.
    """
    low, high = min(float(seen.low.min()), 0.0), max(float(seen.high.max()), 0.0)
    candidates = [Range(low, high, "largest")]
    for percent in PERCENTILES:
        lower, upper = np.percentile(seen.tokens, (100 - percent, percent))
        candidates.append(Range(min(float(lower), 0.0), max(float(upper), 0.0), f"percentile {percent}"))
    shrunk = [Range(low * part, high * part, "mean square") for part in SHRINK]
    errors = [np.square(seen.tokens - rounded(seen.tokens, limits)).sum() for limits in shrunk]
    return [*candidates, shrunk[int(np.argmin(errors))]]


def smoothing_scale(peak: np.ndarray, weights: Sequence[np.ndarray]) -> np.ndarray:
    """s_j = sqrt(max |x_j| / max |W_j|); 1 where a channel is always zero or read by no one.

    With the square root, the outcome depends on max |x_j| max |W_j| alone: however a function's scale is shared by what
    makes x and what reads it, the same comes out.

    Args:
        peak: Largest magnitude of each channel [C].
        weights: That read it [C, F].
    """
    wanted = np.max([np.abs(weight.astype(np.float64)).max(axis=1) for weight in weights], axis=0)
    alive = (peak > 0) & (wanted > 0)
    scale: np.ndarray = np.ones_like(wanted)
    scale[alive] = np.sqrt(peak[alive].astype(np.float64) / wanted[alive])
    return scale


def power_of_two(scale: np.ndarray) -> np.ndarray:
    """The nearest: of a floating format the rounding is the same at any, and dividing by it rounds nothing."""
    return np.exp2(np.rint(np.log2(scale)))

"""What a run can tell apart: intervals of ratios by bootstrap, the A/A control, and the verdicts that follow.

Every group times its best call twice, under two names, in the same turns: whatever lies between the two is what this
machine does to identical code, and the resolution of the run. A ratio is a difference only when its interval leaves 1
out and it lies farther from 1 than the resolution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES, CONFIDENCE = 1000, 0.99
# Where identical code differs by more than this, nothing is ranked.
UNRANKABLE = 0.10
SAME, FASTER, SLOWER, UNKNOWN = "no difference", "faster", "slower", "cannot be ranked"
QUIET_RUN = "for a quiet run: end what else runs here, fix the clocks, or give the run cores of its own (taskset -c)"


def ratio_interval(
    base_ms: Sequence[float], other_ms: Sequence[float], *, paired: bool, share: float = 0.5
) -> tuple[float, float]:
    """An interval for how many times as fast the other is: median(base_ms) / median(other_ms).

    Moving blocks of neighbouring samples are drawn, as bursts and drift last for several.

    Args:
        base_ms: Durations, at least one.
        other_ms: Those of the other; in ms, as they were taken.
        paired: Whether samples of the same number were taken in the same turn, and share what the machine did then.
        share: Of the calls that are compared by the longest of them; 0.5 compares medians.
    """
    generator = np.random.default_rng(0)
    base, other = np.asarray(base_ms), np.asarray(other_ms)
    rows = _blocks(len(base), generator)
    others = rows if paired and len(base) == len(other) else _blocks(len(other), generator)
    ratios = np.quantile(base[rows], share, axis=1) / np.quantile(other[others], share, axis=1)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _blocks(count: int, generator: np.random.Generator) -> np.ndarray:
    """Indices [RESAMPLES, count] in blocks of about the root of their number, round and round."""
    length = max(1, round(math.sqrt(count)))
    starts = generator.integers(0, count, (RESAMPLES, math.ceil(count / length), 1))
    return ((starts + np.arange(length)) % count).reshape(RESAMPLES, -1)[:, :count]


def control(first_ms: Sequence[float], again_ms: Sequence[float], *, share: float = 0.5) -> dict[str, Any]:
    """The A/A control: identical code timed in the same turns, and the resolution that follows, as a share."""
    low, high = ratio_interval(first_ms, again_ms, paired=True, share=share)
    ratio = float(np.quantile(first_ms, share) / np.quantile(again_ms, share))
    return {"ratio": ratio, "interval": [low, high], "resolution": max(high, 1 / low, ratio, 1 / ratio) - 1}


def verdict(ratio: float, interval: Sequence[float], resolution: float) -> str:
    """What a ratio says at a resolution: faster, slower, no difference, or that nothing can be said."""
    if resolution > UNRANKABLE:
        return UNKNOWN
    low, high = interval
    if low <= 1 <= high or max(ratio, 1 / ratio) - 1 <= resolution:
        return SAME
    return FASTER if ratio > 1 else SLOWER


def compare_rows(
    base: Mapping[str, Any], other: Mapping[str, Any], resolution: float, *, paired: bool
) -> dict[str, Any]:
    """How many times as fast the other measured row is: ratio, its interval, verdict."""
    ratio = other["images_per_s"] / base["images_per_s"]
    scale = other["batch"] / base["batch"]
    interval = [scale * end for end in ratio_interval(base["samples_ms"], other["samples_ms"], paired=paired)]
    return {"ratio": ratio, "interval": interval, "verdict": verdict(ratio, interval, resolution)}

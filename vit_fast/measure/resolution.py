"""Resolution of a run: intervals of ratios by bootstrap, the A/A control, and the verdicts that follow.

Every group times its best call at full precision twice, under two names, in the same turns: whatever lies between the
two is what this machine does to identical code, and the resolution of the run. Samples of one turn share what the
machine did then, and are compared with one another. A ratio is a difference only when its interval leaves 1 out and it
lies farther from 1 than the resolution.
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


def ratio(base_ms: Sequence[float], other_ms: Sequence[float], *, paired: bool, share: float = 0.5) -> float:
    """Returns the speed of the other relative to the base.

    Of samples taken in the same turns the median of each turn's own ratio, in which cancels whatever the machine did
    to that turn: drift and bursts that move a median by half leave it within some per cent. Else of the medians.

    Args:
        base_ms: Durations, at least one.
        other_ms: Those of the other; in ms, as they were taken.
        paired: Whether samples of the same number were taken in the same turn.
        share: Of the calls that are compared by the longest of them; 0.5 compares medians.
    """
    return float(_ratios(np.asarray(base_ms)[None], np.asarray(other_ms)[None], paired, share)[0])


def ratio_interval(
    base_ms: Sequence[float], other_ms: Sequence[float], *, paired: bool, share: float = 0.5
) -> tuple[float, float]:
    """An interval for the ratio of the same arguments.

    Moving blocks of neighbouring samples are drawn, as bursts and drift last for several.
    """
    generator = np.random.default_rng(0)
    base, other = np.asarray(base_ms), np.asarray(other_ms)
    rows = _blocks(len(base), generator)
    others = rows if paired and len(base) == len(other) else _blocks(len(other), generator)
    ratios = _ratios(base[rows], other[others], paired, share)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _ratios(base: np.ndarray, other: np.ndarray, paired: bool, share: float) -> np.ndarray:
    """Ratios of rows of samples; medians turn by turn, as the longest calls of two are not of the same turns."""
    if paired and share == 0.5 and base.shape == other.shape:
        return np.median(base / other, axis=1)
    return np.quantile(base, share, axis=1) / np.quantile(other, share, axis=1)


def _blocks(count: int, generator: np.random.Generator) -> np.ndarray:
    """Indices [RESAMPLES, count] in blocks of about the root of their number, round and round."""
    length = max(1, round(math.sqrt(count)))
    starts = generator.integers(0, count, (RESAMPLES, math.ceil(count / length), 1))
    return ((starts + np.arange(length)) % count).reshape(RESAMPLES, -1)[:, :count]


def control(first_ms: Sequence[float], again_ms: Sequence[float], *, share: float = 0.5) -> dict[str, Any]:
    """The A/A control: identical code timed in the same turns, and the resolution that follows, as a share.

    `resolution` is that of ratios within these turns; `between_runs`, of medians alone, that of ratios to other runs,
    in which what the machine did then does not cancel.
    """
    low, high = ratio_interval(first_ms, again_ms, paired=True, share=share)
    found = ratio(first_ms, again_ms, paired=True, share=share)
    apart = ratio_interval(first_ms, again_ms, paired=False, share=share)
    within = max(high, 1 / low, found, 1 / found) - 1
    between = max(within, apart[1] - 1, 1 / apart[0] - 1)
    return {"ratio": found, "interval": [low, high], "resolution": within, "between_runs": between}


def verdict(found: float, interval: Sequence[float], resolution: float) -> str:
    """Judges a ratio at a resolution: faster, slower, no difference, or cannot be ranked.

    Of too few samples the interval is wider than what can be ranked: two candidates are then not called equal.
    """
    if resolution > UNRANKABLE:
        return UNKNOWN
    low, high = interval
    if low <= 1 <= high:
        return UNKNOWN if max(high, 1 / low) > 1 + UNRANKABLE else SAME
    if max(found, 1 / found) - 1 <= resolution:
        return SAME
    return FASTER if found > 1 else SLOWER


def compare_rows(
    base: Mapping[str, Any], other: Mapping[str, Any], resolution: float, *, paired: bool
) -> dict[str, Any]:
    """Compares the other measured row with the base: speed ratio, its interval, verdict.

    paired: The samples are of the same rounds, as far as both have some: noise may have left one fewer.
    """
    scale = other["batch"] / base["batch"]
    count = min(len(base["samples_ms"]), len(other["samples_ms"])) if paired else None
    samples = base["samples_ms"][:count], other["samples_ms"][:count]
    interval = [scale * end for end in ratio_interval(*samples, paired=paired)]
    found = scale * ratio(*samples, paired=paired)
    return {"ratio": found, "interval": interval, "verdict": verdict(found, interval, resolution)}

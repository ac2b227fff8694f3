"""Comparison of timings: confidence intervals of ratios by bootstrap, the A/A control, and verdicts.

The fastest full-precision candidate of each group is timed twice under two names, in the same rounds. The difference
between the two is the resolution of the run. Samples of one round share the state of the machine and are compared with
each other. A ratio is a difference only if its interval excludes 1 and it is farther from 1 than the resolution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES, CONFIDENCE = 1000, 0.99
# If identical code differs by more than this, nothing is ranked.
UNRANKABLE = 0.10
SAME, FASTER, SLOWER, UNKNOWN = "no difference", "faster", "slower", "cannot be ranked"
QUIET_RUN = "to reduce noise, stop other processes, fix the clocks, or pin the run to unused cores (taskset -c)"


def ratio(base_ms: Sequence[float], other_ms: Sequence[float], *, paired: bool, share: float = 0.5) -> float:
    """Returns the speed of the other relative to the base.

    Args:
        base_ms, other_ms: Durations in ms in the order of measurement.
        paired: True if samples with the same index are of the same round: the result is the median of the ratios of
            the rounds, in which drift of the machine cancels out. False compares the medians.
        share: The quantile to compare; 0.5 is the median.
    """
    return float(_ratios(np.asarray(base_ms)[None], np.asarray(other_ms)[None], paired, share)[0])


def ratio_interval(
    base_ms: Sequence[float], other_ms: Sequence[float], *, paired: bool, share: float = 0.5
) -> tuple[float, float]:
    """Returns a confidence interval for the ratio of the same arguments.

    It resamples blocks of consecutive samples, because bursts and drift last for several.
    """
    generator = np.random.default_rng(0)
    base, other = np.asarray(base_ms), np.asarray(other_ms)
    rows = _blocks(len(base), generator)
    others = rows if paired and len(base) == len(other) else _blocks(len(other), generator)
    ratios = _ratios(base[rows], other[others], paired, share)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _ratios(base: np.ndarray, other: np.ndarray, paired: bool, share: float) -> np.ndarray:
    """Returns the ratio of each of the resampled durations [RESAMPLES, count], by round for the median."""
    if paired and share == 0.5 and base.shape == other.shape:
        return np.median(base / other, axis=1)
    return np.quantile(base, share, axis=1) / np.quantile(other, share, axis=1)


def _blocks(count: int, generator: np.random.Generator) -> np.ndarray:
    """Returns indices [RESAMPLES, count] of circular blocks of about sqrt(count) samples."""
    length = max(1, round(math.sqrt(count)))
    starts = generator.integers(0, count, (RESAMPLES, math.ceil(count / length), 1))
    return ((starts + np.arange(length)) % count).reshape(RESAMPLES, -1)[:, :count]


def control(first_ms: Sequence[float], again_ms: Sequence[float], *, share: float = 0.5) -> dict[str, Any]:
    """Compares two timings of identical code in the same rounds.

    Returns `resolution` for ratios within these rounds and `between_runs` for ratios to another run, both as a share.
    """
    low, high = ratio_interval(first_ms, again_ms, paired=True, share=share)
    found = ratio(first_ms, again_ms, paired=True, share=share)
    apart = ratio_interval(first_ms, again_ms, paired=False, share=share)
    within = max(high, 1 / low, found, 1 / found) - 1
    between = max(within, apart[1] - 1, 1 / apart[0] - 1)
    return {"ratio": found, "interval": [low, high], "resolution": within, "between_runs": between}


def verdict(found: float, interval: Sequence[float], resolution: float) -> str:
    """Returns faster, slower, no difference, or cannot be ranked, e.g. if too few samples make the interval wide."""
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
    """Returns the ratio of a measured row to the base with interval and verdict; paired: rounds that both have."""
    scale = other["batch"] / base["batch"]
    count = min(len(base["samples_ms"]), len(other["samples_ms"])) if paired else None
    samples = base["samples_ms"][:count], other["samples_ms"][:count]
    interval = [scale * end for end in ratio_interval(*samples, paired=paired)]
    found = scale * ratio(*samples, paired=paired)
    return {"ratio": found, "interval": interval, "verdict": verdict(found, interval, resolution)}


def format_number(value: float, digits: int = 3) -> str:
    """Formats a number with `digits` significant digits and without an exponent: 0.012, 4.56, 1,235."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"

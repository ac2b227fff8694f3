"""Comparison of timings: confidence intervals of ratios by bootstrap, the A/A control, and verdicts.

As an A/A control, one candidate is timed twice, interleaved in the same rounds: the fastest full-precision candidate of
each benchmark group, and in `optimize` the fastest candidate. The resolution (noise floor) is the largest deviation
from 1 that the ratio of the two, or its confidence interval, reaches. A candidate is faster or slower only if its
interval excludes 1 and its ratio differs from 1 by more than the resolution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES, CONFIDENCE = 1000, 0.99
# Candidates are not ranked if the resolution exceeds this.
UNRANKABLE = 0.10
SAME, FASTER, SLOWER, UNKNOWN = "no difference", "faster", "slower", "cannot be ranked"
QUIET_RUN = "to reduce noise, stop other processes, fix the clocks, or pin the run to unused cores (taskset -c)"


def ratio(base_ms: Sequence[float], other_ms: Sequence[float], *, paired: bool, share: float = 0.5) -> float:
    """Returns the speedup of `other` over `base`: base time / other time.

    Args:
        base_ms, other_ms: Durations in ms in the order of measurement.
        paired: True if samples with the same index are from the same round. For share 0.5, the result is then the
            median of the ratios per round, in which machine drift cancels. For another share, the result is
            the ratio of the two quantiles.
        share: The quantile that is compared, from 0 to 1; 0.5 is the median.
    """
    return float(_ratios(np.asarray(base_ms)[None], np.asarray(other_ms)[None], paired, share)[0])


def ratio_interval(
    base_ms: Sequence[float], other_ms: Sequence[float], *, paired: bool, share: float = 0.5
) -> tuple[float, float]:
    """Returns the 99 % confidence interval of `ratio` with the same arguments.

    Uses a circular block bootstrap, because consecutive samples are correlated (bursts, drift).
    """
    generator = np.random.default_rng(0)
    base, other = np.asarray(base_ms), np.asarray(other_ms)
    rows = _blocks(len(base), generator)
    others = rows if paired and len(base) == len(other) else _blocks(len(other), generator)
    ratios = _ratios(base[rows], other[others], paired, share)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _ratios(base: np.ndarray, other: np.ndarray, paired: bool, share: float) -> np.ndarray:
    """Returns one `ratio` per row of base and other, two arrays [rows, count]."""
    if paired and share == 0.5 and base.shape == other.shape:
        return np.median(base / other, axis=1)
    return np.quantile(base, share, axis=1) / np.quantile(other, share, axis=1)


def _blocks(count: int, generator: np.random.Generator) -> np.ndarray:
    """Returns sample indices [RESAMPLES, count]: random circular blocks of about sqrt(count) consecutive samples."""
    length = max(1, round(math.sqrt(count)))
    starts = generator.integers(0, count, (RESAMPLES, math.ceil(count / length), 1))
    return ((starts + np.arange(length)) % count).reshape(RESAMPLES, -1)[:, :count]


def control(first_ms: Sequence[float], again_ms: Sequence[float], *, share: float = 0.5) -> dict[str, Any]:
    """Compares two timings of identical code in the same rounds.

    Returns `resolution` for ratios within these rounds and `between_runs` for ratios to another run (0.02 means 2 %).
    """
    low, high = ratio_interval(first_ms, again_ms, paired=True, share=share)
    found = ratio(first_ms, again_ms, paired=True, share=share)
    apart = ratio_interval(first_ms, again_ms, paired=False, share=share)
    within = max(high, 1 / low, found, 1 / found) - 1
    between = max(within, apart[1] - 1, 1 / apart[0] - 1)
    return {"ratio": found, "interval": [low, high], "resolution": within, "between_runs": between}


def verdict(found: float, interval: Sequence[float], resolution: float) -> str:
    """Returns FASTER, SLOWER or SAME; UNKNOWN if the resolution exceeds 10 % or an interval around 1 is too wide."""
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
    """Returns the throughput ratio of row `other` to row `base`, its interval and verdict; see `ratio` for `paired`."""
    scale = other["batch"] / base["batch"]
    count = min(len(base["samples_ms"]), len(other["samples_ms"])) if paired else None
    samples = base["samples_ms"][:count], other["samples_ms"][:count]
    interval = [scale * end for end in ratio_interval(*samples, paired=paired)]
    found = scale * ratio(*samples, paired=paired)
    return {"ratio": found, "interval": interval, "verdict": verdict(found, interval, resolution)}


def format_number(value: float, digits: int = 3) -> str:
    """Rounds to `digits` significant digits (0.012, 4.56), and values >= 10^(digits - 1) to integers (1,235)."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"

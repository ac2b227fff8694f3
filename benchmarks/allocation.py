"""Allocation of a run's time to preparations and groups, estimated from the calls that were seen.

Nothing is known about a machine before its first call. The calls of a group then predict its rounds, and the rounds and
preparations of later groups, in proportion to FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vit_fast.measure import clock
from vit_fast.measure.candidate import Prepared
from vit_fast.measure.clock import Samples
from vit_fast.work import total

from .models import Group

# A measurement that ends early is still valid if it has FLOOR_REPEATS repeats, or if it has FLOOR_LEAST_REPEATS repeats
# that took FLOOR_MS together. Preparations leave time for that, and for at least EXPECTED_ROUNDS.
FLOOR_REPEATS, FLOOR_MS, FLOOR_LEAST_REPEATS, EXPECTED_ROUNDS = 50, 200.0, 3, 6


def estimate(
    group: Group, later: Sequence[Group], prepared: Mapping[str, Prepared], spent_s: Mapping[str, float]
) -> tuple[float, float, float]:
    """Estimates the seconds of timing a group, of timing this and all later groups, and of preparing the later groups.

    `spent_s` contains the seconds of preparing each candidate, and under "" those of the reference and the ceilings.
    """
    calls_s, builds_s = [ready.call_s for ready in prepared.values()], sum(ready.build_s for ready in prepared.values())
    timings_s, preparing_s, seen = [_timing_s(calls_s)], 0.0, {(group.model, group.dtype_name)}
    for other in later:  # exported files serve all batch sizes
        scale = _size(other) / _size(group)
        timings_s.append(_timing_s([scale * call_s for call_s in calls_s]))
        preparing_s += sum(spent_s.values()) - ((other.model, other.dtype_name) in seen) * builds_s
        seen.add((other.model, other.dtype_name))
    return timings_s[0], sum(timings_s), preparing_s


def is_enough(*timings: Samples) -> bool:
    """Returns True if measurements that end now are valid."""
    return all(
        len(taken) >= FLOOR_REPEATS or (len(taken) >= FLOOR_LEAST_REPEATS and sum(taken) >= FLOOR_MS)
        for taken in timings
    )


def _timing_s(calls_s: Sequence[float]) -> float:
    rounds = max(EXPECTED_ROUNDS, min(FLOOR_REPEATS, FLOOR_MS / 1e3 / min(calls_s, default=1.0)))
    settle_s, most_s = clock.SETTLE_MS / 1e3, clock.LONG_MS / 1e3
    return rounds * sum(call_s + min(max(call_s, settle_s), most_s) for call_s in calls_s)


def _size(group: Group) -> float:
    return total(group.least().values()).flop or float(group.batch_size)

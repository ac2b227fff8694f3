"""Two records side by side: the same rows paired, the ratio and its interval, what that says at their resolution."""

from __future__ import annotations

from typing import Any

from vit_fast.measure.resolution import QUIET_RUN, UNKNOWN, compare_rows

from .records import Record
from .rows import Row, resolution_of

# What must be equal for two rows to be about the same thing.
KEY_FIELDS = ("model", "task", "dtype", "requested_batch", "batch", "img_size", "data", "subject")


def compare(first: Record, second: Record) -> dict[str, Any]:
    """Pairs the rows of two records by model, dtype, batch and candidate.

    Returns:
        Plain data: pairs, each with what it is about, images_per_s of both, the second's ratio to the first with its
        interval (None without samples), the resolution below which share these records cannot tell a difference (None
        where there is no control), and the verdict, see resolution.verdict; unpaired, what could not be paired and
        why; warnings, what makes the records hard to compare.
    """
    rows, others = ({_key(row): row for row in record["rows"]} for record in (first, second))
    drift = _drift(first["ceilings"], second["ceilings"])
    pairs, unpaired = [], []
    for key in dict.fromkeys([*rows, *others]):
        row, other = rows.get(key), others.get(key)
        name = "{model} {dtype} batch {batch} {subject}".format(**(row or other or {}))
        if row is None or other is None:
            unpaired.append(f"{name}: only in the {'second' if row is None else 'first'}")
        elif row["status"] != "measured" or other["status"] != "measured":
            unpaired.append(f"{name}: {row['status']} in the first, {other['status']} in the second")
        else:
            sides = (row, first["controls"]), (other, second["controls"])
            resolution = max(drift, *(resolution_of(*side, between_runs=True) for side in sides))
            pairs.append(_pair(row, other, resolution))
    return {"pairs": pairs, "unpaired": unpaired, "warnings": _warnings(first, second, drift, pairs)}


def _pair(row: Row, other: Row, resolution: float) -> dict[str, Any]:
    rates = [row["images_per_s"], other["images_per_s"]]
    found: dict[str, Any] = {"ratio": rates[1] / rates[0], "interval": None, "verdict": UNKNOWN}
    if row["samples_ms"] and other["samples_ms"]:
        found = compare_rows(row, other, resolution, paired=False)
    told = {"images_per_s": rates, "resolution": resolution if resolution != float("inf") else None}
    return {field: row[field] for field in KEY_FIELDS} | told | found


def _drift(one: dict[str, Any], other: dict[str, Any]) -> float:
    if not one or not other:
        return 0.0
    theirs = other["matmul_TFLOP_per_s"]
    both = [(reached, theirs[dtype]) for dtype, reached in one["matmul_TFLOP_per_s"].items() if dtype in theirs]
    return max(max(pair) / min(pair) for pair in [*both, (one["copy_GB_per_s"], other["copy_GB_per_s"])]) - 1


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(map(str, (row[field] for field in KEY_FIELDS)))


def _warnings(first: Record, second: Record, drift: float, pairs: list[dict[str, Any]]) -> list[str]:
    warnings = []
    for name, record in (("first", first), ("second", second)):
        warnings += [f"the {name} is BUSY: {reason}" for reason in record["busy"]]
        if not record["rows"]:
            warnings.append(f"the {name} has no rows")
    for field in ("device", "threads", "packages", "float32_matmul_precision"):
        one, other = first["machine"][field], second["machine"][field]
        if one != other:
            if isinstance(one, dict):
                names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
                one, other = ({name: side.get(name) for name in names} for side in (one, other))
            warnings.append(f"{field} differs: {one} and {other}")
    if first["plan"]["images"] != second["plan"]["images"]:
        warnings.append("images differ")
    if drift > 0.01:
        warnings.append(f"the machine's own ceilings differ by {drift:.1%}: no smaller difference is told")
    if any(pair["verdict"] == UNKNOWN for pair in pairs):
        warnings.append(f"some pairs cannot be ranked; {QUIET_RUN}")
    return warnings

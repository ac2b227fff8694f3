"""Two records side by side: the same rows paired, their ratio, and whether the difference is more than the spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .records import Record
from .rows import Row

# What must be equal for two rows to be about the same thing.
KEY_FIELDS = ("model", "dtype", "requested_batch", "batch", "subject")


@dataclass(frozen=True)
class Pair:
    """One subject in both records.

    Attributes:
        first: Its row in the first record.
        second: Its row in the second.
        ratio: Images a second of the second over the first.
        overlap: Whether the intervals from the 20th to the 80th percentile have a time in common.
    """

    first: Row
    second: Row
    ratio: float
    overlap: bool

    @property
    def verdict(self) -> str:
        if self.overlap:
            return "no difference beyond the spread"
        return "faster" if self.ratio > 1 else "slower"


@dataclass(frozen=True)
class Comparison:
    """Pairs, what could not be paired and why, and what makes the records hard to compare."""

    pairs: list[Pair]
    unpaired: list[str]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "pairs": [
                {
                    **{field: pair.first[field] for field in KEY_FIELDS},
                    "images_per_s": [pair.first["images_per_s"], pair.second["images_per_s"]],
                    "ratio": pair.ratio,
                    "intervals_overlap": pair.overlap,
                    "verdict": pair.verdict,
                }
                for pair in self.pairs
            ],
            "unpaired": self.unpaired,
            "warnings": self.warnings,
        }


def compare(first: Record, second: Record) -> Comparison:
    """Pairs the rows of two records by model, dtype, batch and subject."""
    rows, others = ({_key(row): row for row in record["rows"]} for record in (first, second))
    pairs, unpaired = [], []
    for key in dict.fromkeys([*rows, *others]):
        row, other = rows.get(key), others.get(key)
        name = "{model} {dtype} batch {batch} {subject}".format(**(row or other or {}))
        if row is None or other is None:
            unpaired.append(f"{name}: only in the {'second' if row is None else 'first'}")
        elif row["status"] != "measured" or other["status"] != "measured":
            unpaired.append(f"{name}: {row['status']} in the first, {other['status']} in the second")
        else:
            overlap = row["ms_p20"] <= other["ms_p80"] and other["ms_p20"] <= row["ms_p80"]
            pairs.append(Pair(row, other, other["images_per_s"] / row["images_per_s"], overlap))
    return Comparison(pairs, unpaired, _warnings(first, second))


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[field] for field in KEY_FIELDS)


def _warnings(first: Record, second: Record) -> list[str]:
    """What differs between two records beside the code: machine, threads, versions, images."""
    warnings = []
    for field in ("device", "threads", "packages", "float32_matmul_precision"):
        one, other = first["machine"][field], second["machine"][field]
        if one != other:
            if isinstance(one, dict):
                names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
                one, other = ({name: side.get(name) for name in names} for side in (one, other))
            warnings.append(f"{field} differs: {one} and {other}")
    if first["plan"]["images"] != second["plan"]["images"]:
        warnings.append("images differ")
    return warnings

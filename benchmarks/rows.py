"""Rows of a record: one candidate in one group, its status, and its figures if it is correct and was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from vit_fast.measure import clock
from vit_fast.measure.candidate import Candidate
from vit_fast.measure.clock import Timing, percentile
from vit_fast.work import Work, total

from .machine import DTYPES
from .models import Model

Status = Literal[
    "measured", "not installed", "unsupported", "incorrect", "failed", "out of memory", "skipped", "interrupted"
]
Row = dict[str, Any]
Record = dict[str, Any]

GAIN = 1.03  # the gain in throughput for which --batch-sizes best tries the next batch size
COMPILED, REST = "compiled, fused", "other"
# Parts of a model by a pattern of the names of their operators or kernels: the first match counts.
PARTS = {
    "attention": "attention|attn|flash|fmha|softmax|bmm",
    "embedding": "conv(?!ert)",
    COMPILED: "^triton_(?!tem)|cpp_fused|compiled|inductor|torchdynamo",
    "linears": "addmm|::mm|linear|mlp|matmul|gemm|nvjet|triton_tem",
    "norms": "layer_?norm|group_?norm|statistics",
    "activations": "gelu|silu|relu|sigmoid|tanh|erf",
}
# Figures of measured rows.
SPEED_FIELDS = (
    "images_per_s", "ms", "ms_p20", "ms_p80", "ms_p90", "ms_p99", "repeats", "host_ms", "host_bound", "J_per_image",
    "TFLOP_per_s", "samples_ms", "ceiling_share", "FLOP", "bytes", "tokens", "GFLOP_per_image", "floor_ms",
    "ratio_to_best_peer", "ratio_interval", "verdict", "best_peer", "defect",
)  # fmt: skip
# Figures of rows that were built and called.
CHECKED_FIELDS = ("max_error", "allowed_error", "agreement", "build_s", "first_call_s", "peak_MiB")
# Bytes of an element in lower precision.
ITEMSIZES = {"bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
# The fewest calls for a 90th and a 99th percentile.
PERCENTILE_REPEATS = 100


@dataclasses.dataclass(frozen=True)
class Group:
    """The candidates of one model, dtype (see machine.DTYPES) and batch size, which are timed interleaved.

    The requested batch size is larger if it did not fit into memory. `data` is the location of the batches: "device"
    or "host" (pinned memory, which each call copies to the GPU).
    """

    model: Model
    dtype_name: str
    batch_size: int
    requested_batch_size: int
    training: bool = False
    data: str = "device"

    def __str__(self) -> str:
        return f"{self.model.name} {self.dtype_name} batch {self.batch_size}{' training' if self.training else ''}"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def as_requested(self) -> Group:
        """The group with the requested batch size."""
        return dataclasses.replace(self, batch_size=self.requested_batch_size)

    @property
    def key(self) -> tuple[str | int, ...]:
        """The key of its rows; see key_of."""
        return self.model.name, self.dtype_name, self.requested_batch_size, self.data, *self.sizes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Height and width of the images, or the shape of another input."""
        return self.model.shape if self.model.data is None else self.model.image_hw

    def about(self, candidate: str) -> Row:
        """Returns the fields that identify a row or a control of a candidate."""
        return {
            "candidate": candidate, "model": self.model.name, "dtype": self.dtype_name, "batch": self.batch_size,
            "requested_batch": self.requested_batch_size, "img_size": list(self.sizes), "data": self.data,
        }  # fmt: skip

    def least(self) -> dict[str, Work]:
        """Returns a lower bound on the work of a call, by part. A training step of a model counts three times."""
        return {} if self.model.parts is None else self.model.parts(self.batch_size, self.training)

    @property
    def launch(self) -> Literal["counted", "hidden"]:
        """The protocol's launch: "counted" at batch size 1, as for a request that waits; otherwise "hidden"."""
        return "counted" if self.batch_size == 1 and self.model.data is not None else "hidden"


def make_row(group: Group, candidate: Candidate, status: Status, reason: str | None = None) -> Row:
    """Makes a row without figures."""
    peer = candidate.peer or (group.model.operator is not None and candidate.base != "triton")
    return group.about(candidate.name) | {
        "peer": peer,
        "compile_mode": candidate.compile_mode,
        "task": "training" if group.training else "inference",
        "precision": candidate.precision or group.model.precision or group.dtype_name,
        "status": status,
        "reason": reason,
        **dict.fromkeys((*CHECKED_FIELDS, *SPEED_FIELDS)),
    }


def add_timing(row: Row, timing: Timing, group: Group) -> None:
    """Adds the durations, and throughput and operations per second."""
    least = total(group.least().values())
    itemsize = ITEMSIZES.get(row["precision"], group.dtype.itemsize)
    flop, moved = least.flop or None, least.elements * itemsize or None
    row.update(dataclasses.asdict(timing))
    row.update(
        images_per_s=group.batch_size / timing.ms * 1e3,
        samples_ms=[float(f"{sample:.6g}") for sample in timing.samples_ms],
        TFLOP_per_s=flop and flop / timing.ms / 1e9,
        FLOP=flop,
        bytes=moved,
        tokens=group.model.config and group.model.config.seqlen,
        GFLOP_per_image=flop and flop / group.batch_size / 1e9,
    )
    if len(timing.samples_ms) >= PERCENTILE_REPEATS:
        row.update(ms_p90=percentile(timing.samples_ms, 0.90), ms_p99=percentile(timing.samples_ms, 0.99))


def make_control(group: Group, candidate: str, timing: Timing, again: Timing, conditions: dict[str, Any]) -> Row:
    """Makes the control of a group, a call that was timed under two names, with the machine's state."""
    found = clock.control(timing.samples_ms, again.samples_ms)
    return group.about(candidate) | found | {"ms": [timing.ms, again.ms], "conditions": conditions}


def finish(rows: Sequence[Row], ceilings: dict[str, Any], controls: Sequence[Row]) -> None:
    """Adds shares of the ceiling, and ratios to the fastest peer with verdicts.

    The peer is the group's fastest one in full precision, or in lower precision if there is no other. A share above 1
    is a defect of the ceiling or of the formula and is reported as such.
    """
    for row in measured(rows):
        reached = ceilings.get("matmul_TFLOP_per_s", {})
        ceiling = reached.get("bf16" if row["precision"] == "amp" else row["precision"])
        share = row["TFLOP_per_s"] / ceiling if ceiling and row["TFLOP_per_s"] else None
        above = share is not None and share > 1
        row["ceiling_share"] = None if above else share
        row["defect"] = f"{share:.2f}x the matmul ceiling of this run" if above else None
        if ceiling and row["bytes"]:
            row["floor_ms"] = Work(row["FLOP"], row["bytes"]).floor_ms(1, ceiling, ceilings["copy_GB_per_s"])
        rivals = [other for other in measured(rows) if other["peer"] and key_of(other) == key_of(row)]
        peers = [other for other in rivals if not is_lower(other)] or rivals
        if not peers:
            continue
        best = max(peers, key=lambda peer: peer["images_per_s"])
        row["best_peer"] = best["candidate"]
        if row is best:
            row["ratio_to_best_peer"] = 1.0
            continue
        found = clock.compare_rows(best, row, resolution_of(row, controls), paired=best["batch"] == row["batch"])
        row.update(ratio_to_best_peer=found["ratio"], ratio_interval=found["interval"], verdict=found["verdict"])


def measured(rows: Iterable[Row]) -> list[Row]:
    """Returns the measured rows."""
    return [row for row in rows if row["status"] == "measured"]


def is_lower(row: Row) -> bool:
    """True if the candidate computes in lower precision than its group."""
    return bool(row["precision"] != row["dtype"])


def resolution_of(row: Row, controls: Sequence[Row], *, between_runs: bool = False) -> float:
    """Returns the resolution of a row's group: the worst of its controls; infinite without one."""
    field = "between_runs" if between_runs else "resolution"
    return max((float(c[field]) for c in controls if key_of(c) == key_of(row)), default=float("inf"))


def key_of(row: Row) -> tuple[Any, ...]:
    """Returns the key of a row's group."""
    return row["model"], row["dtype"], row["requested_batch"], row["data"], *row["img_size"]


def may_gain(group: Group, rows: Sequence[Row]) -> bool:
    """True if the previous batch size of a search had a higher throughput for any candidate than all before it."""
    rates: dict[str, list[float]] = {}
    for row in rows:
        if (row["model"], row["dtype"], *row["img_size"]) == (group.model.name, group.dtype_name, *group.sizes):
            whole = row["batch"] == row["requested_batch"]
            rates.setdefault(row["candidate"], []).append((row["images_per_s"] or 0.0) if whole else 0.0)
    most = max(map(len, rates.values()), default=0)
    tried = [found for found in rates.values() if len(found) == most]
    return most < 2 or any(found[-1] > GAIN * max(found[:-1]) for found in tried)


# Fields that pair two rows.
KEY_FIELDS = ("model", "task", "dtype", "requested_batch", "batch", "img_size", "data", "candidate")


def compare_records(first: Record, second: Record) -> dict[str, Any]:
    """Pairs the rows of two records.

    Returns:
        Plain data. pairs: fields that identify them, images_per_s of both, the ratio of the second to the first with
        its interval (None without samples), the resolution as a share (None without a control), the verdict; unpaired:
        rows without a pair; warnings.
    """
    rows, others = ({_key(row): row for row in record["rows"]} for record in (first, second))
    drift = _drift(first["ceilings"], second["ceilings"])
    pairs, unpaired = [], []
    for key in dict.fromkeys([*rows, *others]):
        row, other = rows.get(key), others.get(key)
        name = "{model} {dtype} batch {batch} {candidate}".format(**(row or other or {}))
        if row is None or other is None:
            unpaired.append(f"{name}: only in the {'second' if row is None else 'first'} record")
        elif row["status"] != "measured" or other["status"] != "measured":
            unpaired.append(f"{name}: {row['status']} in the first record, {other['status']} in the second")
        else:
            sides = (row, first["controls"]), (other, second["controls"])
            resolution = max(drift, *(resolution_of(*side, between_runs=True) for side in sides))
            pairs.append(_pair(row, other, resolution))
    return {"pairs": pairs, "unpaired": unpaired, "warnings": _warnings(first, second, drift, pairs)}


def _pair(row: Row, other: Row, resolution: float) -> dict[str, Any]:
    rates = [row["images_per_s"], other["images_per_s"]]
    found: dict[str, Any] = {"ratio": rates[1] / rates[0], "interval": None, "verdict": clock.UNKNOWN}
    if row["samples_ms"] and other["samples_ms"]:
        found = clock.compare_rows(row, other, resolution, paired=False)
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
        warnings += [f"the {name} record was measured on a busy machine: {reason}" for reason in record["busy"]]
        if not record["rows"]:
            warnings.append(f"the {name} record has no rows")
    for field in ("device", "threads", "packages", "float32_matmul_precision"):
        one, other = first["machine"][field], second["machine"][field]
        if one != other:
            if isinstance(one, dict):
                names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
                one, other = ({name: side.get(name) for name in names} for side in (one, other))
            warnings.append(f"{field} differs: {one} and {other}")
    if first["configuration"]["images"] != second["configuration"]["images"]:
        warnings.append("images differ")
    if drift > 0.01:
        warnings.append(f"the ceilings of the machine differ by {drift:.1%}: smaller differences cannot be measured")
    if any(pair["verdict"] == clock.UNKNOWN for pair in pairs):
        warnings.append(f"some pairs cannot be ranked; {clock.QUIET_RUN}")
    return warnings

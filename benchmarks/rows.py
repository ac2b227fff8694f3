"""One line of a record: what was asked, what became of it, and, only when it was right and measured, its figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from vit_fast.measure import resolution
from vit_fast.measure.check import Verdict
from vit_fast.measure.clock import Timing, percentile
from vit_fast.work import Work, total

from .candidates import NamedCandidate
from .machine import DTYPES
from .models import Model

Status = Literal[
    "measured", "not installed", "unsupported", "wrong", "failed", "out of memory", "skipped", "interrupted"
]
Row = dict[str, Any]

# Figures that exist only in a row whose outputs were right and whose time was measured.
SPEED_FIELDS = (
    "images_per_s", "ms", "ms_p20", "ms_p80", "ms_p90", "ms_p99", "repeats", "host_ms", "host_bound", "J_per_image",
    "TFLOP_per_s", "samples_ms", "ceiling_share", "FLOP", "bytes", "tokens", "GFLOP_per_image", "floor_ms",
    "ratio_to_best_peer", "ratio_interval", "verdict", "best_peer", "defect",
)  # fmt: skip
# Of one that was built and called, whatever came of it.
CHECKED_FIELDS = ("max_error", "allowed_error", "agreement", "build_s", "first_call_s", "peak_MiB")
# Bytes of an element where that is not the group's dtype.
ITEMSIZES = {"bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
# Calls that a 90th and a 99th percentile take.
PERCENTILE_REPEATS = 100


@dataclasses.dataclass(frozen=True)
class Group:
    """Selections that are measured in turns: one model, one dtype, one batch size.

    Attributes:
        model: What is computed.
        dtype_name: Of parameters, images and products, see machine.DTYPES.
        batch_size: Images a call.
        requested_batch_size: What was asked for; larger when that did not fit into memory.
        training: Whether a training step is measured.
        data: Where a call finds its batch: "device", or "host", from whose pinned memory the call copies it.
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
    def whole(self) -> Group:
        """The group with the requested batch size."""
        return dataclasses.replace(self, batch_size=self.requested_batch_size)

    @property
    def contest(self) -> tuple[str | int, ...]:
        """The contest of its rows; see contest."""
        return self.model.name, self.dtype_name, self.requested_batch_size, self.data, *self.sizes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Height and width of its images; of what takes none, the shape of an input."""
        return self.model.shape if self.model.data is None else self.model.image_hw

    def about(self, candidate: str) -> Row:
        """Returns the fields that name a row of this candidate, or a control."""
        return {
            "subject": candidate, "model": self.model.name, "dtype": self.dtype_name, "batch": self.batch_size,
            "requested_batch": self.requested_batch_size, "img_size": list(self.sizes), "data": self.data,
        }  # fmt: skip

    def least(self) -> dict[str, Work]:
        """Returns the least work of a call by part, three times that of inference for a training step."""
        return {} if self.model.parts is None else self.model.parts(self.batch_size, self.training)

    @property
    def launch(self) -> Literal["counted", "hidden"]:
        """ "counted" where each output is awaited, "hidden" in a loop that never waits."""
        return "counted" if self.batch_size == 1 and self.model.data is not None else "hidden"


def make_row(group: Group, selection: NamedCandidate, status: Status, reason: str | None = None) -> Row:
    """A row without figures: why there are none, or the ground on which they are put."""
    peer = selection.peer or (group.model.operator is not None and selection.name != "triton")
    return group.about(selection.label) | {
        "peer": peer,
        "compile_mode": selection.mode,
        "task": "training" if group.training else "inference",
        "precision": selection.precision or group.model.precision or group.dtype_name,
        "status": status,
        "reason": reason,
        **dict.fromkeys((*CHECKED_FIELDS, *SPEED_FIELDS)),
    }


def add_verdict(row: Row, verdict: Verdict) -> None:
    """Puts down how far off the outputs are; infinite becomes None, which JSON can say."""
    row["max_error"] = verdict.max_error if verdict.max_error != float("inf") else None
    row["allowed_error"] = verdict.allowed_error
    row["agreement"] = verdict.agreement


def add_timing(row: Row, timing: Timing, group: Group) -> None:
    """Puts down the figures that follow from a time: images and operations a second."""
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
    """Makes the control of a group: one call timed under two names, with the machine's state."""
    found = resolution.control(timing.samples_ms, again.samples_ms)
    return group.about(candidate) | found | {"ms": [timing.ms, again.ms], "conditions": conditions}


def finish(rows: Sequence[Row], ceilings: dict[str, Any], controls: Sequence[Row]) -> None:
    """Adds what needs the whole run: shares of the ceiling, and ratios to the fastest peer with their verdicts.

    The peer is the fastest of the same model, dtype and requested batch that computes in that dtype. A share above 1 is
    not given: the row names it as a defect, of the ceiling or of the formula.
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
        rivals = [other for other in measured(rows) if other["peer"] and contest(other) == contest(row)]
        peers = [other for other in rivals if not is_lower(other)] or rivals
        if not peers:
            continue
        best = max(peers, key=lambda peer: peer["images_per_s"])
        row["best_peer"] = best["subject"]
        if row is best:
            row["ratio_to_best_peer"] = 1.0
            continue
        found = resolution.compare_rows(best, row, resolution_of(row, controls), paired=best["batch"] == row["batch"])
        row.update(ratio_to_best_peer=found["ratio"], ratio_interval=found["interval"], verdict=found["verdict"])


def measured(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows that have figures."""
    return [row for row in rows if row["status"] == "measured"]


def is_lower(row: Row) -> bool:
    """True if it computes in fewer bits than its contest's dtype."""
    return bool(row["precision"] != row["dtype"])


def resolution_of(row: Row, controls: Sequence[Row], *, between_runs: bool = False) -> float:
    """The resolution of the contest that a row is in: the worst of its controls; infinite where there is none."""
    field = "between_runs" if between_runs else "resolution"
    alike = {"img_size": row["img_size"]}  # of records whose controls do not say it
    fields = [(field if field in c else "resolution", c) for c in controls if contest(alike | c) == contest(row)]
    return max((float(control[name]) for name, control in fields), default=float("inf"))


def contest(row: Row) -> tuple[Any, ...]:
    """Returns the key of a row's contest."""
    return row["model"], row["dtype"], row["requested_batch"], row["data"], *row["img_size"]

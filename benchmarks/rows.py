"""One line of a record: what was asked, what became of it, and, only when it was right and measured, its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vit_fast.config import ViTConfig

from .correctness import Verdict
from .machine import short_name
from .roofline import total, work
from .subjects import Selection
from .timing import Timing

Status = Literal[
    "measured", "not installed", "unsupported", "wrong", "failed", "out of memory", "skipped", "interrupted"
]
Row = dict[str, Any]

# Figures that exist only in a row whose outputs were right and whose time was measured.
SPEED_FIELDS = (
    "images_per_s",
    "ms",
    "ms_p20",
    "ms_p80",
    "repeats",
    "host_ms",
    "TFLOP_per_s",
    "ceiling_share",
    "FLOP",
    "bytes",
    "tokens",
    "GFLOP_per_image",
    "floor_ms",
    "ratio_to_best_peer",
    "best_peer",
)


@dataclass(frozen=True)
class Group:
    """Selections that are measured in turns: one model, one dtype, one batch size.

    Attributes:
        model: The variant's name.
        config: Its shape.
        dtype: Of parameters and images.
        batch_size: Images a call.
        requested_batch_size: What was asked for; larger when that did not fit into memory.
    """

    model: str
    config: ViTConfig
    dtype: torch.dtype
    batch_size: int
    requested_batch_size: int

    def __str__(self) -> str:
        return f"{self.model} {short_name(self.dtype)} batch {self.batch_size}"


def make_row(group: Group, selection: Selection, status: Status, reason: str | None = None) -> Row:
    """A row without figures: why there are none, or the ground on which they are put."""
    row: Row = {
        "subject": selection.label,
        "peer": selection.subject.peer,
        "compile_mode": selection.mode,
        "model": group.model,
        "dtype": short_name(group.dtype),
        "batch": group.batch_size,
        "requested_batch": group.requested_batch_size,
        "img_size": list(group.config.image_hw),
        "status": status,
        "reason": reason,
        "max_error": None,
        "allowed_error": None,
        "first_call_s": None,
        "peak_MiB": None,
    }
    row.update(dict.fromkeys(SPEED_FIELDS))
    return row


def add_verdict(row: Row, verdict: Verdict) -> None:
    """Puts down how far off the outputs are; infinite becomes None, which JSON can say."""
    row["max_error"] = verdict.max_error if verdict.max_error != float("inf") else None
    row["allowed_error"] = verdict.allowed_error


def add_timing(row: Row, timing: Timing, group: Group, ceilings: dict[str, Any]) -> None:
    """Puts down the figures that follow from a time: images and operations a second, share of the ceiling."""
    images_per_s = group.batch_size / timing.ms * 1e3
    least = total(work(group.config, group.batch_size).values())
    matmul = ceilings["matmul_TFLOP_per_s"][row["dtype"]]
    tflops = least.flop / timing.ms / 1e9
    row.update(
        images_per_s=images_per_s,
        ms=timing.ms,
        ms_p20=timing.ms_p20,
        ms_p80=timing.ms_p80,
        repeats=timing.repeats,
        host_ms=timing.host_ms,
        TFLOP_per_s=tflops,
        ceiling_share=tflops / matmul,
        FLOP=least.flop,
        bytes=least.elements * group.dtype.itemsize,
        tokens=group.config.seqlen,
        GFLOP_per_image=least.flop / group.batch_size / 1e9,
        floor_ms=least.floor_ms(group.dtype.itemsize, matmul, ceilings["copy_GB_per_s"]),
    )


def add_ratios(rows: Sequence[Row]) -> None:
    """Gives every measured row its ratio to the fastest peer of the same model, dtype and requested batch."""
    for row in rows:
        peers = [
            other
            for other in rows
            if other["peer"] and other["status"] == "measured" and _contest(other) == _contest(row)
        ]
        if row["status"] == "measured" and peers:
            best = max(peers, key=lambda peer: peer["images_per_s"])
            row["best_peer"] = best["subject"]
            row["ratio_to_best_peer"] = row["images_per_s"] / best["images_per_s"]


def _contest(row: Row) -> tuple[Any, ...]:
    return row["model"], row["dtype"], row["requested_batch"]

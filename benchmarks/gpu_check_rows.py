"""What a row of the gpu-check is, and how one is judged and measured; gpu_check.py lists the rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vit_fast import accuracy
from vit_fast.accuracy import Measure

from .machine import measure_ceilings
from .timing import Call, Protocol, peak_memory_of_call, time_interleaved

Found = dict[str, Any]
NO_TIME = "no time left"
OPERATOR_PROTOCOL = Protocol(repeats=50, seconds=0.25, warmup_seconds=0.1, launch="hidden")
ROTATIONS = 3
# Assumed, from offline compilation on two cores (0.5 to 2 s a kernel): seconds to compile one Triton kernel.
KERNEL_S = 1.0


@dataclass(frozen=True)
class Cost:
    """Assumed seconds of a row, a stand-in until they are measured: the plan's sum is made of these."""

    compile: float
    check: float
    timing: float

    @property
    def total(self) -> float:
        return self.compile + self.check + self.timing


@dataclass(frozen=True)
class Context:
    """What a row is given.

    Attributes:
        device: Where it computes; on a CPU the kernels run in Triton's interpreter and nothing is timed.
        ceilings: What this device reaches; None where that was not measured.
        end: When, by time.monotonic(), the row should have what it wants to show.
    """

    device: torch.device
    ceilings: dict[str, Any] | None
    end: float

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The interpreter gets the arithmetic of fp16 right, and that of bf16 wrong."""
        return torch.bfloat16 if self.on_gpu else torch.float16

    def is_late(self) -> bool:
        return time.monotonic() > self.end


@dataclass(frozen=True)
class Row:
    """One thing to find out.

    Attributes:
        part: What it belongs to, for --parts.
        name: Unique.
        cost: What it is assumed to take.
        fill: Finds it out, in a process that keeps what is compiled; pickled on the way there.
        command: Instead of fill, what is run; {folder} stands for a new folder, {seconds} for its time.
        important: Whether later rows give way to it.
        packages: What it imports beyond torch, triton and pytest; without one of them it is not run.
        on_gpu: Whether it is for a machine with a GPU, or one for a machine without.
    """

    part: str
    name: str
    cost: Cost
    fill: Callable[[Context], Found] | None = None
    command: tuple[str, ...] = ()
    important: bool = False
    packages: tuple[str, ...] = ()
    on_gpu: bool = True


def ceilings(context: Context) -> Found:
    """The device's ceilings, and how far apart one call under two names is: what this run can tell apart."""
    square = torch.randn(2048, 2048, device=context.device, dtype=context.dtype)
    same = time_interleaved({name: lambda _: square @ square for name in "ab"}, context.device, OPERATOR_PROTOCOL)
    low, high = sorted(timing.ms for timing in same.values())
    measured = measure_ceilings(context.device, [torch.bfloat16])
    return {"correct": True, "ceilings": measured, "same_call_twice": high / low}


def judge(
    ours: Sequence[Tensor],
    eager: Sequence[Tensor],
    exact: Sequence[Tensor],
    factor: float,
    measure: Measure = "largest",
) -> Found:
    """Every output by the rule of accuracy; exact is eager in fp64."""
    verdicts = [accuracy.judge(*results, factor, measure) for results in zip(ours, eager, exact, strict=True)]
    text = f"largest error is {max(verdict.share for verdict in verdicts):.2f} of what is allowed"
    return {
        "correct": all(verdict.passed for verdict in verdicts),
        "correctness": text,
        "dtype": str(ours[0].dtype).removeprefix("torch."),
    }


def measure(
    makers: Mapping[str, Callable[[], Call]], context: Context, protocol: Protocol, *, flop: int, moved: int
) -> Found:
    """Ours and the peers in turns; what cannot run, or is too late to begin, is named with the reason.

    Args:
        makers: By name, what makes each call; those that start with "ours" are ours, "ours" is the row's figure.
        context: See Context.
        protocol: How long.
        flop: Operations a call must do.
        moved: Bytes a call must read and write.
    Raises:
        RuntimeError: "ours" does not run.
    """
    calls: dict[str, Call] = {}
    missing: dict[str, str] = {}
    peak_MiB: dict[str, float] = {}
    for name, make in makers.items():
        if context.is_late():
            missing[name] = NO_TIME
            continue
        try:
            call = make()
            call(0)  # compiles, and makes what is kept between calls
            peak_MiB[name] = peak_memory_of_call(lambda: call(1), context.device) / 2**20  # noqa: B023  # called at once
            calls[name] = call
        except Exception as error:  # a peer that is not installed or does not run is named, not dropped
            missing[name] = f"{type(error).__name__}: {str(error).strip()[:120]}"
    if "ours" not in calls:
        raise RuntimeError(missing["ours"])
    timings = time_interleaved(
        calls,
        context.device,
        protocol,
        on_round=lambda number, _: number < protocol.least_repeats or not context.is_late(),
    )
    subjects = {
        name: {
            "ms": timing.ms,
            "ms_p20": timing.ms_p20,
            "ms_p80": timing.ms_p80,
            "repeats": timing.repeats,
            "host_ms": timing.host_ms,
            "host_bound": timing.host_bound,
            "peak_MiB": peak_MiB[name],
        }
        for name, timing in timings.items()
    }
    ms = timings["ours"].ms
    peers = {name: timing.ms for name, timing in timings.items() if not name.startswith("ours")}
    best = min(peers, key=lambda name: peers[name]) if peers else None
    floor_ms = None
    if context.ceilings is not None:
        copy, matmul = context.ceilings["copy_GB_per_s"], context.ceilings["matmul_TFLOP_per_s"]["bf16"]
        floor_ms = max(moved / copy / 1e6, flop / matmul / 1e9)
    return {
        **subjects["ours"],
        "TFLOP_per_s": flop / ms / 1e9,
        "GB_per_s": moved / ms / 1e6,
        "floor_ms": floor_ms,
        "share_of_floor": floor_ms / ms if floor_ms else None,
        "subjects": subjects,
        "missing": missing,
        "best_peer": best,
        "ratio": peers[best] / ms if best else None,
    }

"""The time of a call by part and kernel, beside the least that each part takes: `vit-fast bench --explain`.

By torch's profiler, in calls of their own: its overhead never reaches a row's figures. On a GPU the kernels' own names
say what they belong to, on a CPU those of the operators; what torch.compile has fused is a part of its own, and so is
eager attention's share of matrix products on a GPU, which cannot be told from the linears'.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from vit_fast.measure.clock import Call, synchronise, without_profiler_chatter
from vit_fast.work import Work

from .records import Record
from .report import contests, label
from .rows import Group, Row, measured

CALLS = 3
MOST_KERNELS = 3  # of each part are named
COMPILED, REST = "compiled, fused", "the rest"
# The first that is found in a name; in the order in which tables show them.
_PARTS = {
    "attention": "attention|attn|flash|fmha|softmax|bmm",
    "embedding": "conv(?!ert)",
    COMPILED: "^triton_(?!tem)|cpp_fused|compiled|inductor|torchdynamo",
    "linears": "addmm|::mm|linear|mlp|matmul|gemm|nvjet|triton_tem",
    "norms": "layer_?norm|group_?norm|statistics",
    "activations": "gelu|silu|relu|sigmoid|tanh|erf",
}


def part_of(name: str) -> str:
    """Returns the part that an operator or a kernel of this name belongs to."""
    return next((part for part, words in _PARTS.items() if re.search(words, name.lower())), REST)


def explain(call: Call, device: torch.device, group: Group) -> dict[str, Any]:
    """Profiles some calls of a warm candidate.

    Args:
        call: What is profiled; see Call.
        device: Where it computes.
        group: What it computes.
    Returns:
        Plain data for a row: kernels [part, name, calls, ms] of one call of the candidate, longest first; and what each
        part must do, [operations, bytes], of shapes that are ours.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with without_profiler_chatter(), profile(activities=activities) as profiler:
        for number in range(CALLS):
            call(number)
        synchronise(device)
    kernels = []
    for event in profiler.key_averages():
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if us and (event.device_type == DeviceType.CUDA) == on_gpu:
            kernels.append([part_of(event.key), event.key, event.count / CALLS, us / 1e3 / CALLS])
    least = group.least()
    if "head" in least:  # a linear among others, for a profiler
        least["linears"] += least.pop("head")
    moved = {part: [some.flop, some.elements * group.dtype.itemsize] for part, some in least.items()}
    return {"kernels": sorted(kernels, key=lambda kernel: -kernel[3]), "least": moved}


def tables(record: Record) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yields caption, titles and rows for every explained contest: the parts of all candidates, then their kernels."""
    for title, rows in contests(record).items():
        explained = [row for row in measured(rows) if row.get("explained")]
        if explained:
            yield f"Where the time goes, ms per call: {title}", *_parts(record, explained)
            yield f"Longest kernels: {title}", ["kernel", "candidate", "part", "calls", "ms"], _kernels(explained)


def _parts(record: Record, rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    ceilings, dtype = record["ceilings"], rows[0]["dtype"]
    matmul = ceilings.get("matmul_TFLOP_per_s", {}).get("bf16" if dtype == "amp" else dtype)
    least = rows[0]["explained"]["least"] if matmul else {}
    floors = {
        part: Work(flop, moved).floor_ms(1, matmul, ceilings["copy_GB_per_s"]) for part, (flop, moved) in least.items()
    }
    spent: list[dict[str, float]] = []
    for row in rows:
        spent.append(defaultdict(float))
        for part, _, _, ms in row["explained"]["kernels"]:
            spent[-1][part] += ms
    sums, times, floor = [sum(parts.values()) for parts in spent], [row["ms"] for row in rows], sum(floors.values())
    lines = [
        _line(part, floors.get(part), [parts.get(part) for parts in spent])
        for part in (*_PARTS, REST, "all")
        if part in floors or any(part in parts for parts in spent)
    ]
    lines.append(_line("sum", floor, sums))
    lines.append(_line("measured without profiler", None, times))
    # the host's own time, and what the profiler does not see, such as ONNX Runtime
    lines.append(
        _line("of it in no kernel", None, [max(ms - known, 0.0) for ms, known in zip(times, sums, strict=True)])
    )
    if floors:
        lines.append(_line("above the floor", None, [ms - floor for ms in times]))
    return ["part", "floor", *map(label, rows)], lines


def _line(title: str, floor: float | None, ms: Iterable[float | None]) -> list[str]:
    return [title, *("" if value is None else f"{value:.4g}" for value in (floor, *ms))]


def _kernels(rows: list[Row]) -> list[list[str]]:
    lines = []
    for row in rows:
        seen: dict[str, int] = defaultdict(int)
        for part, name, calls, ms in row["explained"]["kernels"]:
            seen[part] += 1
            if seen[part] <= MOST_KERNELS:
                lines.append([name, label(row), part, f"{calls:g}", f"{ms:.4g}"])
    return lines

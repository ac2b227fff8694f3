"""What exporting costs and what the file gains: ViT-B/16 in ONNX Runtime against eager torch, on this machine's CPU.

    python -m vit_fast.benchmarks.export_check --out benchmarks/results/export-cpu.json

Times are paired: every subject takes its turn in one process. The export itself runs in a process of its own, whose
peak memory is read when it ends. Targets, from the project's goals: fp32 <= 0.85x eager's time at batch 1 and <= 1x
at batch 8; int8 <= 0.45x at batch 1; never slower than plain torch.onnx.export's or timm's file; export and
verification in under 60 s and 4 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vit_fast.files import file_aside

from .plan import make_plan
from .runner import run
from .timing import Protocol

MODEL = "vit_base_patch16_224"
BATCHES = (1, 8)
PROTOCOL = Protocol(repeats=30, seconds=6.0, least_repeats=7, warmup_repeats=2)
BASELINE, OURS, OURS_INT8 = "sdpa", "onnxruntime", "onnxruntime-int8"
CUDA_TARGET = "H200: fp16 on CUDA <= compiled torch at batch 1"
PEER_FILES = ("torch-onnx", "timm-onnx")


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="ViT-B/16 in ONNX Runtime against eager torch, on the CPU.")
    parser.add_argument("--out", type=Path, required=True, help="the JSON record to write")
    parser.add_argument("--model", default=MODEL)
    given = parser.parse_args(args)
    record = measure(given.model)
    with file_aside(given.out) as aside:
        aside.write_text(json.dumps(record, indent=1) + "\n")
    for row in record["rows"]:
        print(f"batch {row['batch']}: {row['subject']:32s} {row['ms']:8.1f} ms  {row['ratio_to_eager']:.3f}x eager")
    for target in record["targets"]:
        if target["met"] is None:
            print(f"not measured: {target['target']}")
            continue
        print(f"{'met' if target['met'] else 'NOT met'}: {target['target']} ({target['measured']:.3f})")


def measure(name: str) -> dict[str, Any]:
    """The record: machine, cost of the export, one row a subject and batch, and whether each target was met."""
    labels = (BASELINE, OURS, OURS_INT8, *PEER_FILES)
    plan = make_plan(
        models=[name], batch_sizes=BATCHES, dtypes=["fp32"], subjects=labels, device="cpu", time_budget_s=0,
        protocol=PROTOCOL,
    )  # fmt: skip
    cost = export_cost(name)
    record = run(plan)
    measured = [row for row in record["rows"] if row["status"] == "measured"]
    eager = {row["batch"]: row["ms"] for row in measured if row["subject"] == BASELINE}
    rows = [row | {"ratio_to_eager": row["ms"] / eager[row["batch"]]} for row in measured]
    return {
        "format": "vit-fast-export-check/2",
        "model": name,
        "protocol": f"in turns, median of at least {PROTOCOL.least_repeats} calls",
        "export": cost,
        "rows": rows,
        "targets": judge(rows, cost),
    } | {name: record[name] for name in ("machine", "busy", "controls")}


def export_cost(name: str) -> dict[str, float]:
    """Seconds and peak memory of exporting and verifying, in a fresh process, counted from the imports on."""
    script = (
        "import vit_fast, tempfile, pathlib\n"
        f"model = vit_fast.create_model({name!r}, backend='sdpa')\n"
        "folder = tempfile.TemporaryDirectory()\n"
        "report = vit_fast.export.export_onnx(model, pathlib.Path(folder.name) / 'm.onnx', target='ort-cpu')\n"
        "assert report.verified\n"
    )
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", script], check=True)
    seconds = time.perf_counter() - start
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {"seconds": round(seconds, 1), "peak_MiB": round(peak_kib / 1024, 1)}


def judge(rows: list[dict[str, Any]], cost: dict[str, float]) -> list[dict[str, Any]]:
    """Each target with what was measured; None where that takes a GPU, which this check does not use."""
    ratio = {(row["subject"], row["batch"]): row["ratio_to_eager"] for row in rows}
    targets = [
        ("fp32 at batch 1 <= 0.85x eager", ratio[OURS, 1], 0.85),
        ("fp32 at batch 8 <= 1x eager", ratio[OURS, 8], 1.0),
        ("int8 at batch 1 <= 0.45x eager", ratio[OURS_INT8, 1], 0.45),
        ("export and verification < 60 s", cost["seconds"], 60.0),
        ("export and verification < 4096 MiB", cost["peak_MiB"], 4096.0),
    ]
    for peer in PEER_FILES:
        if (peer, 1) in ratio:
            targets += [(f"fp32 at batch {b} <= {peer}'s file", ratio[OURS, b] / ratio[peer, b], 1.0) for b in BATCHES]
    judged: list[dict[str, Any]] = [
        {"target": text, "measured": measured, "met": measured <= limit} for text, measured, limit in targets
    ]
    return [*judged, {"target": CUDA_TARGET, "measured": None, "met": None}]


if __name__ == "__main__":
    main()

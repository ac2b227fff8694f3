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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import machine
from .inputs import random_weights
from .timing import Protocol, time_interleaved

MODEL = "vit_base_patch16_224"
BATCHES = (1, 8)
PROTOCOL = Protocol(repeats=30, seconds=6.0, least_repeats=7, warmup_repeats=2)
BASELINE = "eager torch (sdpa)"
OURS, OURS_INT8 = "vit_fast.export, ort-cpu, fp32", "vit_fast.export, ort-cpu, int8"
CUDA_TARGET = "H200: fp16 on CUDA <= compiled torch at batch 1"
PEER_FILES = ("torch.onnx.export", "timm onnx_export")


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="ViT-B/16 in ONNX Runtime against eager torch, on the CPU.")
    parser.add_argument("--out", type=Path, required=True, help="the JSON record to write")
    parser.add_argument("--model", default=MODEL)
    given = parser.parse_args(args)
    record = measure(given.model)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    beside = given.out.with_name(f".{given.out.name}.partial")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.replace(given.out)
    for row in record["rows"]:
        print(f"batch {row['batch']}: {row['subject']:32s} {row['ms']:8.1f} ms  {row['ratio_to_eager']:.3f}x eager")
    for target in record["targets"]:
        if target["met"] is None:
            print(f"not measured: {target['target']}")
            continue
        print(f"{'met' if target['met'] else 'NOT met'}: {target['target']} ({target['measured']:.3f})")


def measure(name: str) -> dict[str, Any]:
    """The record: machine, cost of the export, one row a subject and batch, and whether each target was met."""
    from vit_fast.factory import create_model

    model = create_model(name, backend="sdpa")
    model.load_state_dict(random_weights(model.config))
    with tempfile.TemporaryDirectory() as folder:
        cost = export_cost(name)
        subjects, errors = make_subjects(model, name, Path(folder))
        rows = []
        for batch in BATCHES:
            peer = timm_subject(model, name, Path(folder), batch)
            rows += time_batch(subjects | peer, model.config.image_hw, batch)
    return {
        "format": "vit-fast-export-check/1",
        "model": name,
        "machine": machine.describe("cpu"),
        "protocol": f"in turns, median of at least {PROTOCOL.least_repeats} calls",
        "export": cost,
        "max_error_of_our_files": errors,
        "rows": rows,
        "targets": judge(rows, cost),
    }


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


def make_subjects(
    model: Any, name: str, folder: Path
) -> tuple[dict[str, Callable[[Tensor], object]], dict[str, float | None]]:
    """Eager torch, our files and the peers' files of the same weights, each as a function of images."""
    from vit_fast.data import default_photograph
    from vit_fast.export import OnnxRunner, export_onnx

    threads = torch.get_num_threads()
    height, width = model.config.image_hw
    fp32 = export_onnx(model, folder / "fp32.onnx", target="ort-cpu")
    int8 = export_onnx(
        model, folder / "int8.onnx", target="ort-cpu", precision="int8", calibration=[default_photograph()]
    )
    torch.onnx.export(
        model,
        (torch.randn(2, 3, height, width),),
        folder / "torch.onnx",
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    files = {OURS: "fp32.onnx", OURS_INT8: "int8.onnx", PEER_FILES[0]: "torch.onnx"}
    subjects: dict[str, Callable[[Tensor], object]] = {BASELINE: torch.inference_mode()(model)}
    for subject, file in files.items():
        subjects[subject] = OnnxRunner(folder / file, "cpu", threads=threads)
    return subjects, {OURS: fp32.max_error, OURS_INT8: max(check.rms_error for check in int8.checks)}


def timm_subject(model: Any, name: str, folder: Path, batch: int) -> dict[str, Callable[[Tensor], object]]:
    """timm's own exporter on timm's own model, whose file has a fixed batch; empty when timm is not installed."""
    from vit_fast.export import OnnxRunner

    try:
        import timm
        from timm.utils.onnx import onnx_export
    except ImportError:
        return {}
    peer = timm.create_model(name, pretrained=False, exportable=True)
    peer.load_state_dict(model.state_dict())
    path = folder / f"timm-{batch}.onnx"
    example = torch.randn(batch, 3, *model.config.image_hw)
    onnx_export(peer.eval(), str(path), example_input=example, check=False, use_dynamo=True)
    return {PEER_FILES[1]: OnnxRunner(path, "cpu", threads=torch.get_num_threads())}


def time_batch(
    subjects: dict[str, Callable[[Tensor], object]], image_hw: tuple[int, int], batch: int
) -> list[dict[str, Any]]:
    """One row a subject."""
    rotation = [torch.randn(batch, 3, *image_hw) for _ in range(4)]
    calls = {
        name: (lambda number, subject=subject: subject(rotation[number % len(rotation)]))
        for name, subject in subjects.items()
    }
    timings = time_interleaved(calls, "cpu", PROTOCOL)
    eager = timings[BASELINE].ms
    return [
        {
            "subject": name,
            "batch": batch,
            "ms": timing.ms,
            "ms_p20": timing.ms_p20,
            "ms_p80": timing.ms_p80,
            "repeats": timing.repeats,
            "images_per_s": 1e3 * batch / timing.ms,
            "ratio_to_eager": timing.ms / eager,
        }
        for name, timing in timings.items()
    ]


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

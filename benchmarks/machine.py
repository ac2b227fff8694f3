"""The machine a record was made on: what it is, and the two ceilings that it reached in that very run."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit_fast.measure.clock import Protocol, time_call
from vit_fast.version import cpu_name, installed

PACKAGES = (
    "torch", "triton", "timm", "transformers", "torchvision", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt",
    "torchao", "flash-attn", "xformers", "transformer-engine", "nvidia-ml-py", "numpy",
)  # fmt: skip

# As they are named in tables; tf32 is fp32 whose products a GPU may round, amp that whose products autocast makes bf16.
DTYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "amp": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip
COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
CEILING_PROTOCOL = Protocol(repeats=50, seconds=0.25, least_repeats=5, warmup_repeats=3)


def describe(device: torch.device | str) -> dict[str, Any]:
    """Everything a record says of where, when and with what it was made; plain data for JSON."""
    device = torch.device(device)
    return {
        "device": _device_name(device),
        "device_type": device.type,
        "gpu": _describe_gpu(device) if device.type == "cuda" else None,
        "cpu": cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "memory_GiB": None if (there := memory_bytes(torch.device("cpu"))) is None else round(there / 2**30, 1),
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def measure_ceilings(device: torch.device | str, dtypes: Sequence[str]) -> dict[str, Any]:
    """Measures the device's ceilings: a large copy in GB/s, a square matmul in TFLOP/s for each dtype.

    Copying counts what is read and what is written. The sizes are part of the answer: 8192 on a GPU, smaller on a CPU.
    """
    device = torch.device(device)
    size, nbytes = MATMUL_SIZE[device.type], COPY_BYTES[device.type]
    matmul = {}
    for name in dict.fromkeys(dtypes):
        left, right = (torch.randn(size, size, device=device).to(DTYPES[name]) for _ in range(2))
        with products_in(name):
            timing = time_call(functools.partial(_matmul, left, right), device, CEILING_PROTOCOL)
        matmul[name] = 2 * size**3 / (min(timing.samples_ms) * 1e9)
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_call(lambda _: target.copy_(source), device, CEILING_PROTOCOL)
    return {
        "copy_GB_per_s": 2 * nbytes / (min(timing.samples_ms) * 1e6),
        "copy_bytes": nbytes,
        "matmul_TFLOP_per_s": matmul,
        "matmul_size": size,
    }


def best_ceilings(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The best of several, over a run: what a neighbour takes away for a while is no limit of the machine."""
    if not measured:
        return {}
    matmul = {
        dtype: max(each["matmul_TFLOP_per_s"].get(dtype, 0.0) for each in measured)
        for dtype in dict.fromkeys(dtype for each in measured for dtype in each["matmul_TFLOP_per_s"])
    }
    copy = max(each["copy_GB_per_s"] for each in measured)
    return measured[0] | {"copy_GB_per_s": copy, "matmul_TFLOP_per_s": matmul, "taken": len(measured)}


def _matmul(left: Tensor, right: Tensor, _: int) -> Tensor:
    return left @ right


@contextlib.contextmanager
def products_in(name: str) -> Iterator[None]:
    """Lets products of fp32 be rounded as this name of DTYPES says, and as torch was told for all but tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def short_name(dtype: torch.dtype) -> str:
    """fp32, fp16, bf16, fp64."""
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}[dtype]


def has_bf16() -> bool:
    """True if this CPU has instructions for products in bf16."""
    if platform.machine() in ("x86_64", "AMD64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def checkout() -> Path | None:
    """The repository this file lies in, or None when the package is installed."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / ".git").exists() and (root / "pyproject.toml").exists() else None


def commit() -> str | None:
    """The checkout's commit, with "-dirty" when tracked files differ from it; None outside a checkout."""
    root = checkout()
    if root is None:
        return None
    head = output(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])
    if head is None:
        return None
    changes = output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return f"{head}-dirty" if changes else head


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()} ({torch.get_num_threads()} threads)"


def _describe_gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    query = ["nvidia-smi", f"--id={bus_id(properties)}", "--format=csv,noheader"]
    reported = output([*query, "--query-gpu=driver_version,power.limit,clocks.max.sm"])
    driver, power_limit, max_clock = (reported or "").split(", ") if (reported or "").count(", ") == 2 else (None,) * 3
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_GiB": round(properties.total_memory / 2**30, 1),
        "L2_MiB": round(properties.L2_cache_size / 2**20, 1),
        "driver": driver,
        "power_limit": power_limit,
        "max_clock": max_clock,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def bus_id(properties: Any) -> str:
    return f"{properties.pci_domain_id:08x}:{properties.pcibus_id:02x}:{properties.pci_device_id:02x}.0"


def memory_bytes(device: torch.device) -> int | None:
    """Returns the memory of the device, or of this process on a CPU; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    try:
        return min(installed, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (ValueError, OSError):  # no such file, or "max"
        return installed


def output(command: list[str]) -> str | None:
    """Returns the output of a command; None if there is no such command or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

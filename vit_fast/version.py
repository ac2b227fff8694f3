"""Versions of vit-fast and of installed packages, and a description of the machine. Imports torch only if needed."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import math
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__version__ = "0.1.0"
PACKAGES = (
    "torch", "triton", "timm", "transformers", "torchvision", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt",
    "torchao", "flash-attn", "numpy",
)  # fmt: skip
# The instruction sets of x86 and ARM on which the speed of fp32, bf16, fp16 and int8 depends.
INSTRUCTIONS = (
    "avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16", "amx_fp16",
    "asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2", "sme",
)  # fmt: skip


def installed(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_model() -> list[str]:
    """Returns what distinguishes CPU models, because virtual machines may shorten the name."""
    fields = ("vendor_id", "model name", "cpu family", "model", "stepping", "CPU implementer", "CPU part")
    return [*map(_cpuinfo, fields), *cpu_instructions()]


def cpu_instructions() -> list[str]:
    """Returns the CPU's vector and matrix instruction sets, under Linux's names; [] if unknown."""
    found = {*_cpuinfo("flags", "Features").split()}
    return [name for name in INSTRUCTIONS if name in found]


def _cpuinfo(*fields: str) -> str:
    """Returns the first of these fields of /proc/cpuinfo; "" if there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in fields:
                return value.strip()
    return ""


def describe(device: torch.device | str) -> dict[str, Any]:
    """Returns device, versions, commit and date for a record, as plain data."""
    import torch

    device, threads = torch.device(device), torch.get_num_threads()
    memory, gpu = memory_bytes(torch.device("cpu")), None
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        names = ("driver", "power_limit", "max_clock")
        query = "--query-gpu=driver_version,power.limit,clocks.max.sm"
        reported = (nvidia_smi(device, "--format=csv,noheader", query) or "").split(", ")
        gpu = {
            "name": properties.name, "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_GiB": round(properties.total_memory / 2**30, 1),
            "L2_MiB": round(properties.L2_cache_size / 2**20, 1),
            **(dict(zip(names, reported, strict=True)) if len(reported) == len(names) else dict.fromkeys(names)),
            "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        }  # fmt: skip
    # virtual machines report the same name for different CPUs
    family = f"family {number}, " if (number := _cpuinfo("cpu family")) else ""
    cpu = f"{cpu_name()} ({family}{torch.backends.cpu.get_cpu_capability()}, {threads} threads)"
    return {
        "device": gpu["name"] if gpu else cpu, "device_type": device.type, "gpu": gpu,
        "cpu": cpu_name(), "cpu_instructions": cpu_instructions(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads, "load_average": round(os.getloadavg()[0], 2),
        "memory_GiB": memory and round(memory / 2**30, 1), "os": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "commit": _commit(), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _commit() -> str | None:
    """Returns the commit, with "-dirty" if tracked files differ from it; None outside a repository."""
    root = Path(__file__).resolve().parent.parent
    if not ((root / ".git").exists() and (root / "pyproject.toml").exists()):  # an installed package
        return None
    return _output(["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"])


@functools.cache
def matmul_slowdown(dtype: torch.dtype) -> float:
    """Returns the duration of a matmul in a dtype on one CPU core, relative to fp32.

    Without instructions for bf16 or fp16, the ratio is above 1: 5 on Zen 3. Counts only the time of this thread on a
    core, so that other processes do not matter.
    """
    import torch

    threads, best = torch.get_num_threads(), dict[torch.dtype, float]()
    operands = {each: torch.ones(2, 512, 512, dtype=each) for each in (torch.float32, dtype)}
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            for each in [*operands] * 5:
                start = time.thread_time()
                torch.nn.functional.linear(operands[each][0, :64], operands[each][1])
                best[each] = min(best.get(each, math.inf), time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return best[dtype] / best[torch.float32]


def memory_bytes(device: torch.device) -> int | None:
    """Returns the memory of a GPU, or the memory that this process may use on a CPU; None if unknown."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    found = None
    with contextlib.suppress(ValueError, OSError):  # the file is missing or contains "max"
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found = min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return found


def _output(command: list[str]) -> str | None:
    """Returns the output of a command; None if the command is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def nvidia_smi(device: torch.device, *options: str) -> str | None:
    """Returns the output of nvidia-smi for a GPU; None if nvidia-smi is missing or fails."""
    import torch

    at: Any = torch.cuda.get_device_properties(device)
    bus = f"{at.pci_domain_id:08x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0"
    return _output(["nvidia-smi", f"--id={bus}", *options])

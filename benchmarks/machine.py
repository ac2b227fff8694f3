"""The machine: its description, its ceilings, its state while candidates are timed, and a profile of a call."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from vit_fast.measure.clock import Call, Protocol, synchronize, time_call, without_profiler_chatter
from vit_fast.version import cpu_name, installed
from vit_fast.work import Work

PACKAGES = (
    "torch", "triton", "timm", "transformers", "torchvision", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt",
    "torchao", "flash-attn", "numpy",
)  # fmt: skip

# Names of dtypes in tables; tf32 is fp32 with TF32 matmuls, amp is fp32 under autocast in bf16.
DTYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "amp": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip
COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
CEILING_PROTOCOL = Protocol(repeats=50, seconds=0.25, least_repeats=5, warmup_repeats=3)


def describe(device: torch.device | str) -> dict[str, Any]:
    """Returns device, versions, commit and date for a record, as plain data."""
    device, threads = torch.device(device), torch.get_num_threads()
    memory, gpu = memory_bytes(torch.device("cpu")), None
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        names = ("driver", "power_limit", "max_clock")
        reported = (_gpu_query(device, "driver_version,power.limit,clocks.max.sm") or "").split(", ")
        gpu = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_GiB": round(properties.total_memory / 2**30, 1),
            "L2_MiB": round(properties.L2_cache_size / 2**20, 1),
            **(dict(zip(names, reported, strict=True)) if len(reported) == len(names) else dict.fromkeys(names)),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return {
        "device": gpu["name"] if gpu else f"{cpu_name()} ({threads} threads)",
        "device_type": device.type,
        "gpu": gpu,
        "cpu": cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "load_average": round(os.getloadavg()[0], 2),
        "memory_GiB": memory and round(memory / 2**30, 1),
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def measure_ceilings(device: torch.device | str, dtypes: Sequence[str]) -> dict[str, Any]:
    """Measures the device's ceilings: a large copy in GB/s (read and written), a square matmul in TFLOP/s per dtype.

    On a CPU in fp32, the matmul is the faster one of torch and oneDNN.
    """
    device = torch.device(device)
    size, nbytes = MATMUL_SIZE[device.type], COPY_BYTES[device.type]

    def matmul(name: str) -> float:
        left, right = (torch.randn(size, size, device=device).to(DTYPES[name]) for _ in range(2))
        calls: list[Call] = [lambda _: left @ right]
        if device.type == "cpu" and left.dtype is torch.float32 and torch.backends.mkldnn.is_available():
            # torch multiplies fp32 with MKL, which takes twice as long as oneDNN on CPUs from AMD
            packed = torch.ops.mkldnn._reorder_linear_weight(right)
            calls.append(lambda _: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], ""))
        with products_in(name):
            fastest_ms = min(min(time_call(call, device, CEILING_PROTOCOL)) for call in calls)
        return 2 * size**3 / (fastest_ms * 1e9)

    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_call(lambda _: target.copy_(source), device, CEILING_PROTOCOL)
    return {
        "copy_GB_per_s": 2 * nbytes / (min(timing) * 1e6),
        "copy_bytes": nbytes,
        "matmul_TFLOP_per_s": {name: matmul(name) for name in dict.fromkeys(dtypes)},
        "matmul_size": size,
    }


def best_ceilings(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the best of several ceilings of a run: other processes only lower them."""
    if not measured:
        return {}
    names = dict.fromkeys(name for each in measured for name in each["matmul_TFLOP_per_s"])
    matmul = {name: max(each["matmul_TFLOP_per_s"].get(name, 0.0) for each in measured) for name in names}
    copy = max(each["copy_GB_per_s"] for each in measured)
    return measured[0] | {"copy_GB_per_s": copy, "matmul_TFLOP_per_s": matmul, "taken": len(measured)}


@contextlib.contextmanager
def products_in(name: str) -> Iterator[None]:
    """Allows TF32 matmuls for tf32, and uses torch's setting for other names of DTYPES."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def has_bf16() -> bool:
    """True if this CPU has instructions for bf16 matmuls."""
    if platform.machine() in ("x86_64", "AMD64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _commit() -> str | None:
    """Returns the commit, with "-dirty" if tracked files differ from it; None outside a repository."""
    root = Path(__file__).resolve().parent.parent
    if not ((root / ".git").exists() and (root / "pyproject.toml").exists()):  # an installed package
        return None
    head = _output(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])
    changes = head and _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return f"{head}-dirty" if changes else head


def memory_bytes(device: torch.device) -> int | None:
    """Returns the memory of the device, or of this process on a CPU; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    found = None
    with contextlib.suppress(ValueError, OSError):  # no such file, or "max"
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found = min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return found


def _output(command: list[str]) -> str | None:
    """Returns the output of a command; None if there is no such command or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _gpu_query(device: torch.device, fields: str) -> str | None:
    at: Any = torch.cuda.get_device_properties(device)
    bus = f"{at.pci_domain_id:08x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0"
    return _output(["nvidia-smi", f"--id={bus}", "--format=csv,noheader", f"--query-gpu={fields}"])


# A run is busy above these shares of CPU time: used by other processes; throttled by the cgroup's quota.
BUSY_SHARE, THROTTLED_SHARE = 0.10, 0.01
# Bits of NVML's clock event reasons for heat or power delivery, not for the power cap or an idle device.
GPU_SLOWDOWNS = 0x8 | 0x20 | 0x40 | 0x80


class Conditions:
    """The state of the machine while candidates are timed: other processes, throttling."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.elapsed_s = self.others_s = self.throttled_s = 0.0
        self.gpu_slowed = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Records the state during a block; may be entered several times."""
        before, start = self._read(), time.perf_counter()
        try:
            yield
        finally:
            others_s, throttled_s = (now - then for now, then in zip(self._read(), before, strict=True))
            self.elapsed_s += time.perf_counter() - start
            self.throttled_s += throttled_s
            self.others_s += max(others_s, 0.0)

    def _read(self) -> tuple[float, float]:
        """Returns seconds per CPU that other processes were busy since boot, and seconds withheld by the quota."""
        if self._device.type == "cuda":
            active = _gpu_query(self._device, "clocks_event_reasons.active") or ""
            self.gpu_slowed |= active.startswith("0x") and bool(int(active, 16) & GPU_SLOWDOWNS)
        (busy_s, processors), times = _busy_seconds(), os.times()
        own_s = times.user + times.system + times.children_user + times.children_system
        return (busy_s - own_s) / processors if processors else 0.0, _throttled_seconds()

    def summary(self) -> dict[str, Any]:
        """Returns plain data for the record; `busy` lists reasons not to trust the figures."""
        others, throttled = (seconds / max(self.elapsed_s, 1e-9) for seconds in (self.others_s, self.throttled_s))
        checks = (
            (others > BUSY_SHARE, f"other processes used {others:.0%} of the CPU time"),
            (throttled > THROTTLED_SHARE, f"the cgroup's quota throttled this process for {throttled:.0%} of the time"),
            (self.gpu_slowed, "the GPU throttled"),
        )
        busy = [reason for is_so, reason in checks if is_so]
        return {"others_share": round(others, 4), "throttled_share": round(throttled, 4), "busy": busy}


def _busy_seconds() -> tuple[float, int]:
    """Returns busy seconds of the CPUs that this process may use, and their number; zeros if unknown."""
    try:
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        ticks = [
            map(float, (*fields[1:4], *fields[6:9])) for fields in lines if allowed & {*fields[:1]}
        ]  # without idle
        return sum(map(sum, ticks)) / os.sysconf("SC_CLK_TCK"), len(ticks)
    except (OSError, AttributeError, ValueError):
        return 0.0, 0


def _throttled_seconds() -> float:
    try:
        fields = dict(line.split() for line in Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines())
        return float(fields.get("throttled_usec", 0)) / 1e6
    except (OSError, ValueError):
        return 0.0


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
PROFILED_CALLS = 3


def part_of(name: str) -> str:
    """Returns the part of a model that an operator or a kernel belongs to."""
    return next((part for part, words in PARTS.items() if re.search(words, name.lower())), REST)


def profile(call: Call, device: torch.device, least: dict[str, Work], itemsize: int) -> dict[str, Any]:
    """Returns kernels, [part, name, calls, ms] per call, the longest first; and least, [operations, bytes] per part."""
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    with without_profiler_chatter(), torch.profiler.profile(activities=activities) as profiler:
        for number in range(PROFILED_CALLS):
            call(number)
        synchronize(device)
    kernels = []
    for event in profiler.key_averages():
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if us and (event.device_type == DeviceType.CUDA) == on_gpu:
            kernels.append([part_of(event.key), event.key, event.count / PROFILED_CALLS, us / 1e3 / PROFILED_CALLS])
    if "head" in least:  # the profiler cannot tell it from other linears
        least["linears"] += least.pop("head")
    moved = {part: [some.flop, some.elements * itemsize] for part, some in least.items()}
    return {"kernels": sorted(kernels, key=lambda kernel: -kernel[3]), "least": moved}

"""The GPU properties from which launch policies (`*_policy.py`) select tile sizes, warps and compile options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Gpu:
    arch: str  # e.g. "sm_90"
    sm_count: int  # streaming multiprocessors


# An H200. Launch policies assume this GPU for CPU and meta tensors, e.g. in the interpreter.
REFERENCE_GPU = Gpu("sm_90", 132)
stand_in: Gpu | None = None  # if set, replaces REFERENCE_GPU; used by inspect/offline.py and inspect/stand_in_driver.py


def gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return stand_in or REFERENCE_GPU
    return _real_gpu(device.index if device.index is not None else torch.cuda.current_device())


@cache
def _real_gpu(index: int) -> Gpu:
    major, minor = torch.cuda.get_device_capability(index)
    return Gpu(f"sm_{10 * major + minor}", int(torch.cuda.get_device_properties(index).multi_processor_count))


def generation(arch: str) -> str:
    """Returns "ampere" (uses mma.sync; sm_8x, 12x), "hopper" (wgmma; 9x) or "blackwell" (tcgen05; 10x, 11x)."""
    number = int(arch.removeprefix("sm_"))
    return "hopper" if 90 <= number < 100 else "blackwell" if 100 <= number < 120 else "ampere"


def has_fp8(arch: str) -> bool:
    return int(arch.removeprefix("sm_")) >= 89


def starts_early(arch: str) -> bool:
    """True for architectures with programmatic dependent launch (ptx.py)."""
    return int(arch.removeprefix("sm_")) >= 90


def reads_descriptors(arch: str) -> bool:
    """True for architectures on which kernels use TMA descriptors."""
    return generation(arch) != "ampere"


def matrix_instruction(arch: str) -> str:
    """Returns the MMA instruction of half precision and TF32, named as in `Stats` (inspect/static_checks.py)."""
    return {"ampere": "hmma", "hopper": "hgmma", "blackwell": "tcgen05"}[generation(arch)]


def matmul_kind(dtype: torch.dtype) -> str:
    """Returns how launch policies call an operand dtype: "half" (fp16, bf16), "fp8" (e4m3) or "tf32" (fp32)."""
    if dtype == torch.float8_e4m3fn:
        return "fp8"
    return "half" if dtype.itemsize == 2 else "tf32"

"""Properties of GPUs for the launch policies: architecture, generation of tiles, and number formats of products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU that the launch policy needs.

    Args:
        arch: Architecture name, e.g. sm_90.
        sm_count: Streaming multiprocessors.
    """

    arch: str
    sm_count: int


# What the interpreter and the offline compiler assume in place of a device: an H200.
REFERENCE_GPU = Gpu("sm_90", 132)
_stand_in: Gpu | None = None


def set_stand_in(gpu: Gpu) -> None:
    """Let CPU tensors stand for tensors on `gpu` in this process: for the stand-in driver, `stand_in_driver.py`."""
    global _stand_in
    _stand_in = gpu


def has_stand_in() -> bool:
    """True if the stand-in driver takes the launches of CPU tensors."""
    return _stand_in is not None


def gpu_of(device: torch.device) -> Gpu:
    """The GPU that a device is; the stand-in or reference GPU where it is none."""
    if device.type != "cuda":
        return _stand_in or REFERENCE_GPU
    return _real_gpu(device.index if device.index is not None else torch.cuda.current_device())


@cache
def _real_gpu(index: int) -> Gpu:
    major, minor = torch.cuda.get_device_capability(index)
    return Gpu(f"sm_{10 * major + minor}", int(torch.cuda.get_device_properties(index).multi_processor_count))


def generation(arch: str) -> str:
    """Whose tiles an architecture takes: "ampere" (mma.sync: sm_80, 86, 89 and 120), "hopper" or "blackwell"."""
    number = int(arch.removeprefix("sm_"))
    return "hopper" if 90 <= number < 100 else "blackwell" if 100 <= number < 120 else "ampere"


def has_fp8(arch: str) -> bool:
    """True for architectures with products of e4m3."""
    return int(arch.removeprefix("sm_")) >= 89


def starts_early(arch: str) -> bool:
    """True for architectures with programmatic dependent launch, see dependent.py."""
    return int(arch.removeprefix("sm_")) >= 90


def reads_descriptors(arch: str) -> bool:
    """True if tiles are loaded through TMA descriptors where the layout allows."""
    return generation(arch) != "ampere"


def matrix_instruction(arch: str) -> str:
    """The instruction that half-precision and TF32 products must reach, by the names of `offline.Stats.has`."""
    return {"ampere": "HMMA", "hopper": "HGMMA", "blackwell": "TCGEN05"}[generation(arch)]


def product_kind(dtype: torch.dtype) -> str:
    """The number format of products of this dtype: "half", "fp8" (e4m3), or "tf32" for fp32."""
    if dtype == torch.float8_e4m3fn:
        return "fp8"
    return "half" if dtype.itemsize == 2 else "tf32"

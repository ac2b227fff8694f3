"""One kernel call as data: what is launched, with which arguments, grid and compile options.

A launcher first builds a `Launch` and then runs it. Because the description is complete before anything touches a
GPU, `offline.py` compiles exactly what would be launched, from meta tensors, on a machine without one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton

MAX_GRID_0 = 2**31 - 1


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments, ready to run or to compile.

    Args:
        kernel: The function decorated with `triton.jit`.
        grid: Programs along the three grid axes; at most 2^31 - 1 on the first, 65,535 on the others.
        args: Runtime arguments by name: tensors, tensor descriptors, numbers, or None for an absent one.
        constants: Compile-time arguments (`tl.constexpr`) by name.
        num_warps: Warps a program.
        num_stages: Default depth of software pipelining.
        maxnreg: Registers a thread may use; None leaves it to the compiler.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def options(self) -> dict[str, Any]:
        """The compile options, as triton names them."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.maxnreg is not None:
            options["maxnreg"] = self.maxnreg
        return options

    def run(self) -> None:
        """Launch on the current stream of `device`; an empty grid launches nothing.

        Raises:
            ValueError: the grid is larger than a GPU accepts.
        """
        if math.prod(self.grid) == 0:
            return
        if self.grid[0] > MAX_GRID_0 or any(size > 65_535 for size in self.grid[1:]):
            raise ValueError(
                f"grid {self.grid} is too large: at most {MAX_GRID_0} programs on axis 0, 65535 on the others"
            )
        with _on_device(self.device):
            self.kernel[self.grid](**self.args, **self.constants, **self.options())


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make that the tensors' own where it is another."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@triton.jit
def _probe() -> None:
    pass


def is_interpreted() -> bool:
    """Whether triton decorated these kernels for its interpreter (`TRITON_INTERPRET=1` at import)."""
    return not isinstance(_probe, triton.JITFunction)


@cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


@cache
def _sm_count(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@dataclass(frozen=True)
class Gpu:
    """What the launch policy asks of a GPU.

    Args:
        arch: Architecture name, e.g. sm_90.
        sm_count: Streaming multiprocessors.
    """

    arch: str
    sm_count: int


# What the interpreter and the offline compiler assume in place of a device: the reference GPU, an H200.
REFERENCE_GPU = Gpu("sm_90", 132)
_stand_in: Gpu | None = None


def set_stand_in(gpu: Gpu) -> None:
    """Let CPU tensors stand for tensors on `gpu` in this process: for the stand-in driver, `stand_in_driver.py`."""
    global _stand_in
    _stand_in = gpu


def has_stand_in() -> bool:
    """Whether the stand-in driver takes the launches of CPU tensors."""
    return _stand_in is not None


def generation(arch: str) -> str:
    """Whose tiles an architecture takes: "ampere" (mma.sync: sm_80, 86, 89 and 120), "hopper" or "blackwell"."""
    number = int(arch.removeprefix("sm_"))
    return "hopper" if 90 <= number < 100 else "blackwell" if 100 <= number < 120 else "ampere"


def arch_of(device: torch.device) -> str:
    """The architecture name of a device, e.g. sm_90; of the stand-in or reference GPU where the device is no GPU."""
    if device.type != "cuda":
        return (_stand_in or REFERENCE_GPU).arch
    return f"sm_{_capability(device.index if device.index is not None else torch.cuda.current_device())}"


def sm_count_of(device: torch.device) -> int:
    """Streaming multiprocessors of a device; of the stand-in or reference GPU where the device is no GPU."""
    if device.type != "cuda":
        return (_stand_in or REFERENCE_GPU).sm_count
    return _sm_count(device.index if device.index is not None else torch.cuda.current_device())

"""Triton's launch path without a GPU: a stand-in for the CUDA driver that accepts CPU tensors and executes no kernel.

`install(arch)` builds a libcuda.so.1 from `stand_in_driver.c` and makes it Triton's driver for this process. Triton
then specializes, compiles and loads kernels, encodes descriptors and packs arguments as on a GPU. The stand-in counts
and checks launches and descriptors. Outputs of kernels are undefined, but host time can be measured. Install the
stand-in in a separate process, without a GPU and without Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, include_dirs
from triton.runtime import build

from .. import device
from ..device import Gpu
from ..launch import is_interpreted
from . import offline

_SOURCE = Path(__file__).with_name("stand_in_driver.c")


class Counters(NamedTuple):
    """Number of driver calls since the stand-in was installed or reset."""

    launches: int
    dependent: int  # programmatic dependent launches
    descriptors: int  # encoded tensor maps, including rejected ones
    modules: int  # loaded kernels
    violations: int  # rejected calls


class StandInDriver:
    """The stand-in driver of this process; `install` creates it."""

    def __init__(self, library: ctypes.CDLL, gpu: Gpu) -> None:
        self.gpu, self._library = gpu, library
        library.stand_in_violation.restype = ctypes.c_char_p

    def counters(self) -> Counters:
        return Counters(*(ctypes.c_long.in_dll(self._library, f"stand_in_{name}").value for name in Counters._fields))

    def violations(self) -> list[str]:
        """Returns descriptions of the first 64 rejected calls."""
        return [self._library.stand_in_violation(i).decode() for i in range(min(self.counters().violations, 64))]

    def reset(self) -> None:
        self._library.stand_in_reset()


def install(arch: str, library: Path | None = None) -> StandInDriver:
    """Makes the stand-in Triton's driver for this process. Call it before the first launch.

    `library` is a libcuda.so.1 compiled from `stand_in_driver.c`; None compiles it. Raises ValueError if `arch` is
    unknown, and RuntimeError if this process cannot use the stand-in.
    """
    limits, gpu = offline.architecture(arch), offline.gpu(arch)
    if torch.cuda.is_available():
        raise RuntimeError("the stand-in CUDA driver requires a machine without a GPU: set CUDA_VISIBLE_DEVICES=''")
    if is_interpreted():
        raise RuntimeError("TRITON_INTERPRET must be unset, because the stand-in CUDA driver requires compiled kernels")
    if device.stand_in is not None:
        raise RuntimeError("the stand-in CUDA driver is already installed in this process")
    library = library or _build()
    # Triton links its launcher against the libcuda.so.1 in TRITON_LIBCUDA_PATH. When the launcher is loaded, the
    # dynamic linker uses the libcuda.so.1 that this process loaded first, which must be the stand-in.
    os.environ["TRITON_LIBCUDA_PATH"] = str(library.parent)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    if not hasattr(ctypes.CDLL(library.name), "stand_in_configure"):
        raise RuntimeError("the real libcuda.so.1 is already loaded: install the stand-in CUDA driver in a new process")
    number = int(arch.removeprefix("sm_"))
    loaded.stand_in_configure(number, gpu.sm_count, limits.shared_bytes_per_block, limits.shared_bytes)
    driver, target = CudaDriver(), GPUTarget("cuda", number, 32)
    driver.get_current_target = lambda: target
    driver.get_current_device, driver.get_current_stream = (lambda: 0), (lambda device: 0)
    driver.get_device_capability = lambda device=0: divmod(number, 10)
    triton.runtime.driver.set_active(driver)
    device.stand_in = gpu
    return StandInDriver(loaded, gpu)


def _build() -> Path:
    """Returns libcuda.so.1 in Triton's cache folder. Builds the library if it does not exist."""
    key = hashlib.sha256(triton.__version__.encode() + _SOURCE.read_bytes()).hexdigest()[:32]
    library = Path(triton.knobs.cache.dir) / f"vit_fast_stand_in_{key}" / "libcuda.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            flags = [f"-Wl,-soname,{library.name}"]
            made = build._build("stand_in", str(_SOURCE), scratch, [], include_dirs, [], flags)
            Path(made).replace(library)  # atomic, because another process may build too
    return library

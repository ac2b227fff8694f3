"""Installs the emulator as Triton's GPU in this process."""

from __future__ import annotations

import ctypes
from typing import Any

from .binding import Emulator
from .build import build

# Triton emits the same PTX for these except for the name of the target, so each kernel is compiled once for all.
# test_executed_kernels.py checks this for a build of every kernel.
SAME_PTX = {"sm_80": "sm_89", "sm_86": "sm_89"}


def start(arch: str) -> Emulator:
    """Starts the emulator. tests/execute.py must have started this process, and no kernel may have been launched.

    Triton compiles only to PTX, so it must not share its cache with other processes.
    """
    if not hasattr(ctypes.CDLL(None), "emulator_find_allocation"):
        raise RuntimeError("the emulator must know all memory from the start: use tests/execute.py")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    from vit_fast.kernels.inspect import stand_in_driver

    def keep_ptx(self: Any, source: str, *rest: Any) -> bytes:
        return b"\x7fELFPTX" + source.encode() + b"\0"

    CUDABackend.make_cubin = keep_ptx
    library = build() / "libcuda.so.1"
    stand_in_driver.install(arch, library)
    if arch in SAME_PTX:
        target = GPUTarget("cuda", int(SAME_PTX[arch].removeprefix("sm_")), 32)
        triton.runtime.driver.active.get_current_target = lambda: target
    return Emulator(library)

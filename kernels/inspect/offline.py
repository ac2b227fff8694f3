"""Records the launches of operators for an architecture and compiles them without a GPU.

To compile, `TRITON_INTERPRET` must be unset.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import triton
from torch.torch_version import TorchVersion
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from .. import device, plan
from ..device import Gpu
from ..launch import Launch, is_interpreted


@dataclass(frozen=True)
class Architecture:
    """A GPU of an architecture, and the limits of its multiprocessors.

    Sources: data sheets (clock in GHz, DRAM bandwidth in GB/s); CUDA C++ Programming Guide, technical specifications.
    """

    gpu: str
    sm_count: int
    clock: float
    dram: int
    shared_bytes: int
    threads: int
    blocks: int

    @property
    def shared_bytes_per_block(self) -> int:
        return self.shared_bytes - KIB  # CUDA reserves 1 KiB per block


KIB = 1024
_ALL = {
    "sm_80": Architecture("A100 SXM", 108, 1.41, 2039, 164 * KIB, 2048, 32),
    "sm_86": Architecture("A10", 72, 1.695, 600, 100 * KIB, 1536, 16),
    "sm_89": Architecture("L40S", 142, 2.52, 864, 100 * KIB, 1536, 24),
    "sm_90": Architecture("H100 SXM", 132, 1.755, 3350, 228 * KIB, 2048, 32),
    "sm_100": Architecture("B200", 148, 1.85, 8000, 228 * KIB, 2048, 32),
    "sm_103": Architecture("B300", 160, 1.9, 8000, 228 * KIB, 2048, 32),
    "sm_120": Architecture("RTX 5090", 170, 2.41, 1792, 100 * KIB, 1536, 24),
}
_SM_103 = TorchVersion(triton.__version__) >= "3.7"  # the cuobjdump of older versions does not know sm_103
ARCHS = tuple(arch for arch in _ALL if arch != "sm_103" or _SM_103)


def architecture(arch: str) -> Architecture:
    """Returns the entry of an architecture, or raises ValueError if it is unknown."""
    if arch not in _ALL:
        raise ValueError(f"arch must be one of {', '.join(_ALL)}, got {arch!r}")
    return _ALL[arch]


def gpu(arch: str) -> Gpu:
    return Gpu(arch, architecture(arch).sm_count)


@dataclass(frozen=True)
class Build:
    """A kernel in a shipped configuration."""

    kernel: str  # e.g. "attention_fwd_row"
    case: str  # the configuration, e.g. "bf16 N197 D64"
    launch: Launch  # with tensors of the CPU or meta device
    core: bool = False  # compiled by the static tests; `vit-fast kernels` compiles all builds
    needs: tuple[str, ...] = ()  # required instructions, by their keys in `static_checks.Stats`

    def key(self, arch: str) -> str:
        return f"{arch}/{self.kernel}/{self.case}"


@contextmanager
def recorded(gpu: Gpu) -> Iterator[list[Launch]]:
    """Collects the launches that operators on CPU or meta tensors would run on `gpu`. Compiles and runs no kernel."""
    launches: list[Launch] = []
    with (
        mock.patch.object(device, "stand_in", gpu),
        mock.patch.object(plan, "is_watched", lambda *kernels: True),  # disables launch plans (plan.py)
        mock.patch.object(Launch, "run", lambda launch: launches.append(launch)),
    ):
        yield launches


def compile_launch(launch: Launch, arch: str) -> Any:
    """Returns triton's CompiledKernel of a launch; raises RuntimeError if triton's interpreter is active."""
    if is_interpreted():
        raise RuntimeError(
            "TRITON_INTERPRET must be unset to compile kernels: unset TRITON_INTERPRET and restart the process"
        )
    target = _target(arch)
    return triton.compile(ASTSource(launch.kernel, *_specialize(launch, target)), target, launch.options())


def specialization(launch: Launch) -> str:
    """Returns the inputs of the compiler as text; launches with equal text share one binary."""
    return repr((launch.kernel.__name__, _specialize(launch, _target("sm_90")), launch.options()))


def _target(arch: str) -> GPUTarget:
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def _specialize(launch: Launch, target: GPUTarget) -> tuple[Any, Any, Any]:
    """Returns types, constants and divisibility of the arguments, derived as in triton's `JITFunction.run`."""
    kernel, options = launch.kernel, launch.options()
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(target))
    arguments, specialized, _ = bind(**launch.named(), **options)
    return kernel._pack_args(make_backend(target), options, arguments, specialized, None)[1:]

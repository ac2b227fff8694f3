"""A kernel launch as data: kernel, arguments, number of programs and compile options.

A `Launch` can be built from meta tensors, so `inspect/offline.py` can compile the kernels without a GPU.

Related arguments, e.g. the parameters of a layer, may form a tuple. In Triton 3.6 and 3.7, a tuple must not contain
tensor descriptors, and a kernel cannot compare a tuple with None. In tuples, Triton ignores do_not_specialize, so
`unspecialized` encodes integers. A constant may also be a tuple or a device function. Triton 3.6 cannot serialize
functions, so a kernel receives the name of the function, and calls `device_function`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_PROGRAMS = 2**31 - 1

# Held while triton compiles and loads a kernel. Without this lock, several threads could compile the same kernel. Also,
# in Python 3.11, `ast.parse` in several threads may raise "AST constructor recursion depth mismatch".
compiling = threading.RLock()
# A fork waits for the compilation of another thread. Otherwise, nothing would release the lock in the child process.
os.register_at_fork(before=compiling.acquire, after_in_parent=compiling.release, after_in_child=compiling.release)


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments."""

    kernel: Any  # decorated with `triton.jit`
    programs: int  # all on the first axis of the grid, because CUDA limits the others to 65,535
    args: Mapping[str, Any]  # by name: tensors, descriptors, numbers, tuples (see above), or None for an absent tensor
    constants: Mapping[str, Any]  # compile-time arguments (`tl.constexpr`) by name
    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None  # maximum registers per thread; None lets the compiler choose
    details: tuple[str, ...] = ()  # for reports: the names of the epilogue and of its activation
    flop: float = 0.0  # of its matmuls; packed sequences count as one sequence
    units: int = 0  # tiles, or parts of tiles, that a persistent kernel computes; 0 for other kernels
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, kernel: Any, programs: int, values: Sequence[Any], **options: Any) -> Launch:
        """Returns a launch. `values` are the arguments of the kernel in order, without the constants at its end."""
        return cls(kernel, programs, dict(zip(kernel.arg_names, values)), **options)

    @property
    def name(self) -> str:
        return str(self.kernel.__name__.strip("_").removesuffix("_kernel"))

    @property
    def tile(self) -> str:
        """The sizes of the tiles of a matmul, e.g. "128x256x64"."""
        return "x".join(str(size) for name, size in self.constants.items() if name.startswith("BLOCK_"))

    def named(self) -> dict[str, Any]:
        """Returns all arguments as triton takes them."""
        return {**self.args, **{name: _as_constant(value) for name, value in self.constants.items()}}

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.maxnreg is not None:
            options["maxnreg"] = self.maxnreg
        if self.constants.get("DEPENDENT"):  # see `ptx.wait_for_previous`
            options["launch_pdl"] = True
        return options

    def run(self) -> None:
        """Launches the kernel on the current stream of `device`. Does nothing if there are no programs.

        Raises:
            ValueError: there are more programs than CUDA allows.
        """
        if self.programs == 0:
            return
        if self.programs > MAX_PROGRAMS:
            raise ValueError(
                f"a kernel must have at most {MAX_PROGRAMS} programs, got {self.programs}: use a smaller batch"
            )
        ready = None
        with _on_device(self.device):
            if not isinstance(self.kernel, triton.JITFunction) or is_watched(self.kernel):
                self._run_by_triton()
            else:
                driver = triton.runtime.driver.active
                device = driver.get_current_device()
                key = self._specialization(device)
                ready = _ready.get(key)
                if ready is not None:
                    ready.launch(self, driver.get_current_stream(device))
                # triton returns something else while it is still compiling, or if a hook skipped the compilation
                elif isinstance(compiled := self._run_by_triton(), CompiledKernel):
                    if len(_ready) >= MAX_READY:
                        _ready.clear()
                    names = tuple(parameter.name for parameter in self.kernel.params)
                    ready = _ready[key] = Ready(self.kernel, compiled, names)
        listener = getattr(listening, "listener", None)
        if listener is not None:
            listener(self, ready)

    def _run_by_triton(self) -> Any:
        with compiling:
            return self.kernel[(self.programs,)](**self.named(), **self.options())

    def _specialization(self, device: int) -> tuple[Any, ...]:
        """Returns the key of `_ready`, a dict of compiled kernels. Launches with equal keys share a compiled kernel."""
        constants = tuple(self.constants.values())
        return (
            id(self.kernel), device, self.num_warps, self.num_stages, self.maxnreg,
            constants, tuple(map(type, constants)), *map(_specialization_of, self.args.values()),
        )  # fmt: skip


@dataclass(frozen=True)
class Ready:
    """A compiled kernel and the names of its parameters in order."""

    kernel: Any  # kept alive, because the key in `_ready` contains the id of the kernel
    compiled: Any
    names: tuple[str, ...]

    def launch(self, call: Launch, stream: int) -> None:
        values = {**call.constants, **call.args}
        self.compiled.run(
            call.programs, 1, 1, stream, self.compiled.function, self.compiled.packed_metadata, None, None, None,
            *map(values.__getitem__, self.names),
        )  # fmt: skip


# Compiled kernels, keyed by `Launch._specialization`. Triton's own lookup takes several times as long as the launch.
_ready: dict[tuple[Any, ...], Ready] = {}
MAX_READY = 4096


# plan.py sets `listening.listener` to record launches. `Launch.run` calls it with the `Launch` and its `Ready` or None.
listening = threading.local()


def _specialization_of(value: Any) -> Any:
    """Returns the properties of an argument on which triton may specialize a kernel."""
    kind = type(value)
    if kind is int or value is None:
        return value
    if kind is tuple:
        return tuple(map(_specialization_of, value))
    if kind is TensorDescriptor:
        return value.base.dtype, *value.block_shape
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return kind if kind is float else (kind, value)  # with its type: True == 1, but triton distinguishes them


def _as_constant(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(tl.constexpr, value))
    return _name_of(value) if hasattr(value, "fn") else value


@functools.cache
def _name_of(function: Any) -> str:
    """Names a device function. The name includes a hash of its source, for the key of triton's cache on disk."""
    return f"{function.fn.__module__}:{function.fn.__qualname__}:{getattr(function, 'cache_key', '')}"


@triton.constexpr_function
def device_function(name):
    """Returns the device function of a name from `_name_of`, while a kernel compiles."""
    module, function, _ = name.split(":")
    return getattr(__import__(module, fromlist=[function]), function)


def unspecialized(value: int) -> int:
    """Encodes an int32 >= 1 for a tuple: as an int64 that is a multiple of 16, so that all values share a kernel."""
    if value < 1:  # 0 would be 2**31, whose dtype triton's interpreter gets wrong
        raise ValueError(f"a size must be at least 1, got {value}")
    return (value << 32) + 2**31


@triton.jit
def decoded(value):
    # of the full range: if LLVM knew that sizes are below 2^27, it would widen loop counters to int64, and spill
    return (value >> 32).to(tl.int32)


def is_watched(*kernels: Any) -> bool:
    """True if triton itself must launch these kernels, because hooks or debug options are active."""
    runtime = triton.knobs.runtime
    for kernel in kernels:
        if kernel.debug or kernel.pre_run_hooks:
            return True
    return bool(
        getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
        or runtime.add_stages_inspection_hook
        or runtime.debug
        or triton.knobs.compilation.instrumentation_mode
    )


def ceil_div(a: int, b: int) -> int:
    """Returns a / b, rounded up; triton's `cdiv` takes microseconds on the host."""
    return -(-a // b)


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes `device` the current device, on which triton launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@triton.jit
def _probe() -> None:
    pass


def is_interpreted() -> bool:
    """True if triton decorated the kernels of vit-fast for its interpreter (`TRITON_INTERPRET=1` at import)."""
    return not isinstance(_probe, triton.JITFunction)

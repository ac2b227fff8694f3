"""The backends: what "auto" means on a device, why a backend cannot run, and compiling without launching."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch.torch_version import TorchVersion

from ..arguments import check_choice
from .flops import register_flop_formulas
from .probe import probe_reasons

Backend = Literal["eager", "sdpa", "triton"]
BackendChoice = Literal["auto", "eager", "sdpa", "triton"]
BACKENDS: tuple[str, ...] = get_args(BackendChoice)

MIN_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_to_compiler(function: Function) -> Function:
    """Decorator: torch.compile calls the function while it traces, and takes the answer as a constant.

    Sets what torch.compiler.assume_constant_result sets; calling that would import the compiler, and triton with it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # an attribute of a function
    return function


def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype | None = None) -> Backend:
    """The backend that a name stands for on a device.

    Args:
        backend: "eager", "sdpa", "triton", or "auto": triton where `auto_reasons` has nothing against it, else sdpa.
        device: Where the tensors are.
        dtype: What they are; None where only the device is to decide.
    Raises:
        ValueError: The name is unknown.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "auto":
        return "sdpa" if auto_reasons(device, dtype) else "triton"
    return backend  # type: ignore[return-value]  # membership in BACKENDS was just checked


def auto_reasons(device: torch.device, dtype: torch.dtype | None = None) -> tuple[str, ...]:
    """Every reason why "auto" is not triton on this device, for tensors of this dtype; empty when it is.

    fp32 products are torch's unless TF32 is allowed or autocast is on.
    """
    if device.type != "cuda":  # also under Triton's interpreter, and without importing triton
        place = "the CPU" if device.type == "cpu" else device.type
        return (f"triton cannot run here: tensors must be on a CUDA device, got {place}",)
    reasons = triton_unavailable_reasons(device)
    if reasons:
        return ("triton cannot run here: " + "; ".join(reasons),)
    if dtype == torch.float32 and not torch.is_autocast_enabled("cuda") and not _tf32_is_allowed():
        return (
            "fp32 without TF32 is left to torch: convert the model, allow TF32 "
            "(torch.set_float32_matmul_precision('high')), or choose the backend inside torch.autocast where the model "
            "runs under it",
        )
    return ()


@constant_to_compiler
def triton_unavailable_reasons(device: torch.device) -> tuple[str, ...]:
    """Every reason why Triton kernels cannot run on this device; empty when they can.

    On a CUDA device one small kernel has run by then, see `probe.py`. A CPU is accepted only under Triton's interpreter
    (TRITON_INTERPRET=1 when the process started), and with the stand-in driver, which computes nothing. torch.compile
    takes the answer as a constant: it could not look into it, and it does not change.
    """
    if device == torch.device("cuda") and torch.cuda.is_available():  # without an index: the current one
        device = torch.device("cuda", torch.cuda.current_device())
    reasons = _static_reasons(device)
    return probe_reasons(device) if device.type == "cuda" and not reasons else reasons


def fp8_reasons(device: torch.device) -> list[str]:
    """Every reason why blocks in FP8 cannot run on a device; empty when they can.

    As for every kernel a CPU is accepted under Triton's interpreter alone.
    """
    return list(triton_unavailable_reasons(device) or _capability_reasons(device))


@constant_to_compiler
def _capability_reasons(device: torch.device) -> tuple[str, ...]:
    from ..kernels.device import gpu_of

    major, minor = divmod(int(gpu_of(device).arch.removeprefix("sm_")), 10)
    if (major, minor) >= FP8_CAPABILITY:
        return ()
    least = ".".join(map(str, FP8_CAPABILITY))
    return (f"FP8 needs compute capability {least} or newer, got {major}.{minor} of {device}",)


def kernel_reasons(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Returns every reason why kernels with products of this dtype cannot run on a device."""
    reasons = list(triton_unavailable_reasons(device))
    if reasons or dtype != torch.float32 or _computes_exactly() or _tf32_is_allowed():
        return reasons
    return [
        "fp32 products must be allowed in TF32, got "
        f"torch.backends.cuda.matmul.fp32_precision={torch.backends.cuda.matmul.fp32_precision!r}: call "
        "torch.set_float32_matmul_precision('high'), use float16 or bfloat16, or backend='sdpa'"
    ]


@constant_to_compiler
def _computes_exactly() -> bool:
    """True under Triton's interpreter; compiled kernels compute fp32 products in TF32."""
    return interpreter_is_active()


@constant_to_compiler
def _tf32_is_allowed() -> bool:
    """True if torch may round the operands of fp32 matmuls to TF32; torch.compile guards this setting."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@functools.cache
def _static_reasons(device: torch.device) -> tuple[str, ...]:
    """Returns the reasons that are known without running a kernel. If there are none, registers FLOP formulas."""
    if importlib.util.find_spec("triton") is None:
        return ("triton is not installed (pip install triton)",)
    reasons = []
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return ("torch finds no CUDA device here",)
        if rocm := getattr(torch.version, "hip", None):  # calls itself "cuda", with capabilities of its own
            return (f"the GPU must be from NVIDIA, got ROCm {rocm}",)
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            reasons.append(
                f"the GPU must have compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or newer, got "
                f"{capability[0]}.{capability[1]} of {torch.cuda.get_device_name(device)}"
            )
    elif device.type == "cpu":
        from ..kernels.device import has_stand_in

        if not (interpreter_is_active() or has_stand_in()):
            reasons.append("tensors must be on a CUDA device (TRITON_INTERPRET=1 for tests), got the CPU")
    else:
        reasons.append(f"tensors must be on a CUDA device, got {device.type}")
    if not reasons and interpreter_is_active():
        reasons += _interpreter_reasons()
    if not reasons:
        register_flop_formulas()
    return tuple(reasons)


def _interpreter_reasons() -> list[str]:
    import numpy
    import triton

    found = TorchVersion(triton.__version__), TorchVersion(numpy.__version__)
    if found[0] >= "3.7" or found[1] < "2.4":
        return []
    return [
        f"the interpreter of triton {found[0]} requires numpy < 2.4, got {found[1]}: install numpy 2.3 or triton 3.7"
    ]


@functools.cache
def interpreter_is_active() -> bool:
    """True if Triton runs kernels in its interpreter; fixed for the life of the process."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def nothing_to_compile_reasons(device: torch.device) -> tuple[str, ...]:
    """Why no kernel is compiled for this device: Triton does not run there, or interprets; empty where some may be."""
    reasons = triton_unavailable_reasons(device)
    if not reasons and interpreter_is_active():
        reasons = ("Triton's interpreter runs the kernels (TRITON_INTERPRET is set)",)
    return reasons


def compile_launches(call: Callable[[], object], progress: Callable[[int, int], None] | None) -> tuple[int, int]:
    """Make a call whose kernels are not launched but for those compiled already, then compile the others.

    Args:
        call: Works with tensors that nothing has written to, and leaves nothing behind. Whether Triton runs there is
            known already: `nothing_to_compile_reasons` was asked.
        progress: Called with how many kernels are done, and of how many.
    Returns:
        How many kernels this process had not loaded, and how many of these were not in Triton's cache on disk either.
    Raises:
        RuntimeError: a kernel does not compile.
    """
    from ..kernels.precompile import collect, compile_all

    with collect() as requests:
        call()
    return len(requests), compile_all(requests, progress)

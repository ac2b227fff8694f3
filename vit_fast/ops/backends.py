"""Which backends exist, what "auto" means on a device, and why a backend cannot run."""

from __future__ import annotations

import functools
import importlib.util
from typing import Literal, get_args

import torch

Backend = Literal["eager", "sdpa", "triton"]
BackendChoice = Literal["auto", "eager", "sdpa", "triton"]
BACKENDS: tuple[str, ...] = get_args(BackendChoice)

MIN_CAPABILITY = (8, 0)


def resolve_backend(backend: str, device: torch.device) -> Backend:
    """The backend that a name stands for on a device.

    Args:
        backend: "eager", "sdpa", "triton", or "auto": triton on a CUDA device of capability 8.0 or newer where
            triton is installed, sdpa everywhere else.
        device: Where the tensors are.
    Raises:
        ValueError: The name is unknown.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: accepted are {', '.join(map(repr, BACKENDS))}")
    if backend == "auto":
        return "sdpa" if device.type != "cuda" or triton_unavailable_reasons(device) else "triton"
    return backend  # type: ignore[return-value]  # membership in BACKENDS was just checked


def triton_unavailable_reasons(device: torch.device) -> tuple[str, ...]:
    """Every reason why Triton kernels cannot run on this device; empty when they can.

    A CPU is accepted only under Triton's interpreter (TRITON_INTERPRET=1 when the process started), and with the
    stand-in driver, which computes nothing. torch.compile takes the answer as a constant: it could not look into it,
    and it does not change.
    """
    return _triton_unavailable_reasons(device)


# What torch.compiler.assume_constant_result sets; calling it would import the compiler, and triton with it.
triton_unavailable_reasons._dynamo_marked_constant = True  # type: ignore[attr-defined]  # an attribute of a function


@functools.cache
def _triton_unavailable_reasons(device: torch.device) -> tuple[str, ...]:
    if importlib.util.find_spec("triton") is None:
        return ("triton is not installed (pip install triton)",)
    reasons = []
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            reasons.append(
                f"{torch.cuda.get_device_name(device)} has capability {capability[0]}.{capability[1]}: "
                f"accepted is {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or newer"
            )
    elif device.type == "cpu":
        from ..kernels.launch import has_stand_in

        if not (interpreter_is_active() or has_stand_in()):
            reasons.append("the tensors are on the CPU: accepted are CUDA tensors (or TRITON_INTERPRET=1, for tests)")
    else:
        reasons.append(f"the tensors are on {device.type}: accepted are CUDA tensors")
    return tuple(reasons)


@functools.cache
def interpreter_is_active() -> bool:
    """Whether Triton runs kernels in its interpreter; fixed for the life of the process."""
    import triton

    return bool(triton.knobs.runtime.interpret)

"""Compile the kernels that a call would launch, without launching them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .backends import interpreter_is_active, triton_unavailable_reasons


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

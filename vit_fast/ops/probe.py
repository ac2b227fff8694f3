"""Probe of a device: compiles and runs one small Triton kernel, and compares it with the reference.

The properties of a device are not enough: a C compiler may be missing, the driver too old, or the compiler may produce
incorrect code for it. The result is cached per process and device.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from ..accuracy import judge
from . import reference

_SHAPE = (1, 2, 40, 64)  # [B, H, N, D]: several tiles, the last one partial
_LONGEST_MESSAGE = 300  # characters; compiler output can be pages long

_found: dict[torch.device, tuple[str, ...]] = {}
_lock = threading.Lock()


def probe_reasons(device: torch.device) -> tuple[str, ...]:
    """Returns all reasons why the kernels cannot run on a device; empty if a small kernel matched the reference.

    The first call for a device compiles and runs the kernel; other threads wait for the result. Inside a CUDA-graph
    capture, which would record the kernel, nothing runs, and an unknown device gives a reason.

    Args:
        device: Must have an index.
    """
    cached = _found.get(device)
    if cached is not None:
        return cached
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return (f"the test kernel must run on {device} before a CUDA graph capture: call the model once first",)
    with _lock:
        if device not in _found:
            # A new thread has none of the caller's modes: fake tensors, torch.func, inference mode, a default
            # device, autocast, a tracer.
            with ThreadPoolExecutor(max_workers=1) as pool:
                try:
                    _found[device] = pool.submit(_run_and_compare, device).result()
                except torch.OutOfMemoryError as error:  # not an error of the kernels: try again next time
                    return (_failure(device, error),)
                except Exception as error:  # compilers and drivers raise any type
                    _found[device] = (_failure(device, error),)
        return _found[device]


def _failure(device: torch.device, error: Exception) -> str:
    message = " ".join(str(error).split())
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[: _LONGEST_MESSAGE // 2]} ... {message[-_LONGEST_MESSAGE // 2 :]}"
    return f"the test kernel failed on {device}: {type(error).__name__}: {message}"


def _run_and_compare(device: torch.device) -> tuple[str, ...]:
    from ..kernels.attention.attention import attention_forward

    generator = torch.Generator().manual_seed(0)  # leaves the user's random state unchanged
    q, k, v = (torch.randn(_SHAPE, generator=generator).half() for _ in range(3))
    out = torch.full(_SHAPE, float("nan"), dtype=torch.float16, device=device)
    lse = torch.empty(_SHAPE[:3], dtype=torch.float32, device=device)
    attention_forward(q.to(device), k.to(device), v.to(device), out, lse, _SHAPE[3] ** -0.5)
    exact = reference.attention(q.double(), k.double(), v.double())
    verdict = judge(out.cpu(), reference.attention(q, k, v), exact)
    if verdict.passed:
        return ()
    return (f"the test kernel does not match the reference on {device}: {verdict}",)

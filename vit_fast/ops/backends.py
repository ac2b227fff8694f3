"""Resolves backend "auto", lists why triton or FP8 cannot run on a device, and compiles kernels ahead of time."""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, get_args

import torch

from ..accuracy import judge
from ..errors import check_choice
from . import reference
from .registration import constant_to_compiler, register_flop_formulas

Backend = Literal["eager", "sdpa", "triton"]
BACKENDS: tuple[str, ...] = ("auto", *get_args(Backend))

MIN_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)

_PROBE_SHAPE = (1, 2, 40, 64)  # [B, H, N, D]; no tile size divides N, so that the kernel must mask the last tile
_LONGEST_MESSAGE = 300  # in characters; longer error messages, such as compiler output, are shortened


def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype | None = None) -> Backend:
    """Resolves "auto" to triton if `auto_reasons` returns no reason, else to sdpa; returns other backends unchanged.

    Args:
        dtype: The dtype of the tensors; None means that only the device is checked.
    Raises:
        ValueError: `backend` is unknown.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "auto":
        return "sdpa" if auto_reasons(device, dtype) else "triton"
    return backend  # type: ignore[return-value]  # membership in BACKENDS was just checked


def auto_reasons(device: torch.device, dtype: torch.dtype | None = None) -> tuple[str, ...]:
    """Returns the reasons why "auto" does not select triton. fp32 requires that TF32 or autocast is enabled."""
    if device.type != "cuda":  # "auto" never selects Triton's interpreter, and does not import triton for the CPU
        place = "the CPU" if device.type == "cpu" else device.type
        return (f"triton cannot run here: tensors must be on a CUDA device, got {place}",)
    reasons = triton_unavailable_reasons(device)
    if reasons:
        return ("triton cannot run here: " + "; ".join(reasons),)
    if dtype == torch.float64:
        return ("triton does not support torch.float64: convert the model to fp32, fp16 or bf16",)
    if dtype == torch.float32 and not torch.is_autocast_enabled("cuda") and not _tf32_is_allowed():
        return (
            "triton computes fp32 in TF32, which is disabled: convert the model to bf16, allow TF32 "
            "(torch.set_float32_matmul_precision('high')), or call vit_fast.fuse under torch.autocast",
        )
    return ()


@constant_to_compiler
def triton_unavailable_reasons(device: torch.device) -> tuple[str, ...]:
    """Returns the reasons why Triton kernels cannot run on a device. The first call for a GPU runs a test kernel.

    The CPU is supported only under Triton's interpreter, or while `kernels/inspect/` imitates a GPU.
    """
    if device == torch.device("cuda") and torch.cuda.is_available():  # "cuda" without an index is the current GPU
        device = torch.device("cuda", torch.cuda.current_device())
    reasons = _static_reasons(device)
    return probe_reasons(device) if device.type == "cuda" and not reasons else reasons


def fp8_reasons(device: torch.device) -> list[str]:
    """Returns the reasons why blocks in FP8 cannot run on a device."""
    if reasons := triton_unavailable_reasons(device):
        return list(reasons)
    from ..kernels.device import gpu_of

    major, minor = divmod(int(gpu_of(device).arch.removeprefix("sm_")), 10)
    if (major, minor) >= FP8_CAPABILITY:
        return []
    least = ".".join(map(str, FP8_CAPABILITY))
    return [f"FP8 needs compute capability {least} or higher, got {major}.{minor} on {device}"]


def kernel_reasons(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Returns the reasons why kernels with matmuls of this dtype cannot run on a device."""
    reasons = list(triton_unavailable_reasons(device))
    if reasons or dtype != torch.float32 or interpreter_is_active() or _tf32_is_allowed():
        return reasons
    return [
        "torch.backends.cuda.matmul.fp32_precision must be 'tf32' for fp32 matmuls, "
        f"got {torch.backends.cuda.matmul.fp32_precision!r}: call torch.set_float32_matmul_precision('high'), "
        "use float16 or bfloat16, or backend='sdpa'"
    ]


@constant_to_compiler
def _tf32_is_allowed() -> bool:
    """True if fp32 matmuls may use TF32. Compiled graphs are recompiled if the TF32 setting changes."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@functools.cache
def _static_reasons(device: torch.device) -> tuple[str, ...]:
    """Returns the reasons that are found without running a kernel. If there are none, registers the FLOP formulas."""
    if importlib.util.find_spec("triton") is None:
        return ("triton is not installed (pip install triton)",)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return ("torch found no CUDA device",)
        if torch.version.hip:  # ROCm devices have type "cuda" too, with other capabilities
            return (f"the GPU must be from NVIDIA, got ROCm {torch.version.hip}",)
        found = torch.cuda.get_device_capability(device)
        if found < MIN_CAPABILITY:
            least, got = (".".join(map(str, each)) for each in (MIN_CAPABILITY, found))
            name = torch.cuda.get_device_name(device)
            return (f"the GPU must have compute capability {least} or higher, got {got} on {name}",)
    elif device.type == "cpu":
        from ..kernels.device import stand_in

        if not (interpreter_is_active() or stand_in):
            return ("tensors must be on a CUDA device, got the CPU (for tests, set TRITON_INTERPRET=1)",)
    else:
        return (f"tensors must be on a CUDA device, got {device.type}",)
    register_flop_formulas()
    return ()


@constant_to_compiler
def interpreter_is_active() -> bool:
    """Returns True if Triton runs kernels in its interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


_probed: dict[torch.device, tuple[str, ...]] = {}
_probe_lock = threading.Lock()
if hasattr(os, "register_at_fork"):  # another thread may hold the lock, and does not exist in the child process
    os.register_at_fork(after_in_child=_probe_lock._at_fork_reinit)  # type: ignore[attr-defined]  # as `threading` does


def probe_reasons(device: torch.device) -> tuple[str, ...]:
    """Runs a test kernel once per device and process; returns the reason if it failed, else ().

    Device properties do not show whether kernels run: a C compiler may be missing, the driver may be too old, or the
    compiled code may be incorrect.
    """
    if (cached := _probed.get(device)) is not None:
        return cached
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # the graph would contain the test kernel
        return (f"vit-fast must run a test kernel on {device} first: call the model once before a CUDA graph capture",)
    with _probe_lock:
        if device not in _probed:
            # A new thread has none of the caller's modes, such as fake tensors, torch.func, inference mode or autocast.
            with ThreadPoolExecutor(max_workers=1) as pool:
                try:
                    _probed[device] = pool.submit(_run_and_compare, device).result()
                except Exception as error:  # compilers and drivers may raise any type
                    message = " ".join(str(error).split())
                    if len(message) > _LONGEST_MESSAGE:
                        message = f"{message[: _LONGEST_MESSAGE // 2]} ... {message[-_LONGEST_MESSAGE // 2 :]}"
                    reasons = (f"vit-fast's test kernel failed on {device}: {type(error).__name__}: {message}",)
                    if isinstance(error, torch.OutOfMemoryError):  # memory may be free later: do not cache
                        return reasons
                    _probed[device] = reasons
        return _probed[device]


def _run_and_compare(device: torch.device) -> tuple[str, ...]:
    from ..kernels.attention.attention import attention_forward
    from ..kernels.attention.attention_launch import AttentionCall

    generator = torch.Generator("cpu").manual_seed(0)  # leaves the user's random state unchanged
    q, k, v = (torch.randn(_PROBE_SHAPE, generator=generator, device="cpu").half() for _ in range(3))
    out = torch.full(_PROBE_SHAPE, float("nan"), dtype=torch.float16, device=device)
    lse = torch.empty(_PROBE_SHAPE[:3], dtype=torch.float32, device=device)
    attention_forward(AttentionCall(q.to(device), k.to(device), v.to(device), lse, _PROBE_SHAPE[3] ** -0.5), out)
    exact = reference.attention(q.double(), k.double(), v.double())
    verdict = judge(out.cpu(), reference.attention(q, k, v), exact)
    return () if verdict.passed else (f"vit-fast's test kernel does not match the reference on {device}: {verdict}",)


def compile_launches(call: Callable[[], object], progress: Callable[[int, int], None] | None) -> tuple[int, int]:
    """Compiles the kernels that `call` would launch and that are not loaded in this process yet.

    Returns the number of these kernels, and how many of them were not in triton's cache on disk.
    """
    from ..kernels.precompile import collect, compile_all

    with collect() as requests:
        call()
    return len(requests), compile_all(requests, progress)

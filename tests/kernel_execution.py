"""Decides how the tests run Triton kernels: on a GPU, on the PTX emulator, or under Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
KERNEL_ARCH = os.environ.get("VIT_FAST_EXECUTE")  # the emulator's architecture, set by execute.py
WITHOUT_FP8 = ("sm_80", "sm_86")  # of the emulator's architectures
INTERPRETED = not HAS_GPU and KERNEL_ARCH is None
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported: before any kernel is decorated

# Compiled kernels compute fp32 matmuls in TF32, which test_executed_kernels tests; the interpreter is exact.
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if INTERPRETED else (torch.float16, torch.bfloat16)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skips tests of exact fp32 matmuls if kernels are compiled, because compiled kernels use TF32."""
    try:
        return (yield)
    except (RuntimeError, ValueError) as error:
        if INTERPRETED or "must be 'tf32' for fp32 matmuls" not in str(error):
            raise
        pytest.skip("only the interpreter computes exact fp32 matmuls")

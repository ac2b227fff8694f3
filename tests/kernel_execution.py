"""Decides how the tests run Triton kernels: on a GPU, on the PTX emulator, or under Triton's interpreter.

As a plugin of pytest (`-p kernel_execution`), it also compiles the kernels of the selected tests first. On a pretend
GPU, it selects few cases.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import tiers
import torch
from _pytest.runner import runtestprotocol

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
KERNEL_ARCH = os.environ.get("VIT_FAST_EXECUTE")  # the emulator's architecture, set by execute.py
WITHOUT_FP8 = ("sm_80", "sm_86")  # of the emulator's architectures
INTERPRETED = not HAS_GPU and KERNEL_ARCH is None
PRETENDED = HAS_GPU and "PRETEND_GPU" in os.environ  # a GPU of pretend_cuda.py: Triton's interpreter runs the kernels
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported: before any kernel is decorated

PASSES = 4  # of the tests that find kernels to compile
# Compiled kernels compute fp32 matmuls in TF32, which test_executed_kernels tests; the interpreter is exact.
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if INTERPRETED else (torch.float16, torch.bfloat16)


def few(real: int, pretended: int) -> int:
    """Returns a size or a number of repeats of a test that only runs on a GPU; a pretended one is slow."""
    return pretended if PRETENDED else real


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skips tests of exact fp32 matmuls if kernels are compiled, because compiled kernels use TF32."""
    try:
        return (yield)
    except (RuntimeError, ValueError) as error:
        if INTERPRETED or "must be 'tf32' for fp32 matmuls" not in str(error):
            raise
        pytest.skip("only the interpreter computes exact fp32 matmuls")


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if PRETENDED:
        fast = [item for item in items if item not in tiers.left_out(items)]
        tiers.keep(config, items, tiers.each_value(fast))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compiles kernels in parallel processes, before each test would compile its own.

    Runs the tests without launching new kernels, several times, because a test ends before it needs all of its kernels.
    A worker of xdist compiles while others do, so it compiles nothing first.
    """
    from vit_fast.ops.backends import compile_launches, interpreter_is_active

    if interpreter_is_active() or "PYTEST_XDIST_WORKER" in os.environ or session.config.option.collectonly:
        return

    def run_all() -> None:
        for item in session.items:
            runtestprotocol(item, log=False, nextitem=None)

    # run backward in this thread, which collects kernels
    with torch.autograd.set_multithreading_enabled(False), contextlib.suppress(RuntimeError):  # the tests report it
        any(not compile_launches(run_all, None)[0] for _ in range(PASSES))

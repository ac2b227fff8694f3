"""A few kernels on the PTX emulator, in processes of their own; `make test-execute` runs all of them."""

from __future__ import annotations

from pathlib import Path

import children
import execute
import pytest
from emulator import build

REASON = build.why_unavailable()
TESTS = Path(__file__).parent
CASES = {
    "sm_80": ("test_matmul_kernel.py", "test_a_residual_in_fp32_is_added and bfloat16 and TMA"),
    "sm_90": ("test_attention_kernel.py", "test_every_shape and 2-20-20-2-32"),
}


@pytest.mark.fast_cases("sm_90")
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("arch", CASES)
def test_kernels_are_executed(arch: str) -> None:
    file, cases = CASES[arch]
    command = [str(TESTS / "execute.py"), arch, str(TESTS / file), "-k", cases, "-p", "no:cacheprovider"]
    printed = children.run_python(command, children.environment())
    assert f"PTX emulator: {arch}, seed 1" in printed
    assert " 2 passed" in printed  # with a fixed and with a random schedule


def test_the_tests_that_are_executed_exist() -> None:
    assert [name for name in execute.KERNEL_TESTS if not (TESTS / f"{name}.py").exists()] == []

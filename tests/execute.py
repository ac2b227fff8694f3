"""Runs tests of kernels on the PTX emulator.

    python tests/execute.py sm_90 [arguments of pytest]

Without a file, all tests of kernels run. Needs g++; see tests/emulator/README.md. Arguments that choose cases:

    (none)      all but tests that are marked slow
    --share     the cases of `make test`, and of the others every fifth: the architectures of ARCHS run all of them;
                --seed S deals them out differently
    --versions  cases with each parameter value, without tests marked slow, as in `make test-newest`
    --slow      all of them
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from emulator import build

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
TESTS = Path(__file__).resolve().parent
# Tests that compare kernels with references. Tests of host code and of whole libraries run in `make test` only.
KERNEL_TESTS = (
    "test_attention_bias_kernel", "test_attention_kernel", "test_attention_varlen", "test_block_operator",
    "test_executed_kernels",
    "test_fp8_block", "test_graph_replay", "test_matmul_kernel", "test_mlp_kernels",
    "test_rotary_kernel",
)  # fmt: skip


def main(arch: str, *arguments: str) -> None:
    if reason := build.why_unavailable():
        raise SystemExit(reason)
    named = any(argument.split("::")[0].endswith(".py") for argument in arguments)
    files = () if named else tuple(str(TESTS / f"{name}.py") for name in KERNEL_TESTS)
    path = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "VIT_FAST_EXECUTE": arch,
        "LD_PRELOAD": str(build.build() / "preload.so"),
        "TRITON_CACHE_DIR": str(build.CACHE / "triton"),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "pytest", "-p", "emulator.plugin", *files, *arguments]
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main(*sys.argv[1:])

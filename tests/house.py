"""Prints the measurements of the code base beside their targets: python tests/house.py"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import test_structure  # noqa: E402
import torch  # noqa: E402

import vit_fast  # noqa: E402
import vit_fast.ops  # noqa: E402  # registers the operators
from vit_fast.benchmarks import machine  # noqa: E402
from vit_fast.cli import main as command_line  # noqa: E402
from vit_fast.cli import make_app  # noqa: E402

TARGETS = {
    "source lines": 28_000,
    "source files": 180,
    "files in the fullest folder": 15,
    "test lines": 16_000,
    "frozen block, steady state: files": 12,
    "frozen block, steady state: functions": 40,
    "jumps between files in fuse of timm": 60,
    "files in a bench run": 35,
    "pairs of folders that import each other": 0,
    "options of all commands": 100,
    "flat positional arguments of an operator": 12,
}


class Trace:
    """The functions of this repository that a call runs, and the number of calls from one of its files into another."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.jumps = 0

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.functions}

    def run(self, call: Callable[[], Any]) -> Trace:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            call()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # as the documentation says
        return self

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and _is_ours(frame):
            self.functions.add(frame.f_code)
            caller = frame.f_back
            while caller is not None and not _is_ours(caller):
                caller = caller.f_back
            if caller is not None and caller.f_code.co_filename != frame.f_code.co_filename:
                self.jumps += 1


def _is_ours(frame: FrameType) -> bool:
    """True for source of this repository that runs on the host, not for kernels in Triton's interpreter."""
    if not frame.f_code.co_filename.startswith(str(ROOT / "vit_fast")):
        return False
    return type(frame.f_globals.get(frame.f_code.co_name)).__name__ != "InterpretedFunction"


def trace_frozen_block() -> Trace:
    """One call of the first block of a frozen model, after two others."""
    model = vit_fast.create_model("vit_test", backend="sdpa").eval()
    vit_fast.freeze(model)
    tokens = torch.randn(1, model.config.seqlen, model.config.embed_dim)
    block = model.blocks[0]
    with torch.inference_mode():
        for _ in range(2):
            block(tokens)
        return Trace().run(lambda: block(tokens))


def trace_fuse() -> Trace:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, depth=2).eval()
    return Trace().run(lambda: vit_fast.fuse(model, backend="sdpa"))


def trace_bench() -> Trace:
    """The command with three candidates, in this process."""

    def bench() -> None:
        arguments = "--models vit_test --batch-sizes 1 --dtypes fp32 --subjects eager,sdpa,timm --time-budget 0"
        try:
            command_line(["bench", *arguments.split(), "--seconds", "0.2", "--device", "cpu", "--out", f"{folder}/out"])
        except SystemExit as ended:
            assert not ended.code, ended.code

    machine.MATMUL_SIZE["cpu"], machine.COPY_BYTES["cpu"] = 64, 2**16  # for the speed of this script
    with tempfile.TemporaryDirectory() as folder:
        return Trace().run(bench)


def count_options() -> int:
    from typer.main import get_command

    commands = get_command(make_app()).commands.values()  # type: ignore[attr-defined]  # a group's
    return sum(parameter.param_type_name == "option" for command in commands for parameter in command.params)


def most_arguments() -> int:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("vit_fast::")]
    return max(len(schema.arguments) for schema in schemas)


def lines(paths: Any) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def main() -> None:
    modules = test_structure.MODULES.values()
    block, bench = trace_frozen_block(), trace_bench()
    tests = [path for path in (ROOT / "tests").rglob("*.py") if "__pycache__" not in path.parts]
    found = {
        "source lines": lines(modules),
        "source files": len(modules),
        "files in the fullest folder": max(Counter(path.parent for path in modules).values()),
        "test lines": lines(tests),
        "frozen block, steady state: files": len(block.files),
        "frozen block, steady state: functions": len(block.functions),
        "jumps between files in fuse of timm": trace_fuse().jumps,
        "files in a bench run": len(bench.files),
        "pairs of folders that import each other": len(test_structure.folder_pairs()),
        "options of all commands": count_options(),
        "flat positional arguments of an operator": most_arguments(),
    }
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    print(f"{commit.stdout.strip() or 'no commit':45} {'now':>7} {'target':>7}")
    for name, target in TARGETS.items():
        print(f"{name:45} {found[name]:7,} {target:7,}{'' if found[name] <= target else '   missed'}")


if __name__ == "__main__":
    main()

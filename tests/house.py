"""Prints the measurements of the code base beside their targets: python tests/house.py"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import test_structure  # noqa: E402
import torch  # noqa: E402

import vit_fast  # noqa: E402
import vit_fast.ops  # noqa: E402  # registers the operators
from vit_fast.cli import make_app  # noqa: E402


def functions_of(call: Callable[[], Any]) -> set[CodeType]:
    """Returns the functions of this repository that a call runs, without the stand-in for a driver."""
    found: set[CodeType] = set()

    def see(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(ROOT / "vit_fast")) and not name.endswith("stand_in_driver.py"):
            found.add(frame.f_code)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def trace_frozen_block() -> set[CodeType]:
    """Traces a call of a frozen block after its launch plans were recorded, with the stand-in for the CUDA driver."""
    from vit_fast.kernels.inspect import stand_in_driver

    stand_in_driver.install("sm_90")
    model = vit_fast.create_model("vit_test", backend="triton").bfloat16().eval()
    vit_fast.freeze(model)
    tokens = torch.zeros(1, model.config.seqlen, model.config.embed_dim, dtype=torch.bfloat16)
    with torch.inference_mode():
        for _ in range(256):  # until the tensor maps of most addresses that the CPU allocates are cached
            model.blocks[0](tokens)
        traces = [functions_of(lambda: model.blocks[0](tokens)) for _ in range(256)]
    return min(traces, key=len)  # others may encode the map of a new address


def count_options() -> int:
    from typer.main import get_command

    commands = get_command(make_app()).commands.values()
    return sum(parameter.param_type_name == "option" for command in commands for parameter in command.params)


def functions() -> list[tuple[Path, ast.FunctionDef]]:
    parsed = [(path, ast.parse(path.read_text())) for path in test_structure.MODULES.values()]
    return [(path, node) for path, tree in parsed for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def most_parameters() -> int:
    """Returns the number of parameters of the kernel that has most."""
    kernels = [node for path, node in functions() if node.name.endswith("_kernel") and "kernels" in path.parts]
    return max(len(node.args.args) for node in kernels)


def longest_flow() -> int:
    """Returns the lines of the longest function, without its parameters and its docstring."""

    def flow(node: ast.FunctionDef) -> int:
        body = node.body[1:] if ast.get_docstring(node) is not None and node.body[1:] else node.body
        return (node.end_lineno or 0) - body[0].lineno + 1

    return max(flow(node) for _, node in functions())


def most_arguments() -> int:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("vit_fast::")]
    return max(len(schema.arguments) for schema in schemas)


def lines(paths: Any) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def main() -> None:
    modules = test_structure.MODULES.values()
    child = subprocess.run([sys.executable, __file__, "block"], capture_output=True, text=True, check=True)
    block_files, block_functions = map(int, child.stdout.split())
    others = ("emulator", "pretend_")
    tests = [path for path in (ROOT / "tests").rglob("*.py") if not any(name in str(path) for name in others)]
    folders = test_structure.folder_graph()
    pairs = [(a, b) for a in folders for b in folders[a] if a < b and a in folders[b]]
    measured = [
        ("source lines", lines(modules), 31_000),
        ("source files", len(modules), 180),
        ("files in the fullest folder", max(Counter(path.parent for path in modules).values()), 15),
        ("test lines without emulator and pretend GPU", lines(tests), 17_500),
        ("frozen block, steady state: files", block_files, 12),
        ("frozen block, steady state: functions", block_functions, 40),
        ("pairs of folders that import each other", len(pairs), 0),
        ("options of all commands", count_options(), 100),
        ("parameters of a kernel", most_parameters(), 25),
        ("lines of a function without docstring", longest_flow(), 60),
        ("flat positional arguments of an operator", most_arguments(), 12),
    ]
    print(f"{'':45} {'now':>7} {'target':>7}")
    for name, now, target in measured:
        print(f"{name:45} {now:7,} {target:7,}{'' if now <= target else '   missed'}")


if __name__ == "__main__":
    if sys.argv[1:] == ["block"]:  # in a process of its own, in which torch takes the CPU for a GPU
        block = trace_frozen_block()
        print(len({code.co_filename for code in block}), len(block))
    else:
        main()

"""Prints the size of the code beside its targets: python tests/house.py"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import test_structure  # noqa: E402
import torch  # noqa: E402
from typer.main import get_command  # noqa: E402

import vit_fast.ops  # noqa: E402, F401  # registers the operators
from vit_fast.cli import make_app  # noqa: E402


def lines(paths: Any) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def main() -> None:
    modules = test_structure.MODULES.values()
    tests = [path for path in (ROOT / "tests").rglob("*.py") if "emulator" not in str(path.relative_to(ROOT))]
    commands = get_command(make_app()).commands.values()  # type: ignore[attr-defined]  # a group's
    options = [parameter for command in commands for parameter in command.params]
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("vit_fast::")]
    measured = [
        ("source lines", lines(modules), 28_000),
        ("source files", len(modules), 180),
        ("files in the fullest folder", max(Counter(path.parent for path in modules).values()), 15),
        ("test lines without the emulator", lines(tests), 16_000),
        ("options of all commands", sum(option.param_type_name == "option" for option in options), 100),
        ("flat positional arguments of an operator", max(len(schema.arguments) for schema in schemas), 12),
    ]
    print(f"{'':45} {'now':>7} {'target':>7}")
    for name, now, target in measured:
        print(f"{name:45} {now:7,} {target:7,}{'' if now <= target else '   missed'}")


if __name__ == "__main__":
    main()

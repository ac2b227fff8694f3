"""Selection of tests: cases that cover all values, tests that a changed folder requires, and the PTX emulator."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import changed
import children
import execute
import pytest
import tiers
from emulator import build
from tiers import covering

AXES = {"dtype": ("fp32", "fp16", "bf16"), "head_dim": (16, 64, 75, 128), "length": (1, 17, 197), "packed": (0, 1)}
CASES = [dict(zip(AXES, values)) for values in product(*AXES.values())]


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 14)])
def test_few_cases_contain_all_combinations(strength: int, most: int) -> None:
    chosen = [CASES[position] for position in covering(CASES, strength)]
    assert len(chosen) <= most < len(CASES)
    for names in combinations(AXES, strength):
        found = {tuple(case[name] for name in names) for case in chosen}
        assert found == set(product(*(AXES[name] for name in names)))


@dataclass(frozen=True, eq=False)
class Item:
    """Stands for a case of `test_a` or `test_b` on the emulator, with the name that pytest gives it."""

    originalname: str
    case: str
    schedule: str
    path: str = "tests/test_kernel.py"
    name: str = ""

    @property
    def callspec(self) -> Any:
        return SimpleNamespace(params={"schedule": self.schedule, "dtype": self.case[:4], "gated": self.case[4:]})


def test_each_value_in_each_test() -> None:
    cases = ("fp16", "bf16", "fp16gated", "bf16gated")
    items = [Item(*values) for values in product(("test_a", "test_b"), cases, ("fixed", "random"))]
    kept = tiers.each_value(items)
    assert {item.case for item in kept} == {"fp16", "bf16gated"} and len(kept) == 8


def test_folders_and_slow_tests_are_listed() -> None:
    table = (changed.ROOT / "CONTRIBUTING.md").read_text()
    folders = re.findall(r"^\| `([\w/]+)/` \|", table, re.MULTILINE)
    assert len(folders) > 10 and all(map(changed.folder_of, folders))
    assert [key for key in changed.PARTS if not (changed.ROOT / key).exists()] == []
    tests = changed.ROOT / "tests"
    patterns = {pattern for part in changed.PARTS.values() for pattern in part}
    assert [pattern for pattern in patterns if not [*tests.glob(f"test_{pattern}.py")]] == []
    marks = re.compile(r"mark\.(slow|pairwise|each_value|fast_cases)\b")
    slow = {f"tests/{path.name}" for path in tests.glob("test_*.py") if marks.search(path.read_text())}
    assert slow - set(changed.tests_of(changed.PARTS)) == set()


def test_tests_of_changed_paths() -> None:
    assert changed.folder_of("vit_fast/ops/attention.py") == "vit_fast/ops"
    assert changed.folder_of("vit_fast/model.py") == "vit_fast"
    assert changed.folder_of("LICENSE") is None
    assert "tests/test_matmul_kernel.py" in changed.tests_of(["kernels/linear/linear.py"])
    assert changed.tests_of(["tests/test_cli.py", "tests/conftest.py"]) == ["tests/test_cli.py"]
    assert "tests/test_onnx_families.py" in changed.tests_of(["tests/onnx_models.py"])


UNAVAILABLE = build.why_unavailable()
EXECUTED = {
    "sm_80": ("test_matmul_kernel.py", "test_input_gradient_in_fp32 and bfloat16 and TMA"),
    "sm_90": ("test_attention_kernel.py", "test_every_shape and 2-20-20-2-32"),
}


@pytest.mark.fast_cases("sm_90")
@pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
@pytest.mark.parametrize("arch", EXECUTED)
def test_kernels_are_executed(arch: str) -> None:
    file, cases = EXECUTED[arch]
    place = execute.TESTS
    command = [str(place / "execute.py"), arch, str(place / file), "-k", cases, "-p", "no:cacheprovider"]
    printed = children.run_python(command, children.environment())
    assert f"PTX emulator: {arch}, seed 1" in printed
    assert " 2 passed" in printed  # with a fixed and with a random schedule

"""Test tiers: the cases that cover all values, and the tests that a changed folder requires."""

from __future__ import annotations

import re
import subprocess
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import changed
import pytest
from tiers import covering, left_out, share

AXES = {"dtype": ("fp32", "fp16", "bf16"), "head_dim": (16, 64, 75, 128), "length": (1, 17, 197), "packed": (0, 1)}
CASES = [dict(zip(AXES, values)) for values in product(*AXES.values())]


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 14)])
def test_few_cases_hold_every_value_and_every_pair(strength: int, most: int) -> None:
    chosen = [CASES[position] for position in covering(CASES, strength)]
    assert len(chosen) <= most < len(CASES)
    for names in combinations(AXES, strength):
        found = {tuple(case[name] for name in names) for case in chosen}
        assert found == set(product(*(AXES[name] for name in names)))


def test_the_other_values_take_turns() -> None:
    cases = [{"kind": kind, "dtype": dtype} for kind, dtype in product(range(6), ("fp32", "fp16", "bf16"))]
    chosen = [cases[position]["dtype"] for position in covering(cases, 1)]
    assert sorted(chosen) == ["bf16"] * 2 + ["fp16"] * 2 + ["fp32"] * 2


class Item(SimpleNamespace):
    """The attributes of a test that tiers.py reads."""

    __hash__ = object.__hash__


def executed(marker: str, *arguments: str) -> list[Any]:
    """Returns seven cases as the PTX emulator collects them."""
    return [
        Item(
            path=Path(__file__), name="test", get_closest_marker={marker: SimpleNamespace(args=arguments)}.get,
            config=SimpleNamespace(args=[]),
            callspec=SimpleNamespace(id=f"{schedule}-{case}", params={"schedule": schedule, "case": case}),
        )
        for schedule, case in product(("fixed", "random"), range(7))
    ]  # fmt: skip


def ids(items: set[Any], schedule: str) -> set[str]:
    return {item.callspec.id.removeprefix(f"{schedule}-") for item in items if item.callspec.id.startswith(schedule)}


@pytest.mark.parametrize(
    ("marker", "expected"), [(("each_value",), set()), (("fast_cases", "2", "3"), {"0", "1", "4", "5", "6"})]
)
def test_all_schedules_of_a_case_run_or_none(marker: tuple[str, ...], expected: set[str]) -> None:
    left = left_out(executed(*marker))
    assert ids(left, "fixed") == ids(left, "random") == expected


def test_shares_hold_every_case_once_with_all_its_schedules() -> None:
    items = executed("slow")
    shares = [share(items, number, 5) for number in range(5)]
    assert sorted(item.callspec.id for one in shares for item in one) == sorted(item.callspec.id for item in items)
    assert all(ids(one, "fixed") == ids(one, "random") for one in shares)
    assert share(items, 6, 5) == shares[1]


def test_every_folder_requires_tests_that_exist_and_every_slow_test_a_folder() -> None:
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


def test_the_longest_folder_decides() -> None:
    assert changed.folder_of("vit_fast/ops/attention.py") == "vit_fast/ops"
    assert changed.folder_of("vit_fast/model.py") == "vit_fast"
    assert changed.folder_of("LICENSE") is None
    assert "tests/test_matmul_kernel.py" in changed.tests_of(["kernels/linear/linear.py"])
    assert changed.tests_of(["tests/test_cli.py", "tests/conftest.py"]) == ["tests/test_cli.py"]
    assert "tests/test_onnx_families.py" in changed.tests_of(["tests/onnx_models.py"])


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_a_branch_is_compared_with_main_and_main_with_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "first")
    assert changed.main(["--list"]) == 0 and "no earlier commit" in capsys.readouterr().out
    first = git(tmp_path, "rev-parse", "HEAD")
    git(tmp_path, "commit", "--allow-empty", "-m", "second")
    assert changed.base_commit() == first
    git(tmp_path, "checkout", "-b", "branch", first)
    (tmp_path / "committed").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "of the branch")
    (tmp_path / "new").write_text("")
    assert changed.base_commit() == first
    assert changed.changed_paths(first) == ["committed", "new"]

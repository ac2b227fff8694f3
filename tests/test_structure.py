"""Structure of the source: imports follow CONTRIBUTING.md without cycles, and no file or class is too long."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOP_FOLDERS = ("vit_fast", "kernels", "export", "benchmarks")
MAX_FILE, MAX_CLASS = 400, 200  # lines
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def _find_modules() -> dict[str, Path]:
    """Returns the path of every source file by module name."""
    found = {}
    for folder in TOP_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if folder == "vit_fast" and parts[1] in TOP_FOLDERS:
                continue  # a symbolic link, on Pythons whose rglob follows them
            parts = parts if folder == "vit_fast" else ("vit_fast", *parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = _find_modules()


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _imports(module: str, *, typing: bool) -> frozenset[str]:
    """Returns the modules of vit-fast that a module imports, also inside functions; `typing`: for the type checker."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found: set[str] = set()
    for node in _statements(_tree(path), typing=typing):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{source}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else source for name in names}
    own = set(accumulate(module.split(".")[:-1], "{}.{}".format))
    # Python first imports the packages that contain a module
    found |= {parent for name in found for parent in accumulate(name.split(".")[:-1], "{}.{}".format)} - own
    return frozenset((found & MODULES.keys()) - {module})


def _statements(tree: ast.AST, *, typing: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if typing or not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
            yield node
            yield from _statements(node, typing=typing)


@pytest.mark.parametrize("typing", [False, True])
def test_no_import_cycle(typing: bool) -> None:
    """Includes imports inside functions. For the type checker, the package itself may import its lazy names."""
    graph = {module: _imports(module, typing=typing) for module in MODULES}
    assert len(graph) > 100 and {"vit_fast.fusion", "vit_fast.fusion.fuse"} <= graph["vit_fast.weights.load"]
    TopologicalSorter(graph | {"vit_fast": _imports("vit_fast", typing=False)}).prepare()  # or raises CycleError


def _folder(module: str) -> str:
    """Returns the folder of a module in CONTRIBUTING's notation."""
    inside = "/".join(MODULES[module].parent.relative_to(ROOT).parts)
    return f"`{inside}/`"


def folder_graph() -> dict[str, set[str]]:
    """Returns the folders that each folder imports, except for the package itself, which imports lazily."""
    graph: dict[str, set[str]] = {_folder(module): set() for module in MODULES}
    for module in MODULES.keys() - {"vit_fast"}:
        imported = {_folder(name) for name in _imports(module, typing=True) - {"vit_fast"}}
        graph[_folder(module)] |= imported - {_folder(module)}
    return graph


def test_no_cycle_of_folders() -> None:
    TopologicalSorter(folder_graph()).prepare()


def test_the_plain_model_and_its_configuration_import_no_folder() -> None:
    top = [module for module in MODULES if _folder(module) == "`vit_fast/`"]
    imported = {module: {_folder(name) for name in _imports(module, typing=True)} - {"`vit_fast/`"} for module in top}
    assert "vit_fast.model" in imported
    assert {module for module, folders in imported.items() if folders} <= {"vit_fast", "vit_fast.cli"}


def test_imports_follow_contributing() -> None:
    table = dict(re.findall(r"^\| (`.+?/`) \| .+ \| (.+) \|$", CONTRIBUTING, re.MULTILINE))
    assert set(table) == {_folder(module) for module in MODULES} | {"`tests/`"}
    pairs = [(module, name) for module in MODULES for name in sorted(_imports(module, typing=True))]
    allowed = {module: f"{table[_folder(module)]}, {_folder(module)}" for module in MODULES}
    assert [
        f"{module} imports {name}"
        for module, name in pairs
        if _folder(name) not in allowed[module] and not allowed[module].startswith("everything")
    ] == []


def test_contributing_names_files_that_exist() -> None:
    paths = re.findall(r"`([\w/.-]+/[\w.-]*)`", CONTRIBUTING)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_export_and_benchmarks_import_across_folders_absolutely() -> None:
    """Relative imports must stay inside the folder, because editors do not resolve the symbolic links."""
    for module, path in MODULES.items():
        if path.parent.name in ("export", "benchmarks"):
            levels = [node.level for node in ast.walk(_tree(path)) if isinstance(node, ast.ImportFrom)]
            assert max(levels, default=0) <= 1, module


def test_no_file_and_no_class_is_too_long() -> None:
    too_long = []
    emulator = (ROOT / "tests/emulator/source").iterdir()
    for path in (*MODULES.values(), *(ROOT / "tests").rglob("*.py"), *emulator):
        text = path.read_text()
        if (lines := text.count("\n")) > MAX_FILE:
            too_long.append(f"{path.name}: {lines} lines")
        if path.suffix != ".py" or lines <= MAX_CLASS:
            continue
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef) and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_CLASS:
                too_long.append(f"{path.name}, class {node.name}: {length} lines")
    assert too_long == []


OPENINGS = re.compile(r"(What|Whether|How|Of|As|Which|Where|That|With|Who)\b")


def _violates_language(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return OPENINGS.match(node.value.value) is not None  # a docstring, also below an attribute
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return re.search(r"\baccepted (is|are)\b", text) is not None


def test_docstrings_and_errors_follow_the_rules_of_language() -> None:
    """Docstrings begin with a verb or a noun phrase; errors say "must be", not "accepted is"."""
    violations = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES.values()
        for node in ast.walk(_tree(path))
        if _violates_language(node) and isinstance(node, ast.expr | ast.stmt)
    ]
    assert violations == []

"""Tests of the package: imports, public names, and the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import children
import pytest

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = ("triton", "timm", "transformers", "torchvision", "onnx", "onnxscript", "onnxruntime", "matplotlib", "typer")


def run(code: str) -> str:
    return children.run_python(["-c", code], os.environ, ROOT)


def test_import_needs_and_loads_no_optional_package() -> None:
    """Includes the files in libraries/, which do not import the libraries."""
    paths = [path.relative_to(ROOT) for path in (ROOT / "vit_fast" / "libraries").rglob("[a-z]*.py")]
    libraries = [".".join(path.with_suffix("").parts) for path in paths]
    assert len(libraries) >= 10
    run(
        f"""
import importlib, sys, torch
before = set(sys.modules)
import vit_fast
loaded = {{name.split(".")[0] for name in set(sys.modules) - before}}
assert not loaded & set({OPTIONAL}), loaded
torch.ops.vit_fast.attention  # registered, because torch was imported first
for name in {OPTIONAL}:
    sys.modules[name] = None  # import of it now raises ImportError
model = vit_fast.create_model("vit_test")
assert model(torch.randn(1, 3, 32, 32)).shape == (1, 10)
assert vit_fast.export.__all__
try:
    vit_fast.ops.attention(*torch.randn(3, 1, 2, 4, 16), backend="triton")
except vit_fast.UnsupportedInputError as error:
    assert "triton" in str(error)
else:
    raise SystemExit("backend='triton' ran without triton")
for name in {libraries}:
    importlib.import_module(name)
"""
    )


def test_public_names() -> None:
    import vit_fast

    assert set(vit_fast.__all__) <= set(dir(vit_fast))
    assert all(getattr(vit_fast, name) is not None for name in vit_fast.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vit_fast.nothing  # noqa: B018  # the access is the test


@pytest.mark.slow
def test_transformers_imports_from_the_repository_root() -> None:
    """transformers would mistake a regular top-level package `kernels` for Hugging Face's."""
    assert "ViTModel" in run("from transformers import ViTModel; print(ViTModel)")
    assert not [folder for folder in ("kernels", "benchmarks", "tests") if (ROOT / folder / "__init__.py").exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    listed = "git ls-files -z --cached --others --exclude-standard"
    subprocess.run(f"{listed} | tar c --null --ignore-failed-read -T - | tar x -C {source}", cwd=ROOT, shell=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_the_wheel_contains_files_instead_of_links(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    data = ("py.typed", "benchmarks/report.html", "kernels/attention/attention_table.json", "apps/digits.npz")
    assert {f"vit_fast/{name}" for name in data} <= names
    for folder in ("vit_fast", "kernels", "export", "benchmarks"):
        found = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
        paths = found if folder == "vit_fast" else {f"vit_fast/{path}" for path in found}
        inspect = {path for path in paths if path.startswith("vit_fast/kernels/inspect/")}
        assert paths - inspect <= names and not inspect & names
    assert not any(name.startswith(("tests/", "kernels/", "benchmarks/", "export/")) for name in names)


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Dependencies come from the environment of the tests."""
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    site = next((environment / "lib").glob("python*/site-packages"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True)
    dependencies = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "dependencies.pth").write_text(dependencies + "\n")
    code = "import vit_fast, vit_fast.cli; print(vit_fast.__file__); vit_fast.cli.main(['info'])"
    command = [environment / "bin" / "python", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout and "vit-fast 0.1.0" in done.stdout

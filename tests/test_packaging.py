"""Importing costs little and needs little, the layout collides with nobody, and the wheel works on its own."""

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


def test_import_needs_and_loads_no_optional_package():
    """Nor do the files of the libraries need peer."""
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


def test_every_public_name_is_there():
    import vit_fast

    for name in vit_fast.__all__:
        assert getattr(vit_fast, name) is not None
        assert name in dir(vit_fast)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vit_fast.nothing  # noqa: B018  # the access is the test


@pytest.mark.slow
def test_transformers_imports_from_the_repository_root():
    """A regular top-level package `kernels` here would be taken for Hugging Face's."""
    assert "ViTModel" in run("from transformers import ViTModel; print(ViTModel)")
    assert not [folder for folder in ("kernels", "benchmarks", "tests") if (ROOT / folder / "__init__.py").exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "checkout"
    source.mkdir()
    listed = "git ls-files -z --cached --others --exclude-standard"
    subprocess.run(f"{listed} | tar c --null --ignore-failed-read -T - | tar x -C {source}", cwd=ROOT, shell=True)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_wheel_holds_real_files(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"vit_fast/model.py", "vit_fast/py.typed", "vit_fast/ops/attention.py"} <= names
    data = ("benchmarks/report.html", "kernels/attention/attention_table.json", "apps/digits.npz")
    assert {f"vit_fast/{name}" for name in data} <= names
    for folder in ("vit_fast", "kernels", "export", "benchmarks"):
        found = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
        paths = found if folder == "vit_fast" else {f"vit_fast/{path}" for path in found}
        inspect = {path for path in paths if path.startswith("vit_fast/kernels/inspect/")}
        assert paths - inspect <= names
        assert not inspect & names
    assert not any(name.startswith(("tests/", "kernels/", "benchmarks/", "export/")) for name in names)


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment(wheel, tmp_path):
    """Installed alone, outside the repository; dependencies come from the environment of these tests."""
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    site = next((environment / "lib").glob("python*/site-packages"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)], check=True
    )
    dependencies = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "dependencies.pth").write_text(dependencies + "\n")
    done = subprocess.run(
        [python, "-c", "import vit_fast, vit_fast.cli; print(vit_fast.__file__); vit_fast.cli.main(['info'])"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout
    assert "vit-fast 0.1.0" in done.stdout

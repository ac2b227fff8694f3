"""The repository for Hugging Face's `kernels` loader: complete, importable from anywhere, apart from vit_fast."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from children import run_python
from command_line import run

from vit_fast.apps.hub_kernel import build_hf_kernel

# What the loader does, in a process that has no vit_fast: import the variant's package under its metadata's id.
LOAD = """
import importlib.util, json, sys, torch
sys.modules["vit_fast"] = None
variant = sys.argv[1]
name = json.load(open(variant + "/metadata.json"))["id"]
spec = importlib.util.spec_from_file_location(name, variant + "/__init__.py")
kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
q, k, v = torch.randn(3, 1, 2, 17, 32)
q.requires_grad_(True)
found, expected = (kernel.attention(q, k, v, backend=backend) for backend in ("triton", "eager"))
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
grads = [torch.autograd.grad(output.sum(), q)[0] for output in (found, expected)]
torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
x, w1, w2 = torch.randn(5, 32), torch.randn(64, 32), torch.randn(32, 64)
found, expected = (kernel.layer_norm_mlp(x, None, None, w1, None, w2, None, backend=b) for b in ("triton", "eager"))
torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-2)
assert not hasattr(torch.ops.vit_fast, "attention")
print(sorted(kernel.__all__))
"""


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "repository"
    assert run("hf-kernel", str(folder)) == 0
    return folder / "build" / "torch-universal"


def test_the_built_kernel_is_imported_and_computes_without_vit_fast(variant: Path, tmp_path: Path) -> None:
    changes = {"TRITON_INTERPRET": "1", "PYTHONPATH": ""}
    assert "layer_norm_mlp" in run_python(["-c", LOAD, str(variant)], os.environ | changes, tmp_path)


def test_metadata_and_card_say_what_it_is(variant: Path, tmp_path: Path) -> None:
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["name"] == "vit-fast-kernels" and metadata["id"].isidentifier() and not metadata["python-depends"]
    assert (variant.parents[1] / "README.md").read_text().startswith("---\nlibrary_name: kernels")
    again = build_hf_kernel(tmp_path / "again")
    assert json.loads((again / "metadata.json").read_text()) == metadata
    namespace = f"vit_fast_{metadata['id'].rsplit('_', 1)[1]}::"
    text = "".join(path.read_text() for path in variant.glob("ops/*_op.py"))
    assert namespace in text and "vit_fast::" not in text
    assert (variant / "kernels" / "attention" / "attention.py").is_file()


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="must be a new or empty folder"):
        build_hf_kernel(tmp_path / "full")
    assert (tmp_path / "full" / "mine").read_text() == "mine"
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(Path, "write_text", Mock(side_effect=OSError("no space left")))
        build_hf_kernel(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]

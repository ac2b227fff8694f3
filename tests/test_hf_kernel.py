"""The repository for Hugging Face's `kernels` loader works without vit_fast."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from children import run_python
from command_line import run

from vit_fast.apps.hub_kernel import build_hf_kernel

# Imports the variant's package under the id of its metadata, like the loader, in a process without vit_fast.
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
"""


def test_the_built_kernel_computes_without_vit_fast(tmp_path: Path) -> None:
    assert run("hf-kernel", str(tmp_path / "repository")) == 0
    variant = tmp_path / "repository" / "build" / "torch-universal"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["name"] == "vit-fast-kernels" and metadata["id"].isidentifier() and not metadata["python-depends"]
    assert (tmp_path / "repository" / "README.md").read_text().startswith("---\nlibrary_name: kernels")
    again = build_hf_kernel(tmp_path / "again")
    assert json.loads((again / "metadata.json").read_text()) == metadata, "the id depends on the content only"
    run_python(["-c", LOAD, str(variant)], os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": ""}, tmp_path)


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="must be a new or empty folder"):
        build_hf_kernel(tmp_path / "full")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(Path, "write_text", Mock(side_effect=OSError("no space left")))
        build_hf_kernel(tmp_path / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "mine"]

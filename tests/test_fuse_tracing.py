"""Fused models under torch.fx and TorchScript: they trace and script like the original, with equal results."""

from __future__ import annotations

import io
import re
import warnings

import pytest
import torch
from fused_models import SUBJECTS, classes_of
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks.fused import FusedModule

# except timm's Qwen3, which compares sizes in Python, which torch.fx does not support
TRACEABLE = [name for name in SUBJECTS if re.match("timm-(?!qwen3)|torchvision-vit", name)]
SCRIPTABLE = [*TRACEABLE, "torch-encoder"]


def _fused(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    """Returns a fused model, its inputs, and its output before fuse."""
    subject = SUBJECTS[name]
    model = subject.build().eval()
    inputs = tuple(subject.inputs().values())
    with torch.no_grad():
        expected = subject.output(model(*inputs))
    vit_fast.fuse(model, backend="sdpa").require_all()
    return model, inputs, expected


def _close(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.fast_cases("timm-vit", "timm-eva02", "timm-gated", "torchvision-vit")
@pytest.mark.parametrize("name", TRACEABLE)
def test_symbolic_trace(name: str) -> None:
    model, inputs, expected = _fused(name)
    before = classes_of(model)
    unfused = torch.fx.symbolic_trace(SUBJECTS[name].build().eval())
    traced = torch.fx.symbolic_trace(model)
    assert [(node.op, str(node.target)) for node in traced.graph.nodes] == [
        (node.op, str(node.target)) for node in unfused.graph.nodes
    ]
    with torch.no_grad():
        _close(traced(*inputs), expected)
        _close(model(*inputs), expected)
    assert classes_of(model) == before


def test_torchs_own_layers_stay_whole_in_a_trace() -> None:
    model, inputs, expected = _fused("torch-encoder")
    traced = torch.fx.symbolic_trace(nn.Sequential(model.layers[0], model.layers[1]))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    assert all(isinstance(layer, FusedModule) for layer in traced.children())
    with torch.no_grad():
        _close(traced(*inputs), expected)


@pytest.mark.fast_cases("timm-vit", "torchvision-vit")
@pytest.mark.parametrize("name", SCRIPTABLE)
def test_script(name: str) -> None:
    model, inputs, expected = _fused(name)
    before = classes_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted, file = torch.jit.script(model), io.BytesIO()
        torch.jit.save(scripted, file)
        file.seek(0)
        again = torch.jit.load(file)
    with torch.no_grad():
        for module in (scripted, again, model):
            _close(module(*inputs), expected)
    assert classes_of(model) == before


def test_a_folded_normalisation_is_traced_and_never_lost() -> None:
    model, (images,), expected = _fused("timm-vit")
    vit_fast.fuse(model, normalize=((0.5,) * 3, (0.25,) * 3))
    pixels = (images * 0.25 + 0.5) * 255
    with torch.no_grad():
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(pixels), expected, atol=1e-3, rtol=1e-3)
    with pytest.raises(Exception, match="annotation"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(model)

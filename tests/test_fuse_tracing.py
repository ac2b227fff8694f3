"""Fused models under torch.fx and TorchScript: what traced or scripted, traces and scripts, with the same results."""

from __future__ import annotations

import inspect
import io
import warnings

import pytest
import torch
from fused_models import SUBJECTS
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks.fused import FusedModule

# timm's own Qwen3 asks in Python whether its input is of the size of its positions, which torch.fx cannot answer
UNTRACEABLE = ("timm-qwen3",)
TRACEABLE = [name for name in SUBJECTS if name.startswith("timm") or name == "torchvision-vit"]
TRACEABLE = [name for name in TRACEABLE if name not in UNTRACEABLE]
SCRIPTABLE = [*TRACEABLE, "torch-encoder"]


def _fused(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    """A model after fuse, its inputs, and what it gave before."""
    subject = SUBJECTS[name]
    model = subject.build().eval()
    inputs = tuple(subject.inputs().values())
    with torch.no_grad():
        expected = subject.output(model(*inputs))
    vit_fast.fuse(model, backend="sdpa").require_all()
    return model, inputs, expected


def _classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def _close(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", TRACEABLE)
def test_symbolic_trace(name: str) -> None:
    model, inputs, expected = _fused(name)
    before = _classes(model)
    unfused = torch.fx.symbolic_trace(SUBJECTS[name].build().eval())
    traced = torch.fx.symbolic_trace(model)
    assert [(node.op, str(node.target)) for node in traced.graph.nodes] == [
        (node.op, str(node.target)) for node in unfused.graph.nodes
    ]
    with torch.no_grad():
        _close(traced(*inputs), expected)
        _close(model(*inputs), expected)
    assert _classes(model) == before


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_cannot_be_traced_could_not_before(name: str) -> None:
    for model in (SUBJECTS[name].build().eval(), _fused(name)[0]):
        with pytest.raises(torch.fx.proxy.TraceError):
            torch.fx.symbolic_trace(model)


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
    before = _classes(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted, file = torch.jit.script(model), io.BytesIO()
        torch.jit.save(scripted, file)
        file.seek(0)
        again = torch.jit.load(file)
    with torch.no_grad():
        for module in (scripted, again, model):
            _close(module(*inputs), expected)
    assert _classes(model) == before


def test_torchvisions_feature_extraction() -> None:
    extraction = pytest.importorskip("torchvision").models.feature_extraction
    model, inputs, expected = _fused("torchvision-vit")
    inside = "encoder.layers.encoder_layer_0.mlp"
    extractor = extraction.create_feature_extractor(model, [inside, "heads"])
    reference = extraction.create_feature_extractor(SUBJECTS["torchvision-vit"].build().eval(), [inside, "heads"])
    with torch.no_grad():
        features, right = extractor(*inputs), reference(*inputs)
    _close(features["heads"], expected)
    _close(features[inside], right[inside])


def test_timms_feature_extraction() -> None:
    fx = pytest.importorskip("timm.models._features_fx")
    model, inputs, _ = _fused("timm-vit")
    unfused = SUBJECTS["timm-vit"].build().eval()
    extracted = [fx.create_feature_extractor(m, ["blocks.0.mlp.fc1", "blocks.1"]) for m in (model, unfused)]
    with torch.no_grad():
        features, right = (extractor(*inputs) for extractor in extracted)
    assert list(features) == list(right)
    for name, feature in features.items():
        _close(feature, right[name])


@pytest.mark.slow
def test_a_fused_block_by_itself() -> None:
    model, _, _ = _fused("timm-vit")
    block, x = model.blocks[0], torch.randn(2, 5, 64)
    with torch.no_grad():
        expected = block(x)
        _close(torch.fx.symbolic_trace(block, {"attn_mask": None, "is_causal": False})(x), expected)
        _close(torch.export.export(block, (x,)).module()(x), expected)
        _close(torch.compile(block, backend="eager", fullgraph=True)(x), expected)


def test_the_signature_is_the_originals() -> None:
    model, _, _ = _fused("timm-vit")
    for part in (model.blocks[0], model.blocks[0].attn):
        assert inspect.signature(type(part).forward) == inspect.signature(type(part).original.forward)


def test_a_folded_normalisation_is_traced_and_never_lost() -> None:
    model, (images,), expected = _fused("timm-vit")
    vit_fast.fuse(model, normalize=((0.5,) * 3, (0.25,) * 3))
    pictures = (images * 0.25 + 0.5) * 255
    with torch.no_grad():
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(pictures), expected, atol=1e-3, rtol=1e-3)
    with pytest.raises(Exception, match="annotation"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(model)

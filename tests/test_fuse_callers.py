"""nn.MultiheadAttention and TransformerEncoderLayer: an example shows how a model calls them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from fused_models import SUBJECTS, torch_encoder
from torch import Tensor, nn

import vit_fast
from vit_fast.libraries import torchvision

X = torch.randn(2, 5, 64)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)


class Caller(nn.Module):
    """A model that calls one attention layer with given arguments, besides other operations."""

    def __init__(self, *args: Any, layer: nn.Module | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.attn = layer or nn.MultiheadAttention(64, 2, batch_first=True)
        self.args, self.kwargs = args, kwargs

    def forward(self, x: Tensor) -> Any:
        given = [x.flip(1) if each == "flipped" else x for each in self.args]
        found = self.attn(x, *given, **self.kwargs)
        return (found[0] if isinstance(found, tuple) else found).cumsum(1).cumprod(2)  # never read as a whole


def encoder(**kwargs: Any) -> Caller:
    layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, norm_first=True)
    return Caller(layer=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), **kwargs)


NEVER = {
    "weights": (lambda: Caller("x", "x"), "its forward returns more than one tensor"),
    "a mask": (lambda: Caller("x", "x", need_weights=False, attn_mask=CAUSAL), "(argument attn_mask)"),
    "positions of q and k": (lambda: Caller("x", "flipped", need_weights=False), "(argument 2)"),
    "cross-attention": (lambda: Caller("flipped", "flipped", need_weights=False), "(argument 1, 2)"),
    "a causal encoder": (lambda: encoder(mask=CAUSAL, is_causal=True), "(argument src_mask)"),
    "padding": (lambda: encoder(src_key_padding_mask=torch.eye(2, 5) > 0), "(argument src_key_padding_mask)"),
}


@pytest.mark.parametrize("name", NEVER)
def test_calls_that_never_run_fused_are_skipped(name: str) -> None:
    make, reason = NEVER[name]
    report = vit_fast.fuse(make(), "sdpa", example=X)
    assert report.skipped and not report.fused, report
    assert all(any(reason in text or "_mask)" in text for text in row.reasons) for row in report.skipped), report
    with pytest.raises(vit_fast.UnsupportedInputError, match="it runs fused only with"):
        report.require_all()


@pytest.mark.parametrize("make", [lambda: Caller("x", "x", need_weights=False), encoder])
def test_calls_that_run_fused_are_fused(make: Any) -> None:
    assert not vit_fast.fuse(make(), "sdpa", example=X).require_all().conditional


@pytest.mark.parametrize("make", [torch_encoder, SUBJECTS["torchvision-vit"].build])
def test_layers_that_call_attention_need_no_example(make: Any) -> None:
    assert not vit_fast.fuse(make(), "sdpa").require_all().conditional


def test_other_calls_are_conditional_without_an_example() -> None:
    report = vit_fast.fuse(Caller("x", "x", need_weights=False), "sdpa")
    assert [row.name for row in report.conditional] == ["attn"] and not report.fused
    assert "conditional  fused if called with need_weights=False, one tensor as" in str(report)
    with pytest.raises(vit_fast.UnsupportedInputError, match=r"(?s)fused if called with need_weights=False.*example="):
        report.require_all()


def test_a_layer_that_is_the_model_is_called_by_the_user() -> None:
    report = vit_fast.fuse(nn.MultiheadAttention(64, 2), "sdpa").require_all()
    assert report.conditional and str(report).startswith("backend sdpa: 0 fused, 0 skipped, 1 conditional")


def test_attention_of_a_post_norm_layer_runs_fused_with_gradients_only() -> None:
    layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    report = vit_fast.fuse(model, "sdpa")
    assert len(report.conditional) == len(report.skipped) == 2 and not report.fused
    assert "fused if called with gradients: in evaluation mode without gradients, torch's" in str(report)
    with mock.patch.object(torchvision, "attention_qkvpacked", wraps=torchvision.attention_qkvpacked) as fused:
        model(X)
        assert fused.call_count == 2
        with torch.no_grad():
            model(X)
        assert fused.call_count == 2

"""nn.MultiheadAttention: the report reads in the source of the model how it is called."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from fused_models import SUBJECTS, torch_encoder
from torch import Tensor, nn

import vit_fast
from vit_fast.libraries import torchvision


class Caller(nn.Module):
    """A model with one attention layer; subclasses call it."""

    def __init__(self, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.mask = nn.LayerNorm(64), None
        self.attn = attention or nn.MultiheadAttention(64, 2, batch_first=True)


class Weights(Caller):
    def forward(self, x: Tensor) -> Any:
        return self.attn(x, x, x)[0]


class LiteralWeights(Caller):
    def forward(self, x: Tensor) -> Any:
        h = self.norm(x)
        h, _ = self.attn(h, h, value=h, need_weights=True)
        return x + h


class Causal(Caller):
    def forward(self, x: Tensor) -> Any:
        n = x.shape[1]
        mask = torch.ones(n, n, device=x.device).triu(1).bool()
        return self.attn(x, x, x, attn_mask=mask, need_weights=False)[0]


class CausalByTransformer(Caller):
    def forward(self, x: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.attend(x, mask)

    def attend(self, x: Tensor, mask: Any) -> Any:
        return self.attn(x, x, x, need_weights=False, attn_mask=mask + 0.0, is_causal=True)[0]


class Buffer(Caller):
    """The text tower of OpenAI's CLIP; without a mask, it is the vision tower."""

    def forward(self, x: Tensor) -> Any:
        mask = self.mask
        return self.attn(x, x, x, None, False, self.mask if mask is None else mask)[0]


class Attribute(Caller):
    def forward(self, x: Tensor) -> Any:
        return self.attn(x, x, x, need_weights=False, attn_mask=self.mask)[0]


class Slice(Caller):
    def forward(self, x: Tensor) -> Any:
        n = x.shape[1]
        return self.attn(x, x, x, need_weights=False, attn_mask=self.mask[:n, :n])[0]


class Options(Caller):
    def forward(self, x: Tensor, **options: Any) -> Any:
        return self.attn(x, x, x, attn_mask=options.get("mask"), need_weights=False)[0]


class Positions(Caller):
    """DETR: positions are added to queries and keys, not to values."""

    def forward(self, x: Tensor, position: Tensor | None = None) -> Any:
        q = k = x + (0.5 if position is None else position)
        return self.attn(q, k, value=x, need_weights=False)[0]


class Cross(Caller):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:
        memory = x if memory is None else memory
        return self.attn(x, memory, memory, need_weights=False)[0]


class Plain(Caller):
    def forward(self, x: Tensor, mask: Tensor | None = None, key_padding_mask: Any = None) -> Any:
        h = self.norm(x)
        q = k = h
        return x + self.attn(q, k, h, key_padding_mask, need_weights=False, attn_mask=mask)[0]


class Listed(Caller):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleList(nn.MultiheadAttention(64, 2, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        for attn, norm in zip(self.attn, self.norms):
            h = norm(x)
            x = x + attn(h, h, h, need_weights=False)[0]
        return self.attn[0](x, x, x, need_weights=False)[0]


class Keywords(Caller):
    def forward(this, x: Tensor) -> Any:  # another name than self
        return this.attn(query=x, key=x, value=x, need_weights=False)[0]


class Renamed(Caller):
    def forward(this, x: Tensor) -> Any:
        attend = this.attn
        return attend(x, x, x)[0]


class Unused(Caller):
    """Its forward asks for weights; another method, which forward does not call, does not."""

    def fast(self, x: Tensor) -> Any:
        return self.attn(x, x, x, need_weights=False)[0]

    def forward(self, x: Tensor) -> Any:
        return self.attn(x, x, x)[0]


class Encoder(Caller):
    """An encoder of torch; `mask` and `layer` of a subclass decide how its layers run."""

    def __init__(self, norm_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, norm_first=norm_first)
        self.attn = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.attn(x, mask, src_key_padding_mask=None)


class CausalEncoder(Encoder):
    """A language model."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.attn(x, causal, is_causal=True)


class PaddedEncoder(Encoder):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.pooled(x, x[..., 0] == 0)

    def pooled(self, x: Tensor, padding: Tensor) -> Any:
        return self.attn(x, src_key_padding_mask=padding).mean(1)


class MaybePaddedEncoder(Encoder):
    def forward(self, x: Tensor, *options: Any) -> Any:
        return self.attn(x, src_key_padding_mask=options[0])


class Unpacked(Caller):
    def forward(self, x: Tensor, **options: Any) -> Any:
        return self.attn(x, x, x, **options)[0]


SOURCE = "class Hidden(Caller):\n    def forward(self, x):\n        return self.attn(x, x, x)[0]\n"
exec(SOURCE, hidden := dict(globals()))  # inspect finds no source of this class


def with_mask(cls: type[Caller]) -> Caller:
    model = cls()
    model.mask = torch.zeros(5, 5)
    return model


NEVER = {
    "Weights": (Weights, "Weights.forward calls it with need_weights=True (the default), for which torch"),
    "LiteralWeights": (LiteralWeights, "with need_weights=True"),
    "Causal": (Causal, "with attn_mask"),
    "CausalByTransformer": (CausalByTransformer, "CausalByTransformer.attend calls it with attn_mask, is_causal"),
    "Attribute": (lambda: with_mask(Attribute), "with attn_mask"),
    "Slice": (lambda: with_mask(Slice), "with attn_mask"),
    "Positions": (Positions, "with another tensor as value"),
    "Renamed": (Renamed, "Renamed.forward calls it with need_weights=True"),
    "Unused": (Unused, "Unused.forward calls it with need_weights=True"),
}


@pytest.mark.parametrize("name", NEVER)
def test_calls_that_never_run_fused_are_skipped(name: str) -> None:
    make, reason = NEVER[name]
    report = vit_fast.fuse(make(), "sdpa")
    assert [row.name for row in report.skipped] == ["attn"] and reason in report.skipped[0].reasons[0]
    with pytest.raises(vit_fast.UnsupportedInputError, match="calls it with"):
        report.require_all()


def test_masks_of_callers_outside_the_caller() -> None:
    report = vit_fast.fuse(CausalEncoder(), "sdpa")
    assert len(report.skipped) == 4 and not report.fused, report
    assert "TransformerEncoderLayer._sa_block calls it with attn_mask, is_causal, for" in str(report)
    assert "TransformerEncoder.forward calls it with src_mask, is_causal, for" in str(report)


@pytest.mark.parametrize(
    "make", [Plain, Keywords, Attribute, Listed, Encoder, torch_encoder, SUBJECTS["torchvision-vit"].build]
)
def test_calls_that_run_fused_are_fused(make: Any) -> None:
    assert not vit_fast.fuse(make(), "sdpa").require_all().conditional


@pytest.mark.parametrize("make", [Buffer, Cross, Unpacked, Options, hidden["Hidden"]])
def test_other_calls_are_conditional(make: Any) -> None:
    report = vit_fast.fuse(make(), "sdpa")
    assert [row.name for row in report.conditional] == ["attn"] and not report.fused
    assert "conditional  fused if called with need_weights=False, one tensor as" in str(report)
    with pytest.raises(vit_fast.UnsupportedInputError, match="fused if called with need_weights=False"):
        report.require_all()


def test_a_layer_that_is_the_model_is_called_by_the_user() -> None:
    report = vit_fast.fuse(nn.MultiheadAttention(64, 2), "sdpa").require_all()
    assert report.conditional and str(report).startswith("backend sdpa: 0 fused, 0 skipped, 1 conditional")


@pytest.mark.parametrize("make", [lambda: Encoder(norm_first=False), PaddedEncoder, MaybePaddedEncoder])
def test_layers_of_torch_that_some_calls_run_fused(make: Any) -> None:
    report = vit_fast.fuse(model := make().eval(), "sdpa")
    assert len(report.conditional) == (2 if len(report.skipped) else 4) and not report.fused
    with pytest.raises(vit_fast.UnsupportedInputError, match="fused if called "):
        report.require_all()
    if report.skipped:
        assert "fused if called with gradients: in evaluation mode without gradients, torch's" in str(report)
        with mock.patch.object(torchvision, "attention_qkvpacked", wraps=torchvision.attention_qkvpacked) as fused:
            model(x := torch.randn(2, 5, 64))
            assert fused.call_count == 2
            with torch.no_grad():
                model(x)
            assert fused.call_count == 2

"""Modules that fuse skips, with the reasons, and calls for which a fused module runs its original forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from fused_models import SUBJECTS, classes_of, tiny_timm, torch_encoder
from kernel_support import DEVICE
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks import fused as common
from vit_fast.fusion import fuse as fusion
from vit_fast.libraries import torchvision


def timm_class(name: str) -> Any:
    return getattr(pytest.importorskip("timm").models.vision_transformer, name)


def eager_vit() -> nn.Module:
    model = SUBJECTS["transformers-vit"].build()
    model.config._attn_implementation = "eager"  # like set_attn_implementation, which 4.53 lacks
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: type("Doubled", (timm_class("Block"),), {"forward": nn.Identity.forward})(64, 2),
            "fuse supports Block, but not its subclass Doubled, which has another forward",
        ),
        (lambda: nn.MultiheadAttention(64, 2, add_bias_kv=True), "add_bias_kv must be False, got True"),
        (lambda: nn.MultiheadAttention(64, 2, add_zero_attn=True), "add_zero_attn must be False, got True"),
        (lambda: nn.MultiheadAttention(64, 2, kdim=32), "kdim and vdim must equal embed_dim"),
        (lambda: nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0), "norm_first must be True, got False"),
        (eager_vit, "attn_implementation='eager' returns attention weights"),
    ],
)
def test_classes_that_compute_something_else_are_skipped(make: Callable[[], nn.Module], reason: str) -> None:
    skipped = vit_fast.fuse(make()).skipped
    assert any(reason in found for module in skipped for found in module.reasons)


def test_calls_with_masks_run_the_original_forward() -> None:
    layer = nn.TransformerEncoderLayer(64, 2, 64, norm_first=True, dropout=0.0, batch_first=True).eval()
    block: Any = tiny_timm().eval().blocks[0]
    rotary: Any = SUBJECTS["timm-dinov3"].build().eval()
    images, keep = torch.randn(2, 3, 32, 32), torch.rand(9, 9) > 0.3
    x, mask, bias = torch.randn(2, 5, 64), torch.ones(5, 5, dtype=torch.bool).triu(1), torch.randn(1, 1, 5, 5)

    def results() -> list[Tensor]:
        return [
            layer(x, src_mask=mask),
            layer(x, src_key_padding_mask=torch.tensor([[False] * 5, [False] * 3 + [True] * 2])),
            layer.self_attn(x, x, x)[1],
            layer.self_attn(x[:, :1], x, x, need_weights=False)[0],
            block(x, attn_mask=bias),
            block(x, is_causal=True),
            rotary(images, attn_mask=keep),
            rotary(images, is_causal=True),
        ]

    expected = results()
    for each in (layer, block, rotary):
        vit_fast.fuse(each).require_all()
    torch.testing.assert_close(results(), expected)


def test_an_error_leaves_the_model_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SUBJECTS["timm-vit"].build()
    before = [(type(module), dict(vars(module))) for module in model.modules()]
    raised = MagicMock(side_effect=[None, MemoryError("the second block")])
    monkeypatch.setattr(common.FusedNormMlp, "set_fused_backend", raised)
    with pytest.raises(MemoryError, match="the second block"):
        vit_fast.fuse(model)
    assert [(type(module), dict(vars(module))) for module in model.modules()] == before


def test_a_backend_that_cannot_run_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_timm()
    classes = classes_of(model)
    monkeypatch.setattr(fusion, "triton_unavailable_reasons", lambda device: ("triton is not installed",))
    with pytest.raises(vit_fast.UnsupportedInputError, match="triton is not installed"):
        vit_fast.fuse(model, backend="triton")
    assert classes_of(model) == classes


NARROW = "head_dim must be between 16 and 128 for the triton kernel, got 8"
DOUBLE = "the weights must be fp32, fp16 or bf16 for the triton kernels, got torch.float64"


def test_head_sizes_and_dtypes_without_kernels_are_skipped() -> None:
    model, images = tiny_timm(num_heads=8).to(DEVICE).eval(), torch.randn(2, 3, 32, 32, device=DEVICE)
    expected = model(images)
    vit_fast.fuse(model, "sdpa").require_all()
    report = vit_fast.fuse(model, backend="triton")
    assert [(module.part, module.reasons) for module in report.skipped] == [("attention", (NARROW,))]
    assert not isinstance(model.blocks[0].attn, common.FusedModule)
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
    report = vit_fast.fuse(model.double(), backend="triton")
    assert report.fused == () and {reason for module in report.skipped for reason in module.reasons} == {NARROW, DOUBLE}
    torch.testing.assert_close(model(images.double()).float(), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(vit_fast.UnsupportedInputError) as caught:
        vit_fast.set_backend(vit_fast.create_model("vit_test", num_heads=8).double().to(DEVICE), "triton")
    assert NARROW in str(caught.value) and DOUBLE in str(caught.value)


def test_auto_selects_sdpa_for_modules_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fusion, common):  # as on a GPU
        monkeypatch.setattr(module, "resolve_backend", lambda name, *_: "triton" if name == "auto" else name)
    for make in (tiny_timm, functools.partial(vit_fast.create_model, "vit_test")):
        model: Any = make(num_heads=8)
        notes = {module.part: module.notes for module in vit_fast.fuse(model).fused}
        assert notes["attention"][-1] == f"it runs with backend sdpa: {NARROW}"
        block = model.blocks[0]
        assert (block.attn.vit_fast_backend, block.vit_fast_backend) == ("sdpa", "triton")
        block.double()
        assert block.vit_fast_backend == "sdpa"


def test_timm_builds_models_of_the_classes_of_vit_fast() -> None:
    pytest.importorskip("timm")
    from vit_fast.integrations.timm import FusedAttention, FusedBlock

    fused = tiny_timm(block_fn=FusedBlock, attn_layer=FusedAttention).eval()
    plain = tiny_timm().eval()
    assert type(fused.blocks[0]) is FusedBlock
    assert type(fused.blocks[0].attn) is FusedAttention
    fused.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(fused(images), plain(images))
    with pytest.raises(ValueError, match=r"FusedBlock cannot be built: mlp.act must be .*, got a Tanh"):
        tiny_timm(block_fn=FusedBlock, act_layer=nn.Tanh)


def test_layers_keep_the_names_by_which_wrapping_policies_find_them() -> None:
    model = SUBJECTS["transformers-vit"].build()
    vit_fast.fuse(model)
    layer = next(module for module in model.modules() if isinstance(module, common.FusedNormMlp))
    assert type(layer).__name__ in model._no_split_modules
    assert repr(layer).startswith("FusedViTLayer(")


# --- require_all: blocks of encoders only, not heads, connectors, language models and decoders -----------------


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
VISION = SIZES | {"image_size": 32, "patch_size": 16}
TEXT = SIZES | {"vocab_size": 50, "pad_token_id": 0}


def report_of(name: str, **settings: Any) -> vit_fast.FusionReport:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    cls = getattr(transformers, name)
    return vit_fast.fuse(cls(cls.config_class(**settings)), "sdpa")


def test_connectors_and_decoders_are_not_required() -> None:
    text = TEXT | {"model_type": "llama", "num_key_value_heads": 2}
    assert report_of("Idefics3ForConditionalGeneration", vision_config=VISION, text_config=text).require_all().fused
    report = report_of("CLIPSegForImageSegmentation", vision_config=VISION, text_config=TEXT, extract_layers=[0])
    assert report.require_all().fused
    assert "decoder (CLIPSegDecoder) is a decoder: only" in str(report)
    text = next(each for each in report.elsewhere if each.endswith("is a language model"))
    assert text.startswith("clip.text_model (")


def test_a_convolutional_decoder_is_not_mentioned() -> None:
    """Like segmentation_models_pytorch's DPT and Unet: decoders of convolutions, and attention without weights."""
    decoder = type("DPTDecoder", (nn.Sequential,), {})
    model = nn.ModuleDict({"encoder": SUBJECTS["timm-vit"].build(), "decoder": decoder(nn.Conv2d(8, 8, 3))})
    model["decoder"].append(type("Attention", (nn.Identity,), {})())
    report = vit_fast.fuse(model, "sdpa").require_all()
    assert report.elsewhere == () and "decoder" not in str(report)


class SomeMlp(nn.Linear):
    pass


@pytest.mark.parametrize("near_attention", [True, False])
def test_an_unknown_mlp_is_required_only_near_attention(near_attention: bool) -> None:
    model = SUBJECTS["timm-vit"].build()
    children = {"mlp": SomeMlp(8, 8)} | ({"attn": nn.Linear(8, 8)} if near_attention else {})
    model.head = nn.ModuleDict(children)
    report = vit_fast.fuse(model, "sdpa")
    assert [module.name for module in report.skipped] == ["head.mlp"] * near_attention
    if near_attention:
        with pytest.raises(vit_fast.UnsupportedInputError, match="SomeMlp is not a supported class"):
            report.require_all()


# --- attention layers of torch: an example shows how the model calls them ----------------------------------------

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
    with patch.object(torchvision, "attention_qkvpacked", wraps=torchvision.attention_qkvpacked) as fused:
        model(X)
        assert fused.call_count == 2
        with torch.no_grad():
            model(X)
        assert fused.call_count == 2

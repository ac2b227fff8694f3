"""require_all() requires the blocks of encoders only, not heads, connectors, language models and decoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_models import SUBJECTS
from torch import nn

import vit_fast

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
VISION = SIZES | {"image_size": 32, "patch_size": 16}
TEXT = SIZES | {"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 50, "pad_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "YolosForObjectDetection": VISION | {"image_size": [32, 32]},
    "Idefics3ForConditionalGeneration": {"vision_config": VISION, "text_config": TEXT},
    "SmolVLMForConditionalGeneration": {"vision_config": VISION, "text_config": TEXT},
}


def transformers_model(name: str, **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    cls = getattr(transformers, name)
    with torch.device("meta"):
        model: nn.Module = cls(cls.config_class(**settings))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_an_mlp_outside_of_a_block_is_not_required(name: str) -> None:
    model = transformers_model(name, **MODELS[name])
    assert any("MLP" in type(module).__name__ for module in model.modules())
    assert vit_fast.fuse(model, "sdpa").require_all().fused


def test_a_decoder_is_not_required() -> None:
    text = {name: value for name, value in TEXT.items() if name not in ("model_type", "num_key_value_heads")}
    settings = {"vision_config": VISION, "text_config": text, "extract_layers": [0]}
    report = vit_fast.fuse(transformers_model("CLIPSegForImageSegmentation", **settings), "sdpa")
    assert {module.reasons for module in report.skipped} == {
        ("it belongs to a text model, which needs causal and padding masks",)
    }
    assert "decoder (CLIPSegDecoder)" in report.elsewhere
    assert "decoder (CLIPSegDecoder) is a language model or decoder" in str(report)


class SomeMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)


class SomeAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def named(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def beside() -> nn.Module:
    return named(attn=nn.Linear(8, 8), mlp=SomeMlp())


def deeper() -> nn.Module:
    return named(self_attention=SomeAttention(), ffn=Residual(SomeMlp()))


@pytest.mark.parametrize(
    ("inside", "unknown"),
    [
        (beside, ["mlp"]),
        (lambda: nn.Sequential(Residual(SomeAttention()), Residual(SomeMlp())), ["0.inner", "1.inner"]),
        (lambda: nn.ModuleList([deeper()]), ["0.self_attention", "0.ffn.inner"]),
        (lambda: named(mlp=SomeMlp()), []),
        (lambda: nn.Sequential(SomeMlp(), nn.Linear(8, 8)), []),
    ],
)
def test_an_unknown_mlp_is_required_only_near_attention(inside: Any, unknown: list[str]) -> None:
    model = SUBJECTS["timm-vit"].build()
    model.head = inside()
    report = vit_fast.fuse(model, "sdpa")
    assert [module.name for module in report.skipped] == [f"head.{name}" for name in unknown]
    if unknown:
        with pytest.raises(vit_fast.UnsupportedInputError, match="is not a supported class"):
            report.require_all()
    else:
        assert report.require_all()


def test_a_model_without_supported_classes_raises() -> None:
    with pytest.raises(vit_fast.UnsupportedInputError, match="contains no attention or MLP of a supported class"):
        vit_fast.fuse(named(mlp=SomeMlp()), "sdpa").require_all()

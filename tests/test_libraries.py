"""Tests models of other libraries that are built with exactly our weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vit_fast import UnsupportedInputError, VisionTransformer, ViTConfig
from vit_fast.libraries import torchvision
from vit_fast.libraries.interface.weight_names import take_weights
from vit_fast.libraries.timm import timm_model
from vit_fast.libraries.transformers import hf_model

TINY: dict[str, Any] = {
    "embed_dim": 64, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8, "num_classes": 7, "mlp_ratio": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("library", "fields"),
    [
        (timm_model, {}),
        (timm_model, {"distilled": True}),
        (timm_model, {"init_values": 1e-5, "reg_tokens": 3, "no_embed_class": True, "num_classes": 0}),
        (timm_model, {"pre_norm": True, "qkv_bias": False}),
        (timm_model, {"class_token": False, "global_pool": "map", "num_classes": 0}),
        (timm_model, {"final_norm": False, "scale_attn_norm": True, "scale_mlp_norm": True, "global_pool": "avg"}),
        (hf_model, {}),
        (hf_model, {"qkv_bias": False, "num_classes": 0, "img_size": (32, 48)}),
        (torchvision, {}),
    ],
)
def test_a_peer_contains_exactly_our_weights(library: Any, fields: dict[str, Any]) -> None:
    """Converts the weights of the peer back."""
    config = ViTConfig(**TINY | fields)
    weights = {name: torch.randn(tensor.shape) for name, tensor in VisionTransformer(config).state_dict().items()}
    peer = library.build_peer(config)
    take_weights(peer, weights, library.convert, config)
    back = library.convert(peer.state_dict(), config)
    assert back.tensors.keys() == weights.keys() and not back.ignored
    assert all(torch.equal(back.tensors[name], weights[name]) for name in weights)


def test_parameters_without_counterpart_are_listed_for_both_models() -> None:
    config = ViTConfig(**TINY)
    weights = VisionTransformer(config.replace(init_values=1e-5, pre_norm=True)).state_dict()
    peer = torchvision.build_peer(config)
    before = {name: tensor.clone() for name, tensor in peer.state_dict().items()}
    reasons = "its parameter conv_proj.bias has no counterpart\n  - vit-fast's parameter norm_pre.weight has no"
    with pytest.raises(UnsupportedInputError, match=reasons) as refusal:
        take_weights(peer, weights, torchvision.convert, config)
    assert len(refusal.value.reasons) == 7
    assert all(torch.equal(tensor, before[name]) for name, tensor in peer.state_dict().items())

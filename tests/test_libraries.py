"""Peers of our models, built by each library with exactly our weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vit_fast import UnsupportedInputError, VisionTransformer, ViTConfig
from vit_fast.libraries import torchvision
from vit_fast.libraries.interface.weight_names import take_weights
from vit_fast.libraries.timm import timm_model
from vit_fast.libraries.transformers import hf_model

TINY: dict[str, Any] = {
    "embed_dim": 64, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8, "num_classes": 7, "mlp_ratio": 3,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "timm": (timm_model, {}),
    "timm_deit": (timm_model, {"distilled": True}),
    "timm_dinov2": (timm_model, {"init_values": 1e-5, "reg_tokens": 3, "no_embed_class": True, "num_classes": 0}),
    "timm_clip": (timm_model, {"pre_norm": True, "qkv_bias": False}),
    "timm_siglip": (timm_model, {"class_token": False, "global_pool": "map", "num_classes": 0}),
    "timm_avg": (timm_model, {"global_pool": "avg"}),
    "timm_norms": (timm_model, {"final_norm": False, "scale_attn_norm": True, "scale_mlp_norm": True}),
    "transformers": (hf_model, {}),
    "transformers_without_bias": (hf_model, {"qkv_bias": False}),
    "transformers_features": (hf_model, {"num_classes": 0, "img_size": (32, 48)}),
    "torchvision": (torchvision, {}),
}


def _peer(library: Any, config: ViTConfig) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    weights = {name: torch.randn(tensor.shape) for name, tensor in VisionTransformer(config).state_dict().items()}
    peer = library.build_peer(config)
    take_weights(peer, weights, library.convert, config)
    return peer, weights


@pytest.mark.parametrize("family", FAMILIES)
def test_a_peer_contains_exactly_our_weights(family: str) -> None:
    """Converts the weights of the peer back; every parameter must equal own exactly."""
    library, fields = FAMILIES[family]
    config = ViTConfig(**TINY | fields)
    peer, weights = _peer(library, config)
    back = library.convert(peer.state_dict(), config)
    assert back.tensors.keys() == weights.keys()
    assert not back.ignored
    assert all(torch.equal(back.tensors[name], weights[name]) for name in weights)


def test_parameters_without_counterpart_are_listed_for_both_models() -> None:
    config = ViTConfig(**TINY)
    weights = VisionTransformer(config.replace(init_values=1e-5, pre_norm=True)).state_dict()
    peer = torchvision.build_peer(config)
    before = {name: tensor.clone() for name, tensor in peer.state_dict().items()}
    with pytest.raises(UnsupportedInputError) as refusal:
        take_weights(peer, weights, torchvision.convert, config)
    reasons = refusal.value.reasons
    assert reasons[:2] == (
        "its parameter conv_proj.bias has no counterpart",
        "vit-fast's parameter norm_pre.weight has no counterpart",
    )
    assert len(reasons) == 7
    assert all(torch.equal(tensor, before[name]) for name, tensor in peer.state_dict().items())

"""Every variant has timm's parameters under timm's names, and every choice gives timm's outputs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import nn
from weights_peers import assert_same_outputs, randomize

import vit_fast
from vit_fast.config import ViTConfig
from vit_fast.libraries.known import convert

NOT_IN_TIMM = {"vit_test", "vit_mnist", "vit_micro_patch7_28", *vit_fast.list_models("vit_*_hybrid_*")}
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 10}
TIMM_ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "ReLU": "relu", "SiLU": "silu"}


@pytest.mark.fast_cases(
    "vit_tiny_patch16_224", "deit3_huge_patch14_224", "deit_tiny_distilled_patch16_224", "vit_giant_patch14_dinov2",
    "vit_large_patch14_clip_quickgelu_224", "vit_so400m_patch16_siglip_512", "vit_huge_plus_patch16_dinov3_qkvb",
    "eva02_base_patch14_448", "eva02_large_patch14_clip_336", "vit_pe_core_gigantic_patch14_448",
    "vit_pe_lang_large_patch14_448", "vit_betwixt_patch16_rope_reg4_gap_256", "vit_base_patch16_rope_ape_224",
    "aimv2_3b_patch14_448",
)  # fmt: skip
@pytest.mark.parametrize("name", sorted(set(vit_fast.list_models()) - NOT_IN_TIMM))
def test_variant_has_timms_parameters(name, monkeypatch):
    monkeypatch.setattr(torch, "linspace", functools.partial(torch.linspace, device="cpu"))  # timm 1.0.20 reads it
    with torch.device("meta"):
        own = vit_fast.VisionTransformer(vit_fast.variants.get_variant(name).config)
        peer = timm.create_model(name, num_classes=own.num_classes)
    state = peer.state_dict()
    if "Eva" in type(peer).__name__ or name.startswith("aimv2"):  # these store q, k and v, or gate and up, apart
        state = convert(state, own.config).tensors
    assert {k: tuple(v.shape) for k, v in own.state_dict().items()} == {k: tuple(v.shape) for k, v in state.items()}
    config, block = own.config, peer.blocks[0]
    assert config.num_heads == block.attn.num_heads
    assert config.norm_eps == block.norm1.eps
    assert config.act_layer == TIMM_ACTIVATIONS[type(block.mlp.act).__name__]
    assert config.no_embed_class == peer.no_embed_class
    if config.global_pool == "map":
        assert config.norm_eps == peer.attn_pool.norm.eps
        assert (config.pool_heads or config.num_heads) == peer.attn_pool.num_heads


CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rectangular": {"img_size": (32, 48), "patch_size": (8, 16)},
    "one channel": {"in_chans": 1},
    "no qkv bias": {"qkv_bias": False},
    "layer scale": {"init_values": 0.3},
    "registers": {"reg_tokens": 4},
    "registers, patches-only positions": {"reg_tokens": 4, "no_embed_class": True},
    "average pooling": {"global_pool": "avg"},
    "average pooling, norm before": {"global_pool": "avg", "fc_norm": False, "class_token": False},
    "token pooling, norm after": {"fc_norm": True},
    "no final norm": {"final_norm": False, "global_pool": "avg"},
    "norms inside": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "attention pooling": {"global_pool": "map", "class_token": False},
    "no pooling": {"global_pool": ""},
    "no head": {"num_classes": 0},
    "pre-norm": {"pre_norm": True, "norm_eps": 1e-5},
    "odd mlp ratio": {"mlp_ratio": 3.7362},
    "head_dim 72": {"embed_dim": 144, "num_heads": 2},
    **{f"activation {name}": {"act_layer": name} for name in ("gelu_tanh", "relu", "quick_gelu", "silu")},
}


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("choice", CHOICES)
def test_choice_gives_timms_outputs(choice, backend):
    fields = SMALL | CHOICES[choice]
    eps = {"norm_layer": functools.partial(nn.LayerNorm, eps=fields["norm_eps"])} if "norm_eps" in fields else {}
    peer = randomize(TimmViT(**{name: value for name, value in fields.items() if name != "norm_eps"}, **eps))
    own = vit_fast.VisionTransformer(ViTConfig(**fields)).eval()
    vit_fast.set_backend(own, backend)
    own.load_state_dict(peer.state_dict())
    assert_same_outputs(own, peer, lambda model, images: model(images))
    images = torch.randn(2, own.config.in_chans, *own.config.image_hw).double()
    models = own.double(), peer.double()
    with torch.no_grad():
        mine, other = (model.forward_head(model.forward_features(images), pre_logits=True) for model in models)
    assert (mine - other).abs().max() < 1e-10


def test_distilled_model_gives_timms_outputs():
    peer = randomize(timm.create_model("deit_tiny_distilled_patch16_224", img_size=64, depth=2))
    own = vit_fast.create_model("deit_tiny_distilled_patch16_224", img_size=64, depth=2)
    own.load_state_dict(peer.state_dict())
    assert_same_outputs(own, peer, lambda model, images: model(images))
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    for model in (own, peer):
        model.set_distilled_training(True)
        model.double().train()
    for mine, other in zip(own(images), peer(images), strict=True):
        assert (mine - other).abs().max() < 1e-10


@pytest.mark.parametrize("no_embed_class", [False, True])
def test_dynamic_image_size_interpolates_as_timm(no_embed_class):
    fields = SMALL | {"dynamic_img_size": True, "no_embed_class": no_embed_class, "reg_tokens": 2}
    peer = randomize(TimmViT(**fields))
    own = vit_fast.VisionTransformer(ViTConfig(**fields)).eval()
    own.load_state_dict(peer.state_dict())
    for size in ((32, 32), (64, 64), (40, 88)):
        images = torch.randn(2, 3, *size)
        with torch.no_grad():
            assert (own(images) - peer(images)).abs().max() < 1e-5


def test_hybrid_is_a_plain_model_on_the_feature_map():
    """Section 3.1: the patch embedding applied to a CNN's feature map equals timm's plain ViT on that map."""
    own = vit_fast.VisionTransformer(ViTConfig(**SMALL | {"img_size": 64, "patch_size": 2, "stem_channels": (8, 16)}))
    peer = TimmViT(**(SMALL | {"img_size": 16, "patch_size": 2, "in_chans": 16})).eval()
    peer.load_state_dict({k: v for k, v in randomize(own).state_dict().items() if ".stem." not in k})
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        feature_map = own.patch_embed.stem(images)
        assert feature_map.shape == (2, 16, 16, 16)
        assert (own(images) - peer(feature_map)).abs().max() < 1e-5

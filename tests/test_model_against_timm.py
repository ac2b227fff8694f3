"""Our models beside timm's: parameters of all variants, outputs and gradients, positions of other image sizes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import timm
import torch
from fused_models import SMALL, assert_same_outputs, double_inputs, randomize
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import Tensor, nn

import vit_fast
from vit_fast.accuracy import judge
from vit_fast.config import ViTConfig
from vit_fast.libraries.known import convert

NOT_IN_TIMM = {"vit_test", "vit_mnist", "vit_micro_patch7_28", *vit_fast.list_models("vit_*_hybrid_*")}
TIMM_ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "ReLU": "relu", "SiLU": "silu"}


@pytest.mark.fast_cases(
    "vit_tiny_patch16_224", "deit3_huge_patch14_224", "deit_tiny_distilled_patch16_224", "vit_giant_patch14_dinov2",
    "vit_large_patch14_clip_quickgelu_224", "vit_so400m_patch16_siglip_512", "vit_huge_plus_patch16_dinov3_qkvb",
    "eva02_base_patch14_448", "eva02_large_patch14_clip_336", "vit_pe_core_gigantic_patch14_448",
    "vit_pe_lang_large_patch14_448", "vit_betwixt_patch16_rope_reg4_gap_256", "vit_base_patch16_rope_ape_224",
    "aimv2_3b_patch14_448",
)  # fmt: skip
@pytest.mark.parametrize("name", sorted(set(vit_fast.list_models()) - NOT_IN_TIMM))
def test_variant_has_timms_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "linspace", functools.partial(torch.linspace, device="cpu"))  # timm 1.0.20 reads it
    with torch.device("meta"):
        own = vit_fast.VisionTransformer(vit_fast.variants.get_variant(name).config)
        peer = timm.create_model(name, num_classes=own.num_classes)
    state = peer.state_dict()
    if "Eva" in type(peer).__name__ or name.startswith("aimv2"):  # these store q, k and v, or gate and up, apart
        state = convert(state, own.config).tensors
    assert {k: tuple(v.shape) for k, v in own.state_dict().items()} == {k: tuple(v.shape) for k, v in state.items()}
    config, block = own.config, peer.blocks[0]
    assert (config.num_heads, config.norm_eps) == (block.attn.num_heads, block.norm1.eps)
    assert config.act_layer == TIMM_ACTIVATIONS[type(block.mlp.act).__name__]
    assert config.no_embed_class == peer.no_embed_class
    if (pool := getattr(peer, "attn_pool", None)) is not None:
        assert (config.pool_heads or config.num_heads, config.norm_eps) == (pool.num_heads, pool.norm.eps)


TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 10}
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rectangular": {"img_size": (32, 48), "patch_size": (8, 16)},
    "one channel, no qkv bias": {"in_chans": 1, "qkv_bias": False},
    "layer scale, registers": {"init_values": 0.3, "reg_tokens": 4},
    "registers, patches-only positions": {"reg_tokens": 4, "no_embed_class": True},
    "average pooling": {"global_pool": "avg"},
    "average pooling, norm before": {"global_pool": "avg", "fc_norm": False, "class_token": False},
    "token pooling, norm after": {"fc_norm": True},
    "no final norm": {"final_norm": False, "global_pool": "avg"},
    "norms inside": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "attention pooling": {"global_pool": "map", "class_token": False},
    "no pooling, no head": {"global_pool": "", "num_classes": 0},
    "pre-norm": {"pre_norm": True, "norm_eps": 1e-5},
    "norms of q and k": {"qk_norm": True},
    **{f"activation {name}": {"act_layer": name} for name in ("gelu_tanh", "relu", "quick_gelu", "silu")},
}


def plain_pair(**fields: Any) -> tuple[nn.Module, Any]:
    """Returns timm's VisionTransformer with random weights, and ours with the same."""
    eps = {"norm_layer": functools.partial(nn.LayerNorm, eps=fields["norm_eps"])} if "norm_eps" in fields else {}
    peer = randomize(TimmViT(**{name: value for name, value in fields.items() if name != "norm_eps"}, **eps))
    own = vit_fast.VisionTransformer(ViTConfig(**fields)).eval()
    own.load_state_dict(peer.state_dict())
    return peer, own


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("choice", CHOICES)
def test_choice_gives_timms_outputs(choice: str, backend: str) -> None:
    peer, own = plain_pair(**TINY | CHOICES[choice])
    vit_fast.set_backend(own, backend)
    assert_same_outputs(own, peer)
    images = torch.randn(2, own.config.in_chans, *own.config.image_hw).double()
    models = own.double(), peer.double()
    with torch.no_grad():
        mine, other = (model.forward_head(model.forward_features(images), pre_logits=True) for model in models)
    assert (mine - other).abs().max() < 1e-10


def test_distilled_model_gives_timms_outputs() -> None:
    peer = randomize(timm.create_model("deit_tiny_distilled_patch16_224", img_size=64, depth=2))
    own = vit_fast.create_model("deit_tiny_distilled_patch16_224", img_size=64, depth=2)
    own.load_state_dict(peer.state_dict())
    assert_same_outputs(own, peer)
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    for model in (own, peer):
        model.set_distilled_training(True)
        model.double().train()
    for mine, other in zip(own(images), peer(images), strict=True):
        assert (mine - other).abs().max() < 1e-10


def test_hybrid_is_a_plain_model_on_the_feature_map() -> None:
    """Section 3.1: the patch embedding applied to a CNN's feature map equals timm's plain ViT on that map."""
    own = vit_fast.VisionTransformer(ViTConfig(**TINY | {"img_size": 64, "patch_size": 2, "stem_channels": (8, 16)}))
    peer = TimmViT(**TINY | {"img_size": 16, "patch_size": 2, "in_chans": 16}).eval()
    peer.load_state_dict({k: v for k, v in randomize(own).state_dict().items() if ".stem." not in k})
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert (own(images) - peer(own.patch_embed.stem(images))).abs().max() < 1e-5


ROTARY = (
    "vit_small_patch16_dinov3", "vit_small_plus_patch16_dinov3", "eva02_tiny_patch14_224", "eva02_base_patch14_448",
    "eva02_base_patch16_clip_224", "vit_pe_core_tiny_patch16_384", "vit_pe_lang_gigantic_patch14_448",
    "vit_pe_spatial_tiny_patch16_512", "vit_mediumd_patch16_rope_reg1_gap_256", "vit_small_patch16_rope_ape_224",
    "aimv2_large_patch14_224",
)  # fmt: skip


def named_pair(name: str, **overrides: Any) -> tuple[nn.Module, Any]:
    """Returns a named model of timm with random weights, and ours with the same."""
    torch.manual_seed(0)
    settings = SMALL | {"num_classes": 5, "img_size": 64 if "16" in name else 56} | overrides
    peer = timm.create_model(name, **settings, **({"attn_pool_num_heads": 2} if "pe_core" in name else {})).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    own = vit_fast.create_model(name, backend="sdpa", **settings, **({"pool_heads": 2} if "pe_core" in name else {}))
    vit_fast.load_weights(own, peer.state_dict())
    return peer, own


def outputs(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    images = images.clone().requires_grad_()
    logits = model(images)
    logits.square().sum().backward()
    assert images.grad is not None
    return logits.detach(), images.grad


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ROTARY)
def test_outputs_and_gradients_are_timms(name: str, backend: str) -> None:
    peer, own = named_pair(name)
    vit_fast.set_backend(own, backend)
    images = torch.randn(2, 3, *own.config.image_hw)
    expected, found = outputs(peer, images), outputs(own, images)
    exact = outputs(peer.double(), double_inputs({"x": images})["x"])
    assert all(judge(*each, 2, "rms").passed for each in zip(found, expected, exact, strict=True))


@pytest.mark.parametrize("name", ["plain", "patches-only", "vit_small_patch16_dinov3", "eva02_tiny_patch14_224"])
def test_positions_of_other_image_sizes_are_timms(name: str) -> None:
    fields = TINY | {"dynamic_img_size": True, "no_embed_class": name == "patches-only", "reg_tokens": 2}
    peer, own = named_pair(name, dynamic_img_size=True) if "_" in name else plain_pair(**fields)
    height, width = own.config.patch_hw
    for rows, columns in ((4, 4), (3, 6), (5, 11)):
        images = torch.randn(2, 3, rows * height, columns * width)
        with torch.no_grad():
            torch.testing.assert_close(own(images), peer(images), rtol=1e-4, atol=1e-4)


def test_attention_maps_contain_rotated_q_and_k() -> None:
    peer, own = named_pair("vit_small_patch16_dinov3")
    images, seen = torch.randn(2, 3, 64, 64), []
    attention = peer.blocks[1].attn
    attention.fused_attn = False
    attention.attn_drop.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        peer(images)
        torch.testing.assert_close(own.attention_maps(images, [1])[1], seen[0], rtol=1e-4, atol=1e-5)

"""Our DINOv3, EVA-02, PE and AIMv2 beside timm's: weights, outputs, positions at other sizes, gradients, backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_models import double_inputs
from kernel_support import DEVICE
from torch import Tensor, nn

import vit_fast
from vit_fast.accuracy import judge

timm = pytest.importorskip("timm")

TINY: dict[str, Any] = {"depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 5}
NAMES = [
    "vit_small_patch16_dinov3",
    "vit_small_plus_patch16_dinov3",
    "eva02_tiny_patch14_224",
    "eva02_base_patch14_448",
    "eva02_base_patch16_clip_224",
    "vit_pe_core_tiny_patch16_384",
    "vit_pe_lang_gigantic_patch14_448",
    "vit_pe_spatial_tiny_patch16_512",
    "vit_mediumd_patch16_rope_reg1_gap_256",
    "vit_small_patch16_rope_ape_224",
    "aimv2_large_patch14_224",
]


def pair(name: str, **overrides: Any) -> tuple[nn.Module, nn.Module]:
    """timm's model with random weights, and own with the same."""
    torch.manual_seed(0)
    settings = TINY | {"img_size": 64 if "16" in name else 56} | overrides
    named_otherwise = {"attn_pool_num_heads": 2} if "pe_core" in name else {}
    peer = timm.create_model(name, **settings, **named_otherwise).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    if "pe_core" in name:
        settings["pool_heads"] = 2
    own = vit_fast.create_model(name, backend="sdpa", **settings).eval()
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
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_are_timms(name: str, backend: str) -> None:
    peer, own = pair(name)
    vit_fast.set_backend(own, backend)
    images = torch.randn(2, 3, *own.config.image_hw)
    expected, found = outputs(peer, images), outputs(own, images)
    exact = outputs(peer.double(), double_inputs({"x": images})["x"])
    for ours_, theirs_, truth in zip(found, expected, exact, strict=True):
        assert judge(ours_, theirs_, truth, 2, "rms").passed


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "eva02_tiny_patch14_224"])
def test_positions_of_other_image_sizes_are_timms(name: str) -> None:
    peer, own = pair(name, dynamic_img_size=True)
    height, width = own.config.patch_hw
    for rows, columns in ((4, 4), (3, 6), (5, 2)):
        images = torch.randn(2, 3, rows * height, columns * width)
        with torch.no_grad():
            torch.testing.assert_close(own(images), peer(images), rtol=1e-4, atol=1e-4)


@pytest.mark.fast_cases("vit_small_plus_patch16_dinov3")
@pytest.mark.parametrize("name", ["vit_small_plus_patch16_dinov3", "eva02_base_patch14_448"])
def test_the_kernels_give_the_same(name: str) -> None:
    """Fused models with gated MLPs or an inner norm agree with the unfused ones, frozen too."""
    _, own = pair(name, embed_dim=32)
    images = torch.randn(2, 3, *own.config.image_hw, device=DEVICE)
    expected = outputs(own.to(DEVICE), images)
    vit_fast.fuse(own, backend="triton").require_all()
    for found, before in zip(outputs(own, images), expected, strict=True):
        torch.testing.assert_close(found, before, rtol=1e-3, atol=1e-3 * before.abs().max().item())
    with torch.no_grad():
        assert vit_fast.freeze(own) == ("blocks.0", "blocks.1")
        torch.testing.assert_close(own(images), expected[0], rtol=1e-3, atol=1e-3 * expected[0].abs().max().item())


def test_attention_maps_are_of_rotated_q_and_k() -> None:
    peer, own = pair("vit_small_patch16_dinov3")
    images, seen = torch.randn(2, 3, 64, 64), []
    attention = peer.blocks[1].attn
    attention.fused_attn = False
    attention.attn_drop.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        peer(images)
        torch.testing.assert_close(own.attention_maps(images, [1])[1], seen[0], rtol=1e-4, atol=1e-5)


def test_qk_norm_and_rms_norm() -> None:
    fields = {"qk_norm": True, "norm_layer": "rms_norm", "mlp_layer": "swiglu", "act_layer": "silu"}
    model = vit_fast.create_model("vit_test", backend="sdpa", **fields).eval()
    peer = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2, num_classes=10, qk_norm=True,
        norm_layer=lambda *args, **kw: timm.layers.RmsNorm(*args, eps=1e-6, **kw), mlp_layer=timm.layers.SwiGLUPacked,
        mlp_ratio=8, act_layer=nn.SiLU,
    ).eval()  # fmt: skip
    vit_fast.load_weights(model, peer.state_dict())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(images), peer(images), rtol=1e-4, atol=1e-5)

"""Fused blocks with rotary embeddings: other image sizes, augmented or learned positions, grouped heads."""

from __future__ import annotations

import copy

import pytest
import torch
from fused_models import SUBJECTS, assert_fused_agrees, assert_same_results, assert_within, gradients, timm_subject
from kernel_support import DEVICE

import vit_fast

RESIZED = {
    "timm": SUBJECTS["timm-dinov3"],
    "timm-eva02": timm_subject("eva02_tiny_patch14_224", size=28, dynamic_img_size=True),
    "timm-perception-encoder": timm_subject(
        "vit_pe_core_tiny_patch16_384", attn_pool_num_heads=2, dynamic_img_size=True
    ),
    "transformers": SUBJECTS["transformers-dinov3"],
}


@pytest.mark.parametrize(("name", "size"), [(name, (42, 84) if name == "timm-eva02" else (48, 64)) for name in RESIZED])
def test_other_image_sizes(name: str, size: tuple[int, int]) -> None:
    subject = RESIZED[name]
    model = subject.build()
    (key,) = subject.inputs()
    inputs = {key: torch.randn(2, 3, *size)}
    assert_fused_agrees(subject, model, inputs)


AUGMENTED = {
    "jitter": {"rope_shift_coords": 0.3, "rope_jitter_coords": 1.5, "rope_rescale_coords": 2.0},
    "dropped patches": {"patch_drop_rate": 0.5},  # each image keeps other patches, so the tables differ per image
    "dropped patches, learned": {"patch_drop_rate": 0.5, "rope_type": "mixed", "rope_rotate_half": False},
}


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize("name", AUGMENTED)
def test_positions_that_training_augments(name: str, backend: str) -> None:
    subject = timm_subject("vit_small_patch16_dinov3", size=64, depth=1, embed_dim=32, **AUGMENTED[name])
    model = subject.build().to(DEVICE).train()
    twin = copy.deepcopy(model)
    report = vit_fast.fuse(twin, backend=backend)
    report.require_all()
    inputs = {key: value.to(DEVICE) for key, value in subject.inputs().items()}
    found = []
    for computed in (model, twin):
        torch.manual_seed(3)
        found.append(gradients(subject, computed, inputs))
    assert_same_results(found[1], found[0])
    with torch.no_grad():
        model.eval(), twin.eval()
        torch.testing.assert_close(subject.run(twin, inputs), subject.run(model, inputs), rtol=1e-3, atol=1e-4)


@pytest.mark.fast_cases("timm-eva02-norms-inside")
@pytest.mark.parametrize("name", ["timm-dinov3", "timm-eva02-norms-inside"])
def test_an_attention_layer_without_head_dim(name: str) -> None:
    """EvaAttention of timm 1.0.20, with q, k and v in one linear layer and in three."""
    subject = SUBJECTS[name]
    model = subject.build().to(DEVICE).eval()
    inputs = {name: tensor.to(DEVICE) for name, tensor in subject.inputs().items()}
    with torch.no_grad():
        expected = subject.run(model, inputs)
        for block in model.blocks:
            block.attn.__dict__.pop("head_dim", None)
        vit_fast.fuse(model, backend="triton").require_all()
        torch.testing.assert_close(subject.run(model, inputs), expected, rtol=1e-3, atol=1e-3)
        model.blocks[0].drop_path1.register_forward_hook(lambda *_: None)  # this block runs as modules
        torch.testing.assert_close(subject.run(model, inputs), expected, rtol=1e-3, atol=1e-3)


def test_fewer_heads_of_keys_run_our_attention_between_the_modules() -> None:
    subject = timm_subject(
        "vit_small_patch16_dinov3", attn_type="rope", qkv_fused=False, num_kv_heads=1, qk_norm=True, qkv_bias=True
    )
    model, inputs = subject.build(), subject.inputs()
    assert_fused_agrees(subject, model, inputs)
    assert model.blocks[0].read().attention_reasons == ("attn.num_kv_groups must be 1, got 2",)


def test_frozen_norms_of_q_and_k_follow_the_pairs() -> None:
    """Freezing makes rotated pairs of q and k adjacent. A call without positions needs the original order."""
    subject = timm_subject("vit_small_patch16_dinov3", depth=1, embed_dim=128, qk_norm=True)
    model = subject.build().eval().to(DEVICE, torch.bfloat16)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    vit_fast.fuse(model, backend="triton").require_all()
    assert len(vit_fast.freeze(model)) == 1
    inputs = {key: value.to(DEVICE, torch.bfloat16) for key, value in subject.inputs().items()}
    tokens = torch.randn(2, 6, 128, device=DEVICE).bfloat16()
    with torch.no_grad():
        found = [subject.run(each, inputs) for each in (model, plain)]
        assert_within(*found, subject.run(exact, {key: value.double() for key, value in inputs.items()}), 2, "output")
        found = [each.blocks[0](tokens) for each in (model, plain)]
        assert_within(*found, exact.blocks[0](tokens.double()), 2, "a block without positions")

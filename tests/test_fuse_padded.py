"""timm's NaFlexVit on images of several sizes, padded to one length, against timm's own modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kernel_support import DEVICE
from torch import Tensor, nn

import vit_fast

timm = pytest.importorskip("timm", minversion="1.0.20")

SIZES = {"img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "averaged": ("naflexvit_base_patch16_gap", {}),
    "pooled by attention": ("naflexvit_base_patch16_siglip", {}),
    "rotary, a table an image": ("naflexvit_base_patch16_gap", {"rope_type": "axial", "class_token": True}),
    "any query": ("naflexvit_base_patch16_gap", {"use_key_only_attn_mask": True}),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    variant, settings = MODELS[name]
    model: nn.Module = timm.create_model(variant, **SIZES, **settings).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.3 if parameter.dim() == 1 else 0, 0.3 if parameter.dim() == 1 else 0.1)
    return model


def padded(lengths: tuple[int, ...] = (6, 2, 9)) -> dict[str, Tensor]:
    """Patches of images three patches wide, behind them what pads them to the longest."""
    index = torch.arange(max(lengths), device=DEVICE)
    valid = index < torch.tensor(lengths, device=DEVICE)[:, None]
    coord = torch.stack([index // 3, index % 3], -1).expand(len(lengths), -1, -1)
    return {
        "patches": torch.randn(len(lengths), len(index), 3 * 16 * 16, device=DEVICE),
        "patch_coord": coord * valid[..., None],
        "patch_valid": valid,
    }


def results(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(inputs)
    out.sin().sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_agree(found: tuple[Tensor, dict[str, Tensor]], right: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], right[0], rtol=1e-4, atol=2e-5)
    assert found[1].keys() == right[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in right[1].values())
    for name, gradient in right[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-4 * largest, msg=name)


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize("name", MODELS)
def test_padded_images_run_ours_and_agree(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="the kernels need triton")
    model = build(name)
    plain = copy.deepcopy(model)
    vit_fast.fuse(model, backend).require_all()
    inputs = padded()
    right = results(plain, inputs)
    from vit_fast.libraries import timm_blocks

    monkeypatch.setattr(timm_blocks.AttentionLayer, "as_it_was", None)  # timm's own forward is called by nobody
    assert_agree(results(model, inputs), right)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), right[0], rtol=1e-4, atol=2e-5)


def test_what_pads_an_image_changes_nothing() -> None:
    model = build("pooled by attention").eval()
    vit_fast.fuse(model, "sdpa").require_all()
    inputs = padded()
    with torch.no_grad():
        right = model(inputs)
        other = {**inputs, "patches": inputs["patches"].masked_fill(~inputs["patch_valid"][..., None], 7.0)}
        assert torch.equal(model(other), right)


@pytest.mark.parametrize("change", ["dropout", "own mask", "hook"])
def test_calls_for_timms_own_forward_get_masks_that_it_knows(change: str) -> None:
    """Without torch's attention timm adds masks to scores: one of truth values would be added as 0 and 1."""
    model = build("pooled by attention").eval()
    inputs: dict[str, Any] = padded()
    if change == "own mask":
        inputs["attn_mask"] = torch.randn(3, 1, 9, 9, device=DEVICE)
    for block in model.blocks:
        block.attn.fused_attn = False
    if change == "dropout":
        for block in model.blocks:
            block.attn.attn_drop.p = 0.3
        model.train()
    plain = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa").require_all()
    if change == "hook":
        for layer in (model.attn_pool.q, model.blocks[0].attn.attn_drop, model.blocks[1].mlp.fc1):
            layer.register_forward_hook(lambda *args: None)
    with torch.no_grad():
        torch.manual_seed(1)
        right = plain(inputs)
        torch.manual_seed(1)
        torch.testing.assert_close(model(inputs), right, rtol=1e-4, atol=1e-5)


def test_images_of_one_size_need_no_mask() -> None:
    model = build("averaged").eval()
    images = torch.randn(2, 3, 32, 32, device=DEVICE)
    with torch.no_grad():
        right = model(images)
        vit_fast.fuse(model, "sdpa").require_all()
        torch.testing.assert_close(model(images), right)
    vit_fast.unfuse(model)
    assert type(model).__module__ == "timm.models.naflexvit"

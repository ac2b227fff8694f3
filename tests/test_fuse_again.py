"""Fusing a model that is fused already: what changed since is looked at again."""

from __future__ import annotations

import copy

import pytest
import torch
from fuse_changes import (
    CHANGES,
    tiny_timm,
)
from fused_models import SUBJECTS
from kernel_support import DEVICE
from torch import nn

import vit_fast
from vit_fast.blocks import fused as common


@pytest.mark.parametrize("change", CHANGES)
def test_fusing_again_looks_at_a_changed_block_again(change: str) -> None:
    apply, reason = CHANGES[change]
    model, images = tiny_timm(depth=2).eval(), torch.randn(2, 3, 32, 32)
    vit_fast.fuse(model, "sdpa").require_all()
    apply(model.blocks[0])
    expected = model(images)
    report = vit_fast.fuse(model, "eager")
    left = {module.name: " | ".join(module.reasons) for module in report.left if module.part == "norm + MLP"}
    assert list(left) == ["blocks.0"]
    assert reason in left["blocks.0"]
    assert not isinstance(model.blocks[0], common.FusedModule)
    assert isinstance(model.blocks[1], common.FusedModule)
    torch.testing.assert_close(model(images), expected)


def test_an_activation_replaced_since_is_taken_at_once_and_by_fusing_again() -> None:
    model, images = tiny_timm().eval(), torch.randn(2, 3, 32, 32)
    twin = copy.deepcopy(model)
    vit_fast.fuse(model).require_all()
    for each in (model, twin):
        each.blocks[0].mlp.act = nn.ReLU()
    expected = twin(images)
    assert not model.blocks[0].runs_as_it_was()
    torch.testing.assert_close(model(images), expected)
    vit_fast.fuse(model).require_all()
    assert not model.blocks[0].runs_as_it_was()
    torch.testing.assert_close(model(images), expected)


@pytest.mark.parametrize("backend", ("sdpa", "triton"))
@pytest.mark.parametrize("name", ("timm-vit", "timm-eva02", "transformers-vit", "transformers-siglip2"))
def test_a_scale_of_attention_changed_since_counts(name: str, backend: str) -> None:
    plain, inputs = SUBJECTS[name].build().to(DEVICE).eval(), SUBJECTS[name].inputs()
    inputs = {key: value.to(DEVICE) for key, value in inputs.items()}
    fused = copy.deepcopy(plain)
    vit_fast.fuse(fused, backend)
    with torch.no_grad():
        before = SUBJECTS[name].output(fused(**inputs))
        for module in (*plain.modules(), *fused.modules()):
            for attribute in ("scale", "scaling"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 3.0)
                    module.fused_attn = False  # timm looks at its scale only then
        expected = SUBJECTS[name].output(plain(**inputs))
        assert (expected - before).norm() > 0.01 * before.norm()
        torch.testing.assert_close(SUBJECTS[name].output(fused(**inputs)), expected, rtol=1e-3, atol=1e-3)


def test_fusing_again_with_triton_leaves_heads_that_it_does_not_take() -> None:
    model = tiny_timm(embed_dim=64, num_heads=8).to(DEVICE).eval()
    images = torch.randn(2, 3, 32, 32, device=DEVICE)
    expected = model(images)
    vit_fast.fuse(model, "sdpa").require_all()
    report = vit_fast.fuse(model, "triton")
    assert [(module.part, module.reasons) for module in report.left] == [
        ("attention", ("a head is 8 wide: the triton kernel takes 16 to 128",))
    ]
    assert [module.part for module in report.fused] == ["norm + MLP"]
    assert not isinstance(model.blocks[0].attn, common.FusedModule)
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)


def test_a_forward_replaced_after_fuse_stays_when_fused_again() -> None:
    model, images = tiny_timm().eval(), torch.randn(2, 3, 32, 32)
    vit_fast.fuse(model, "sdpa").require_all()
    fused_forward = model.blocks[0].forward
    model.blocks[0].forward = lambda x, **masks: fused_forward(x, **masks) * 2
    expected = model(images)
    report = vit_fast.fuse(model, "eager")
    assert [module.reasons for module in report.left] == [("its forward was replaced on the instance",)]
    torch.testing.assert_close(model(images), expected)

"""Accuracy of models in FP8 on digits, and the layers that stay in half precision to preserve top-1 agreement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from digits import digits_vit, held_out, inputs
from fused_models import SUBJECTS
from mlp_support import DEVICE
from torch import nn

import vit_fast
from vit_fast.blocks.fp8_scales import scales_of
from vit_fast.fusion.fuse import sharing_copy
from vit_fast.ops.descriptions import BlockScales
from vit_fast.quantization import fp8
from vit_fast.quantization.fp8_emulation import emulate

POINTS, WANTED = 0.006, 0.995
"""Accuracy that e4m3 may cost; share of images whose top class must stay in the tests that keep layers for it."""


def rounded(model: Any, choice: Any) -> nn.Module:
    """The model with its blocks as they are defined in e4m3, but for what the choice keeps."""
    copied = sharing_copy(model)
    for block in emulate(copied)[0]:
        own = scales_of(model.get_submodule(block.name))
        assert own is not None
        block.scales = own.all()._replace(**dict.fromkeys(choice.kept[block.name]))
    return copied


def accuracies(model: Any, eight: nn.Module) -> tuple[float, float]:
    """Share of the held-out images that a model recognises, and that it does in e4m3."""
    images, labels = held_out()
    with torch.inference_mode():
        plain, other = ((each(images).argmax(1) == labels).float().mean().item() for each in (model, eight))
    return plain, other


@pytest.mark.slow
@pytest.mark.parametrize("massive", [100.0, 1000.0])
def test_massive_activations_cost_no_accuracy(massive: float) -> None:
    """Two channels of the residual stream hundreds of times the rest, as in DINOv2 and CLIP; nothing is kept."""
    model = digits_vit(massive=massive)
    vit_fast.calibrate(model, inputs()[:64])
    plain, eight = accuracies(model, rounded(model, fp8.choose(model, sharing_copy(model), (), None)))
    assert plain > 0.95 and eight >= plain - POINTS


@pytest.mark.fast_cases("1.0")
@pytest.mark.parametrize("outlier", [1.0, 100.0])
def test_as_many_layers_are_kept_as_the_agreement_takes(outlier: float) -> None:
    model = digits_vit(outlier)
    images, _ = held_out()
    vit_fast.calibrate(model, images)
    before = fp8.choose(model, sharing_copy(model), (), None)
    with torch.inference_mode():
        same = float((model(images).argmax(1) == rounded(model, before)(images).argmax(1)).float().mean())
    assert 0.99 <= same < WANTED, "there is something to keep"
    choice = fp8.choose(model, sharing_copy(model), ("blocks.0.mlp.fc2",), WANTED)
    reasons = [why for layers in choice.kept.values() for why in layers.values()]
    assert choice.kept["blocks.0"]["fc2"] == "requested by keep"
    assert 1 <= reasons.count("required by min_agreement") <= 8
    eight = rounded(model, choice)
    with torch.inference_mode():
        share = float((model(images).argmax(1) == eight(images).argmax(1)).float().mean())
    assert share >= WANTED and f"{share:.1%} on {len(images)} calibration images" in choice.notes[0]
    plain, in_eight = accuracies(model, eight)
    assert in_eight >= plain - POINTS


def test_an_agreement_that_cannot_be_reached_is_refused_with_the_best() -> None:
    model = digits_vit()
    vit_fast.calibrate(model, inputs()[:100])
    for block in model.blocks:
        for name in BlockScales._fields:
            getattr(block.vit_fast_fp8, name).fill_(2.0**15)  # rounds everything to zero
    keep = ("*.proj", "*.mlp.*", "blocks.0.attn.qkv")
    with pytest.raises(
        vit_fast.UnsupportedInputError, match=r"agreement on 100 images is \d+\.\d% with 1 of 2 linear layers in half"
    ):
        fp8.choose(model, sharing_copy(model), keep, 1.0)


def test_a_model_without_classes_has_no_agreement() -> None:
    subject = SUBJECTS["transformers-dinov2"]
    model = subject.build().eval()
    vit_fast.calibrate(model, subject.inputs()["pixel_values"])
    with pytest.raises(ValueError, match=r"must return logits \[B, classes\] for min_agreement, got transformers"):
        fp8.choose(model, sharing_copy(model), None, 0.9)


def test_agreement_is_measured_on_a_model_converted_since() -> None:
    subject = SUBJECTS["timm-vit"]
    model = subject.build().eval().to(DEVICE)
    vit_fast.calibrate(model, subject.inputs()["x"])
    report = vit_fast.fuse(model.to(torch.bfloat16), precision="fp8", min_agreement=0.01)
    assert "calibration images" in str(report)

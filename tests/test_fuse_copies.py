"""Towers of transformers whose layers are copies of others', against their own modules: outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
from fused_models import Subject, assert_fused_agrees, transformers_subject

pytest.importorskip("transformers", minversion="5.0")


def tower(path: str, config: str, pick: str = "last_hidden_state", **settings: Any) -> Subject:
    return transformers_subject(path, config, pick, **settings)


TOWERS = {
    "janus": tower("janus.modeling_janus.JanusVisionModel", "JanusVisionConfig", mlp_ratio=2.0),
    "kosmos2": tower("kosmos2.modeling_kosmos2.Kosmos2VisionModel", "Kosmos2VisionConfig"),
    "owlv2": tower("owlv2.modeling_owlv2.Owlv2VisionModel", "Owlv2VisionConfig"),
    "owlvit": tower("owlvit.modeling_owlvit.OwlViTVisionModel", "OwlViTVisionConfig"),
    "pixio": tower("pixio.modeling_pixio.PixioModel", "PixioConfig", mlp_ratio=2),
    "radio": tower("radio.modeling_radio.RadioModel", "RadioConfig"),
    "yolos": tower("yolos.modeling_yolos.YolosModel", "YolosConfig", image_size=[32, 32], num_detection_tokens=3),
}


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_is_fused_and_agrees(name: str) -> None:
    subject = TOWERS[name]
    model = subject.build()
    inputs = subject.inputs()
    assert_fused_agrees(subject, model, inputs)

"""Classes that fuse knows, read by their computation too: both readers find the same parts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_models import SUBJECTS, transformers_subject

import vit_fast
from vit_fast.blocks.block import parts_of
from vit_fast.blocks.fused import FusedNormMlp
from vit_fast.blocks.parts import AttentionParts, MlpParts
from vit_fast.libraries.transformers.families import LAYERS
from vit_fast.reading.reader import read_model

CLASSES = (Path(__file__).parents[1] / "docs" / "classes.md").read_text()
# without rotary embeddings and padding masks, which calls pass as tensors, and halves that the class does not read
OTHERS = re.compile("dinov3|eva02|siglip2|rope|perception|deepseek|qwen|beit|norm-inside")
MODELS = {name: subject for name, subject in SUBJECTS.items() if not OTHERS.search(name)} | {
    name: transformers_subject(f"{folder}.modeling_{folder}.{name}")
    for folder, name in re.findall(r"^\| (\w+) \| (\w+) \| default \| fused", CLASSES, re.MULTILINE)
    if folder in LAYERS.keys() - {"dinov3_vit", "siglip2"}
}


def facts(half: Any) -> dict[str, Any]:
    """Returns the numbers, names and tensors of a half; separate and packed linear layers count as equal."""
    found = {"norm": (half.norm.kind, half.norm.eps, half.norm.weight, half.norm.bias), "layer_scale": half.layer_scale}
    linears = {}
    if isinstance(half, AttentionParts):
        width = half.qkv.tensors()[0].shape[0] // (3 * half.num_heads)
        scale = width**-0.5 if half.scale is None else half.scale
        found |= {"heads": half.num_heads, "scale": pytest.approx(scale), "qk_norm": half.qk_norm, "proj": half.proj}
        linears = {"qkv": half.qkv}
    if isinstance(half, MlpParts):
        found |= {"activation": half.activation, "fc2": half.fc2, "inner": half.inner_norm}
        linears = {"fc1": half.fc1, "gate": half.gate}
    for name, linear in linears.items():
        found[name] = None if linear is None else [None if each is None else each.tolist() for each in linear.tensors()]
    return found


@pytest.mark.fast_cases("timm-siglip", "transformers-vit", "torchvision-vit")
@pytest.mark.parametrize("name", MODELS)
def test_class_and_computation_give_the_same_parts(name: str) -> None:
    model = MODELS[name].build().eval()
    recipes = read_model(model, MODELS[name].inputs(), lambda module: False).recipes
    vit_fast.fuse(model, "eager")
    compared = 0
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, FusedNormMlp) and module in recipes:
                parts, read = parts_of(module), recipes[module].reading(module)
                for half in ("attention", "mlp"):
                    assert facts(getattr(parts, half)) == facts(getattr(read, half))
                compared += 1
    assert compared

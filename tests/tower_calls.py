"""Towers that `GraphRunner` packs, with calls for images of given sizes, and their outputs without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from packed_towers import (
    DEVICE,
    ENCODER,
    QWEN,
    TOWERS,
    Sizes,
    grids,
    made,
    naflex,
    padded,
    padded_images,
    qwen,
    siglip2,
    squares,
)
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from vit_fast.libraries.transformers.families import LIKE_QWEN

MIXED: Sizes = ((4, 6), (2, 2), (8, 4), (2, 4))
BUDGETS = (16, 64)


@dataclass(frozen=True)
class Family:
    """A tower, a call with images of these sizes, and the outputs without padding."""

    build: Callable[[], nn.Module]
    call: Callable[[Sizes], dict[str, Any]]
    real: Callable[[Any, Sizes], list[Any]] = lambda outputs, sizes: pytree.tree_leaves(outputs)


def siglip2_outputs(outputs: Any, sizes: Sizes) -> list[Any]:
    mask = padded(sizes)[2]
    leaves = pytree.tree_leaves(outputs)
    return [leaf[mask] if isinstance(leaf, Tensor) and leaf.shape[:2] == mask.shape else leaf for leaf in leaves]


def naflexvit(name: str, **settings: Any) -> Family:
    def build() -> nn.Module:
        timm = pytest.importorskip("timm")
        torch.manual_seed(0)
        sizes = {"embed_dim": 64, "depth": 2, "num_heads": 2, "patch_size": 4, "num_classes": 5}
        model: nn.Module = timm.create_model(name, **sizes, **settings).to(DEVICE)
        return model

    def call(sizes: Sizes) -> dict[str, Any]:
        patches, *others = naflex(sizes).items()
        return {"x": {"patches": patches[1], **dict(others)}}

    return Family(build, call)


SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [1]},
    "glm4v": {"image_size": 16},
}
TOWER_CLASSES = {
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen3_omni_moe": "Qwen3OmniMoeVisionEncoder",
}


def like_qwen(family: str) -> Family:
    name = LIKE_QWEN[family]
    settings = SETTINGS.get(family, {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]})
    config = f"{name}EncoderConfig" if family == "qwen3_omni_moe" else f"{name}Config"
    tower = qwen(f"{family}.modeling_{family}.{TOWER_CLASSES.get(family, f'{name}Model')}", config, **settings)
    values = 3 * 4 * 4 if family == "ernie4_5_vl_moe" else 3 * QWEN["temporal_patch_size"] * 4 * 4
    return Family(tower.build, lambda sizes: grids(sizes, values=values))


INTERNVL = made(
    "internvl.modeling_internvl.InternVLVisionModel", "InternVLVisionConfig", **ENCODER, image_size=[16, 16],
    patch_size=[4, 4],
)  # fmt: skip
DEEPSEEK_VL = made(  # its tower is SigLIP's
    "siglip.modeling_siglip.SiglipVisionModel", "SiglipVisionConfig", **ENCODER, image_size=16, patch_size=4
)
FAMILIES = {
    "qwen2_vl": Family(TOWERS["qwen2_vl"].build, grids),
    **{family: like_qwen(family) for family in LIKE_QWEN},
    "pixtral": Family(TOWERS["pixtral"].build, padded_images),
    "siglip2": Family(TOWERS["siglip2"].build, siglip2, siglip2_outputs),
    "naflexvit": naflexvit("naflexvit_base_patch16_gap"),
    "naflexvit, pooling head": naflexvit("naflexvit_base_patch16_map"),
    "naflexvit, axial, registers": naflexvit(
        "naflexvit_base_patch16_gap", rope_type="axial", reg_tokens=2, class_token=True
    ),
    "naflexvit, mixed": naflexvit("naflexvit_base_patch16_gap", rope_type="mixed"),
    "internvl": Family(INTERNVL, squares),
    "deepseek_vl": Family(DEEPSEEK_VL, squares),
}
EVERY_CODE = ("qwen2_5_vl", "qwen3_vl", "glm4v", "pixtral", "siglip2", "naflexvit, mixed", "internvl")

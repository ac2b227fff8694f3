"""Towers that `GraphRunner` packs, with calls for images of given sizes, and their outputs without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fused_models import Subject
from kernel_support import DEVICE
from packed_towers import ENCODER, QWEN, TOWERS, made, qwen
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from vit_fast.libraries.transformers.families import LIKE_QWEN

Sizes = Sequence[tuple[int, int]]
MIXED: Sizes = ((4, 6), (2, 2), (8, 4), (2, 4))
BUDGETS = (16, 64)


@dataclass(frozen=True)
class Family:
    """A tower, a call with images of these sizes, and the outputs without padding."""

    build: Callable[[], nn.Module]
    call: Callable[[Sizes], dict[str, Any]]
    real: Callable[[Any, Sizes], list[Any]] = lambda outputs, sizes: pytree.tree_leaves(outputs)


def grids(sizes: Sizes, frames: int = 1, values: int = 3 * 2 * 4 * 4) -> dict[str, Any]:
    grid = torch.tensor([[frames, *size] for size in sizes], device=DEVICE).reshape(-1, 3)
    return {"hidden_states": torch.randn(int(grid.prod(1).sum()), values, device=DEVICE), "grid_thw": grid}


def padded_images(sizes: Sizes) -> dict[str, Any]:
    pixels = torch.tensor(sizes).reshape(-1, 2) * 4
    height, width = pixels.amax(0).tolist() if sizes else (4, 4)
    return {"pixel_values": torch.randn(len(sizes), 3, height, width, device=DEVICE), "image_sizes": pixels}


def squares(sizes: Sizes) -> dict[str, Any]:
    """Returns images of one size."""
    return {"pixel_values": torch.randn(len(sizes), 3, 16, 16, device=DEVICE)}


def padded(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Returns patches, shapes and mask, with at least one patch of padding."""
    shapes = torch.tensor(sizes, dtype=torch.int64, device=DEVICE).reshape(-1, 2)
    width = int(shapes.prod(1).max()) + 1 if sizes else 1
    mask = torch.arange(width, device=DEVICE) < shapes.prod(1)[:, None]
    return torch.randn(len(sizes), width, 3 * 4 * 4, device=DEVICE), shapes, mask


def siglip2(sizes: Sizes) -> dict[str, Any]:
    patches, shapes, mask = padded(sizes)
    return {"pixel_values": patches, "pixel_attention_mask": mask.long(), "spatial_shapes": shapes}


def siglip2_outputs(outputs: Any, sizes: Sizes) -> list[Any]:
    mask = padded(sizes)[2]
    leaves = pytree.tree_leaves(outputs)
    return [leaf[mask] if isinstance(leaf, Tensor) and leaf.shape[:2] == mask.shape else leaf for leaf in leaves]


def naflex(sizes: Sizes) -> dict[str, Any]:
    patches, _, mask = padded(sizes)
    places = torch.zeros((*mask.shape, 2), dtype=torch.int64, device=DEVICE)
    for row, (height, width) in zip(places, sizes):
        row[: height * width] = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    return {"x": {"patches": patches, "patch_coord": places, "patch_valid": mask}}


def naflexvit(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        timm = pytest.importorskip("timm")
        torch.manual_seed(0)
        sizes = {"embed_dim": 64, "depth": 2, "num_heads": 2, "patch_size": 4, "num_classes": 5}
        model: nn.Module = timm.create_model(name, **sizes, **settings).to(DEVICE)
        return model

    return build


def of_subject(subject: Subject, call: Callable[[Sizes], dict[str, Any]], real: Any = None) -> Family:
    return Family(subject.build, call, *(() if real is None else (real,)))


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
    return of_subject(tower, lambda sizes: grids(sizes, values=values))


INTERNVL = made(
    "internvl.modeling_internvl.InternVLVisionModel", "InternVLVisionConfig", **ENCODER, image_size=[16, 16],
    patch_size=[4, 4],
)  # fmt: skip
DEEPSEEK_VL = made(  # its tower is SigLIP's
    "siglip.modeling_siglip.SiglipVisionModel", "SiglipVisionConfig", **ENCODER, image_size=16, patch_size=4
)
FAMILIES = {
    "qwen2_vl": of_subject(TOWERS["qwen2_vl"], grids),
    **{family: like_qwen(family) for family in LIKE_QWEN},
    "pixtral": of_subject(TOWERS["pixtral"], padded_images),
    "siglip2": of_subject(TOWERS["siglip2"], siglip2, siglip2_outputs),
    "naflexvit": Family(naflexvit("naflexvit_base_patch16_gap"), naflex),
    "naflexvit, pooling head": Family(naflexvit("naflexvit_base_patch16_map"), naflex),
    "naflexvit, axial, registers": Family(
        naflexvit("naflexvit_base_patch16_gap", rope_type="axial", reg_tokens=2, class_token=True), naflex
    ),
    "naflexvit, mixed": Family(naflexvit("naflexvit_base_patch16_gap", rope_type="mixed"), naflex),
    "internvl": of_subject(Subject(INTERNVL, grids), squares),
    "deepseek_vl": of_subject(Subject(DEEPSEEK_VL, grids), squares),
}
EVERY_CODE = ("qwen2_5_vl", "qwen3_vl", "glm4v", "pixtral", "siglip2", "naflexvit, mixed", "internvl")

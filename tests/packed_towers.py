"""Small towers for images of any size, packed or padded, with random weights, and calls for images of given sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fused_models import Subject, timm_subject, transformers_subject
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from vit_fast.libraries.transformers.families import LIKE_QWEN

# kernel_support has the same constant, but selects the interpreter, which processes with the stand-in cannot use
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Sizes = Sequence[tuple[int, int]]  # height and width in patches
BATCHES: tuple[Sizes, ...] = (((4, 6), (2, 2), (8, 4)), ((2, 2),), ((10, 2), (2, 2)))
SIZES = {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 32, "num_heads": 2}
QWEN = {**SIZES, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
MIXED: Sizes = ((4, 6), (2, 2), (8, 4), (2, 4))
BUDGETS = (16, 64)
ENCODER = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}


def grids(sizes: Sizes, frames: int = 1, values: int = 3 * 2 * 4 * 4) -> dict[str, Any]:
    grid = torch.tensor([[frames, *size] for size in sizes], device=DEVICE).reshape(-1, 3)
    return {"hidden_states": torch.randn(int(grid.prod(1).sum()), values, device=DEVICE), "grid_thw": grid}


def padded_images(sizes: Sizes) -> dict[str, Any]:
    pixels = torch.tensor(sizes).reshape(-1, 2) * 4
    height, width = pixels.amax(0).tolist() if sizes else (4, 4)
    return {"pixel_values": torch.randn(len(sizes), 3, height, width, device=DEVICE), "image_sizes": pixels}


def squares(sizes: Sizes) -> dict[str, Any]:
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


def naflex(sizes: Sizes) -> dict[str, Any]:
    patches, _, mask = padded(sizes)
    places = torch.zeros((*mask.shape, 2), dtype=torch.int64, device=DEVICE)
    for row, (height, width) in zip(places, sizes):
        row[: height * width] = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    return {"x": patches, "patch_coord": places, "patch_valid": mask}


@dataclass(frozen=True)
class Tower(Subject):
    """A tower, its call with images of given sizes, and the outputs of a call without padding."""

    call: Callable[[Sizes], dict[str, Any]] = grids
    real: Callable[[Any, Sizes], list[Any]] = lambda outputs, sizes: pytree.tree_leaves(outputs)


def tower_of(
    make: Callable[..., nn.Module], call: Callable[[Sizes], dict[str, Any]], output: Any = None, **rest: Any
) -> Tower:
    return Tower(make, lambda batch=0: call(BATCHES[batch]), output or (lambda result: result), call, **rest)


def siglip2_outputs(outputs: Any, sizes: Sizes) -> list[Any]:
    mask = padded(sizes)[2]
    leaves = pytree.tree_leaves(outputs)
    return [leaf[mask] if isinstance(leaf, Tensor) and leaf.shape[:2] == mask.shape else leaf for leaf in leaves]


def made(family: str, cls: str, **settings: Any) -> Callable[..., nn.Module]:
    """Returns a function that builds a class of a family of transformers with a given depth."""
    subject = transformers_subject(f"{family}.modeling_{family}.{cls}", **settings)

    def make(depth: int = 2) -> nn.Module:
        pytest.importorskip("transformers", minversion="5.0")
        return subject.make(depth).to(DEVICE)

    return make


def as_dictionary(sizes: Sizes) -> dict[str, Any]:
    """Returns a call with the dictionary that timm's data loaders yield."""
    call = naflex(sizes)
    return {"x": {"patches": call.pop("x"), **call}}


def naflexvit(name: str, **settings: Any) -> Tower:
    subject = timm_subject(name, patch_size=4, init_values=None, **settings)
    return tower_of(lambda depth=2: subject.make(depth).to(DEVICE), naflex)


SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [1]},
    "glm4v": {"image_size": 16},
}
TOWER_CLASSES = {
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
    "qwen2_vl": "Qwen2VisionTransformerPretrainedModel",
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen3_omni_moe": "Qwen3OmniMoeVisionEncoder",
}


def like_qwen(family: str) -> Tower:
    settings = SETTINGS.get(family, {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]})
    cls = TOWER_CLASSES.get(family, f"{LIKE_QWEN.get(family, 'Qwen2VLVision')}Model")
    values = 3 * 4 * 4 * (1 if family == "ernie4_5_vl_moe" else QWEN["temporal_patch_size"])
    return tower_of(
        made(family, cls, **QWEN | settings),
        lambda sizes: grids(sizes, values=values),
        lambda result: result.pooler_output,
    )


FOURS = ENCODER | {"patch_size": 4}
TOWERS: dict[str, Tower] = {
    **{family: like_qwen(family) for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")},
    "pixtral": tower_of(
        made("pixtral", "PixtralVisionModel", **FOURS, image_size=40),
        padded_images,
        lambda result: result.last_hidden_state.square(),  # because RMSNorm makes the sum of squares constant
    ),
    "siglip2": tower_of(
        made("siglip2", "Siglip2VisionModel", **FOURS, num_patches=9),
        siglip2,
        lambda result: result.pooler_output,
        real=siglip2_outputs,
    ),
    "idefics3": tower_of(
        made("idefics3", "Idefics3VisionTransformer", **FOURS, image_size=16),
        squares,
        lambda result: result.last_hidden_state,
    ),
}
GAP = "naflexvit_base_patch16_gap"
NAFLEX: dict[str, Tower] = {
    "averaged": naflexvit(GAP),
    "pooled by attention": naflexvit("naflexvit_base_patch16_siglip"),
    "rotary, a table an image": naflexvit(GAP, rope_type="axial", class_token=True),
    "any query": naflexvit(GAP, use_key_only_attn_mask=True),
}
# the towers that GraphRunner packs; one that needs no packing has images of one size
FAMILIES: dict[str, Tower] = {
    **{name: TOWERS[name] for name in ("qwen2_vl", "pixtral", "siglip2")},
    **{family: like_qwen(family) for family in LIKE_QWEN},
    "naflexvit": dataclasses.replace(NAFLEX["averaged"], call=as_dictionary),
    "naflexvit, pooling head": naflexvit("naflexvit_base_patch16_map"),
    "naflexvit, axial, registers": naflexvit(GAP, rope_type="axial", reg_tokens=2, class_token=True),
    "naflexvit, mixed": naflexvit(GAP, rope_type="mixed"),
    "internvl": tower_of(
        made("internvl", "InternVLVisionModel", **ENCODER, image_size=[16, 16], patch_size=[4, 4]), squares
    ),
    "deepseek_vl": tower_of(made("siglip", "SiglipVisionModel", **FOURS, image_size=16), squares),
}
EVERY_CODE = ("qwen2_5_vl", "qwen3_vl", "glm4v", "pixtral", "siglip2", "naflexvit, mixed", "internvl")

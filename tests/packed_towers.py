"""Small towers for images of any size, packed or padded, with random weights and inputs for images of given sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fused_models import Subject, timm_subject
from torch import Tensor, nn

# kernel_support has the same constant, but selects the interpreter, which processes with the stand-in cannot use
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Sizes = Sequence[tuple[int, int]]  # height and width in patches
BATCHES: tuple[Sizes, ...] = (((4, 6), (2, 2), (8, 4)), ((2, 2),), ((10, 2), (2, 2)))
SIZES = {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 32, "depth": 2, "num_heads": 2}
QWEN = {**SIZES, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
ENCODER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}


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


def padded(sizes: Sizes, values: int = 3 * 4 * 4) -> tuple[Tensor, Tensor, Tensor]:
    """Returns patches, shapes and mask, with at least one patch of padding."""
    shapes = torch.tensor(sizes, dtype=torch.int64, device=DEVICE).reshape(-1, 2)
    width = int(shapes.prod(1).max()) + 1 if sizes else 1
    mask = torch.arange(width, device=DEVICE) < shapes.prod(1)[:, None]
    return torch.randn(len(sizes), width, values, device=DEVICE), shapes, mask


def siglip2(sizes: Sizes) -> dict[str, Any]:
    patches, shapes, mask = padded(sizes)
    return {"pixel_values": patches, "pixel_attention_mask": mask.long(), "spatial_shapes": shapes}


def naflex(sizes: Sizes, values: int = 3 * 4 * 4) -> dict[str, Any]:
    patches, _, mask = padded(sizes, values)
    places = torch.zeros((*mask.shape, 2), dtype=torch.int64, device=DEVICE)
    for row, (height, width) in zip(places, sizes):
        row[: height * width] = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    return {"x": patches, "patch_coord": places, "patch_valid": mask}


def batches(call: Callable[[Sizes], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda batch=0: call(BATCHES[batch])


def made(path: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Builds a class, given its path below transformers.models and a configuration of the same package."""

    def make() -> nn.Module:
        pytest.importorskip("transformers", minversion="5.0")
        home, _, name = path.rpartition(".")
        configs = importlib.import_module(f"transformers.models.{home.replace('modeling', 'configuration')}")
        tower: Any = getattr(importlib.import_module(f"transformers.models.{home}"), name)
        return tower._from_config(getattr(configs, config)(**settings)).to(DEVICE)

    return make


def naflexvit(name: str, **settings: Any) -> Subject:
    subject = timm_subject(name, init_values=None, **settings)
    return Subject(lambda: subject.make().to(DEVICE), batches(lambda sizes: naflex(sizes, 3 * 16 * 16)))


def qwen(path: str, config: str, **settings: Any) -> Subject:
    return Subject(made(path, config, **{**QWEN, **settings}), batches(grids), lambda result: result.pooler_output)


LLAMA4 = {
    "intermediate_size": 256, "image_size": 16, "patch_size": 4, "vision_output_dim": 48,
    "projector_input_dim": 48, "projector_output_dim": 48, "pixel_shuffle_ratio": 0.5,
}  # fmt: skip


def towers_of_depth(depth: int) -> dict[str, Subject]:
    """Returns the towers of transformers with this depth."""
    sizes = ENCODER | {"num_hidden_layers": depth}
    return {
        "qwen2_vl": qwen(
            "qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig",
            depth=depth, embed_dim=64, mlp_ratio=2,
        ),
        "qwen2_5_vl": qwen(
            "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionConfig",
            depth=depth, window_size=16, fullatt_block_indexes=[1],
        ),
        "qwen3_vl": qwen(
            "qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel", "Qwen3VLVisionConfig",
            depth=depth, num_position_embeddings=16, deepstack_visual_indexes=[0],
        ),
        "pixtral": Subject(
            made("pixtral.modeling_pixtral.PixtralVisionModel", "PixtralVisionConfig", **sizes,
                 image_size=40, patch_size=4),
            batches(padded_images),
            lambda result: result.last_hidden_state.square(),  # because RMSNorm makes the sum of squares constant
        ),
        "siglip2": Subject(
            made("siglip2.modeling_siglip2.Siglip2VisionModel", "Siglip2VisionConfig", **sizes,
                 num_patches=9, patch_size=4),
            batches(siglip2),
            lambda result: result.pooler_output,
        ),
        "idefics3": Subject(
            made("idefics3.modeling_idefics3.Idefics3VisionTransformer", "Idefics3VisionConfig", **sizes,
                 image_size=16, patch_size=4),
            batches(squares),
            lambda result: result.last_hidden_state,
        ),
        "llama4": Subject(
            made("llama4.modeling_llama4.Llama4VisionModel", "Llama4VisionConfig", **{**sizes, **LLAMA4}),
            batches(squares),
            lambda result: result.last_hidden_state,
        ),
    }  # fmt: skip


def naflex_of_depth(depth: int) -> dict[str, Subject]:
    """Returns NaFlexVits with this depth."""
    gap = "naflexvit_base_patch16_gap"
    return {
        "averaged": naflexvit(gap, depth=depth),
        "pooled by attention": naflexvit("naflexvit_base_patch16_siglip", depth=depth),
        "rotary, a table an image": naflexvit(gap, depth=depth, rope_type="axial", class_token=True),
        "any query": naflexvit(gap, depth=depth, use_key_only_attn_mask=True),
    }


def packed_of_depth(depth: int) -> dict[str, Subject]:
    """Returns a tower for each way in which blocks get the sizes of images."""
    names = ("qwen2_5_vl", "pixtral", "siglip2", "averaged", "rotary, a table an image")
    every = towers_of_depth(depth) | naflex_of_depth(depth)
    return {name: every[name] for name in names}


TOWERS, NAFLEX = towers_of_depth(2), naflex_of_depth(2)

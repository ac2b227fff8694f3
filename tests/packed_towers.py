"""Small towers for images of any size, packed or padded, with random weights and three batches of inputs each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_models import Subject, timm_subject
from torch import Tensor, nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 32, "depth": 2, "num_heads": 2}
QWEN = {**SIZES, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
ENCODER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
GRIDS = ([[1, 4, 6], [2, 2, 2], [1, 8, 4]], [[1, 2, 2]], [[1, 10, 2], [1, 2, 2]])  # frames, height, width in patches


def qwen_inputs(batch: int = 0) -> dict[str, Any]:
    grid = torch.tensor(GRIDS[batch], device=DEVICE)
    return {"hidden_states": torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4, device=DEVICE), "grid_thw": grid}


def pixtral_inputs(batch: int = 0) -> dict[str, Any]:
    sizes = ([(16, 24), (32, 8), (8, 8)], [(32, 32)], [(8, 8), (8, 32)])[batch]
    return {"pixel_values": torch.randn(len(sizes), 3, 32, 32, device=DEVICE), "image_sizes": torch.tensor(sizes)}


def siglip2_inputs(batch: int = 0) -> dict[str, Any]:
    shapes = torch.tensor(([[2, 3], [4, 2], [1, 1]], [[3, 3]], [[2, 2], [1, 5]])[batch], device=DEVICE)
    mask = torch.arange(9, device=DEVICE) < shapes.prod(1)[:, None]
    patches = torch.randn(len(shapes), 9, 3 * 4 * 4, device=DEVICE)
    return {"pixel_values": patches, "pixel_attention_mask": mask.long(), "spatial_shapes": shapes}


def image_inputs(batch: int = 0) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch + 1, 3, 16, 16, device=DEVICE)}


def naflex_inputs(batch: int = 0) -> dict[str, Tensor]:
    """Returns patches of images that are three patches wide, padded to the longest."""
    lengths = ((6, 2, 9), (9,), (4, 9))[batch]
    index = torch.arange(max(lengths), device=DEVICE)
    valid = index < torch.tensor(lengths, device=DEVICE)[:, None]
    coord = torch.stack([index // 3, index % 3], -1).expand(len(lengths), -1, -1)
    patches = torch.randn(len(lengths), len(index), 3 * 16 * 16, device=DEVICE)
    return {"x": patches, "patch_coord": coord * valid[..., None], "patch_valid": valid}


def made(path: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Builds a class, given its path below transformers.models and a configuration of the same package."""

    def make() -> nn.Module:
        pytest.importorskip("transformers", minversion="5.0")
        home, _, name = path.rpartition(".")
        configs = importlib.import_module(f"transformers.models.{home.replace('modeling', 'configuration')}")
        tower: Any = getattr(importlib.import_module(f"transformers.models.{home}"), name)
        return tower._from_config(getattr(configs, config)(**settings)).to(DEVICE)

    return make


def naflex(name: str, **settings: Any) -> Subject:
    subject = timm_subject(name, init_values=None, **settings)
    return Subject(lambda: subject.make().to(DEVICE), naflex_inputs)


def qwen(path: str, config: str, **settings: Any) -> Subject:
    return Subject(made(path, config, **{**QWEN, **settings}), qwen_inputs, lambda result: result.pooler_output)


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
                 image_size=32, patch_size=4),
            pixtral_inputs,
            lambda result: result.last_hidden_state.square(),  # because RMSNorm makes the sum of squares constant
        ),
        "siglip2": Subject(
            made("siglip2.modeling_siglip2.Siglip2VisionModel", "Siglip2VisionConfig", **sizes,
                 num_patches=9, patch_size=4),
            siglip2_inputs,
            lambda result: result.pooler_output,
        ),
        "idefics3": Subject(
            made("idefics3.modeling_idefics3.Idefics3VisionTransformer", "Idefics3VisionConfig", **sizes,
                 image_size=16, patch_size=4),
            image_inputs,
            lambda result: result.last_hidden_state,
        ),
        "llama4": Subject(
            made("llama4.modeling_llama4.Llama4VisionModel", "Llama4VisionConfig", **{**sizes, **LLAMA4}),
            image_inputs,
            lambda result: result.last_hidden_state,
        ),
    }  # fmt: skip


def naflex_of_depth(depth: int) -> dict[str, Subject]:
    """Returns NaFlexVits with this depth."""
    return {
        "averaged": naflex("naflexvit_base_patch16_gap", depth=depth),
        "pooled by attention": naflex("naflexvit_base_patch16_siglip", depth=depth),
        "rotary, a table an image": naflex(
            "naflexvit_base_patch16_gap", depth=depth, rope_type="axial", class_token=True
        ),
        "any query": naflex("naflexvit_base_patch16_gap", depth=depth, use_key_only_attn_mask=True),
    }


def packed_of_depth(depth: int) -> dict[str, Subject]:
    """Returns a tower for each way in which blocks get the sizes of images."""
    names = ("qwen2_5_vl", "pixtral", "siglip2", "averaged", "rotary, a table an image")
    every = towers_of_depth(depth) | naflex_of_depth(depth)
    return {name: every[name] for name in names}


TOWERS, NAFLEX = towers_of_depth(2), naflex_of_depth(2)

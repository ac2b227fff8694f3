"""Small towers of transformers' for images of any size, packed or padded, with random weights and inputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_support import DEVICE
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.0")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 32, "depth": 2, "num_heads": 2}
QWEN = {**SIZES, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
ENCODER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
GRIDS = ([[1, 4, 6], [2, 2, 2], [1, 8, 4]], [[1, 2, 2]], [[1, 10, 2], [1, 2, 2]])  # frames, height, width in patches


@dataclass(frozen=True)
class Tower:
    """A tower, what it takes for the i-th of three batches, and the tensor of its result."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    pick: Callable[[Any], Tensor]

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.make().to(DEVICE)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.3 if parameter.dim() == 1 else 0, 0.3 if parameter.dim() == 1 else 0.15)
        return model


def qwen_inputs(batch: int) -> dict[str, Any]:
    grid = torch.tensor(GRIDS[batch], device=DEVICE)
    return {"hidden_states": torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4, device=DEVICE), "grid_thw": grid}


def pixtral_inputs(batch: int) -> dict[str, Any]:
    sizes = ([(16, 24), (32, 8), (8, 8)], [(32, 32)], [(8, 8), (8, 32)])[batch]
    return {"pixel_values": torch.randn(len(sizes), 3, 32, 32, device=DEVICE), "image_sizes": torch.tensor(sizes)}


def siglip2_inputs(batch: int) -> dict[str, Any]:
    shapes = torch.tensor(([[2, 3], [4, 2], [1, 1]], [[3, 3]], [[2, 2], [1, 5]])[batch], device=DEVICE)
    mask = torch.arange(9, device=DEVICE) < shapes.prod(1)[:, None]
    patches = torch.randn(len(shapes), 9, 3 * 4 * 4, device=DEVICE)
    return {"pixel_values": patches, "pixel_attention_mask": mask.long(), "spatial_shapes": shapes}


def image_inputs(batch: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch + 1, 3, 16, 16, device=DEVICE)}


def qwen(family: str, config: str, tower: str, **settings: Any) -> Tower:
    def make() -> nn.Module:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        made = getattr(importlib.import_module(f"transformers.models.{family}.configuration_{family}"), config)
        return getattr(module, tower)._from_config(made(**{**QWEN, **settings}))

    return Tower(make, qwen_inputs, lambda result: result.pooler_output)


def made(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return getattr(transformers, name)._from_config(getattr(transformers, config)(**{**ENCODER, **settings}))

    return make


def idefics3() -> nn.Module:
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer

    return Idefics3VisionTransformer._from_config(Idefics3VisionConfig(**ENCODER, image_size=16, patch_size=4))


LLAMA4 = {
    "intermediate_size": 256,
    "image_size": 16,
    "patch_size": 4,
    "vision_output_dim": 48,
    "projector_input_dim": 48,
}
LLAMA4 |= {"projector_output_dim": 48, "pixel_shuffle_ratio": 0.5}
TOWERS = {
    "qwen2_vl": qwen(
        "qwen2_vl", "Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel", embed_dim=64, mlp_ratio=2
    ),
    "qwen2_5_vl": qwen(
        "qwen2_5_vl", "Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel",
        window_size=16, fullatt_block_indexes=[1],
    ),
    "qwen3_vl": qwen(
        "qwen3_vl", "Qwen3VLVisionConfig", "Qwen3VLVisionModel",
        num_position_embeddings=16, deepstack_visual_indexes=[0],
    ),
    "pixtral": Tower(
        made("PixtralVisionModel", "PixtralVisionConfig", image_size=32, patch_size=4),
        pixtral_inputs,
        lambda result: result.last_hidden_state,
    ),
    "siglip2": Tower(
        made("Siglip2VisionModel", "Siglip2VisionConfig", num_patches=9, patch_size=4),
        siglip2_inputs,
        lambda result: result.pooler_output,
    ),
    "idefics3": Tower(idefics3, image_inputs, lambda result: result.last_hidden_state),
    "llama4": Tower(
        made("Llama4VisionModel", "Llama4VisionConfig", **LLAMA4), image_inputs, lambda result: result.last_hidden_state
    ),
}  # fmt: skip

"""Wraps Qwen's packed towers as models of images of one size, which CUDA graphs and ONNX can represent.

Such a tower takes patches of any number of images and their grids. It reads the grids on the host to compute positions
and windows. For one grid these are known beforehand, and transformers accepts them as arguments.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blocks.fused import FusedModule
from ..config import Size
from .image_model import Head, ImageModel, comes_from, pair
from .peers import refuse

TOWERS = ("Qwen2VisionTransformerPretrainedModel", "Qwen2_5_VisionTransformerPretrainedModel")


class FixedGrid(nn.Module):
    """A vision tower of Qwen2-VL or Qwen2.5-VL for images of one size.

    Its forward reads nothing on the host, so `GraphRunner` captures it, `compile` traces it whole, and, once the tower
    is fused, `export_onnx` exports it.

    Args:
        tower: `model.visual`, fused or not; it is not copied.
        image_hw: Height and width of the images in pixels after the processor's resizing, or one number for both. Must
            be multiples of the patch size times the merge size, 28 in the published models.
    Raises:
        ValueError: image_hw is not such a multiple.
        UnsupportedInputError: the model has another class, or transformers is too old.
    """

    def __init__(self, tower: nn.Module, image_hw: int | Size) -> None:
        super().__init__()
        refuse("FixedGrid", _reasons(tower))
        config: Any = tower.config
        self.tower, self.image_hw = tower, pair(image_hw)
        self.patch, self.merge, self.frames = config.patch_size, config.spatial_merge_size, config.temporal_patch_size
        self.channels = int(config.in_channels)
        cell = self.patch * self.merge
        if any(pixels < cell or pixels % cell for pixels in self.image_hw):
            raise ValueError(f"image_hw must be multiples of {cell} pixels, got {image_hw!r}")
        rows, columns = (pixels // self.patch for pixels in self.image_hw)
        self.tokens = rows * columns
        for name, tensor in _layout(tower, torch.tensor([[1, rows, columns]])).items():
            self.register_buffer(name, tensor.to(next(tower.parameters()).device), persistent=False)
        self.given = [name for name, _ in self.named_buffers(recurse=False)]

    def forward(self, images: Tensor) -> Tensor:
        """Maps normalized images [B, 3, height, width] to the input of the language model, [B, tokens, C]."""
        image = (self.channels, *self.image_hw)
        if images.shape[1:] != image:
            raise ValueError(f"images must have shape [B, {', '.join(map(str, image))}], got {tuple(images.shape)}")
        batch = images.shape[0]
        layout = {name: self._of_all(name, batch) for name in self.given}
        merged: Tensor = self.tower(self.patches(images), None, **layout).pooler_output
        return merged.unflatten(0, (batch, -1))

    def patches(self, images: Tensor) -> Tensor:
        """Cuts images [B, channels, height, width] like the processor: [B N, channels frames patch patch]."""
        cells = images.unflatten(3, (-1, self.merge, self.patch)).unflatten(2, (-1, self.merge, self.patch))
        by_patch = cells.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)  # [B, rows, columns, merge, merge, channels, ...]
        return by_patch.expand(*(-1,) * 6, self.frames, -1, -1).flatten(5).flatten(0, 4)

    def _of_all(self, name: str, batch: int) -> Tensor:
        """Repeats the facts about one image for all images of a batch."""
        one = self.get_buffer(name)
        if name == "position_ids":
            return one.repeat(batch, 1)
        image = torch.arange(batch, device=one.device, dtype=one.dtype)[:, None]
        if name == "window_index":
            return (one + image * len(one)).flatten()
        return F.pad((one[1:] + image * self.tokens).flatten(), (1, 0))


class FixedGridModel(ImageModel):
    """A FixedGrid to be exported."""

    def make_exportable(self, undo: contextlib.ExitStack, dynamic_size: bool) -> None:
        """Does nothing, because fused layers can be exported."""

    def run(self, images: Tensor, head: Head, dynamic_size: bool) -> Tensor:
        """Returns the input of the language model for images, [B, tokens, C]."""
        tokens: Tensor = self.model(images)
        return tokens


def recognise(model: nn.Module) -> ImageModel | None:
    """Describes a FixedGrid for export; returns None for another model.

    Raises:
        UnsupportedInputError: its tower is not fused; transformers' own layers read lengths on the host.
    """
    if not isinstance(model, FixedGrid):
        return None
    blocks: Any = model.tower.blocks
    unfused = [
        f"blocks.{i}.attn must be fused: call vit_fast.fuse(tower) first, with any backend"
        for i, block in enumerate(blocks)
        if not isinstance(block.attn, FusedModule)
    ]
    refuse("export of a FixedGrid", unfused[:1])
    config: Any = model.tower.config
    return FixedGridModel(
        model=model,
        library="transformers",
        name=type(model.tower).__name__,
        image_hw=model.image_hw,
        in_chans=model.channels,
        patch_hw=pair(model.patch),
        depth=len(blocks),
        attentions=len(blocks),
        num_classes=0,
        config=config.to_diff_dict(),
    )


def _reasons(tower: nn.Module) -> list[str]:
    if not any(comes_from("transformers", tower, name) for name in TOWERS):
        return [f"the tower must be one of {', '.join(TOWERS)} of transformers, got a {type(tower).__name__}"]
    try:
        import transformers.vision_utils  # noqa: F401
    except ImportError:
        return ["transformers must have transformers.vision_utils: install version 5.23"]
    return []


def _layout(tower: Any, grid: Tensor) -> dict[str, Tensor]:
    """Returns the facts that transformers computes from a grid, by the names of the towers' arguments."""
    from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

    merge = tower.config.spatial_merge_size
    found = {"position_ids": get_vision_position_ids(grid, merge), "cu_seqlens": get_vision_cu_seqlens(grid)}
    if hasattr(tower, "window_size"):
        index, bounds = get_vision_window_index(grid, merge, tower.window_size, tower.patch_size)
        found |= {"window_index": index, "cu_window_seqlens": bounds}
    return found

"""FixedGrid turns a vision tower for images of any size into a model for images of one size, for ONNX and graphs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blocks.fused import FusedModule
from ..config import Size
from ..errors import pair, raise_unsupported
from .interface.image_model import ImageModel, comes_from
from .transformers.graph_towers import embed_patches, grid_layout, patchify, resizing_weights, version_reasons

QWEN = ("Qwen2VisionTransformerPretrainedModel", "Qwen2_5_VisionTransformerPretrainedModel")
TOWERS = (*QWEN, "Siglip2VisionModel", "NaFlexVit")


class FixedGrid(nn.Module):
    """A vision tower of Qwen2-VL, Qwen2.5-VL or SigLIP 2, or timm's NaFlexVit, for images of one size.

    `GraphRunner`, `vit_fast.compile` and `export_onnx` support a FixedGrid, because its forward reads nothing on the
    host. Fuse Qwen's towers first. For images of several sizes, use `GraphRunner` with budgets.

    Args:
        tower: The tower, e.g. `model.visual`; it is not copied.
        image_hw: Height and width of the resized images in pixels, or one number for a square. Height and width must be
            multiples of the patch size, and for Qwen multiples of patch size times merge size (usually 28).
    Raises:
        ValueError: height or width is not a multiple of this number.
        UnsupportedInputError: the tower has another class, or transformers is too old.
    """

    def __init__(self, tower: nn.Module, image_hw: int | Size) -> None:
        super().__init__()
        package = "timm" if comes_from("timm", tower) else "transformers"
        reasons = version_reasons() if package == "transformers" else []
        if not comes_from(package, tower, *TOWERS):
            reasons = [f"the tower must be one of {', '.join(TOWERS)}, got a {type(tower).__name__}"]
        raise_unsupported("FixedGrid", reasons)
        self.tower: Any = tower
        facts: Any = getattr(tower, "config", None) or tower.embeds  # NaFlexVit has no config
        self.is_qwen = comes_from("transformers", tower, *QWEN)
        self.merge = facts.spatial_merge_size if self.is_qwen else 1
        names = ("in_channels", "num_channels", "in_chans")
        self.channels = int(next(getattr(facts, name) for name in names if hasattr(facts, name)))
        self.image_hw, self.patch_hw = pair("image_hw", image_hw), pair("patch_size", facts.patch_size)
        cell = tuple(side * self.merge for side in self.patch_hw)
        if any(pixels < side or pixels % side for pixels, side in zip(self.image_hw, cell)):
            raise ValueError(f"image_hw must be multiples of {cell} pixels, got {image_hw!r}")
        rows, columns = (pixels // side for pixels, side in zip(self.image_hw, self.patch_hw))
        self.tokens = rows * columns
        layout: dict[str, Tensor] = {}
        if self.is_qwen:
            with torch.device("cpu"):  # a user may have set another default device
                layout = grid_layout(tower, torch.tensor([[1, rows, columns]]))
        elif hasattr(tower, "config"):
            layout = {"resizing": resizing_weights(self.tower.embeddings, rows, columns)}
        for name, tensor in layout.items():
            self.register_buffer(name, tensor.to(next(tower.parameters()).device), persistent=False)

    def forward(self, images: Tensor, features: bool = False) -> Tensor:
        """Maps normalized images [B, channels, height, width] to the tower's output.

        Qwen returns the image tokens for the language model, [B, tokens, C]. SigLIP 2 returns the pooled output [B, C],
        or without a head the tokens [B, N, C]. NaFlexVit returns logits, or with `features` the input of the head.
        """
        image = (self.channels, *self.image_hw)
        if images.shape[1:] != image:
            raise ValueError(f"images must have shape [B, {', '.join(map(str, image))}], got {tuple(images.shape)}")
        output: Tensor
        if self.is_qwen:  # cuts images like Qwen's processor, to [B * N, channels * frames * patch**2]
            cells = patchify(images, self.patch_hw).unflatten(2, (-1, self.merge)).unflatten(1, (-1, self.merge))
            cells = cells.transpose(2, 3).unsqueeze(6)  # [B, rows, columns, merge, merge, channels, 1, height, width]
            cells = cells.expand(*(-1,) * 6, self.tower.config.temporal_patch_size, -1, -1)
            layout = {name: self._repeated(name, images.shape[0]) for name in self._buffers}
            output = self.tower(cells.flatten(5).flatten(0, 4), None, **layout).pooler_output
            output = output.unflatten(0, (images.shape[0], -1))
        elif self._buffers:  # SigLIP 2
            patches = patchify(images, self.patch_hw).movedim(3, -1).flatten(3).flatten(1, 2)
            tokens = embed_patches(self.tower.embeddings, patches, self.get_buffer("resizing"))
            output = self.tower.post_layernorm(self.tower.encoder(inputs_embeds=tokens).last_hidden_state)
            output = self.tower.head(output) if self.tower.use_head else output
        else:
            output = self.tower.forward_head(self.tower.forward_features(images), pre_logits=features)
        return output

    def _repeated(self, name: str, batch: int) -> Tensor:
        """Repeats the metadata of one image for all images of a batch."""
        one = self.get_buffer(name)
        if name == "position_ids":
            return one.repeat(batch, 1)
        image = torch.arange(batch, device=one.device, dtype=one.dtype)[:, None]
        if name == "window_index":
            return (one + image * len(one)).flatten()
        return F.pad((one[1:] + image * self.tokens).flatten(), (1, 0))


class FixedGridModel(ImageModel):
    def run(self, images: Tensor, wanted: Collection[str], dynamic_size: bool) -> dict[str, Tensor]:
        names = ("logits", "features") if self.num_classes else ("features",)
        return {name: self.model(images, features=name == "features") for name in names if name in wanted}


def recognize(model: nn.Module) -> ImageModel | None:
    """Describes a FixedGrid for export; returns None for another model. Qwen's attention must be fused."""
    if not isinstance(model, FixedGrid):
        return None
    tower: Any = model.tower
    blocks = tower.blocks if hasattr(tower, "blocks") else tower.encoder.layers
    unfused = [i for i, block in enumerate(blocks) if model.is_qwen and not isinstance(block.attn, FusedModule)]
    advice = "must be fused: call vit_fast.fuse(tower) first, with any backend"
    raise_unsupported("export of a FixedGrid", [f"blocks.{i}.attn {advice}" for i in unfused[:1]])
    config = getattr(tower, "config", None)
    return FixedGridModel(
        model=model, library="timm" if config is None else "transformers", name=type(tower).__name__,
        image_hw=model.image_hw, in_chans=model.channels, patch_hw=model.patch_hw,
        blocks="tower.blocks" if hasattr(tower, "blocks") else "tower.encoder.layers",
        num_classes=0 if config is not None else int(tower.num_classes),
        config={} if config is None else config.to_diff_dict(),
    )  # fmt: skip

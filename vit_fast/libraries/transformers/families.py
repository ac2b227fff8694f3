"""The fused classes of transformers: the most frequent families, and those that pass packed sequences to their layers.

`fuse` reads the layers of all other families by their computation.

Images of any size reach the layers in three ways: Qwen's towers pass cu_seqlens of images or windows, Pixtral's fused
tower packs images and passes their lengths, and SigLIP 2's fused tower passes a padding mask.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ...blocks.fused import Finding, FusedModule
from ...ops.descriptions import Keys
from ...ops.registration import is_exporting
from .encoder_layer import FusedLayer
from .self_attention import KEYS, FusedPackedAttention, FusedPoolingHead, FusedRotarySelfAttention, FusedSelfAttention

# Prefix of the class names of layer and attention: CLIPEncoderLayer, CLIPAttention
LAYERS = {
    "clip": "CLIPEncoder", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters",
    "dinov3_vit": "DINOv3ViT", "siglip": "SiglipEncoder", "siglip2": "Siglip2Encoder", "vit": "ViT",
}  # fmt: skip

# Families with Qwen's layer and attention, and rotary layout "half"; the prefix of their class names
LIKE_QWEN = {
    "cohere_compass": "CohereCompassVision", "ernie4_5_vl_moe": "Ernie4_5_VLMoeVision", "glm4v": "Glm4vVision",
    "qwen2_5_vl": "Qwen2_5_VLVision", "qwen3_5": "Qwen3_5Vision", "qwen3_5_moe": "Qwen3_5MoeVision",
    "qwen3_omni_moe": "Qwen3OmniMoeVision", "qwen3_vl": "Qwen3VLVision", "qwen3_vl_moe": "Qwen3VLMoeVision",
    "qwen4_exp": "Qwen4ExpVision",
}  # fmt: skip


class FusedTowerWithLengths(FusedModule):
    """Pixtral's tower, which passes the lengths of the packed images to its layers."""

    passes_for_original = True
    kind = "lengths of packed images"
    host_reads = "the tower reads the sizes of its images on the host: pass budgets instead of an example"

    def forward(self, pixel_values: Tensor, image_sizes: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Maps images [B, 3, H, W], with the (height, width) of each in pixels, to tokens [1, total, C]."""
        if not is_exporting():
            if image_sizes is not None:
                image_sizes = [(int(height), int(width)) for height, width in image_sizes]
            sizes = image_sizes or [tuple(pixel_values.shape[2:])] * pixel_values.shape[0]
            lengths = [(height // self.patch_size) * (width // self.patch_size) for height, width in sizes]
            bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=pixel_values.device)
            kwargs = {**kwargs, KEYS: Keys(bounds, max(lengths, default=0))}
        return super().forward(pixel_values, image_sizes, *args, **kwargs)


class FusedPaddedTower(FusedModule):
    """SigLIP 2's tower. Its layers get a padding mask, which, unlike transformers' mask, needs no synchronization."""

    passes_for_original = True
    kind = "padding mask"

    @classmethod
    def examine(cls, module: Any) -> Finding:
        if hasattr(module, "use_head"):
            return Finding()
        return Finding(notes=["before transformers 5.6, padded images run the original attention"])

    def forward(self, pixel_values: Tensor, pixel_attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs patches [B, N, P] with a mask [B, N]."""
        fits = isinstance(pixel_attention_mask, Tensor) and pixel_attention_mask.shape == pixel_values.shape[:2]
        # before 5.6 the head is in an inner tower, which does not support four-dimensional masks
        supported = hasattr(self, "use_head") and (not self.use_head or isinstance(self.head, FusedPoolingHead))
        if fits and supported and not is_exporting() and self._masks_only_keys():
            batch, tokens = pixel_values.shape[:2]
            pixel_attention_mask = pixel_attention_mask.bool()[:, None, None, :].expand(batch, 1, tokens, tokens)
        return super().forward(pixel_values, pixel_attention_mask, *args, **kwargs)

    def _masks_only_keys(self) -> bool:
        """Returns True if transformers' own function for masks is selected; a user may have registered another one."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

        name = self.config._attn_implementation
        return name == "vit_fast" or ALL_MASK_ATTENTION_FUNCTIONS.get(name) is sdpa_mask


OTHER_CLASSES: dict[str, type[FusedModule]] = {
    "dinov3_vit.DINOv3ViTAttention": FusedRotarySelfAttention,
    "pixtral.PixtralAttention": FusedRotarySelfAttention,
    "pixtral.PixtralAttentionLayer": FusedLayer,
    "pixtral.PixtralVisionModel": FusedTowerWithLengths,
    "qwen2_vl.Qwen2VLVisionBlock": FusedLayer,
    "qwen2_vl.VisionAttention": FusedPackedAttention,
    "siglip2.Siglip2VisionModel": FusedPaddedTower,
}


def _mixins() -> dict[str, type[FusedModule]]:
    found = dict(OTHER_CLASSES)
    for family, prefix in LAYERS.items():
        short = prefix.removesuffix("Encoder")
        found[f"{family}.{prefix}Layer"] = FusedLayer
        found = dict.fromkeys((f"{family}.{short}{kind}Attention" for kind in ("", "Self")), FusedSelfAttention) | found
        found[f"{family}.{short}MultiheadAttentionPoolingHead"] = FusedPoolingHead
    for family, prefix in LIKE_QWEN.items():
        found |= {f"{family}.{prefix}Block": FusedLayer, f"{family}.{prefix}Attention": FusedPackedAttention}
    path = "transformers.models.{0}.modeling_{0}.{1}"
    return {path.format(*name.split(".")): mixin for name, mixin in found.items()}


MIXINS = _mixins()

"""The fused classes of all model families of transformers. To fuse another family, add a row to one of the tables."""

from __future__ import annotations

import inspect

from torch import nn

from ...blocks.fused import Forms, FusedModule
from .encoder_layer import AIMV2, BEIT, CLIP, DINOV2, INTERNVL, JANUS, PIXIO, VIT, VITPOSE, FusedLayer
from .packed_layers import (
    LLAMA4,
    PIXTRAL,
    QWEN,
    FusedAttentionWithLengths,
    FusedLlama4Attention,
    FusedPackedAttention,
    FusedPaddedTower,
    FusedTowerWithLengths,
)
from .self_attention import (
    FusedAttentionPoolingHead,
    FusedPoolingHead,
    FusedRotarySelfAttention,
    FusedSelfAttention,
)

# Encoder layer by family, with the prefix of the family's class names: CLIPEncoderLayer, CLIPAttention
LAYERS: dict[str, tuple[type[FusedLayer], str]] = {
    "aimv2": (AIMV2, "Aimv2Encoder"),
    "altclip": (CLIP, "AltCLIPEncoder"),
    "beit": (BEIT, "Beit"),
    "chinese_clip": (CLIP, "ChineseCLIPVision"),
    "clip": (CLIP, "CLIPEncoder"),
    "clipseg": (CLIP, "CLIPSegEncoder"),
    "deit": (VIT, "DeiT"),
    "dinov2": (DINOV2, "Dinov2"),
    "dinov2_with_registers": (DINOV2, "Dinov2WithRegisters"),
    "dinov3_vit": (DINOV2, "DINOv3ViT"),
    "dpt": (VIT, "DPTViT"),
    "eomt": (DINOV2, "Eomt"),
    "eomt_dinov3": (DINOV2, "EomtDinov3"),
    "ijepa": (VIT, "IJepa"),
    "internvl": (INTERNVL, "InternVLVision"),
    "janus": (JANUS, "JanusVisionEncoder"),
    "kosmos2": (CLIP, "Kosmos2VisionEncoder"),
    "metaclip_2": (CLIP, "MetaClip2Encoder"),
    "ovis2": (AIMV2, "Ovis2VisionEncoder"),
    "owlv2": (CLIP, "Owlv2Encoder"),
    "owlvit": (CLIP, "OwlViTEncoder"),
    "pixio": (PIXIO, "Pixio"),
    "radio": (DINOV2, "Radio"),
    "siglip": (CLIP, "SiglipEncoder"),
    "siglip2": (CLIP, "Siglip2Encoder"),
    "tipsv2": (DINOV2, "Tipsv2Vision"),
    "unlimited_ocr": (CLIP, "UnlimitedOcrEncoder"),
    "vit": (VIT, "ViT"),
    "vit_mae": (VIT, "ViTMAE"),
    "vit_msn": (VIT, "ViTMSN"),
    "vitpose_backbone": (VITPOSE, "VitPoseBackbone"),
    "vivit": (VIT, "Vivit"),
    "yolos": (VIT, "Yolos"),
}
ROTARY = {"dinov3_vit", "eomt_dinov3"}  # families whose layers get cosines and sines

# Families with Qwen's layer and attention, and rotary layout "half"; the prefix of their class names
LIKE_QWEN = {
    "cohere_compass": "CohereCompassVision",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeVision",
    "glm4v": "Glm4vVision",
    "qwen2_5_vl": "Qwen2_5_VLVision",
    "qwen3_5": "Qwen3_5Vision",
    "qwen3_5_moe": "Qwen3_5MoeVision",
    "qwen3_omni_moe": "Qwen3OmniMoeVision",
    "qwen3_vl": "Qwen3VLVision",
    "qwen3_vl_moe": "Qwen3VLMoeVision",
    "qwen4_exp": "Qwen4ExpVision",
}

# Classes with other names, by family and class
CLASSES: dict[str, type[FusedModule]] = {
    "idefics2.Idefics2EncoderLayer": CLIP,
    "idefics2.Idefics2VisionAttention": FusedSelfAttention,
    "idefics3.Idefics3EncoderLayer": CLIP,
    "idefics3.Idefics3VisionAttention": FusedSelfAttention,
    "llama4.Llama4VisionAttention": FusedLlama4Attention,
    "llama4.Llama4VisionEncoderLayer": LLAMA4,
    "pixtral.PixtralAttention": FusedAttentionWithLengths,
    "pixtral.PixtralAttentionLayer": PIXTRAL,
    "pixtral.PixtralVisionModel": FusedTowerWithLengths,
    "qwen2_vl.Qwen2VLVisionBlock": QWEN,
    "qwen2_vl.VisionAttention": FusedPackedAttention,
    "siglip2.Siglip2VisionModel": FusedPaddedTower,
    "smolvlm.SmolVLMEncoderLayer": CLIP,
    "smolvlm.SmolVLMVisionAttention": FusedSelfAttention,
}

# Reasons against fusing other classes, by a pattern of their names
SKIPPED = {
    ".*Rope.*Attention.*|.*Attention.*Rope.*": "rotary embeddings",
    "BeitSdpaSelfAttention": "it adds a relative position bias",
}


def _mixins() -> dict[str, type[FusedModule]]:
    found = dict(CLASSES)
    for family, (layer, prefix) in LAYERS.items():
        short = "DPT" if family == "dpt" else prefix.removesuffix("Encoder")  # DPTViTLayer holds DPTSelfAttention
        attention = FusedRotarySelfAttention if family in ROTARY else FusedSelfAttention
        found |= {
            f"{family}.{prefix}Layer": layer,
            f"{family}.{short}Attention": attention,
            f"{family}.{short}SelfAttention": attention,
            f"{family}.{short}MultiheadAttentionPoolingHead": FusedPoolingHead,
            f"{family}.{short}AttentionPoolingHead": FusedAttentionPoolingHead,
        }
    for family, prefix in LIKE_QWEN.items():
        found |= {f"{family}.{prefix}Block": QWEN, f"{family}.{prefix}Attention": FusedPackedAttention}
    split = [(path.split("."), mixin) for path, mixin in found.items()]
    return {f"transformers.models.{family}.modeling_{family}.{name}": mixin for (family, name), mixin in split}


class _Forms(Forms):
    def of(self, original: type[nn.Module]) -> type[FusedModule] | None:
        return None if _only_wraps_attention(original) else super().of(original)


def _only_wraps_attention(cls: type[nn.Module]) -> bool:
    """Returns True for ViTAttention of transformers 4, which contains ViTSelfAttention and ViTSelfOutput."""
    if not cls.__name__.endswith("Attention") or cls.__name__.endswith("SelfAttention"):
        return False
    return hasattr(inspect.getmodule(cls), cls.__name__.replace("Attention", "SelfAttention"))


FORMS = _Forms(globals(), _mixins())
__getattr__ = FORMS.named

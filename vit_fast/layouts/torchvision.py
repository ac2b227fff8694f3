"""torchvision.models.VisionTransformer's names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..config import ViTConfig
from .rename import Converted, Rule, rename

NAME = "torchvision"
SIGNATURE = r"^encoder\.layers\.encoder_layer_0\."

_BLOCK = r"encoder\.layers\.encoder_layer_(\d+)\."

RULES: tuple[Rule, ...] = (
    (r"class_token", "cls_token"),
    (r"conv_proj\.(weight|bias)", r"patch_embed.proj.\1"),
    (r"encoder\.pos_embedding", "pos_embed"),
    (_BLOCK + r"ln_([12])\.(weight|bias)", r"blocks.\1.norm\2.\3"),
    (_BLOCK + r"self_attention\.in_proj_(weight|bias)", r"blocks.\1.attn.qkv.\2"),
    (_BLOCK + r"self_attention\.out_proj\.(weight|bias)", r"blocks.\1.attn.proj.\2"),
    (_BLOCK + r"mlp\.(?:0|linear_1)\.(weight|bias)", r"blocks.\1.mlp.fc1.\2"),
    (_BLOCK + r"mlp\.(?:3|linear_2)\.(weight|bias)", r"blocks.\1.mlp.fc2.\2"),
    (r"encoder\.ln\.(weight|bias)", r"norm.\1"),
    (r"heads\.head\.(weight|bias)", r"head.\1"),
)


def convert(state: Mapping[str, Tensor], config: ViTConfig) -> Converted:
    """MultiheadAttention's packed projection is already timm's qkv."""
    return rename(state, NAME, RULES)

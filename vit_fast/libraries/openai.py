"""Weight names of the image tower of CLIP, as in the files of OpenAI and OpenCLIP."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..config import ViTConfig
from .interface.weight_names import Converted, Rule, rename

NAME = "OpenAI CLIP"
SIGNATURE = r"^visual\.conv1\.weight$"

_BLOCK = r"visual\.transformer\.resblocks\.(\d+)\."

RULES: tuple[Rule, ...] = (
    (r"visual\.class_embedding", "cls_token"),
    (r"visual\.positional_embedding", "pos_embed"),
    (r"visual\.proj", "head.weight"),
    (r"visual\.conv1\.weight", "patch_embed.proj.weight"),
    (r"visual\.ln_pre\.(weight|bias)", r"norm_pre.\1"),
    (r"visual\.ln_post\.(weight|bias)", r"norm.\1"),
    (_BLOCK + r"ln_([12])\.(weight|bias)", r"blocks.\1.norm\2.\3"),
    (_BLOCK + r"attn\.in_proj_(weight|bias)", r"blocks.\1.attn.qkv.\2"),
    (_BLOCK + r"attn\.out_proj\.(weight|bias)", r"blocks.\1.attn.proj.\2"),
    (_BLOCK + r"mlp\.c_fc\.(weight|bias)", r"blocks.\1.mlp.fc1.\2"),
    (_BLOCK + r"mlp\.c_proj\.(weight|bias)", r"blocks.\1.mlp.fc2.\2"),
    (r"(?!visual\.).+", None),  # the text tower has no prefix
)


def convert(state: Mapping[str, Tensor], config: ViTConfig) -> Converted:
    """Converts CLIP's names to timm's, transposes the projection, and adds zeros as its bias."""
    converted = rename(state, NAME, RULES)
    converted.add_batch_axis()
    if "head.weight" in converted.tensors:
        converted.tensors["head.weight"] = converted.tensors["head.weight"].t().contiguous()
        converted.add_head_bias("the projection")
    return converted

"""timm's names, which are ours; also its old files, the original DeiT and DINOv2 ones, and timm towers in OpenCLIP."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..config import ViTConfig
from .rename import Converted, Rule, rename

NAME = "timm"
SIGNATURE = r"(^|^visual\.trunk\.)patch_embed\.proj\.weight$"

RULES: tuple[Rule, ...] = (
    (r"visual\.trunk\.(.+)", r"\1"),
    (r"text\..+|logit_scale|logit_bias|visual\.head\..+", None),
    (r"mask_token", None),
    (r"register_tokens", "reg_token"),
    (r"blocks\.(\d+)\.gamma_([12])", r"blocks.\1.ls\2.gamma"),
)


def convert(state: Mapping[str, Tensor], config: ViTConfig) -> Converted:
    """Nearly the identity; DINOv2's original files with registers keep a class position that timm adds to the token."""
    converted = rename(state, NAME, RULES)
    if "register_tokens" in state and config.no_embed_class and {"cls_token", "pos_embed"} <= set(converted.tensors):
        converted.fold_class_position()
    weight = converted.tensors["patch_embed.proj.weight"]
    if weight.dim() == 2 and weight.numel() == weight.shape[0] * config.in_chans * _area(config):
        converted.tensors["patch_embed.proj.weight"] = weight.reshape(-1, config.in_chans, *config.patch_hw)
    return converted


def _area(config: ViTConfig) -> int:
    return config.patch_hw[0] * config.patch_hw[1]

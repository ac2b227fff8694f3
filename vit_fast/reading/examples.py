"""Builds an input for a model that states the size of its images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def example_of(model: nn.Module) -> Tensor | None:
    """Returns one random image [1, channels, height, width] in the model's dtype; None if the size is unknown.

    The size is an attribute `img_size` or `image_size` of the model, its patch embedding or its configuration, or
    timm's `pretrained_cfg["input_size"]`.
    """
    conv = next((each for each in model.modules() if isinstance(each, nn.Conv2d)), None)
    weight = next(iter(model.parameters()), None)
    owners = (getattr(model, "patch_embed", None), model, getattr(model, "config", None))
    stated = [getattr(owner, name, None) for owner in owners for name in ("img_size", "image_size")]
    size: Any = next((each for each in stated if each), None)
    cfg = getattr(model, "pretrained_cfg", None)
    if size is None and isinstance(cfg, dict):
        size = (cfg.get("input_size") or (None,))[-1]
    sizes = tuple(size) if isinstance(size, list | tuple) else (size, size)
    known = len(sizes) == 2 and all(type(each) is int for each in sizes)
    if not known or conv is None or weight is None or weight.is_meta or not conv.weight.is_floating_point():
        return None
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, conv.in_channels, *sizes, generator=generator, device="cpu")
    return image.to(weight.device, conv.weight.dtype)

"""Builds inputs for a model that states the size of its images."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

TEXT_LENGTH = 8  # tokens, for models that get text and images


def examples_of(model: nn.Module) -> Iterator[Any]:
    """Yields inputs, one of which the model may accept, in its dtype; none if it does not state the size of an image.

    The inputs are a random image [1, channels, height, width], for a model whose forward gets text the image with token
    ids and boxes; a clip [1, frames, ...], or frames as a batch; and flattened patches [1, patches, values].
    """
    sizes, config = _image_size(model), getattr(model, "config", None)
    convs = (each for each in model.modules() if isinstance(each, nn.Conv2d | nn.Conv3d))
    weight = getattr(next(convs, None), "weight", next(iter(model.parameters()), None))
    if sizes is None or weight is None or weight.is_meta or not weight.is_floating_point():
        return
    stated = getattr(config, "num_channels", 3) if weight.dim() < 4 else weight.shape[1]
    channels = (_timm_size(model) or (stated,))[0]
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, channels, *sizes, generator=generator, device="cpu").to(weight.device, weight.dtype)
    names = inspect.signature(model.forward).parameters
    if "input_ids" in names and "pixel_values" in names:
        ids = torch.ones(1, TEXT_LENGTH, dtype=torch.long, device=weight.device)
        text = {"input_ids": ids, "bbox": ids[..., None].expand(-1, -1, 4)}
        yield {"pixel_values": image} | {name: value for name, value in text.items() if name in names}
        return
    yield image
    frames, patch = getattr(config, "num_frames", None), getattr(config, "patch_size", None)
    if isinstance(frames, int):
        yield image[:, None].expand(-1, frames, -1, -1, -1)
        yield image.expand(frames, -1, -1, -1)
    if isinstance(patch, int) and all(size % patch == 0 for size in sizes):
        yield _patches(image, patch)


def _image_size(model: nn.Module) -> tuple[int, int] | None:
    """Returns the size that a model states.

    It is an attribute of the model, its patch embedding or its configuration, or timm's `pretrained_cfg["input_size"]`.
    """
    owners = (getattr(model, "patch_embed", None), model, getattr(model, "config", None))
    stated = [getattr(owner, name, None) for owner in owners for name in ("img_size", "image_size", "input_size")]
    size: Any = next((each for each in stated if each), None)
    if size is None:
        size = (_timm_size(model) or (None,))[-1]
    sizes = tuple(size) if isinstance(size, list | tuple) else (size, size)
    return sizes if len(sizes) == 2 and all(type(each) is int for each in sizes) else None


def _timm_size(model: nn.Module) -> Any:
    """Returns channels, height and width in timm's configuration; None if there are none."""
    cfg = getattr(model, "pretrained_cfg", None)
    return cfg.get("input_size") if isinstance(cfg, dict) else None


def _patches(image: Tensor, size: int) -> Tensor:
    """Returns patches [1, patches, size * size * channels] of an image."""
    cut = image.unfold(2, size, size).unfold(3, size, size)
    return cut.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)

"""create_model: a named variant, with any field overridden and weights from wherever they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .model import VisionTransformer, set_backend
from .variants import get_variant


def create_model(
    name: str,
    *,
    backend: str = "auto",
    weights: str | Path | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **config_overrides: Any,
) -> VisionTransformer:
    """A Vision Transformer by timm's name.

    Args:
        name: One of list_models().
        backend: "auto", "eager", "sdpa" or "triton"; see set_backend.
        weights: A file (.safetensors, .pth, .bin, .npz) or a Hugging Face Hub id; None means random weights.
        device: Where to make it; None means torch's default device.
        dtype: Parameter dtype; None means torch's default dtype.
        **config_overrides: Fields of ViTConfig, e.g. depth=2, img_size=(320, 240), num_classes=7.
    Returns:
        The model, in evaluation mode.
    Raises:
        ValueError: unknown name (with the nearest), unknown or unacceptable field, or weights that do not fit.
    """
    variant = get_variant(name)
    config = variant.config.replace(**config_overrides)
    with torch.device(device if device is not None else torch.get_default_device()):
        model = VisionTransformer(config, data_config=variant.data, backend=backend)
    if dtype is not None:
        model = model.to(dtype)
    if weights is not None:
        from .weights import load_weights

        load_weights(model, weights)
    set_backend(model, backend)
    return model.eval()

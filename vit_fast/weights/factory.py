"""create_model: builds a variant with overridden fields, loads its weights, and fuses it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ..arguments import as_device
from ..config import DataConfig, ViTConfig
from ..errors import check_type
from ..fusion.fuse import fuse, set_backend
from ..model import VisionTransformer
from ..variants import get_variant
from .hub import open_source
from .load import load_weights, overrides_from
from .source import Source


def create_model(
    name: str,
    *,
    backend: str = "auto",
    weights: str | Path | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    precision: str | None = None,
    **config_overrides: Any,
) -> VisionTransformer:
    """Builds a Vision Transformer by timm's name and fuses it.

    Args:
        name: One of list_models(), or a Hugging Face Hub id (or a folder of that form) whose shape and weights to take.
        backend: "auto", "eager", "sdpa" or "triton"; see set_backend.
        weights: A file (.safetensors, .pth, .bin, .npz), a folder or a Hugging Face Hub id; None means random weights.
            Its configuration, if any, sets head size, activation and epsilon, unless config_overrides do. A head with
            another num_classes stays random.
        device: None means torch's default device.
        dtype: Parameter dtype; None means torch's default dtype.
        precision: "fp8" runs the blocks in e4m3, as `vit_fast.fuse` does, of weights that were saved with the scales
            that `vit_fast.calibrate` found; None runs them in dtype.
        **config_overrides: Fields of ViTConfig, e.g. depth=2, img_size=(320, 240), num_classes=7.
    Returns:
        The model, in evaluation mode.
    Raises:
        ValueError: unknown name (with the nearest), unknown or unacceptable field, weights that do not fit, or a model
            larger than the device's memory.
        UnsupportedInputError: a backend asked for by name cannot run the model; lists all reasons.
    """
    check_type("name", name, str)
    check_type("dtype", dtype, torch.dtype, type(None))
    if "/" in name and weights is not None:
        raise ValueError(f"name must be a variant's if weights are given, got {name!r}, which has weights of its own")
    head_is_asked_for = "num_classes" in config_overrides
    source = None
    if weights is not None or "/" in name:
        source = open_source(name if weights is None else weights)
    config, data_config = _shape(name, source)
    if source is not None:
        config_overrides = overrides_from(source) | config_overrides
    config = config.replace(**config_overrides)
    place = as_device(device)
    _check_memory(config, place)
    with place:
        model = VisionTransformer(config, data_config=data_config)
    if dtype is not None:
        model = model.to(dtype)
    if source is not None:
        load_weights(model, source, replace_head=head_is_asked_for)
    set_backend(model, backend)
    if precision is not None:
        fuse(model.eval(), backend, precision=precision)
    return model.eval()


def _check_memory(config: ViTConfig, device: torch.device) -> None:
    """Raises for a model that is larger than the memory, before the system ends the process."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    needed = config.num_parameters() * torch.get_default_dtype().itemsize
    if needed > memory:
        raise ValueError(
            f"img_size={config.img_size}, embed_dim={config.embed_dim}, depth={config.depth}: the parameters alone "
            f"take {needed / 2**30:.0f} GiB, {device} has {memory / 2**30:.0f} GiB"
        )


def _shape(name: str, source: Source | None) -> tuple[ViTConfig, DataConfig | None]:
    if "/" not in name:
        variant = get_variant(name)
        return variant.config, variant.data
    if source is None or source.config is None:
        raise ValueError(f"{name} does not say what shape its model has; name a variant, and pass it as weights")
    source.check_size()
    return source.config, source.data_config

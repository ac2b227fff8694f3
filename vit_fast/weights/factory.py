"""create_model: builds a named model, loads its weights, and fuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import as_device, check_type
from ..fusion.fuse import fuse, set_backend
from ..model import VisionTransformer
from ..variants import get_variant
from .load import load_weights, overrides_from
from .source import open_source


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
    """Builds a Vision Transformer by its timm name and fuses it.

    In training mode, blocks with active dropout run their original modules, with every backend. The report of
    `vit_fast.fuse(model, backend)` lists these blocks.

    Args:
        name: One of list_models(), or a Hugging Face Hub id or folder with config and weights.
        backend: "auto", "eager", "sdpa" or "triton"; see set_backend.
        weights: A file (.safetensors, .pth, .bin, .npz), a folder or a Hugging Face Hub id; None means random weights.
            The config of the weights, if any, sets num_classes, act_layer and norm_eps; config_overrides take
            precedence. If num_classes is given and differs, the head stays random.
        device: Device of the parameters; None means torch's default device.
        dtype: Parameter dtype; None means torch's default dtype.
        precision: "fp8" runs the linear layers of blocks in e4m3; see `vit_fast.fuse`. The weights must contain the
            scales of `vit_fast.calibrate`. None means dtype.
        **config_overrides: Fields of ViTConfig, e.g. depth=2, img_size=(320, 240), num_classes=7.
    Returns:
        The model, in evaluation mode.
    Raises:
        ValueError: name or a field is unknown, a field is invalid, or the weights do not fit.
        UnsupportedInputError: the requested backend cannot run the model; lists all reasons.
    """
    check_type("name", name, str)
    check_type("dtype", dtype, torch.dtype, type(None))
    source = None if weights is None else open_source(weights)
    if "/" in name:
        if weights is not None:
            requirement = "name must be one of list_models() if weights are given"
            raise ValueError(f"{requirement}, got {name!r}, which has its own weights")
        source = open_source(name)
        if source.config is None:
            advice = f"pass a name of list_models() and weights={name!r}"
            raise ValueError(f"{name} has no config of a supported model: {advice}")
        config, data_config = source.config, source.data_config
    else:
        variant = get_variant(name)
        config, data_config = variant.config, variant.data
    overrides = {} if source is None else overrides_from(source)
    config = config.replace(**overrides | config_overrides)
    with as_device(device):
        model = VisionTransformer(config, data_config=data_config)
    if dtype is not None:
        model = model.to(dtype)
    if source is not None:
        load_weights(model, source, replace_head="num_classes" in config_overrides)
    set_backend(model, backend)
    if precision is not None:
        fuse(model.eval(), backend, precision=precision)
    return model.eval()

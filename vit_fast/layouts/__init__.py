"""Other libraries' names of a Vision Transformer's parameters, one module a library; all translated to timm's."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from ..config import ViTConfig
from . import google, openai, timm, torchvision, transformers
from .rename import Converted, strip_wrappers

LAYOUTS = (google, torchvision, transformers, openai, timm)


def convert(state: Mapping[str, Tensor], config: ViTConfig) -> Converted | None:
    """A state dict in timm's names, with what was renamed and ignored on the way.

    Args:
        state: Parameters under any of the known layouts' names, also behind `module.` or `_orig_mod.`.
        config: The model they are for: decides where a class position goes.
    Returns:
        None where no layout recognises the names.
    """
    state = strip_wrappers(state)
    for layout in LAYOUTS:
        if any(re.search(layout.SIGNATURE, name) for name in state):
            return layout.convert(state, config)
    return None


def known_layouts() -> str:
    """The layouts' names, for messages."""
    return ", ".join(layout.NAME for layout in LAYOUTS)

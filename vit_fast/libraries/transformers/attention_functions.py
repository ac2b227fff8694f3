"""The attention functions of transformers that compute plain attention. `attn_implementation` selects one by its name.

transformers registers a function per name, and users may register their own under any name.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


@functools.cache
def plain_functions() -> list[Any]:
    """Returns the functions that compute softmax(scale * q k^T) v, with tensors as masks. Other files append their own.

    flex_attention gets a BlockMask in every call, also without padding. fuse cannot read this mask.
    """
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return [sdpa_attention_forward, flash_attention_forward, plain_attention]


def is_plain(name: str | None, registered: Any, plain: list[Any]) -> bool:
    """Returns True if the function registered under a name is one of `plain`. A name with "/" is a kernel of the Hub.

    If the layer uses no registered function (`registered` or `name` is None), returns False for "eager" only.
    """
    if registered is None or name is None:
        return name != "eager"
    function = registered.get(name)
    for each in plain:  # compares by identity; a loop is faster than a generator, and this runs in every forward
        if function is each:
            return "/" not in name
    return False


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Computes attention [B, H, N, D] -> [B, N, H, D]."""
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return mixed.transpose(1, 2), None


def mask_unless_plain(*args: Any, **kwargs: Any) -> Tensor | None:
    """Creates the mask of SDPA; returns None for all keys of all queries, where transformers traces a mask of ones."""
    from transformers import masking_utils

    plain = getattr(masking_utils, "bidirectional_mask_function", None)  # since transformers 5
    if plain is not None and kwargs.get("mask_function") is plain and kwargs.get("attention_mask") is None:
        return None
    return masking_utils.sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})

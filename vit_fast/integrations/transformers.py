"""Attention function "vit_fast" for transformers, and CUDA graphs of vision towers.

Importing this file registers the attention function:

    AutoModel.from_pretrained(name, attn_implementation="vit_fast")
    runner = graph_vision_tower(model)
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ..errors import UnsupportedInputError, check_type, raise_unsupported
from ..libraries.known import packed_tower
from ..libraries.transformers.attention_functions import plain_functions
from ..libraries.transformers.self_attention import changes_attention, is_set
from ..ops import attention
from ..ops.descriptions import key_mask_of
from ..run.graph_runner import Fallback, GraphRunner

try:
    from transformers.masking_utils import bidirectional_mask_function
except ImportError:  # transformers 4
    bidirectional_mask_function = None

ATTENTION_NAME = "vit_fast"

# Keywords that change attention, and that transformers' sdpa function ignores:
REFUSED = {"block_indices", "cu_seq_lens_q", "head_mask", "indices", "s_aux", "sinks", "softcap"}
if "position_bias" not in inspect.signature(sdpa_attention_forward).parameters:  # transformers 4
    REFUSED.add("position_bias")


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Computes attention [B, H, N, D] -> [B, N, H, D] with the fused operator, else with transformers' sdpa function.

    Raises UnsupportedInputError for keywords that transformers' sdpa function would ignore.
    """
    refused = [name for name in kwargs if name in REFUSED and is_set(kwargs[name])]
    reasons = [f"{name} must not be set: use another attn_implementation" for name in refused]
    raise_unsupported(f"attn_implementation={ATTENTION_NAME!r} in {type(module).__name__}", reasons)
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal  # True as in transformers' sdpa function
    key_mask = None if attention_mask is None else key_mask_of(attention_mask, query, key)
    masked = attention_mask is not None and key_mask is None
    fits = key.shape == value.shape and key.shape[:2] == query.shape[:2]
    if masked or dropout or causal or changes_attention(kwargs) or not fits:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    return attention(query, key, value, scale=scaling, key_mask=key_mask).transpose(1, 2).contiguous(), None


def padding_mask(
    batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """Builds the attention mask; a padding mask has stride 0 along the queries, by which "vit_fast" recognizes it."""
    others = ("q_offset", "kv_offset", "local_size", "use_vmap")
    alone = kwargs.get("mask_function") is bidirectional_mask_function and not any(map(kwargs.get, others))
    if alone and attention_mask is not None and attention_mask.shape == (batch_size, kv_length):
        return attention_mask.bool()[:, None, None, :].expand(batch_size, 1, q_length, kv_length)
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs
    )


AttentionInterface.register(ATTENTION_NAME, attention_forward)
plain_functions().append(attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask if bidirectional_mask_function is None else padding_mask)


def graph_vision_tower(
    model: nn.Module, budgets: Sequence[int] = (256, 1024, 4096), max_images: int = 64, *, fallback: Fallback = "eager"
) -> GraphRunner:
    """Makes a model replay CUDA graphs of its vision tower, also in generate(). Undo with `ungraph_vision_tower`.

    Copies and pickles of the model run without graphs.

    Args:
        model: A fused transformers model whose vision tower docs/classes.md lists with "token budgets", or this tower.
        budgets: Numbers of tokens per graph. `GraphRunner` describes budgets, max_images and fallback.
    Returns:
        The runner, for `stats()` and `refresh()`.
    Raises:
        UnsupportedInputError: the model has no tower with token budgets, or GraphRunner does not support the tower.
    """
    check_type("model", model, nn.Module)
    tower: Any = next((module for module in model.modules() if packed_tower(module) is not None), None)
    if tower is None:
        reason = f"the model must have a vision tower for token budgets (docs/classes.md), got {type(model).__name__}"
        raise UnsupportedInputError("graph_vision_tower", [reason])
    runner = GraphRunner(tower, budgets=budgets, max_images=max_images, fallback=fallback)
    tower.forward = runner
    return runner


def ungraph_vision_tower(model: nn.Module) -> None:
    """Undoes `graph_vision_tower`. Other models do not change."""
    check_type("model", model, nn.Module)
    for module in model.modules():
        if isinstance(vars(module).get("forward"), GraphRunner):
            del module.forward

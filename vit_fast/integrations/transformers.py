"""transformers' own hook for attention: importing this file makes our operator known to it by name.

AutoModel.from_pretrained(name, attn_implementation="vit_fast")
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ..errors import UnsupportedInputError
from ..libraries.transformers_attention import given, says_more
from ..ops import attention

try:
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
except ImportError:  # a version without it makes no masks for vision models either
    AttentionMaskInterface = None

ATTENTION_NAME = "vit_fast"

# Keywords that change attention, and that transformers' sdpa function drops:
REFUSED = {
    "block_indices": "sparse attention",
    "head_mask": "a factor a head",
    "indices": "sparse attention",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "capped logits",
}
if "position_bias" not in inspect.signature(sdpa_attention_forward).parameters:  # transformers 4
    REFUSED["position_bias"] = "a bias on the logits"
# Everything else is handed on to it: is_causal, position_bias, cache, output_attentions, sliding_window, cu_seq_lens_q,
# max_length_q, position_ids and what is not known yet.


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function named "vit_fast": our operator, torch's where it does not apply.

    Args:
        module: The attention layer that calls.
        query: [B, H, N, D].
        key: [B, H or a divisor of it, N, D].
        value: Shaped as key.
        attention_mask: With a mask, causality, grouped heads, dropout or a keyword that is not NEUTRAL, transformers'
            sdpa function runs.
        scaling: Multiplier of q k^T; None means D**-0.5.
        dropout: Probability.
        **kwargs: Whatever else the model gives; None and False count as not given.
    Returns:
        [B, N, H, D] contiguous, and None instead of weights.
    Raises:
        UnsupportedInputError: a keyword asks for what transformers' sdpa function would leave out.
    """
    if refused := [name for name in REFUSED if given(kwargs.get(name))]:
        advice = "accepted is none: make the model with attn_implementation='eager'"
        raise UnsupportedInputError(
            f"attn_implementation={ATTENTION_NAME!r} in {type(module).__name__}",
            [f"{name} ({REFUSED[name]}) is given: {advice}" for name in refused],
        )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal  # True as in transformers' sdpa function
    plain = attention_mask is None and not dropout and not causal and not says_more(kwargs)
    if not plain or key.shape != value.shape or key.shape[:2] != query.shape[:2]:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    return attention(query, key, value, scale=scaling).transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Makes attn_implementation="vit_fast" known; importing this file calls it."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    if AttentionMaskInterface is not None:
        AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


register_attention()

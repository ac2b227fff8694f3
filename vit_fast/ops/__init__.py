"""Public operators: attention, LayerNorm + MLP, and qk-norm with rotary positions, each with a choice of backends."""

from .attention import (
    attention,
    attention_qkvpacked,
    attention_varlen,
    attention_varlen_qkvpacked,
    scaled_dot_product_attention,
)
from .descriptions import Norm, QkNorm, Rope
from .layer_norm_mlp import LayerNormMLP, layer_norm_mlp
from .rotary import qk_norm_rope

__all__ = [
    "LayerNormMLP",
    "Norm",
    "QkNorm",
    "Rope",
    "attention",
    "attention_qkvpacked",
    "attention_varlen",
    "attention_varlen_qkvpacked",
    "layer_norm_mlp",
    "qk_norm_rope",
    "scaled_dot_product_attention",
]

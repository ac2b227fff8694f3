"""Public operators with selectable backends: attention, LayerNorm + MLP, qk-norm with rotary position embeddings."""

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

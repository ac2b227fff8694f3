"""The operators: one signature each, computed by the eager formula, torch's fused kernels or ours."""

from .attention import attention, attention_qkvpacked, scaled_dot_product_attention
from .layer_norm_mlp import layer_norm_mlp
from .layer_norm_mlp_module import LayerNormMLP

__all__ = [
    "LayerNormMLP",
    "attention",
    "attention_qkvpacked",
    "layer_norm_mlp",
    "scaled_dot_product_attention",
]

"""Layers for timm's `attn_layer` and `block_fn` arguments.

timm.create_model("vit_base_patch16_224", block_fn=FusedBlock, attn_layer=FusedAttention)
"""

from __future__ import annotations

from timm.layers.attention import Attention
from timm.layers.attention_pool import AttentionPoolLatent
from timm.models.vision_transformer import Block

from ..libraries.known import fused_form

FusedAttention = fused_form(Attention)
FusedBlock = fused_form(Block)
FusedAttentionPoolLatent = fused_form(AttentionPoolLatent)

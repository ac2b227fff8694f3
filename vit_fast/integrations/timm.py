"""Layers for timm's `attn_layer` and `block_fn` arguments.

timm.create_model("vit_base_patch16_224", block_fn=FusedBlock, attn_layer=FusedAttention)
"""

from __future__ import annotations

from ..libraries.timm import timm_blocks

FusedAttention = timm_blocks.FORMS.named("FusedAttention")
FusedBlock = timm_blocks.FORMS.named("FusedBlock")
FusedAttentionPoolLatent = timm_blocks.FORMS.named("FusedAttentionPoolLatent")

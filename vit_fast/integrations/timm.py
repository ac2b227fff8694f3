"""What timm's own `attn_layer` and `block_fn` arguments take.

timm.create_model("vit_base_patch16_224", block_fn=FusedBlock, attn_layer=FusedAttention)
"""

from __future__ import annotations

from ..libraries import timm

FusedAttention = timm.FORMS.named("FusedAttention")
FusedBlock = timm.FORMS.named("FusedBlock")
FusedAttentionPoolLatent = timm.FORMS.named("FusedAttentionPoolLatent")

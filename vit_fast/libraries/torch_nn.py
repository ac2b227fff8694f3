"""Fused layers of torch.nn: self-attention by MultiheadAttention, and a pre-norm TransformerEncoderLayer."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..blocks.fused import Finding, Forms, FusedBlocks, FusedModule, FusedNormMlp
from ..blocks.parts import MlpParts
from ..blocks.plain import PLAIN, is_touched, tensor_reasons, touch_reasons
from ..blocks.reading import Reader, dropout_notes
from ..errors import type_name
from ..ops import attention_qkvpacked


class MultiheadAttentionMixin(FusedModule):
    """Self-attention, mha(x, x, x, need_weights=False) without masks, as a fused operator.

    Other calls (cross-attention, masks, returned weights, dropout in training) run the original forward.
    """

    kind = "attention"

    @classmethod
    def examine(cls, module: Any) -> Finding:
        if module.in_proj_weight is None:
            return Finding(["kdim and vdim must equal embed_dim"])
        reasons = tensor_reasons("in_proj_weight", module.in_proj_weight)
        if module.bias_k is not None or module.bias_v is not None:
            reasons.append("it appends learned tokens to keys and values (add_bias_kv)")
        if module.add_zero_attn:
            reasons.append("it appends a zero token to keys and values (add_zero_attn)")
        if type(module.out_proj) is not NonDynamicallyQuantizableLinear:
            reasons.append(f"out_proj must be torch's own linear, got {type_name(module.out_proj)}")
        notes = ["calls other than mha(x, x, x, need_weights=False) without masks run torch's forward"]
        notes += dropout_notes("attention", module.dropout) if isinstance(module.dropout, float) else []
        return Finding(reasons + touch_reasons([("out_proj", module.out_proj)]), notes)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Maps [B, N, C] (or [N, B, C] without batch_first) to the same shape, and returns None as weights."""
        masked = key_padding_mask is not None or attn_mask is not None or is_causal
        self_attention = query is key and key is value and query.dim() == 3 and not query.is_nested
        dropping = self.training and self.dropout > 0
        changed = type(self.out_proj) is not NonDynamicallyQuantizableLinear
        changed = changed or any(type(parameter) not in PLAIN for parameter in self._parameters.values())
        if masked or need_weights or not self_attention or dropping or changed or is_touched(self.out_proj):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        x = query if self.batch_first else query.transpose(0, 1)
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.num_heads, -1))
        mixed = attention_qkvpacked(qkv, backend=self.vit_fast_backend).flatten(2)
        mixed = F.linear(mixed, self.out_proj.weight, self.out_proj.bias)
        return (mixed if self.batch_first else mixed.transpose(0, 1)), None


class TransformerEncoderLayerMixin(FusedNormMlp):
    """A pre-norm TransformerEncoderLayer with norm2, feed-forward and residual as one operator."""

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        if not block.value("norm_first"):
            block.reasons.append("norm_first must be True, got False")
            return None
        return block.mlp("norm2", "linear1", "activation", "linear2", dropouts=("dropout", "dropout2"))

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Maps [B, N, C] (or [N, B, C] without batch_first) to the same shape."""
        masks: dict[str, Any] = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask}
        given = is_causal or any(mask is not None for mask in masks.values())
        parts = self.ready()
        if given or src.is_nested or parts is None:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        normed = self.norm1(src)
        mixed, _ = self.self_attn(normed, normed, normed, need_weights=False)
        return self.norm_mlp(parts, src + self.dropout1(mixed))


FORMS = Forms(
    globals(),
    {
        "torch.nn.modules.activation.MultiheadAttention": MultiheadAttentionMixin,
        "torch.nn.modules.transformer.TransformerEncoderLayer": TransformerEncoderLayerMixin,
        "torch.nn.modules.container.Sequential": FusedBlocks,
    },
)
SKIPPED = {"TransformerDecoderLayer": "a decoder layer: causal and cross-attention"}
__getattr__ = FORMS.named

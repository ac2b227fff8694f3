"""torchvision's VisionTransformer: its EncoderBlock; the attention in it is torch's MultiheadAttention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import EncoderBlock, MLPBlock

from ..ops import attention_qkvpacked
from ..ops.linear import layer_norm_linear
from .common import FusedModule, NormMlp, fused_form_of
from .whole_block import AttentionHalf, FusedBlockBase

FIRST_HALF = AttentionHalf(
    norm="ln_1", attention="self_attention", out="self_attention.out_proj", dropouts=("dropout",)
)


@fused_form_of(EncoderBlock)
class FusedEncoderBlock(FusedBlockBase, EncoderBlock):
    """torchvision's EncoderBlock with ln_2, MLP and residual as one operator; see whole_block for the rest."""

    @classmethod
    def parts_of(cls, module: Any) -> NormMlp:
        return NormMlp(
            norm="ln_2",
            fc1="mlp.0",
            activation="mlp.1",
            fc2="mlp.3",
            containers=("mlp",),
            dropouts=("mlp.2", "mlp.4"),
        )

    @classmethod
    def container_classes(cls, module: Any) -> tuple[type, ...]:
        return (MLPBlock,)

    @classmethod
    def first_half_of(cls, module: Any) -> AttentionHalf:
        return FIRST_HALF

    def mixed_heads(self, x: Tensor) -> Tensor:
        norm, mha = self.ln_1, self.self_attention
        qkv = layer_norm_linear(x, norm.weight, norm.bias, mha.in_proj_weight, mha.in_proj_bias, eps=norm.eps)
        return attention_qkvpacked(qkv.unflatten(-1, (3, mha.num_heads, -1)), backend="triton").flatten(2)

    def forward(self, input: Tensor) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        if self.runs_as_it_was():
            return super().forward(input)
        torch._assert(input.dim() == 3, f"Expected (batch_size, seq_length, hidden_dim) got {input.shape}")
        if self.runs_whole() and not (self.training and self.self_attention.dropout):
            return self.whole_block(input)
        x = self.ln_1(input)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        return self.norm_mlp(self.dropout(x) + input)


def fused_form(cls: type[nn.Module]) -> type[FusedModule] | None:
    """The fused class for one of torchvision's, or None."""
    return FusedEncoderBlock if cls is EncoderBlock else None


def left_reason(cls: type[nn.Module]) -> str | None:
    """Why a class of torchvision's is never fused, where that is known."""
    if cls.__name__ == "ShiftedWindowAttention":
        return "windowed attention with a position bias"
    return None

"""torchvision's VisionTransformer: its EncoderBlock; the attention in it is torch's MultiheadAttention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import EncoderBlock, MLPBlock

from ..block import AttentionParts, MlpParts
from ..reading import Reader
from .common import FusedModule, FusedNormMlp, fused_form_of
from .torch_nn import FusedMultiheadAttention


@fused_form_of(EncoderBlock)
class FusedEncoderBlock(FusedNormMlp, EncoderBlock):
    """torchvision's EncoderBlock with ln_2, MLP and residual as one operator, or altogether a chain of kernels."""

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        return block.attention(
            "self_attention",
            "ln_1",
            ("self_attention",),
            "self_attention.out_proj",
            inside={"self_attention": (FusedMultiheadAttention,)},
            dropouts=("dropout",),
            rates=("self_attention.dropout",),
            num_heads=block.value("self_attention.num_heads"),
        )

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        return block.mlp("ln_2", "mlp.0", "mlp.1", "mlp.3", inside={"mlp": (MLPBlock,)}, dropouts=("mlp.2", "mlp.4"))

    def forward(self, input: Tensor) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        parts = self.ready()
        if parts is None:
            return super().forward(input)
        torch._assert(input.dim() == 3, f"Expected (batch_size, seq_length, hidden_dim) got {input.shape}")
        return self.run_as_block(parts, input, self._attend)

    def _attend(self, input: Tensor) -> Tensor:
        x = self.ln_1(input)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        return self.dropout(x) + input


def fused_form(cls: type[nn.Module]) -> type[FusedModule] | None:
    """The fused class for one of torchvision's, or None."""
    return FusedEncoderBlock if cls is EncoderBlock else None


def left_reason(cls: type[nn.Module]) -> str | None:
    """Why a class of torchvision's is never fused, where that is known."""
    if cls.__name__ == "ShiftedWindowAttention":
        return "windowed attention with a position bias"
    return None

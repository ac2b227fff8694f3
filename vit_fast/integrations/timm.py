"""timm's VisionTransformer and its relatives: Block, Attention and the latent pooling head.

`FusedAttention` and `FusedBlock` are also what timm's own `attn_layer` and `block_fn` arguments take:

    timm.create_model("vit_base_patch16_224", block_fn=FusedBlock, attn_layer=FusedAttention)
"""

from __future__ import annotations

from typing import Any

from timm.layers import Mlp
from timm.layers.attention import Attention
from timm.layers.attention_pool import AttentionPoolLatent
from timm.models.vision_transformer import Block, LayerScale  # 1.0.20 has a LayerScale of its own here
from torch import Tensor, nn

from ..layers import is_touched
from ..ops import attention, attention_qkvpacked
from ..ops.linear import layer_norm_linear
from .common import (
    FusedModule,
    FusedNormMlp,
    NormMlp,
    at,
    dropout_notes,
    fused_form_of,
    touch_reasons,
)
from .whole_block import AttentionHalf, FusedBlockBase

LEFT = {
    "ResPostBlock": "it normalises after the MLP, not before it",
    "ParallelScalingBlock": "its attention and MLP share one linear",
    "DiffParallelScalingBlock": "its attention and MLP share one linear",
    "ParallelThingsBlock": "it runs several branches side by side",
    "AttentionRope": "rotary positions",
    "EvaAttention": "rotary positions",
    "EvaBlock": "it belongs to a model with rotary positions",
    "EvaBlockPostNorm": "it normalises after the MLP, not before it",
    "DiffAttention": "it subtracts two attention maps",
    "DiffAttentionRope": "it subtracts two attention maps",
}


@fused_form_of(Attention)
class FusedAttention(FusedModule, Attention):
    """timm's Attention with our operator between its linears, which still run as modules.

    With a mask, a causal flag, attention dropout in training or a changed attn_drop, timm's own forward runs.
    """

    kind = "attention"

    @classmethod
    def reasons(cls, module: Any) -> list[str]:
        dropout = module.attn_drop
        if type(dropout) is not nn.Dropout:
            return [f"attn_drop is a {type(dropout).__qualname__}: accepted is torch.nn.Dropout"]
        return touch_reasons("attn_drop", dropout)

    @classmethod
    def notes(cls, module: Any) -> list[str]:
        return dropout_notes("attn_drop", at(module, "attn_drop").p)

    @classmethod
    def head_width(cls, module: Any) -> int:
        return int(module.head_dim)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """[B, N, C] -> [B, N, dim_out]."""
        changed = type(self.attn_drop) is not nn.Dropout or is_touched(self.attn_drop)
        if attn_mask is not None or is_causal or changed or (self.training and self.attn_drop.p):
            extra: dict[str, Any] = {"is_causal": True} if is_causal else {}
            return super().forward(x, attn_mask=attn_mask, **extra)
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # [B, N, 3, H, D]
        if type(self.q_norm) is nn.Identity and type(self.k_norm) is nn.Identity:
            mixed = attention_qkvpacked(qkv, backend=self.vit_fast_backend)
        else:
            q, k, v = qkv.transpose(1, 3).unbind(2)
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
            mixed = attention(q, k, v, backend=self.vit_fast_backend).transpose(1, 2)
        mixed = self.norm(mixed.flatten(2))
        if getattr(self, "gate", None) is not None:
            mixed = mixed * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(mixed))


FIRST_HALF = AttentionHalf(
    norm="norm1",
    attention="attn",
    out="attn.proj",
    linears=("attn.qkv",),
    identities=("attn.q_norm", "attn.k_norm", "attn.norm"),
    dropouts=("attn.attn_drop", "attn.proj_drop"),
    layer_scale="ls1.gamma",
    drop_path="drop_path1",
)


@fused_form_of(Block)
class FusedBlock(FusedBlockBase, Block):
    """timm's Block with norm2, MLP, LayerScale and residual as one operator; see whole_block for the rest."""

    @classmethod
    def parts_of(cls, module: Any) -> NormMlp:
        return NormMlp(
            norm="norm2",
            fc1="mlp.fc1",
            activation="mlp.act",
            fc2="mlp.fc2",
            containers=("mlp", "ls2"),
            identities=("mlp.norm",),
            dropouts=("mlp.drop1", "mlp.drop2"),
            layer_scale="ls2.gamma",
            drop_path="drop_path2",
        )

    @classmethod
    def container_classes(cls, module: Any) -> tuple[type, ...]:
        return (Mlp, LayerScale, nn.Identity)

    @classmethod
    def first_half_of(cls, module: Any) -> AttentionHalf | None:
        if getattr(module.attn, "gate", None) is not None or type(module.ls1) not in (LayerScale, nn.Identity):
            return None
        return FIRST_HALF

    def mixed_heads(self, x: Tensor) -> Tensor:
        norm, attn = self.norm1, self.attn
        qkv = layer_norm_linear(x, norm.weight, norm.bias, attn.qkv.weight, attn.qkv.bias, eps=norm.eps)
        return attention_qkvpacked(qkv.unflatten(-1, (3, attn.num_heads, -1)), backend="triton").flatten(2)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        extra: dict[str, Any] = {"is_causal": True} if is_causal else {}
        if self.runs_as_it_was():
            return super().forward(x, attn_mask=attn_mask, **extra)
        if attn_mask is None and not is_causal and self.runs_whole():
            return self.whole_block(x)
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, **extra)))
        return self.norm_mlp(x)


@fused_form_of(AttentionPoolLatent)
class FusedAttentionPoolLatent(FusedNormMlp, AttentionPoolLatent):
    """SigLIP's pooling head: a learned query attends to all tokens, then norm, MLP and residual."""

    kind = "attention, norm + MLP"

    @classmethod
    def parts_of(cls, module: Any) -> NormMlp | None:
        if module.mlp is None:
            return None
        dropouts = ("mlp.drop1", "mlp.drop2")
        return NormMlp("norm", "mlp.fc1", "mlp.act", "mlp.fc2", ("mlp",), identities=("mlp.norm",), dropouts=dropouts)

    @classmethod
    def container_classes(cls, module: Any) -> tuple[type, ...]:
        return (Mlp,)

    @classmethod
    def head_width(cls, module: Any) -> int:
        return int(module.head_dim)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Tokens [B, N, C] -> pooled [B, C]."""
        if attn_mask is not None:
            return super().forward(x, attn_mask=attn_mask)
        if self.runs_as_it_was():
            return super().forward(x)
        B, N, _ = x.shape
        if self.pos_embed is not None:
            x = x + self.pos_embed.unsqueeze(0).to(x.dtype)
        q = self.q(self.latent.expand(B, -1, -1)).reshape(B, self.latent_len, self.num_heads, -1).transpose(1, 2)
        k, v = self.kv(x).reshape(B, N, 2, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        pooled = attention(q, k, v, backend=self.vit_fast_backend).transpose(1, 2).reshape(B, self.latent_len, -1)
        pooled = self.norm_mlp(self.proj_drop(self.proj(pooled)))
        if self.pool == "token":
            return pooled[:, 0]
        return pooled.mean(1) if self.pool == "avg" else pooled


FORMS: dict[type[nn.Module], type[FusedModule]] = {
    form.original: form for form in (FusedAttention, FusedBlock, FusedAttentionPoolLatent)
}


def fused_form(cls: type[nn.Module]) -> type[FusedModule] | None:
    """The fused class for one of timm's, or None."""
    return FORMS.get(cls)


def left_reason(cls: type[nn.Module]) -> str | None:
    """Why a class of timm's is never fused, where that is known."""
    return LEFT.get(cls.__name__)

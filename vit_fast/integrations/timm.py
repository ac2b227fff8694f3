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

from ..block import AttentionParts, MlpParts
from ..ops import attention, attention_qkvpacked
from ..plain import is_touched
from ..reading import Reader
from .common import Finding, FusedModule, FusedNormMlp, fused_form_of

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
    def examine(cls, module: Any) -> Finding:
        reader = Reader(module)
        reader.dropout("attn_drop")
        reader.judge()
        return Finding(reader.reasons, reader.notes)

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


@fused_form_of(Block)
class FusedBlock(FusedNormMlp, Block):
    """timm's Block with norm2, MLP, LayerScale and residual as one operator, or altogether a chain of kernels."""

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        block.nothing("attn.gate")
        return block.attention(
            "attn",
            "norm1",
            ("attn.qkv",),
            "attn.proj",
            inside={"attn": (FusedAttention,), "ls1": (LayerScale, nn.Identity)},
            empty=("attn.q_norm", "attn.k_norm", "attn.norm"),
            dropouts=("attn.attn_drop", "attn.proj_drop"),
            num_heads=block.value("attn.num_heads"),
            layer_scale="ls1.gamma",
            drop_path="drop_path1",
        )

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        return block.mlp(
            "norm2",
            "mlp.fc1",
            "mlp.act",
            "mlp.fc2",
            inside={"mlp": (Mlp,), "ls2": (LayerScale, nn.Identity)},
            empty=("mlp.norm",),
            dropouts=("mlp.drop1", "mlp.drop2"),
            layer_scale="ls2.gamma",
            drop_path="drop_path2",
        )

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        extra: dict[str, Any] = {"is_causal": True} if is_causal else {}
        parts = self.ready()
        if parts is None:
            return super().forward(x, attn_mask=attn_mask, **extra)

        def attend(x: Tensor) -> Tensor:
            return x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, **extra)))

        return self.run_as_block(parts, x, attend, ordinary=attn_mask is None and not is_causal)


@fused_form_of(AttentionPoolLatent)
class FusedAttentionPoolLatent(FusedNormMlp, AttentionPoolLatent):
    """SigLIP's pooling head: a learned query attends to all tokens, then norm, MLP and residual."""

    kind = "attention, norm + MLP"

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        inside, dropouts = {"mlp": (Mlp,)}, ("mlp.drop1", "mlp.drop2")
        return block.mlp("norm", "mlp.fc1", "mlp.act", "mlp.fc2", inside=inside, empty=("mlp.norm",), dropouts=dropouts)

    @classmethod
    def head_width(cls, module: Any) -> int:
        return int(module.head_dim)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Tokens [B, N, C] -> pooled [B, C]."""
        parts = self.ready()
        if attn_mask is not None:
            return super().forward(x, attn_mask=attn_mask)
        if parts is None:
            return super().forward(x)
        B, N, _ = x.shape
        if self.pos_embed is not None:
            x = x + self.pos_embed.unsqueeze(0).to(x.dtype)
        q = self.q(self.latent.expand(B, -1, -1)).reshape(B, self.latent_len, self.num_heads, -1).transpose(1, 2)
        k, v = self.kv(x).reshape(B, N, 2, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        pooled = attention(q, k, v, backend=self.vit_fast_backend).transpose(1, 2).reshape(B, self.latent_len, -1)
        pooled = self.norm_mlp(parts, self.proj_drop(self.proj(pooled)))
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

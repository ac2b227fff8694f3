"""timm's attention layers and blocks, 1.0.20 and newer: of its VisionTransformer, and of its Eva."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..fused import Finding, Forms, FusedModule, FusedNormMlp, fused_class
from ..ops import Rope, attention, attention_qkvpacked, qk_norm_rope
from ..parts import AttentionParts, MlpParts
from ..plain import is_touched
from ..reading import Reader
from .timm import ACTIVATION_CLASSES, NORM_CLASSES

LEFT = {
    "ResPostBlock": "it normalises after the MLP, not before it",
    "ParallelScalingBlock": "its attention and MLP share one linear",
    "DiffParallelScalingBlock": "its attention and MLP share one linear",
    "ParallelThingsBlock": "it runs several branches side by side",
    "EvaBlockPostNorm": "it normalises after the MLP, not before it",
    "DiffAttention": "it subtracts two attention maps",
    "DiffAttentionRope": "it subtracts two attention maps",
}


class _AttentionLayer(FusedModule):
    """An attention layer of timm's with our operator between its linears, which still run as modules.

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

    def runs_as_it_was(self, attn_mask: Tensor | None, is_causal: bool) -> bool:
        """Whether a call is for timm's own forward."""
        changed = type(self.attn_drop) is not nn.Dropout or is_touched(self.attn_drop)
        return attn_mask is not None or is_causal or changed or bool(self.training and self.attn_drop.p)

    def mix(self, qkv: Tensor, rope: Rope | None = None) -> Tensor:
        """Attention of packed projections [B, N, 3, H, D], normalised and rotated -> [B, N, H, D]."""
        if not (type(self.q_norm) is nn.Identity and type(self.k_norm) is nn.Identity):
            q, k, v = qkv.unbind(2)
            qkv = torch.stack((self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v), 2)
        if rope is not None:
            qkv = qk_norm_rope(qkv, rope=rope, backend="sdpa" if learns(rope) else self.vit_fast_backend)
        return attention_qkvpacked(qkv, backend=self.vit_fast_backend)

    def project(self, mixed: Tensor, x: Tensor) -> Tensor:
        """What follows attention: heads [B, N, H, D] and the layer's input [B, N, C] -> [B, N, dim_out]."""
        mixed = self.norm(mixed.flatten(2))
        if getattr(self, "gate", None) is not None:
            mixed = mixed * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(mixed))


class AttentionForm(_AttentionLayer):
    """timm's Attention with our operator between its linears."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """[B, N, C] -> [B, N, dim_out]."""
        if self.runs_as_it_was(attn_mask, is_causal):
            return super().forward(x, attn_mask=attn_mask, **_causal(is_causal))
        return self.project(self.mix(self.qkv(x).unflatten(-1, (3, self.num_heads, -1))), x)


class RotaryAttentionForm(_AttentionLayer):
    """timm's EvaAttention and AttentionRope, with our operators between their linears."""

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """[B, N, C], and sines and cosines as of `rope_of` -> [B, N, dim_out]."""
        if self.runs_as_it_was(attn_mask, is_causal):
            return super().forward(x, rope=rope, attn_mask=attn_mask, **_causal(is_causal))
        return self.project(self.mix(self._packed(x), self.rope_of(rope)), x)

    def rope_of(self, rope: Tensor | None) -> Rope | None:
        """timm's sines and cosines, side by side: [N - prefix, 2 D], [H, N - prefix, 2 D], or [B, 1 or H, ...]."""
        if rope is None:
            return None
        sin, cos = (rope[None] if rope.dim() == 3 else rope).chunk(2, -1)
        return Rope(cos, sin, self.num_prefix_tokens, "half" if getattr(self, "rotate_half", False) else "interleaved")

    def _packed(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, N, 3, H, D]; fewer heads of k and v are repeated."""
        if self.qkv is None:
            q, k, v = (
                linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.q_proj, self.k_proj, self.v_proj)
            )
            if (groups := getattr(self, "num_kv_groups", 1)) > 1:
                k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
            return torch.stack((q, k, v), 2)
        if getattr(self, "q_bias", None) is None:
            qkv = self.qkv(x)
        else:
            bias = torch.cat([self.q_bias, self.k_bias, self.v_bias])
            qkv = self.qkv(x) + bias if self.qkv_bias_separate else F.linear(x, self.qkv.weight, bias)
        return qkv.unflatten(-1, (3, self.num_heads, -1))


class TimmReader(Reader):
    """Reads a module that may hold timm's own activations and norms."""

    activation_classes: ClassVar[Mapping[str, str]] = {**Reader.activation_classes, **ACTIVATION_CLASSES}
    norm_classes: ClassVar[Mapping[str, str]] = {**Reader.norm_classes, **NORM_CLASSES}


class BlockForm(FusedNormMlp):
    """timm's Block with norm2, MLP, LayerScale and residual as one operator, or altogether a chain of kernels."""

    reader = TimmReader

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        block.nothing("attn.gate")
        return block.attention(
            "attn",
            "norm1",
            ("attn.qkv",),
            "attn.proj",
            qk_norm=("attn.q_norm", "attn.k_norm"),
            inside={"attn": fused_class(block.at("attn"), AttentionForm), "ls1": _scales()},
            empty=("attn.norm",),
            dropouts=("attn.attn_drop", "attn.proj_drop"),
            num_heads=block.value("attn.num_heads"),
            layer_scale="ls1.gamma",
            drop_path="drop_path1",
        )

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        return read_mlp(block, "norm2", {"ls2": _scales()}, layer_scale="ls2.gamma", drop_path="drop_path2")

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        extra = _causal(is_causal)
        parts = self.ready()
        if parts is None:
            return super().forward(x, attn_mask=attn_mask, **extra)

        def attend(x: Tensor) -> Tensor:
            return x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, **extra)))

        return self.run_as_block(parts, x, attend, ordinary=attn_mask is None and not is_causal)


class EvaBlockForm(FusedNormMlp):
    """timm's EvaBlock, likewise, and DeepseekVitBlock, which has no LayerScale."""

    reader = TimmReader

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        block.nothing("attn.gate")
        if (groups := block.value("attn.num_kv_groups")) not in (None, 1):
            block.reasons.append(f"attn has {groups} heads of q for one of k and v: accepted is one")
        packed = block.at("attn.qkv") is not None
        own_biases = packed and block.at("attn.q_bias") is not None
        return block.attention(
            "attn",
            "norm1",
            ("attn.qkv",) if packed else ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
            "attn.proj",
            biases=("attn.q_bias", "attn.k_bias", "attn.v_bias") if own_biases else None,
            qk_norm=("attn.q_norm", "attn.k_norm"),
            inside={"attn": fused_class(block.at("attn"), RotaryAttentionForm)},
            empty=("attn.norm",),
            dropouts=("attn.attn_drop", "attn.proj_drop"),
            num_heads=block.value("attn.num_heads"),
            rotates_halves=bool(block.value("attn.rotate_half")),
            layer_scale="gamma_1",
            drop_path="drop_path1",
        )

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        return read_mlp(block, "norm2", {}, layer_scale="gamma_2", drop_path="drop_path2")

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        extra = _causal(is_causal) | ({} if attn_mask is None else {"attn_mask": attn_mask})
        parts = self.ready()
        if parts is None:
            return super().forward(x, rope=rope, **extra)

        def attend(x: Tensor) -> Tensor:
            branch = self.attn(self.norm1(x), rope=rope, **extra)
            scale = getattr(self, "gamma_1", None)
            return x + self.drop_path1(branch if scale is None else scale * branch)

        tables = None if parts.attention is None else parts.attention.module.rope_of(rope)
        ordinary = attn_mask is None and not is_causal and not (tables and learns(tables))
        return self.run_as_block(parts, x, attend, ordinary, tables)


class AttentionPoolLatentForm(FusedNormMlp):
    """SigLIP's pooling head: a learned query attends to all tokens, then norm, MLP and residual."""

    reader = TimmReader
    kind = "attention, norm + MLP"

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        return read_mlp(block, "norm", {})

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


def read_mlp(block: Reader, norm: str, inside: Mapping[str, tuple[type, ...]], **rest: Any) -> MlpParts | None:
    """A norm and the `mlp` of a block: timm's Mlp, its GluMlp, which packs the gate, or its SwiGLU."""
    from timm.layers import GluMlp, Mlp, SwiGLU

    fc1, kind = "mlp.fc1", type(block.at("mlp"))
    if kind is GluMlp:
        rest["gate_half"] = int(block.value("mlp.gate_last"))
    elif kind is SwiGLU:
        fc1, rest["gate"] = "mlp.fc1_x", "mlp.fc1_g"
    inside = {"mlp": (Mlp, GluMlp, SwiGLU), **inside}
    dropouts = ("mlp.drop1", "mlp.drop2")
    return block.mlp(norm, fc1, "mlp.act", "mlp.fc2", inside=inside, inner_norm="mlp.norm", dropouts=dropouts, **rest)


def learns(rope: Rope) -> bool:
    """Whether the tables want gradients, as RoPE-Mixed's do in training: torch has to rotate then."""
    return rope.cos.requires_grad and torch.is_grad_enabled()


def _causal(is_causal: bool) -> dict[str, Any]:
    """The flag as an argument where it is set: 1.0.20 does not know it."""
    return {"is_causal": True} if is_causal else {}


def _scales() -> tuple[type, ...]:
    from timm.models.vision_transformer import LayerScale  # 1.0.20 has one of its own here

    return LayerScale, nn.Identity


FORMS = Forms(
    globals(),
    {
        "timm.layers.attention.Attention": AttentionForm,
        "timm.layers.attention.AttentionRope": RotaryAttentionForm,
        "timm.models.eva.EvaAttention": RotaryAttentionForm,
        "timm.models.vision_transformer.Block": BlockForm,
        "timm.models.eva.EvaBlock": EvaBlockForm,
        "timm.models.deepseek_vit.DeepseekVitBlock": EvaBlockForm,
        "timm.layers.attention_pool.AttentionPoolLatent": AttentionPoolLatentForm,
    },
)


def __getattr__(name: str) -> Any:
    return FORMS.named(name)


def fused_form(cls: type[nn.Module]) -> type[FusedModule] | None:
    """The fused class for one of timm's, or None."""
    return FORMS.of(cls)


def left_reason(cls: type[nn.Module]) -> str | None:
    """Why a class of timm's is never fused, where that is known."""
    return LEFT.get(cls.__name__)

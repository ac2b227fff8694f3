"""Fused attention layers and blocks of timm: VisionTransformer, Eva and NaFlexVit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...blocks.fused import Finding, FusedModule, FusedNormMlp, fused_class
from ...blocks.parts import AttentionParts, MlpParts
from ...blocks.plain import is_touched
from ...blocks.reading import Reader
from ...ops import Rope, attention, qk_norm_rope
from ...ops.attention import attention_among
from ...ops.descriptions import is_padding, keys_of, names_keys


class AttentionLayer(FusedModule):
    """An attention layer of timm with a fused operator between its linear layers, which still run as modules."""

    kind = "attention"

    @classmethod
    def examine(cls, module: Any) -> Finding:
        reader = Reader(module)
        reader.dropout("attn_drop")
        reader.check_fusible()
        if p := getattr(module.proj_drop, "p", 0.0):
            reader.notes.append(f"in training, its linear layers are not fused, because proj_drop has p={p}")
        return Finding(reader.reasons, reader.notes)

    @classmethod
    def head_width(cls, module: Any) -> int:
        # EvaAttention of timm 1.0.20 has no head_dim
        return int(getattr(module, "head_dim", 0) or module.proj.in_features // module.num_heads)

    def needs_original_forward(self, attn_mask: Tensor | None, is_causal: bool) -> bool:
        drop, q_norm, k_norm = self._bypassed()
        changed = type(drop) is not nn.Dropout or is_touched(drop) or is_touched(q_norm) or is_touched(k_norm)
        masked = attn_mask is not None and not names_keys(attn_mask)
        return masked or is_causal or changed or bool(self.training and drop.p)

    def _bypassed(self) -> tuple[Any, Any, Any]:
        """Reads the modules from a dictionary, because nn.Module.__getattr__ is slow."""
        children = self._modules
        return children["attn_drop"], children["q_norm"], children["k_norm"]

    def compute(self, x: Tensor, attn_mask: Tensor | None, is_causal: bool, **rope: Any) -> Tensor:
        if self.needs_original_forward(attn_mask, is_causal):
            options = rope | ({"is_causal": True} if is_causal else {})  # timm 1.0.20 has no is_causal
            return super().forward(x, attn_mask=additive(attn_mask, x.dtype), **options)
        return self.project_out(self.mix(self.packed(x), attn_mask, self.rope_of(*rope.values())), x)

    def packed(self, x: Tensor) -> Tensor:
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1))

    def rope_of(self, *rope: Any) -> Rope | None:
        return None

    def mix(self, qkv: Tensor, attn_mask: Tensor | None, rope: Rope | None = None) -> Tensor:
        """Normalizes and rotates q and k of qkv [B, N, 3, H, D], and computes attention -> [B, N, H, D]."""
        _, q_norm, k_norm = self._bypassed()
        if not (type(q_norm) is nn.Identity and type(k_norm) is nn.Identity):
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # [B, H, N, D], as timm calls the norms
            parts = (q_norm(q).to(v.dtype), k_norm(k).to(v.dtype), v)
            qkv = torch.stack([part.transpose(1, 2) for part in parts], 2)
        if rope is not None:
            qkv = qk_norm_rope(qkv, rope=rope, backend="sdpa" if learns(rope) else self.vit_fast_backend)
        own = self.__dict__  # timm's fused attention ignores its scale, which a user may have changed
        scale = None if own.get("fused_attn", True) else own["scale"]
        return attention_among(qkv, keys_of(attn_mask, qkv), scale=scale, backend=self.vit_fast_backend)

    def project_out(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Maps heads [B, N, H, D] and the layer's input x [B, N, C] to the output [B, N, dim_out]."""
        mixed = self.norm(mixed.flatten(2))
        if getattr(self, "gate", None) is not None:
            mixed = mixed * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(mixed))


class AttentionMixin(AttentionLayer):
    """timm's Attention."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if self.vit_fast_backend == "sdpa" and self.fused_attn and attn_mask is None and not is_causal:
            return super().forward(x)
        return self.compute(x, attn_mask, is_causal)


class RotaryAttentionMixin(AttentionLayer):
    """timm's EvaAttention and AttentionRope."""

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return self.compute(x, attn_mask, is_causal, rope=rope)

    def rope_of(self, rope: Tensor | Rope | None = None) -> Rope | None:
        """Converts timm's joint sines and cosines: [N - prefix, 2 D], [H, N - prefix, 2 D], or [B, 1 or H, ...]."""
        if rope is None or isinstance(rope, Rope):
            return rope
        sin, cos = (rope[None] if rope.dim() == 3 else rope).chunk(2, -1)
        return Rope(cos, sin, self.num_prefix_tokens, "half" if getattr(self, "rotate_half", False) else "interleaved")

    def packed(self, x: Tensor) -> Tensor:
        """Projects [B, N, C] to [B, N, 3, H, D]; repeats heads of k and v if q has more heads."""
        if self.qkv is None:
            projected = (linear(x) for linear in (self.q_proj, self.k_proj, self.v_proj))
            q, k, v = (part.unflatten(-1, (-1, self.head_width(self))) for part in projected)
            if (groups := getattr(self, "num_kv_groups", 1)) > 1:
                k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
            return torch.stack((q, k, v), 2)
        if getattr(self, "q_bias", None) is None:
            return super().packed(x)
        bias = torch.cat([self.q_bias, self.k_bias, self.v_bias])
        qkv = self.qkv(x) + bias if self.qkv_bias_separate else F.linear(x, self.qkv.weight, bias)
        return qkv.unflatten(-1, (3, self.num_heads, -1))


class TimmReader(Reader):
    """Reads a module that may contain timm's activations and norms."""

    activation_classes: ClassVar[dict[str, str]] = Reader.activation_classes | {
        f"timm.layers.activations.{name}": kind
        for name, kind in (("GELU", "gelu"), ("GELUTanh", "gelu_tanh"), ("QuickGELU", "quick_gelu"))
    }
    norm_classes: ClassVar[dict[str, str]] = Reader.norm_classes | {
        f"timm.layers.norm.{name}{suffix}": kind
        for name, kind in (("LayerNorm", "layer_norm"), ("RmsNorm", "rms_norm"))
        for suffix in ("", "Fp32")
    }


class BlockMixin(FusedNormMlp):
    """timm's Block, fused as a whole or in parts."""

    reader = TimmReader

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        layer_scale, inside = _layer_scale(block, 1)
        return read_attention(block, layer_scale, inside, bool(block.value("attn.rotate_half")))

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        layer_scale, inside = _layer_scale(block, 2)
        return read_mlp(block, "norm2", inside, layer_scale=layer_scale, drop_path="drop_path2")

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.compute(x, attn_mask, is_causal)

    def compute(self, x: Tensor, attn_mask: Tensor | None, is_causal: bool, **rope: Any) -> Tensor:
        options = rope | ({} if attn_mask is None else {"attn_mask": attn_mask})
        options |= {"is_causal": True} if is_causal else {}
        parts = self.ready()
        if parts is None:
            return super().forward(x, **options)

        def attend(x: Tensor) -> Tensor:
            return x + self.drop_path1(self.scaled(self.attn(self.norm1(x), **options)))

        tables = None if parts.attention is None else parts.attention.module.rope_of(*rope.values())
        ordinary = not is_causal and not (tables and learns(tables)) and (attn_mask is None or names_keys(attn_mask))
        return self.run_as_block(parts, x, attend, ordinary, tables, keys_of(attn_mask, x) if ordinary else None)

    def scaled(self, branch: Tensor) -> Tensor:
        return self.ls1(branch)


class EvaBlockMixin(BlockMixin):
    """timm's EvaBlock, and DeepseekVitBlock, which has no LayerScale."""

    def forward(  # type: ignore[override]  # timm's
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return self.compute(x, attn_mask, is_causal, rope=rope)

    def scaled(self, branch: Tensor) -> Tensor:
        scale = getattr(self, "gamma_1", None)
        return branch if scale is None else scale * branch


class AttentionPoolLatentMixin(FusedNormMlp):
    """SigLIP's pooling head: a learned query attends to all tokens, then norm, MLP and residual."""

    reader = TimmReader
    kind = "attention, norm + MLP"

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        return read_mlp(block, "norm", {})

    def is_idle(self) -> bool:
        return False  # it supports padding masks

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Maps tokens [B, N, C] to pooled [B, C]."""
        parts = self.ready()
        if parts is None or not (attn_mask is None or is_padding(attn_mask)):
            return super().forward(x, **({} if attn_mask is None else {"attn_mask": additive(attn_mask, x.dtype)}))
        B, N, _ = x.shape
        if self.pos_embed is not None:
            x = x + self.pos_embed.unsqueeze(0).to(x.dtype)
        q = self.q(self.latent.expand(B, -1, -1)).reshape(B, self.latent_len, self.num_heads, -1).transpose(1, 2)
        k, v = self.kv(x).reshape(B, N, 2, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        keys = keys_of(attn_mask, x)
        pooled = attention(q, k, v, key_mask=keys and keys.mask, backend=self.vit_fast_backend)
        pooled = pooled.transpose(1, 2).reshape(B, self.latent_len, -1)
        pooled = self.norm_mlp(parts, self.proj_drop(self.proj(pooled)))
        if self.pool == "token":
            return pooled[:, 0]
        return pooled.mean(1) if self.pool == "avg" else pooled


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Converts a padding mask to an additive mask, because timm may add it to the scores."""
    if mask is None or not is_padding(mask):
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def _layer_scale(block: Reader, half: int) -> tuple[str, dict[str, tuple[type, ...]]]:
    """Returns the path of a LayerScale vector, and the supported classes of a module that contains it."""
    from timm.models.vision_transformer import LayerScale  # timm 1.0.20 defines another class here

    if block.at(f"ls{half}") is None:
        return f"gamma_{half}", {}
    return f"ls{half}.gamma", {f"ls{half}": (LayerScale, nn.Identity)}


def read_attention(
    block: Reader, layer_scale: str, inside: Mapping[str, tuple[type, ...]], rotates_halves: bool
) -> AttentionParts | None:
    """Reads norm1 and `attn` of a block of timm or vit-fast."""
    block.require_absent("attn.gate")
    if (groups := block.value("attn.num_kv_groups")) not in (None, 1):
        block.reasons.append(f"attn.num_kv_groups must be 1, got {groups}")
    packed = block.at("attn.qkv") is not None
    own_biases = packed and block.at("attn.q_bias") is not None
    inside = {"attn": fused_class(block.at("attn"), AttentionLayer), **inside}
    return block.attention(
        "attn", "norm1", ("attn.qkv",) if packed else ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "attn.proj",
        biases=("attn.q_bias", "attn.k_bias", "attn.v_bias") if own_biases else None,
        qk_norm=("attn.q_norm", "attn.k_norm"), inside=inside, empty=("attn.norm",),
        dropouts=("attn.attn_drop", "attn.proj_drop"), num_heads=block.value("attn.num_heads"),
        scale=block.value("attn.scale") if block.value("attn.fused_attn") is False else None,
        rotates_halves=rotates_halves, layer_scale=layer_scale, drop_path="drop_path1",
    )  # fmt: skip


def read_mlp(block: Reader, norm: str, inside: Mapping[str, tuple[type, ...]], **rest: Any) -> MlpParts | None:
    """Reads a norm and the `mlp` of a block: an Mlp, a GluMlp (fc1 packs the gate) or a SwiGLU."""
    from timm.layers import GluMlp, Mlp, SwiGLU

    fc1, kind = "mlp.fc1", type(block.at("mlp"))
    if kind is GluMlp:
        rest["gate_chunk"] = int(block.value("mlp.gate_last"))
    elif kind is SwiGLU:
        fc1, rest["gate"] = "mlp.fc1_x", "mlp.fc1_g"
    inside = {"mlp": (Mlp, GluMlp, SwiGLU), **inside}
    dropouts = ("mlp.drop1", "mlp.drop2")
    return block.mlp(norm, fc1, "mlp.act", "mlp.fc2", inside=inside, inner_norm="mlp.norm", dropouts=dropouts, **rest)


def learns(rope: Rope) -> bool:
    """Returns True if cosines and sines require gradients, as in RoPE-Mixed. Then torch's operators rotate."""
    return rope.cos.requires_grad and torch.is_grad_enabled()


MIXINS: dict[str, type[FusedModule]] = {
    "timm.layers.attention.Attention": AttentionMixin,
    "timm.layers.attention.AttentionRope": RotaryAttentionMixin,
    "timm.models.eva.EvaAttention": RotaryAttentionMixin,
    "timm.models.vision_transformer.Block": BlockMixin,
    "timm.models.eva.EvaBlock": EvaBlockMixin,
    "timm.models.deepseek_vit.DeepseekVitBlock": EvaBlockMixin,
    "timm.layers.attention_pool.AttentionPoolLatent": AttentionPoolLatentMixin,
}

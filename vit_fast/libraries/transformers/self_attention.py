"""Fused attention layers of transformers: self-attention in its variants, and SigLIP's pooling head."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...blocks.fused import Finding, FusedModule, FusedNormMlp
from ...blocks.parts import MlpParts
from ...blocks.plain import is_touched, touch_reasons
from ...blocks.reading import Reader, describe, dropout_notes
from ...ops import Rope, attention, qk_norm_rope
from ...ops.attention import attention_among
from ...ops.descriptions import Keys, is_padding, keys_of, names_keys
from .attention_functions import is_plain, plain_functions

# Keyword argument by which Pixtral's fused tower passes the lengths of its images to its layers, beside its mask
KEYS = "vit_fast_keys"
# Endings of the names of modules that only group the parts of an attention layer or MLP
CONTAINERS = ("Attention", "MLP", "VisionMlp", "FFN", "Intermediate", "Output", "LayerScale")
# Keyword arguments that models of transformers 4.53 to 5.23 pass to attention layers and that do not change the result
NEUTRAL = frozenset(
    {"interpolate_pos_encoding", "num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict"}
)
# Attribute names in attention layers; the first existing one applies
DROPOUT_RATES = ("attention_dropout", "dropout_prob", "dropout")
PROJECTIONS = (
    *(("q_proj", "k_proj", "v_proj", out) for out in ("o_proj", "out_proj")),
    ("query", "key", "value", None),  # in transformers 4, where another module projects the output
)

# Reads an attribute of a config without transformers' map of attribute names, which takes 3 us
_SKIP_MAP = object.__getattribute__


def is_set(value: Any) -> bool:
    """Returns True if a keyword argument is neither None nor False."""
    return value is not None and value is not False


def changes_attention(kwargs: dict[str, Any], known: tuple[str, ...] = ()) -> bool:
    return any(name not in NEUTRAL and name not in known and is_set(value) for name, value in kwargs.items())


def projections_of(module: nn.Module) -> Any:
    """Returns the first of PROJECTIONS that a module has, or None."""
    return next((names for names in PROJECTIONS if all(hasattr(module, name) for name in names if name)), None)


def first_attribute(module: nn.Module, *names: str) -> Any:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


class FusedSelfAttention(FusedModule):
    """An attention layer of transformers with a fused operator between its linear layers, which run as modules."""

    kind = "attention"
    uses: ClassVar[tuple[str, ...]] = ()  # keyword arguments that every call must have
    ignores: ClassVar[tuple[str, ...]] = ()  # further keyword arguments that the fused forward allows
    registered: ClassVar[Any] = None  # attention functions by name, from which the original forward selects
    plain: ClassVar[list[Any]] = []
    vit_fast_names: tuple[str, str, str, str | None]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "original" in vars(cls):
            cls.registered = vars(sys.modules[cls.original.__module__]).get("ALL_ATTENTION_FUNCTIONS")
            cls.plain = plain_functions()

    @classmethod
    def replaces(cls, original: type[nn.Module]) -> bool:
        """Returns False for ViTAttention of transformers 4, which only contains ViTSelfAttention and ViTSelfOutput."""
        name = original.__name__.removesuffix("Attention") + "SelfAttention"
        return not hasattr(sys.modules[original.__module__], name)

    @property
    def vit_fast_scale(self) -> float:
        return float(first_attribute(self, "scaling", "scale"))

    @classmethod
    def examine(cls, module: Any) -> Finding:
        if projections_of(module) is None or first_attribute(module, "scaling", "scale") is None:
            return Finding(["it must have attributes such as q_proj, k_proj and v_proj, and scaling or scale"])
        reasons = []
        # SigLIP's text tower attends in both directions, mostly without a mask
        if "Text" in type(module.config).__name__ and not type(module).__name__.startswith("Siglip"):
            reasons.append("it belongs to a text model, which needs causal and padding masks")
        return Finding(reasons + cls.function_reasons(module), dropout_notes("attention", _dropout(module)))

    @classmethod
    def function_reasons(cls, module: Any) -> list[str]:
        """Returns a reason if the module's attention function returns weights or may compute something else."""
        name = module.config._attn_implementation
        if vars(module).get("is_causal"):
            return ["is_causal must be False, got True"]
        if is_plain(name, cls.registered, cls.plain):
            return []
        advice = "to fuse it, build the model with attn_implementation='sdpa'"
        if name == "eager":
            return [f"attn_implementation='eager' returns attention weights: {advice}"]
        function = cls.registered.get(name)
        what = "a kernel of the Hub" if "/" in name else getattr(function, "__qualname__", repr(function))
        different = "may compute something else than plain attention, or get masks that fuse cannot read"
        return [f"attn_implementation={name!r} selects {what}, which {different}: {advice}"]

    @classmethod
    def head_width(cls, module: Any) -> int:
        return int(first_attribute(module, "head_dim", "attention_head_size"))

    def set_up(self) -> None:
        self.vit_fast_names = projections_of(self)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Maps [B, N, C] to [B, N, C]; returns None as attention weights."""
        if self.needs_original_forward(args, kwargs):
            return super().forward(hidden_states, *args, **kwargs)
        output = self.attend(hidden_states, self.rope_of(hidden_states, kwargs), self.keys_of(hidden_states, kwargs))
        return (getattr(self, self.vit_fast_names[3])(output) if self.vit_fast_names[3] else output), None

    def rope_of(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> Rope | None:
        return None

    def keys_of(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> Keys | None:
        """Returns the keys that the queries of a call attend to; None means all keys."""
        return kwargs.get(KEYS) or keys_of(kwargs.get("attention_mask"), hidden_states)

    def needs_original_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        known = (*self.uses, *self.ignores, KEYS)
        if KEYS in kwargs or names_keys(kwargs.get("attention_mask")):
            known += ("attention_mask",)
        return bool(
            any(map(is_set, args))
            or any(kwargs.get(name) is None for name in self.uses)
            or changes_attention(kwargs, known)
            or self.__dict__.get("is_causal")
            or not is_plain(_SKIP_MAP(self.config, "_attn_implementation"), self.registered, self.plain)
            or (self.training and _dropout(self))
        )

    def attend(self, hidden_states: Tensor, rope: Rope | None, keys: Keys | None) -> Tensor:
        """Maps [B, N, C] to the input [B, N, H * D] of the output projection."""
        projected = [getattr(self, name)(hidden_states) for name in self.vit_fast_names[:3]]
        parts = [part.unflatten(-1, (-1, type(self).head_width(self))) for part in projected]
        if rope is not None or (keys is not None and keys.cu_seqlens is not None):
            return self.mix(torch.stack(parts, 2), rope, keys).flatten(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        key_mask = None if keys is None else keys.mask
        mixed = attention(q, k, v, scale=self.vit_fast_scale, key_mask=key_mask, backend=self.vit_fast_backend)
        return mixed.transpose(1, 2).flatten(2)

    def mix(self, qkv: Tensor, rope: Rope | None, keys: Keys | None) -> Tensor:
        """Rotates q and k of qkv [..., 3, H, D] and computes attention -> [..., H, D]."""
        qkv = qkv if rope is None else qk_norm_rope(qkv, rope=rope, backend=self.vit_fast_backend)
        return attention_among(qkv, keys, scale=self.vit_fast_scale, backend=self.vit_fast_backend)


class FusedRotarySelfAttention(FusedSelfAttention):
    """Self-attention whose caller passes cosines and sines. Prefix tokens are not rotated."""

    uses: ClassVar[tuple[str, ...]] = ("position_embeddings",)

    def rope_of(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> Rope:
        cos, sin = kwargs["position_embeddings"]
        return Rope(cos, sin, prefix=hidden_states.shape[-2] - cos.shape[-2], layout="half")


class FusedPackedAttention(FusedRotarySelfAttention):
    """Qwen's attention of packed tokens [total, C]. Unlike transformers' forward, reads no lengths on the host."""

    uses = ("position_embeddings", "cu_seqlens")
    ignores = ("max_seqlen",)

    @classmethod
    def examine(cls, module: Any) -> Finding:
        return Finding(cls.function_reasons(module))

    def keys_of(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> Keys:
        # cu_seqlens is int64 while traced. The maximum length only selects tiles, so the total is enough.
        return Keys(kwargs["cu_seqlens"].to(torch.int32), hidden_states.shape[0])

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Maps [total, C] to [total, C]."""
        if self.needs_original_forward(args, kwargs):
            return super(FusedSelfAttention, self).forward(hidden_states, *args, **kwargs)
        qkv = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1))
        mixed = self.mix(qkv, self.rope_of(hidden_states, kwargs), self.keys_of(hidden_states, kwargs))
        return self.proj(mixed.flatten(1))


def _dropout(module: nn.Module) -> float:
    p = first_attribute(module, *DROPOUT_RATES)
    return p.p if isinstance(p, nn.Dropout) else p


def container_classes_beside(original: type[nn.Module]) -> tuple[type, ...]:
    """Returns the classes in the Python module of `original` that only group parts of attention layers and MLPs."""
    beside = vars(sys.modules[original.__module__]).values()
    classes = (each for each in beside if isinstance(each, type) and issubclass(each, nn.Module))
    return tuple(cls for cls in classes if cls.__name__.endswith(CONTAINERS))


class TransformersReader(Reader):
    """Reads a module that may contain transformers' activations and norms."""

    activation_classes: ClassVar[dict[str, str]] = Reader.activation_classes | {
        f"transformers.activations.{name}": kind
        for name, kind in (
            ("GELUActivation", "gelu"), ("GELUTanh", "gelu_tanh"), ("FastGELUActivation", "gelu_tanh"),
            ("NewGELUActivation", "gelu_tanh"), ("PytorchGELUTanh", "gelu_tanh"),
            ("QuickGELUActivation", "quick_gelu"), ("SiLUActivation", "silu"),
        )
    }  # fmt: skip
    norm_classes: ClassVar[dict[str, str]] = Reader.norm_classes | {
        f"transformers.models.{family}.modeling_{family}.{name}": "rms_norm"
        for family, name in (
            ("glm4v", "Glm4vRMSNorm"), ("pixtral", "PixtralRMSNorm"), ("qwen2_5_vl", "Qwen2_5_VLRMSNorm"),
            ("qwen2_5_vl", "Qwen2RMSNorm"),  # in transformers 4
        )
    }  # fmt: skip


class FusedPoolingHead(FusedNormMlp):
    """SigLIP's pooling head: one query per image attends to all tokens, then norm, MLP and residual."""

    kind = "attention, norm + MLP"
    reader = TransformersReader

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        inside = {"mlp": container_classes_beside(cls.original)}
        return block.mlp("layernorm", "mlp.fc1", "mlp.activation_fn", "mlp.fc2", inside=inside)

    @classmethod
    def examine(cls, module: Any) -> Finding:
        mha, mlp = module.attention, super().examine(module)
        if type(mha) is not nn.MultiheadAttention:
            return Finding([f"attention must be torch.nn.MultiheadAttention, got {describe(mha)}"])
        reasons = touch_reasons([("attention", mha), ("attention.out_proj", mha.out_proj)])
        notes = dropout_notes("attention", mha.dropout)
        return Finding([*reasons, *mlp.reasons], [*notes, *mlp.notes], [*mlp.bypassed, *mha.modules()])

    @classmethod
    def head_width(cls, module: Any) -> int:
        return int(module.attention.head_dim)

    def is_idle(self) -> bool:
        return False  # it supports padding masks

    def forward(self, hidden_state: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Maps tokens [B, N, C] to pooled [B, C]."""
        mha, key_mask = self.attention, None
        if is_padding(attention_mask):
            attention_mask = key_mask = attention_mask[:, 0, 0]  # type: ignore[index]  # is_padding checked that
        elif attention_mask is not None:
            return super().forward(hidden_state, attention_mask)
        changed = type(mha) is not nn.MultiheadAttention or is_touched(mha) or is_touched(mha.out_proj)
        parts = self.ready()
        if changed or (self.training and mha.dropout) or parts is None:
            # the heads of other models have no parameter for a mask
            return super().forward(hidden_state, *(() if attention_mask is None else (attention_mask,)))
        C, heads = mha.embed_dim, (mha.num_heads, -1)
        weight, bias = mha.in_proj_weight, mha.in_proj_bias
        probe = self.probe.expand(hidden_state.shape[0], -1, -1)
        q = F.linear(probe, weight[:C], bias[:C]).unflatten(-1, heads).transpose(1, 2)
        k, v = F.linear(hidden_state, weight[C:], bias[C:]).unflatten(-1, (2, *heads)).permute(2, 0, 3, 1, 4).unbind(0)
        pooled = attention(q, k, v, key_mask=key_mask, backend=self.vit_fast_backend).transpose(1, 2).flatten(2)
        pooled = F.linear(pooled, mha.out_proj.weight, mha.out_proj.bias)
        return self.norm_mlp(parts, pooled)[:, 0]

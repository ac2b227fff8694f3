"""transformers' vision models, 4.53 and newer: ViT, DeiT, DINOv2 (with registers), CLIP, SigLIP, SigLIP 2, BEiT.

Importing this module also registers the official hook, so that any model of transformers can use the attention alone:

    AutoModel.from_pretrained(name, attn_implementation="vit_fast")

Fused classes are made when they are first asked for: each needs its model's module, which is slow to import.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ..ops import attention
from .common import (
    FusedModule,
    FusedNormMlp,
    NormMlp,
    at,
    describe,
    dropout_notes,
    dropout_reasons,
    fused_form_of,
    is_touched,
    tensor_reasons,
    touch_reasons,
)
from .whole_block import AttentionHalf, FusedBlockBase

try:
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
except ImportError:  # 4.53.0 to 4.53.x may lack the public name: such versions build no masks for vision models either
    AttentionMaskInterface = None

ATTENTION_NAME = "vit_fast"

MLP_CONTAINERS = ("MLP", "Intermediate", "Output", "LayerScale")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function named "vit_fast": our operator, torch's where it does not apply.

    Args:
        module: The attention layer that calls.
        query: [B, H, N, D].
        key: [B, H or a divisor of it, N, D].
        value: Shaped as key.
        attention_mask: With a mask, causality, grouped heads or dropout, transformers' sdpa function runs.
        scaling: Multiplier of q k^T; None means D**-0.5.
        dropout: Probability.
        **kwargs: Passed on to sdpa.
    Returns:
        [B, N, H, D] contiguous, and None instead of weights.
    """
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None else causal
    if attention_mask is not None or dropout or causal or key.shape[1] != query.shape[1]:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    return attention(query, key, value, scale=scaling).transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Makes attn_implementation="vit_fast" known to transformers; importing this module does it."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    if AttentionMaskInterface is not None:
        AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


register_attention()


@dataclass(frozen=True)
class Projections:
    """Attribute names of an attention layer; out is None where the caller projects."""

    query: str
    key: str
    value: str
    out: str | None


PROJECTIONS = (
    Projections("q_proj", "k_proj", "v_proj", "o_proj"),
    Projections("q_proj", "k_proj", "v_proj", "out_proj"),
    Projections("query", "key", "value", None),
)


def projections_of(module: nn.Module) -> Projections | None:
    for names in PROJECTIONS:
        if all(hasattr(module, name) for name in (names.query, names.key, names.value, names.out) if name):
            return names
    return None


def first_attribute(module: nn.Module, *names: str) -> Any:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


class FusedSelfAttention(FusedModule):
    """An attention layer of transformers with our operator between its linears, which still run as modules.

    With a mask, weights asked for, or dropout in training, transformers' own forward runs.
    """

    kind = "attention"
    vit_fast_names: Projections
    vit_fast_scale: float

    @classmethod
    def reasons(cls, module: Any) -> list[str]:
        if projections_of(module) is None or first_attribute(module, "scaling", "scale") is None:
            return ["it does not compute attention through transformers' attention interface"]
        reasons = []
        biases = ("use_relative_position_bias", "use_shared_relative_position_bias")
        if any(getattr(module.config, name, False) for name in biases):
            reasons.append("it adds a relative position bias")
        if "Text" in type(module.config).__name__:
            reasons.append("it belongs to a text model: causal and padding masks")
        if module.config._attn_implementation == "eager":
            advice = "make the model with attn_implementation='sdpa'"
            reasons.append(f"attn_implementation='eager' returns attention weights: {advice}")
        return reasons + dropout_reasons("attention", _dropout(module), module.training)

    @classmethod
    def notes(cls, module: Any) -> list[str]:
        return dropout_notes("attention", _dropout(module))

    @classmethod
    def head_width(cls, module: Any) -> int:
        return int(first_attribute(module, "head_dim", "attention_head_size"))

    def prepare(self) -> None:
        names = projections_of(self)
        if names is None:
            raise ValueError(f"{type(self).__qualname__} has no query, key and value projections")
        self.vit_fast_names = names
        self.vit_fast_scale = first_attribute(self, "scaling", "scale")

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[B, N, C] -> [B, N, C] and None instead of weights."""
        if self.runs_as_it_was(args, kwargs):
            return super().forward(hidden_states, *args, **kwargs)
        mixed, out = self.mixed_heads(hidden_states), self.vit_fast_names.out
        return (getattr(self, out)(mixed) if out else mixed), None

    def runs_as_it_was(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is for transformers' own forward."""
        unusual = any(_given(value) for value in (*args, *(kwargs.get(name) for name in MASK_ARGUMENTS)))
        eager = self.config._attn_implementation == "eager"
        return bool(unusual or eager or (self.training and _dropout(self)))

    def mixed_heads(self, hidden_states: Tensor) -> Tensor:
        """[B, N, C] -> [B, N, H * D], before the output linear."""
        names = self.vit_fast_names
        D = type(self).head_width(self)
        q, k, v = (
            getattr(self, name)(hidden_states).unflatten(-1, (-1, D)).transpose(1, 2)
            for name in (names.query, names.key, names.value)
        )
        mixed = attention(q, k, v, scale=self.vit_fast_scale, backend=self.vit_fast_backend)
        return mixed.transpose(1, 2).flatten(2)


MASK_ARGUMENTS = (
    "attention_mask",
    "causal_attention_mask",
    "head_mask",
    "relative_position_bias",
    "output_attentions",
    "is_causal",
)


def _given(value: Any) -> bool:
    return value is not None and value is not False


def _dropout(module: nn.Module) -> float:
    p = first_attribute(module, "attention_dropout", "dropout_prob", "dropout")
    return p.p if isinstance(p, nn.Dropout) else p


@dataclass(frozen=True)
class Layer:
    """Where an encoder layer keeps its first half: x + after(attention(norm(x)))."""

    norm: str
    attention: str
    after: tuple[str, ...]  # modules called and Parameters multiplied, in order
    mlp: tuple[NormMlp, ...]  # by version of transformers, newest first
    dropouts: tuple[str, ...] = ()
    layer_scale: str | None = None
    drop_path: str | None = None

    def first_halves(self) -> Iterator[AttentionHalf]:
        """By the name of the output linear; transformers 4 has it elsewhere for most models, and none fits."""
        for out in ("o_proj", "out_proj"):
            yield AttentionHalf(
                norm=self.norm,
                attention=self.attention,
                out=f"{self.attention}.{out}",
                dropouts=self.dropouts,
                layer_scale=self.layer_scale,
                drop_path=self.drop_path,
            )


def _mlp(norm: str, activation: str = "activation_fn", **rest: Any) -> NormMlp:
    return NormMlp(norm, "mlp.fc1", f"mlp.{activation}", "mlp.fc2", containers=("mlp", *rest.pop("also", ())), **rest)


def _intermediate(**rest: Any) -> NormMlp:
    """transformers 4: the two linears live in `intermediate` and `output`."""
    return NormMlp(
        "layernorm_after",
        "intermediate.dense",
        "intermediate.intermediate_act_fn",
        "output.dense",
        containers=("intermediate", "output"),
        dropouts=("output.dropout",),
        **rest,
    )


VIT = Layer(
    "layernorm_before",
    "attention",
    ("dropout",),
    (_mlp("layernorm_after", dropouts=("dropout",)), _intermediate()),
    dropouts=("dropout",),
)
BEIT = Layer(
    "layernorm_before",
    "attention",
    ("dropout", "lambda_1", "drop_path"),
    (
        _mlp("layernorm_after", dropouts=("dropout",), layer_scale="lambda_2", drop_path="drop_path"),
        _intermediate(layer_scale="lambda_2", drop_path="drop_path"),
    ),
    dropouts=("dropout",),
    layer_scale="lambda_1",
    drop_path="drop_path",
)
DINOV2 = Layer(
    "norm1",
    "attention",
    ("layer_scale1", "drop_path"),
    tuple(
        _mlp("norm2", name, also=("layer_scale2",), layer_scale="layer_scale2.lambda1", drop_path="drop_path")
        for name in ("activation_fn", "activation")
    ),
    layer_scale="layer_scale1.lambda1",
    drop_path="drop_path",
)
CLIP = Layer("layer_norm1", "self_attn", (), (_mlp("layer_norm2"),))


def container_classes_beside(original: type[nn.Module]) -> tuple[type, ...]:
    """The MLP classes that a model's own module defines."""
    return tuple(
        thing
        for name, thing in vars(inspect.getmodule(original)).items()
        if isinstance(thing, type) and name.endswith(MLP_CONTAINERS) and issubclass(thing, nn.Module)
    )


class FusedLayer(FusedBlockBase):
    """An encoder layer of transformers with its second norm, MLP, LayerScale and residual as one operator.

    Its three projections stay linears of torch; see whole_block for the rest.
    """

    layer_spec: Layer
    returns_tuple: bool

    @classmethod
    def parts_of(cls, module: Any) -> NormMlp | None:
        return next((parts for parts in cls.layer_spec.mlp if parts.fits(module)), None)

    @classmethod
    def container_classes(cls, module: Any) -> tuple[type, ...]:
        return container_classes_beside(cls.original)

    @classmethod
    def first_half_of(cls, module: Any) -> AttentionHalf | None:
        if getattr(module, "relative_position_bias", None) is not None:
            return None
        return next((half for half in cls.layer_spec.first_halves() if at(module, half.out) is not None), None)

    def mixed_heads(self, x: Tensor) -> Tensor:
        spec = type(self).layer_spec
        mixed: Tensor = getattr(self, spec.attention).mixed_heads(getattr(self, spec.norm)(x))
        return mixed

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """[B, N, C] -> the same, in the tuple that this version of transformers wants."""
        if self.runs_as_it_was():
            return super().forward(hidden_states, *args, **kwargs)
        layer = type(self).layer_spec
        attention_layer = getattr(self, layer.attention)
        if self.runs_whole() and not attention_layer.runs_as_it_was(args, kwargs):
            output = self.whole_block(hidden_states)
            return (output,) if type(self).returns_tuple else output
        branch, extras = self.attend(getattr(self, layer.norm)(hidden_states), *args, **kwargs)
        for name in layer.after:
            part = getattr(self, name, None)
            if isinstance(part, nn.Module):
                branch = part(branch)
            elif part is not None:
                branch = part * branch
        output = self.norm_mlp(branch + hidden_states)
        return (output, *extras) if type(self).returns_tuple else output

    def attend(self, normed: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Any, ...]]:
        """The attention layer's output, and whatever else it returned."""
        result = getattr(self, type(self).layer_spec.attention)(normed, *args, **kwargs)
        if isinstance(result, tuple):
            return result[0], tuple(extra for extra in result[1:] if extra is not None)
        return result, ()


class FusedLayerWithBias(FusedLayer):
    """BEiT's layer makes its attention's position bias; transformers 4 leaves that to the attention."""

    def attend(self, normed: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Any, ...]]:
        if not hasattr(self, "relative_position_bias"):
            return super().attend(normed, *args, **kwargs)
        return self._attend_with_bias(normed, *args, **kwargs)

    def _attend_with_bias(
        self,
        normed: Tensor,
        attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, tuple[Any, ...]]:
        if self.relative_position_bias is not None:
            if resolution is None:
                raise ValueError("resolution is None: a BEiT layer with a position bias needs (height, width)")
            window = (resolution[0] // self.patch_size, resolution[1] // self.patch_size)
            bias = self.relative_position_bias(window, interpolate_pos_encoding, dim_size=normed.shape[1])
            attention_mask = bias if attention_mask is None else bias + attention_mask
        return super().attend(normed, attention_mask=attention_mask, **kwargs)


class FusedPoolingHead(FusedNormMlp):
    """SigLIP's pooling head: one query a picture attends to all tokens, then norm, MLP and residual."""

    kind = "attention, norm + MLP"

    @classmethod
    def parts_of(cls, module: Any) -> NormMlp:
        return NormMlp("layernorm", "mlp.fc1", "mlp.activation_fn", "mlp.fc2", containers=("mlp",))

    @classmethod
    def container_classes(cls, module: Any) -> tuple[type, ...]:
        return container_classes_beside(cls.original)

    @classmethod
    def reasons(cls, module: Any) -> list[str]:
        mha = module.attention
        if type(mha) is not nn.MultiheadAttention:
            return [f"attention is {describe(mha)}: accepted is torch.nn.MultiheadAttention"]
        reasons = dropout_reasons("attention", mha.dropout, module.training) + touch_reasons("attention", mha)
        return reasons + tensor_reasons("attention.in_proj_weight", mha.in_proj_weight) + super().reasons(module)

    @classmethod
    def bypassed(cls, module: Any) -> list[nn.Module]:
        return [*super().bypassed(module), *at(module, "attention").modules()]

    @classmethod
    def head_width(cls, module: Any) -> int:
        return int(module.attention.head_dim)

    def forward(self, hidden_state: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Tokens [B, N, C] -> pooled [B, C]."""
        mha = self.attention
        if attention_mask is not None:
            return super().forward(hidden_state, attention_mask)
        changed = type(mha) is not nn.MultiheadAttention or is_touched(mha) or (self.training and mha.dropout)
        if changed or self.runs_as_it_was():
            return super().forward(hidden_state)
        C = mha.embed_dim
        weight, bias = mha.in_proj_weight, mha.in_proj_bias
        probe = self.probe.expand(hidden_state.shape[0], -1, -1)
        q = F.linear(probe, weight[:C], bias[:C]).unflatten(-1, (mha.num_heads, -1)).transpose(1, 2)
        kv = F.linear(hidden_state, weight[C:], bias[C:]).unflatten(-1, (2, mha.num_heads, -1))
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        pooled = attention(q, k, v, backend=self.vit_fast_backend).transpose(1, 2).flatten(2)
        return self.norm_mlp(F.linear(pooled, mha.out_proj.weight, mha.out_proj.bias))[:, 0]


CLASSES: dict[str, dict[str, Layer | type[FusedModule]]] = {
    "vit": {"ViTLayer": VIT, "ViTAttention": FusedSelfAttention, "ViTSelfAttention": FusedSelfAttention},
    "deit": {"DeiTLayer": VIT, "DeiTAttention": FusedSelfAttention, "DeiTSelfAttention": FusedSelfAttention},
    "dinov2": {"Dinov2Layer": DINOV2, "Dinov2Attention": FusedSelfAttention, "Dinov2SelfAttention": FusedSelfAttention},
    "dinov2_with_registers": {
        "Dinov2WithRegistersLayer": DINOV2,
        "Dinov2WithRegistersAttention": FusedSelfAttention,
        "Dinov2WithRegistersSelfAttention": FusedSelfAttention,
    },
    "clip": {"CLIPEncoderLayer": CLIP, "CLIPAttention": FusedSelfAttention},
    "siglip": {
        "SiglipEncoderLayer": CLIP,
        "SiglipAttention": FusedSelfAttention,
        "SiglipMultiheadAttentionPoolingHead": FusedPoolingHead,
    },
    "siglip2": {
        "Siglip2EncoderLayer": CLIP,
        "Siglip2Attention": FusedSelfAttention,
        "Siglip2MultiheadAttentionPoolingHead": FusedPoolingHead,
    },
    "beit": {"BeitLayer": BEIT, "BeitAttention": FusedSelfAttention, "BeitSelfAttention": FusedSelfAttention},
}
PREFIX = "Fused"


def _home(model: str) -> str:
    return f"transformers.models.{model}.modeling_{model}"


def _names() -> Iterator[tuple[str, str]]:
    """Every (model, class) that has a fused form."""
    for model, classes in CLASSES.items():
        for name in classes:
            yield model, name


def _make(model: str, name: str) -> type[FusedModule]:
    """The fused class of one of transformers' classes, made once and kept as a global of this module for pickle."""
    original = getattr(importlib.import_module(_home(model)), name)
    made_for = CLASSES[model][name]
    namespace: dict[str, Any] = {}
    if isinstance(made_for, Layer):
        base: type[FusedModule] = FusedLayerWithBias if made_for is BEIT else FusedLayer
        namespace = {"layer_spec": made_for, "returns_tuple": _returns_tuple(original.forward)}
    else:
        base = made_for
    namespace |= {"__module__": __name__, "__qualname__": PREFIX + name, "__doc__": base.__doc__}
    fused: type[FusedModule] = fused_form_of(original)(type(PREFIX + name, (base, original), namespace))
    globals()[PREFIX + name] = fused
    return fused


def _returns_tuple(forward: Callable[..., Any]) -> bool:
    """Whether this version's layer returns a tuple; its annotation is what tells."""
    return "tuple" in str(inspect.signature(forward).return_annotation).lower()


def __getattr__(name: str) -> Any:
    for model, original in _names():
        if name == PREFIX + original:
            return _make(model, original)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def fused_form(cls: type[nn.Module]) -> type[FusedModule] | None:
    """The fused class for one of transformers', or None."""
    for model, name in _names():
        if cls.__name__ == name and cls.__module__ == _home(model):
            if _only_wraps_attention(cls):
                return None
            return globals().get(PREFIX + name) or _make(model, name)
    return None


def _only_wraps_attention(cls: type[nn.Module]) -> bool:
    """transformers 4 has ViTAttention around ViTSelfAttention and ViTSelfOutput: the inner one is fused."""
    if not cls.__name__.endswith("Attention") or cls.__name__.endswith("SelfAttention"):
        return False
    return hasattr(inspect.getmodule(cls), cls.__name__.replace("Attention", "SelfAttention"))


def left_reason(cls: type[nn.Module]) -> str | None:
    """Why a class of transformers' is never fused, where that is known."""
    if "Rope" in cls.__name__ or "DINOv3" in cls.__name__:
        return "rotary positions"
    if cls.__name__ == "BeitSdpaSelfAttention":
        return "it adds a relative position bias"
    return None

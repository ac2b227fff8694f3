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

from torch import Tensor, nn

from .common import FusedModule, NormMlp, at, fused_form_of
from .transformers_attention import (
    ATTENTION_NAME,
    FusedPoolingHead,
    FusedSelfAttention,
    attention_forward,
    container_classes_beside,
    register_attention,
)
from .whole_block import AttentionHalf, FusedBlockBase

__all__ = ["ATTENTION_NAME", "attention_forward", "fused_form", "left_reason", "register_attention"]

register_attention()


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

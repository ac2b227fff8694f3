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

from ..block import AttentionParts, MlpParts
from ..reading import Reader, describe
from .common import FusedModule, FusedNormMlp, fused_form_of
from .transformers_attention import (
    ATTENTION_NAME,
    DROPOUT_RATES,
    FusedPoolingHead,
    FusedSelfAttention,
    attention_forward,
    container_classes_beside,
    projections_of,
    register_attention,
)

__all__ = ["ATTENTION_NAME", "attention_forward", "fused_form", "left_reason", "register_attention"]

register_attention()


@dataclass(frozen=True)
class Layer:
    """How an encoder layer names its parts: x + after(attention(norm(x))), then norm and MLP.

    Attributes:
        norms: The two LayerNorms.
        attention: The attention layer.
        after: Modules called and Parameters multiplied behind it, in order.
        dropouts, drop_path: Of either half.
        layer_scales: Parameters, or dotted paths to them.
        scale_modules: Modules that hold those.
    """

    norms: tuple[str, str]
    attention: str
    after: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()
    drop_path: str | None = None
    layer_scales: tuple[str | None, str | None] = (None, None)
    scale_modules: tuple[str, ...] = ()


VIT = Layer(("layernorm_before", "layernorm_after"), "attention", ("dropout",), dropouts=("dropout",))
BEIT = Layer(
    ("layernorm_before", "layernorm_after"),
    "attention",
    ("dropout", "lambda_1", "drop_path"),
    dropouts=("dropout",),
    drop_path="drop_path",
    layer_scales=("lambda_1", "lambda_2"),
)
DINOV2 = Layer(
    ("norm1", "norm2"),
    "attention",
    ("layer_scale1", "drop_path"),
    drop_path="drop_path",
    layer_scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
    scale_modules=("layer_scale1", "layer_scale2"),
)
CLIP = Layer(("layer_norm1", "layer_norm2"), "self_attn")


class FusedLayer(FusedNormMlp):
    """An encoder layer of transformers with its second norm, MLP, LayerScale and residual as one operator.

    Or altogether a chain of kernels, where the attention layer has all four projections: in transformers 4 most do not.
    """

    layer_spec: Layer
    returns_tuple: bool

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        layer = cls.layer_spec
        name, module = layer.attention, block.reach(layer.attention)
        block.nothing("relative_position_bias")
        names = projections_of(module)
        if names is None or names.out is None or "original" not in vars(type(module)):
            block.reasons.append(f"{name} is {describe(module)}: accepted is a fused one with four projections")
            return None
        linears = [block.linear(f"{name}.{linear}") for linear in (names.query, names.key, names.value)]
        if not block.judge() or len({linear.weight.shape for linear in linears}) > 1:
            return None
        rate = next(rate for rate in DROPOUT_RATES if hasattr(module, rate))
        return block.attention(
            name,
            layer.norms[0],
            tuple(f"{name}.{linear}" for linear in (names.query, names.key, names.value)),
            f"{name}.{names.out}",
            inside={path: container_classes_beside(cls.original) for path in layer.scale_modules[:1]},
            dropouts=layer.dropouts,
            rates=(f"{name}.{rate}",),
            num_heads=linears[0].out_features // type(module).head_width(module),
            scale=module.vit_fast_scale,
            layer_scale=layer.layer_scales[0],
            drop_path=layer.drop_path,
        )

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        layer, known = cls.layer_spec, container_classes_beside(cls.original)
        if block.at("intermediate.dense") is not None:  # transformers 4: the two linears live apart
            linears = ("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense")
            inside: tuple[str, ...] = ("intermediate", "output")
            dropouts = tuple(f"output.{name}" for name in layer.dropouts)
        else:
            activation = "activation" if block.at("mlp.activation_fn") is None else "activation_fn"
            linears, inside, dropouts = ("mlp.fc1", f"mlp.{activation}", "mlp.fc2"), ("mlp",), layer.dropouts
        if any(block.at(path) is None for path in linears):
            mlp = describe(block.reach("mlp"))
            block.reasons.append(f"its MLP is {mlp}: accepted is fc2(activation(fc1(x))) where vit_fast knows it")
            return None
        return block.mlp(
            layer.norms[1],
            *linears,
            inside=dict.fromkeys((*inside, *layer.scale_modules[1:]), known),
            dropouts=dropouts,
            layer_scale=layer.layer_scales[1],
            drop_path=layer.drop_path,
        )

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """[B, N, C] -> the same, in the tuple that this version of transformers wants."""
        parts = self.ready()
        if parts is None:
            return super().forward(hidden_states, *args, **kwargs)
        layer = type(self).layer_spec
        extras: tuple[Any, ...] = ()

        def attend(x: Tensor) -> Tensor:
            nonlocal extras
            branch, extras = self.attend(getattr(self, layer.norms[0])(x), *args, **kwargs)
            for name in layer.after:
                part = getattr(self, name, None)
                if isinstance(part, nn.Module):
                    branch = part(branch)
                elif part is not None:
                    branch = part * branch
            return branch + x

        ordinary = parts.attention is not None and not parts.attention.module.runs_as_it_was(args, kwargs)
        output = self.run_as_block(parts, hidden_states, attend, ordinary)
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

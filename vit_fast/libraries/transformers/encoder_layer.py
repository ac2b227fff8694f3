"""Fused encoder layers of transformers, described by the names of their parts."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ...blocks.fused import FusedNormMlp, fused_class
from ...blocks.parts import AttentionParts, MlpParts
from ...blocks.plain import is_touched
from ...blocks.reading import Reader, describe
from .self_attention import (
    DROPOUT_RATES,
    OUTPUT_DROPOUT,
    QK_NORMS,
    FusedRotarySelfAttention,
    FusedSelfAttention,
    TransformersReader,
    container_classes_beside,
    is_set,
    projections_of,
    scale_name,
)


@dataclass(frozen=True)
class Layer:
    """Attribute names in an encoder layer: x + after(attention(norm(x))), then norm and MLP.

    Attributes:
        norms: The two norms.
        attention: The attention layer.
        after: Modules to call and Parameters to multiply after the attention layer, in order.
        mlp: The MLP.
        dropouts: Dropout modules, which the layer calls after attention and after the MLP.
        drop_path: The DropPath module, which it also calls twice.
        layer_scales: The LayerScale Parameters of the two halves, or dotted paths to them.
        scale_modules: Modules that contain these Parameters.
    """

    norms: tuple[str, str]
    attention: str = "attention"
    after: tuple[str, ...] = ()
    mlp: str = "mlp"
    dropouts: tuple[str, ...] = ()
    drop_path: str | None = None
    layer_scales: tuple[str | None, str | None] = (None, None)
    scale_modules: tuple[str, ...] = ()


# fc1, activation and fc2 of an MLP, and the gate if it has one; names with a dot are paths from the layer
MLPS: tuple[tuple[str, ...], ...] = (
    ("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),  # transformers 4
    ("fc1", "activation_fn", "fc2"),
    ("fc1", "activation", "fc2"),
    ("fc1", "act", "fc2"),
    ("linear_fc1", "act_fn", "linear_fc2"),
    ("up_proj", "act_fn", "down_proj", "gate_proj"),
    ("up_proj", "act_fn", "down_proj"),
)


class FusedLayer(FusedNormMlp):
    """An encoder layer of transformers as a sequence of fused kernels, if its attention layer has four projections.

    Otherwise, as with most models in transformers 4, norm, MLP, LayerScale and residual are one operator.
    """

    reader = TransformersReader
    layer_spec: ClassVar[Layer]
    vit_fast_returns_tuple: bool
    vit_fast_arguments: tuple[str, ...]

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        layer, known = cls.layer_spec, container_classes_beside(cls.original)
        name, module = layer.attention, block.watch(layer.attention)
        inside, dropouts = dict.fromkeys(layer.scale_modules[:1], known), layer.dropouts
        names = projections_of(module)
        out = names and names[3] and f"{name}.{names[3]}"
        block.require_absent("relative_position_bias")
        if block.at(f"{name}.output.dense") is not None:  # transformers 4: the output linear layer is in another module
            inside |= {name: known, f"{name}.output": known}
            out, dropouts = f"{name}.output.dense", (f"{name}.output.dropout",)
            name, module = f"{name}.attention", block.watch(f"{name}.attention")
            names = projections_of(module)
        if names is None or not out or not fused_class(module, FusedSelfAttention):
            block.reasons.append(f"{name} must be fused and have four projections, got {describe(module)}")
            return None
        qkv = tuple(f"{name}.{linear}" for linear in names[:3])
        linears = [block.linear(path) for path in qkv]
        if not block.check_fusible() or len({linear.weight.shape for linear in linears}) > 1:
            return None
        rate = next(rate for rate in DROPOUT_RATES if hasattr(module, rate))
        return block.attention(
            name,
            layer.norms[0],
            qkv,
            out,
            inside=inside,
            dropouts=dropouts,
            rates=(f"{name}.{rate}",),
            empty=(f"{name}.{OUTPUT_DROPOUT}",),
            qk_norm=(f"{name}.{QK_NORMS[0]}", f"{name}.{QK_NORMS[1]}"),
            qk_norm_over="width",
            num_heads=linears[0].out_features // type(module).head_width(module),
            scale=block.value(f"{name}.{scale_name(module)}"),
            rotates_halves=isinstance(module, FusedRotarySelfAttention),
            layer_scale=layer.layer_scales[0],
            drop_path=layer.drop_path,
        )

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        layer, known = cls.layer_spec, container_classes_beside(cls.original)
        inside: tuple[str, ...] = (layer.mlp,)
        dropouts = layer.dropouts
        candidates = ([name if "." in name else f"{layer.mlp}.{name}" for name in names] for names in MLPS)
        paths = next((paths for paths in candidates if all(block.at(path) is not None for path in paths)), None)
        if paths is None:
            mlp = describe(block.watch(layer.mlp))
            block.reasons.append(f"its MLP must have two or three linear layers with known names, got {mlp}")
            return None
        fc1, activation, fc2, *gate = paths
        if fc1.startswith("intermediate."):  # transformers 4: the two linear layers are in two modules
            inside, dropouts = ("intermediate", "output"), tuple(f"output.{name}" for name in dropouts)
        return block.mlp(
            layer.norms[1],
            fc1,
            activation,
            fc2,
            gate=gate[0] if gate else None,
            inside=dict.fromkeys((*inside, *layer.scale_modules[1:]), known),
            dropouts=dropouts,
            layer_scale=layer.layer_scales[1],
            drop_path=layer.drop_path,
        )

    def set_up(self) -> None:
        names = tuple(inspect.signature(type(self).original_forward).parameters)
        self.vit_fast_arguments = names[2:]
        # layers with this parameter return tuples, to which they can append attention weights
        self.vit_fast_returns_tuple = "output_attentions" in names

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """Maps [B, N, C] to [B, N, C], in a tuple if this version of transformers expects one."""
        parts, layer = self.ready(), type(self).layer_spec
        named = self.named(args, kwargs)
        # hooks on the attention layer would get arguments by keyword that transformers passes by position
        hooked = parts is not None and parts.attention is None and is_touched(getattr(self, layer.attention))
        if parts is None or hooked or is_set(named.get("output_attentions")):
            return super().forward(hidden_states, *args, **kwargs)

        def attend(x: Tensor) -> Tensor:
            branch = self.attend(getattr(self, layer.norms[0])(x), **named)
            for name in layer.after:
                part = getattr(self, name, None)
                if isinstance(part, nn.Module):
                    branch = part(branch)
                elif part is not None:
                    branch = part * branch
            return branch + x

        rope = keys = None
        attention = None if parts.attention is None else parts.attention.module
        if ordinary := attention is not None and not attention.needs_original_forward((), named):
            rope, keys = attention.rope_of(hidden_states, named), attention.keys_of(hidden_states, named)
        output = self.run_as_block(parts, hidden_states, attend, ordinary, rope, keys)
        return (output,) if self.vit_fast_returns_tuple else output

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of the attention layer by name; transformers passes some by position."""
        return {**dict(zip(self.vit_fast_arguments, args, strict=False)), **kwargs}

    def attend(self, normed: Tensor, **kwargs: Any) -> Tensor:
        result = getattr(self, type(self).layer_spec.attention)(normed, **kwargs)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output


class FusedBeitLayer(FusedLayer):
    """BEiT's layer, which computes the position bias of its attention; in transformers 4, the attention does that."""

    def attend(self, normed: Tensor, **kwargs: Any) -> Tensor:
        if hasattr(self, "relative_position_bias"):
            mask, resolution = kwargs.pop("attention_mask", None), kwargs.pop("resolution", None)
            interpolate = kwargs.pop("interpolate_pos_encoding", False)
            if self.relative_position_bias is not None and resolution is None:
                raise ValueError("resolution must be (height, width) for a BEiT layer with a position bias, got None")
            if self.relative_position_bias is not None:
                window = (resolution[0] // self.patch_size, resolution[1] // self.patch_size)
                bias = self.relative_position_bias(window, interpolate, dim_size=normed.shape[1])
                mask = bias if mask is None else bias + mask
            kwargs["attention_mask"] = mask
        return super().attend(normed, **kwargs)


class FusedVitPoseLayer(FusedLayer):
    """VitPose's layer with a single MLP, which ignores the index of the expert."""

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        if experts := block.value("mlp.num_experts"):
            block.reasons.append(f"mlp must be a single MLP, got {describe(block.watch('mlp'))} with {experts} experts")
            return None
        return super().read_mlp(block)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in super().named(args, kwargs).items() if name != "dataset_index"}


def layer_of(layer: Layer, base: type[FusedLayer] = FusedLayer) -> type[FusedLayer]:
    """Returns the fused class of an encoder layer whose parts have these names."""
    return type(base.__name__, (base,), {"layer_spec": layer, "__doc__": base.__doc__})


VIT_NORMS = ("layernorm_before", "layernorm_after")
VIT = layer_of(Layer(VIT_NORMS, after=("dropout",), dropouts=("dropout",)))
PIXIO = layer_of(Layer(VIT_NORMS, after=("dropout", "drop_path"), dropouts=("dropout",), drop_path="drop_path"))
VITPOSE = layer_of(Layer(VIT_NORMS), FusedVitPoseLayer)
INTERNVL = layer_of(Layer(VIT_NORMS, after=("lambda_1",), dropouts=("dropout",), layer_scales=("lambda_1", "lambda_2")))
BEIT = layer_of(
    Layer(
        VIT_NORMS,
        after=("dropout", "lambda_1", "drop_path"),
        dropouts=("dropout",),
        drop_path="drop_path",
        layer_scales=("lambda_1", "lambda_2"),
    ),
    FusedBeitLayer,
)
DINOV2 = layer_of(
    Layer(
        ("norm1", "norm2"),
        after=("layer_scale1", "drop_path"),
        drop_path="drop_path",
        layer_scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
        scale_modules=("layer_scale1", "layer_scale2"),
    )
)
AIMV2 = layer_of(Layer(("rms_norm1", "rms_norm2"), mlp="ffn"))
CLIP = layer_of(Layer(("layer_norm1", "layer_norm2"), "self_attn"))
JANUS = layer_of(Layer(("layer_norm1", "layer_norm2"), "self_attn", dropouts=("mlp.dropout1", "mlp.dropout2")))

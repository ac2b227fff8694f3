"""Vision models of transformers 4.53 and newer: ViT, DeiT, DINOv2 (with registers), CLIP, SigLIP, SigLIP 2, BEiT."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ..blocks.fused import Forms, FusedModule, FusedNormMlp, fused_class
from ..blocks.parts import AttentionParts, MlpParts
from ..blocks.plain import is_touched
from ..blocks.reading import Reader, describe
from .transformers_attention import (
    AFTERWARDS,
    DROPOUT_RATES,
    QK_NORMS,
    FusedAttentionPoolingHead,
    FusedPoolingHead,
    FusedRotarySelfAttention,
    FusedSelfAttention,
    TransformersReader,
    container_classes_beside,
    given,
    projections_of,
    scale_name,
)


@dataclass(frozen=True)
class Layer:
    """Names of the parts of an encoder layer: x + after(attention(norm(x))), then norm and MLP.

    Attributes:
        norms: The two LayerNorms.
        attention: The attention layer.
        after: Modules to call and Parameters to multiply after the attention layer, in order.
        mlp: The MLP.
        dropouts, drop_path: Modules after attention and after the MLP.
        layer_scales: The LayerScale Parameters, or dotted paths to them.
        scale_modules: Modules that contain these Parameters.
    """

    norms: tuple[str, str]
    attention: str
    after: tuple[str, ...] = ()
    mlp: str = "mlp"
    dropouts: tuple[str, ...] = ()
    drop_path: str | None = None
    layer_scales: tuple[str | None, str | None] = (None, None)
    scale_modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mlp:
    """Names of the parts of an MLP. In transformers 4, with two modules per MLP, they are paths from the layer."""

    fc1: str
    activation: str
    fc2: str
    gate: str | None = None

    def paths(self, layer: Layer) -> tuple[str, ...]:
        """Returns the dotted paths of all parts from the layer, the gate last."""
        names = [name for name in (self.fc1, self.activation, self.fc2, self.gate) if name]
        return tuple(name if "." in name else f"{layer.mlp}.{name}" for name in names)


MLPS = (
    Mlp("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
    Mlp("fc1", "activation_fn", "fc2"),
    Mlp("fc1", "activation", "fc2"),
    Mlp("fc1", "act", "fc2"),
    Mlp("linear_fc1", "act_fn", "linear_fc2"),
    Mlp("up_proj", "act_fn", "down_proj", "gate_proj"),
    Mlp("up_proj", "act_fn", "down_proj"),
)

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
INTERNVL = Layer(
    ("layernorm_before", "layernorm_after"),
    "attention",
    ("lambda_1",),
    dropouts=("dropout",),
    layer_scales=("lambda_1", "lambda_2"),
)
PIXIO = Layer(
    ("layernorm_before", "layernorm_after"),
    "attention",
    ("dropout", "drop_path"),
    dropouts=("dropout",),
    drop_path="drop_path",
)
VITPOSE = Layer(("layernorm_before", "layernorm_after"), "attention")
JANUS = Layer(("layer_norm1", "layer_norm2"), "self_attn", dropouts=("mlp.dropout1", "mlp.dropout2"))
AIMV2 = Layer(("rms_norm1", "rms_norm2"), "attention", mlp="ffn")
CLIP = Layer(("layer_norm1", "layer_norm2"), "self_attn")


class FusedLayer(FusedNormMlp):
    """An encoder layer of transformers with its second norm, MLP, LayerScale and residual as one operator.

    The whole layer is a sequence of fused kernels if the attention layer has all four projections; in transformers 4
    most do not.
    """

    reader = TransformersReader
    layer_spec: ClassVar[Layer]
    vit_fast_returns_tuple: bool
    vit_fast_arguments: tuple[str, ...]

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        layer, known = cls.layer_spec, container_classes_beside(cls.original)
        name, module = layer.attention, block.reach(layer.attention)
        inside, dropouts = dict.fromkeys(layer.scale_modules[:1], known), layer.dropouts
        block.nothing("relative_position_bias")
        names = projections_of(module)
        out = names and names.out and f"{name}.{names.out}"
        if block.at(f"{name}.output.dense") is not None:  # transformers 4: the output linear layer is in another module
            inside |= {name: known, f"{name}.output": known}
            out, dropouts = f"{name}.output.dense", (f"{name}.output.dropout",)
            name, module = f"{name}.attention", block.reach(f"{name}.attention")
            names = projections_of(module)
        if names is None or not out or not fused_class(module, FusedSelfAttention):
            block.reasons.append(f"{name} must be fused and have four projections, got {describe(module)}")
            return None
        linears = [block.linear(f"{name}.{linear}") for linear in (names.query, names.key, names.value)]
        if not block.judge() or len({linear.weight.shape for linear in linears}) > 1:
            return None
        rate = next(rate for rate in DROPOUT_RATES if hasattr(module, rate))
        return block.attention(
            name,
            layer.norms[0],
            tuple(f"{name}.{linear}" for linear in (names.query, names.key, names.value)),
            out,
            inside=inside,
            dropouts=dropouts,
            rates=(f"{name}.{rate}",),
            empty=[f"{name}.{after}" for after in AFTERWARDS],
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
        names = next((names for names in MLPS if all(block.at(path) is not None for path in names.paths(layer))), None)
        if names is None:
            mlp = describe(block.reach(layer.mlp))
            block.reasons.append(f"its MLP must have two or three linear layers with known names, got {mlp}")
            return None
        if names.fc1.startswith("intermediate."):  # transformers 4: the two linear layers are in two modules
            inside, dropouts = ("intermediate", "output"), tuple(f"output.{name}" for name in layer.dropouts)
        fc1, activation, fc2, *gate = names.paths(layer)
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
        # every version that returns a tuple can add attention weights to it
        self.vit_fast_returns_tuple = "output_attentions" in names

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """Maps [B, N, C] to [B, N, C], in a tuple if this version of transformers expects one."""
        parts, layer = self.ready(), type(self).layer_spec
        given_by_name = self.named(args, kwargs)
        # hooks on the attention layer see its arguments, which some models pass by keyword
        hooked = parts is not None and parts.attention is None and is_touched(getattr(self, layer.attention))
        if parts is None or hooked or given(given_by_name.get("output_attentions")):
            return super().forward(hidden_states, *args, **kwargs)

        def attend(x: Tensor) -> Tensor:
            branch = self.attend(getattr(self, layer.norms[0])(x), **given_by_name)
            for name in layer.after:
                part = getattr(self, name, None)
                if isinstance(part, nn.Module):
                    branch = part(branch)
                elif part is not None:
                    branch = part * branch
            return branch + x

        rope = keys = None
        if ordinary := parts.attention is not None and not parts.attention.module.needs_original_forward(
            (), given_by_name
        ):
            rope = parts.attention.module.rope_of(hidden_states, given_by_name)
            keys = parts.attention.module.keys_of(hidden_states, given_by_name)
        output = self.run_as_block(parts, hidden_states, attend, ordinary, rope, keys)
        return (output,) if self.vit_fast_returns_tuple else output

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of the attention layer by name; transformers passes some by position."""
        return {**dict(zip(self.vit_fast_arguments, args, strict=False)), **kwargs}

    def attend(self, normed: Tensor, **kwargs: Any) -> Tensor:
        """Returns the output of the attention layer."""
        result = getattr(self, type(self).layer_spec.attention)(normed, **kwargs)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output


class FusedLayerWithBias(FusedLayer):
    """BEiT's layer, which computes the position bias of its attention; transformers 4 does that in the attention."""

    def attend(self, normed: Tensor, **kwargs: Any) -> Tensor:
        if not hasattr(self, "relative_position_bias"):
            return super().attend(normed, **kwargs)
        return self._attend_with_bias(normed, **kwargs)

    def _attend_with_bias(
        self,
        normed: Tensor,
        attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if self.relative_position_bias is not None:
            if resolution is None:
                raise ValueError("resolution must be (height, width) for a BEiT layer with a position bias, got None")
            window = (resolution[0] // self.patch_size, resolution[1] // self.patch_size)
            bias = self.relative_position_bias(window, interpolate_pos_encoding, dim_size=normed.shape[1])
            attention_mask = bias if attention_mask is None else bias + attention_mask
        return super().attend(normed, attention_mask=attention_mask, **kwargs)


class FusedLayerOfOneMlp(FusedLayer):
    """VitPose's layer with a single MLP, which ignores the index of the expert."""

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        if experts := block.value("mlp.num_experts"):
            block.reasons.append(f"mlp must be a single MLP, got {describe(block.reach('mlp'))} with {experts} experts")
            return None
        return super().read_mlp(block)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in super().named(args, kwargs).items() if name != "dataset_index"}


def layer_of(spec: Layer, base: type[FusedLayer] = FusedLayer) -> type[FusedLayer]:
    """Returns the fused class for a layer whose parts have these names."""
    return type(base.__name__, (base,), {"layer_spec": spec, "__doc__": base.__doc__})


# Maps each model to its layer and the prefix of its class names.
LAYERS: dict[str, tuple[type[FusedLayer], str]] = {
    "vit": (layer_of(VIT), "ViT"),
    "deit": (layer_of(VIT), "DeiT"),
    "dinov2": (layer_of(DINOV2), "Dinov2"),
    "dinov2_with_registers": (layer_of(DINOV2), "Dinov2WithRegisters"),
    "clip": (layer_of(CLIP), "CLIPEncoder"),
    "siglip": (layer_of(CLIP), "SiglipEncoder"),
    "siglip2": (layer_of(CLIP), "Siglip2Encoder"),
    "beit": (layer_of(BEIT, FusedLayerWithBias), "Beit"),
    "dinov3_vit": (layer_of(DINOV2), "DINOv3ViT"),
    "aimv2": (layer_of(AIMV2), "Aimv2Encoder"),
    "internvl": (layer_of(INTERNVL), "InternVLVision"),
    # copies of the layers above
    "ijepa": (layer_of(VIT), "IJepa"),
    "vit_mae": (layer_of(VIT), "ViTMAE"),
    "vit_msn": (layer_of(VIT), "ViTMSN"),
    "vivit": (layer_of(VIT), "Vivit"),
    "eomt": (layer_of(DINOV2), "Eomt"),
    "eomt_dinov3": (layer_of(DINOV2), "EomtDinov3"),
    "tipsv2": (layer_of(DINOV2), "Tipsv2Vision"),
    "altclip": (layer_of(CLIP), "AltCLIPEncoder"),
    "chinese_clip": (layer_of(CLIP), "ChineseCLIPVision"),
    "clipseg": (layer_of(CLIP), "CLIPSegEncoder"),
    "metaclip_2": (layer_of(CLIP), "MetaClip2Encoder"),
    "unlimited_ocr": (layer_of(CLIP), "UnlimitedOcrEncoder"),
    "ovis2": (layer_of(AIMV2), "Ovis2VisionEncoder"),
    "janus": (layer_of(JANUS), "JanusVisionEncoder"),
    "kosmos2": (layer_of(CLIP), "Kosmos2VisionEncoder"),
    "owlv2": (layer_of(CLIP), "Owlv2Encoder"),
    "owlvit": (layer_of(CLIP), "OwlViTEncoder"),
    "pixio": (layer_of(PIXIO), "Pixio"),
    "radio": (layer_of(DINOV2), "Radio"),
    "yolos": (layer_of(VIT), "Yolos"),
    "dpt": (layer_of(VIT), "DPTViT"),
    "vitpose_backbone": (layer_of(VITPOSE, FusedLayerOfOneMlp), "VitPoseBackbone"),
}


ROTARY = {"dinov3_vit", "eomt_dinov3"}


def _mixins() -> dict[str, type[FusedModule]]:
    found: dict[str, type[FusedModule]] = {}
    for model, (layer, name) in LAYERS.items():
        home = f"transformers.models.{model}.modeling_{model}"
        short = "DPT" if model == "dpt" else name.removesuffix("Encoder")  # DPTViTLayer holds DPTSelfAttention
        found[f"{home}.{name}Layer"] = layer
        for attention in ("Attention", "SelfAttention"):
            found[f"{home}.{short}{attention}"] = FusedRotarySelfAttention if model in ROTARY else FusedSelfAttention
        found[f"{home}.{short}MultiheadAttentionPoolingHead"] = FusedPoolingHead
        found[f"{home}.{short}AttentionPoolingHead"] = FusedAttentionPoolingHead
    return found


class _Forms(Forms):
    def of(self, original: type[nn.Module]) -> type[FusedModule] | None:
        return None if _only_wraps_attention(original) else super().of(original)


def _only_wraps_attention(cls: type[nn.Module]) -> bool:
    """Returns True for ViTAttention of transformers 4.

    It contains ViTSelfAttention, which is fused, and ViTSelfOutput.
    """
    if not cls.__name__.endswith("Attention") or cls.__name__.endswith("SelfAttention"):
        return False
    return hasattr(inspect.getmodule(cls), cls.__name__.replace("Attention", "SelfAttention"))


FORMS = _Forms(globals(), _mixins())
SKIPPED = {
    ".*Rope.*Attention.*|.*Attention.*Rope.*": "rotary positions",
    "BeitSdpaSelfAttention": "it adds a relative position bias",
}


def __getattr__(name: str) -> Any:
    return FORMS.named(name)

"""timm's vision transformers: weight names (ours are timm's), config.json, a peer with our weights, and export."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...config import DataConfig, ViTConfig
from ...errors import UnsupportedInputError, pair, raise_unsupported
from ...variants import get_variant
from ..interface.image_model import Facts, ImageModel, comes_from, switch
from ..interface.weight_names import Converted, Rule, config_reasons, parts, rename, with_key_biases

NAME = "timm"
CONFIG_KEYS = {"pretrained_cfg", "architecture"}  # one of them is in every config.json of the library
SIGNATURE = r"(^|^visual\.trunk\.)patch_embed\.proj\.weight$"

RULES: tuple[Rule, ...] = (
    (r"visual\.trunk\.(.+)", r"\1"),
    (r"text\..+|logit_scale|logit_bias|visual\.head\..+", None),
    # parts of self-supervised training: decoder, projectors and heads of the loss
    (r"mask_token|(decoder|predictor|projector|prototypes|\w+_head)(_\w+)?(\..+)?", None),
    (r"register_tokens", "reg_token"),
    (r"blocks\.(\d+)\.gamma_([12])", r"blocks.\1.ls\2.gamma"),
    *parts(r"(blocks\.\d+\.attn)\.(?:NAME_bias|NAME_proj\.bias)", "qkv", r"\1.qkv.bias"),
    *parts(r"(blocks\.\d+\.attn)\.NAME_proj\.weight", "qkv", r"\1.qkv.weight"),
    *parts(r"(blocks\.\d+\.mlp)\.fc1_NAME\.(weight|bias)", "gx", r"\1.fc1.\2"),
    (r"(blocks\.\d+\.mlp)\.w12\.(weight|bias)", r"\1.fc1.\2"),
    (r"(blocks\.\d+\.mlp)\.w3\.(weight|bias)", r"\1.fc2.\2"),
)


def convert(state: Mapping[str, Tensor], config: ViTConfig) -> Converted:
    """Converts old names; for DINOv2's original files with registers, adds the class position to the class token."""
    state = {re.sub(r"^blocks\.\d+\.(?=\d+\.)", "blocks.", name): t for name, t in state.items()}  # DINOv2's chunks
    converted = rename(with_key_biases(state, r"(blocks\.\d+\.attn\.)q(_bias|_proj\.bias)"), NAME, RULES)
    if "register_tokens" in state:
        converted.fold_class_position(config)
    weight, patch = converted.tensors["patch_embed.proj.weight"], (config.in_chans, *config.patch_hw)
    if weight.dim() == 2 and weight.shape[1] == math.prod(patch):
        converted.tensors["patch_embed.proj.weight"] = weight.reshape(-1, *patch)
    return converted


def read_config(config: Mapping[str, Any]) -> Facts:
    """Reads timm's config.json; raises ValueError if it sets an option that ViTConfig does not have."""
    pretrained = config.get("pretrained_cfg") or config
    labels = {**pretrained, **config}
    names, texts = labels.get("label_names") or (), labels.get("label_descriptions") or {}
    facts = Facts(class_names=tuple(str(texts.get(name, name)) for name in names) or None)
    fields: dict[str, Any] = dict(config.get("model_args") or {})
    if (num_classes := config.get("num_classes", pretrained.get("num_classes"))) is not None:
        fields["num_classes"] = num_classes
    if (input_size := pretrained.get("input_size")) is not None:
        fields |= {"in_chans": input_size[0], "img_size": tuple(input_size[1:])}
    try:
        variant = get_variant(str(config.get("architecture", "")))
    except ValueError as error:
        facts.notes.append(f"the architecture in config.json is not used: {error}")
    else:
        facts.config = variant.config.replace(**fields)
    try:
        facts.data_config = _data_config(pretrained)
    except ValueError as error:
        facts.notes.append(f"the preprocessing in config.json is not used: {error}")
    return facts


def _data_config(pretrained: Mapping[str, Any]) -> DataConfig | None:
    """Returns the preprocessing of a pretrained_cfg, or None if it does not contain mean and std."""
    keys = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
    known = {key: pretrained[key] for key in keys if pretrained.get(key) is not None}
    return DataConfig.from_dict(known) if {"mean", "std"} <= known.keys() else None


def build_peer(config: ViTConfig) -> nn.Module:
    """Builds timm's model of this shape; raises UnsupportedInputError with all reasons if there is none."""
    required = {
        "pos_embed": "learn", "stem_channels": (), "rope": None, "mlp_layer": "mlp", "norm_layer": "layer_norm",
        "embed_norm": False, "pool_heads": None, "pool_mlp_ratio": None,
    }  # fmt: skip
    raise_unsupported(NAME, config_reasons(config, **required))
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    # timm's arguments have the names of our fields; these two are classes
    names = inspect.signature(VisionTransformer).parameters.keys() - {"norm_layer", "mlp_layer"}
    fields = {name: getattr(config, name) for name in names if hasattr(config, name)}
    fields["norm_layer"] = functools.partial(nn.LayerNorm, eps=config.norm_eps)
    return (VisionTransformerDistilled if config.distilled else VisionTransformer)(**fields)


def recognize(model: Any) -> ImageModel | None:
    """Describes a model of timm for export; returns None for another model."""
    if not comes_from(NAME, model) or not hasattr(model, "forward_head") or not hasattr(model, "patch_embed"):
        return None
    pretrained = getattr(model, "pretrained_cfg", None) or {}
    patch_embed = model.patch_embed
    problems = [f"the model has no {name}" for name in ("blocks", "num_classes") if not hasattr(model, name)]
    if not hasattr(patch_embed, "patch_size") or getattr(patch_embed, "img_size", None) is None:
        problems.append("its patch embedding has no fixed image and patch size")
    raise_unsupported(f"export of timm's {type(model).__name__}", problems)
    data_config, reasons = None, dict[str, Any]()
    try:
        data_config = _data_config(pretrained)
    except ValueError as error:
        reasons["no_data_config"] = f"the model's preprocessing is not supported ({error})"
    names = tuple(pretrained.get("label_names") or ())
    return TimmModel(
        model=model, library=NAME, name=str(pretrained.get("architecture") or type(model).__name__),
        image_hw=pair("img_size", patch_embed.img_size), in_chans=patch_embed.proj.in_channels,
        patch_hw=pair("patch_size", patch_embed.patch_size), blocks="blocks",
        num_classes=int(model.num_classes), data_config=data_config,
        class_names=names if names and len(names) == model.num_classes else None,
        config={name: value for name, value in pretrained.items() if isinstance(value, str | int | float)}, **reasons,
    )  # fmt: skip


class TimmModel(ImageModel):
    def make_exportable(self, undo: contextlib.ExitStack, dynamic_size: bool) -> None:
        model: Any = self.model
        if not dynamic_size:
            return
        what, embed = f"dynamic_size with timm's {type(model).__name__}", model.patch_embed
        if (rope := getattr(model, "rope", None)) is not None:
            reason = f"its rotary embeddings ({type(rope).__name__}) are computed for one size only"
            advice = "vit_fast.create_model builds DINOv3 and EVA-02 for any size"
            raise UnsupportedInputError(what, [f"{reason}: {advice}"])
        if model.dynamic_img_size:
            return
        from timm.layers.format import Format

        if not hasattr(embed, "strict_img_size"):
            raise UnsupportedInputError(what, ["its patch embedding supports one image size only"])
        switch(undo, model, "dynamic_img_size", True)
        for name, value in (("strict_img_size", False), ("flatten", False), ("output_fmt", Format.NHWC)):
            switch(undo, embed, name, value)

"""Reads config.json and preprocessor_config.json of transformers: shape, head, class names and preprocessing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...config import DataConfig, Interpolation, RopeConfig, ViTConfig
from ..interface.image_model import Facts

# transformers' names of our activations; the peer gets the first name of an activation.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Defaults of transformers' configuration classes for fields that config.json omits.
_COMMON = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 224, "num_channels": 3}
_VIT = {"patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "intermediate_size": 3072}
_DINOV2 = {"patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "mlp_ratio": 4}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "vit": _VIT,
    "deit": _VIT,
    "dinov2": _DINOV2,
    "dinov2_with_registers": {**_DINOV2, "num_register_tokens": 4},
    "dinov3_vit": {
        "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "hidden_size": 384, "num_attention_heads": 6,
        "intermediate_size": 1536, "num_register_tokens": 0, "rope_theta": 100.0,
    },
    "clip": {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "intermediate_size": 3072},
    "siglip": {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "intermediate_size": 3072},
}  # fmt: skip
_PIL_FILTERS: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def wrote(config: Mapping[str, Any]) -> bool:
    """True if transformers wrote a config.json."""
    return "model_type" in config


def read_config(config: Mapping[str, Any]) -> Facts:
    """Reads transformers' config.json: shape, head and class names."""
    facts = Facts(config=ViTConfig(**vit_fields(config)))
    labels = config.get("id2label")
    if labels and facts.config is not None and facts.config.num_classes == len(labels):
        facts.class_names = tuple(str(labels[key]) for key in sorted(labels, key=int))
    return facts


def vit_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ViTConfig's fields from a transformers config.json; raises ValueError if the model is not supported."""
    family = str(config.get("model_type", "")).removesuffix("_vision_model")
    if family not in _DEFAULTS:
        raise ValueError(f"model_type must be one of {', '.join(_DEFAULTS)}, got {config.get('model_type')!r}")
    vision = {**_COMMON, **_DEFAULTS[family], **(config.get("vision_config") or config)}
    if vision["hidden_act"] not in ACTIVATIONS:
        raise ValueError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}, got {vision['hidden_act']!r}")
    for bias in ("proj_bias", "mlp_bias"):
        if not vision.get(bias, True):
            raise ValueError(f"{bias} must be True, got False")
    C = vision["hidden_size"]
    hidden = None if "mlp_ratio" in vision else vision["intermediate_size"]
    if vision.get("use_swiglu_ffn"):
        hidden = (int(int(C * vision["mlp_ratio"]) * 2 / 3) + 7) // 8 * 8
    mlp_ratio = vision["mlp_ratio"] if hidden is None else hidden / C
    if hidden is not None and int(C * mlp_ratio) != hidden:
        mlp_ratio = (hidden + 0.5) / C  # half a unit more, because ViTConfig rounds down
    image_size, patch_size = vision["image_size"], vision["patch_size"]
    fields = {
        "img_size": tuple(image_size) if isinstance(image_size, list) else image_size,
        "patch_size": tuple(patch_size) if isinstance(patch_size, list) else patch_size,
        "in_chans": vision["num_channels"],
        "embed_dim": C,
        "depth": vision["num_hidden_layers"],
        "num_heads": vision["num_attention_heads"],
        "mlp_ratio": mlp_ratio,
        "qkv_bias": vision.get("qkv_bias", True),
        "act_layer": ACTIVATIONS[vision["hidden_act"]],
        "norm_eps": vision["layer_norm_eps"],
        "num_classes": _num_classes(family, config),
    }
    return fields | _family_fields(family, config, vision)


def _family_fields(family: str, config: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    if family == "deit":
        return {"distilled": True}
    if family.startswith("dinov2"):
        registers = vision["num_register_tokens"] if family == "dinov2_with_registers" else 0
        layer_scale = {"init_values": vision.get("layerscale_value", 1.0)}
        swiglu = {"mlp_layer": "swiglu", "act_layer": "silu"} if vision.get("use_swiglu_ffn") else {}
        return layer_scale | swiglu | ({"reg_tokens": registers, "no_embed_class": True} if registers else {})
    if family == "dinov3_vit":
        return {
            "init_values": vision.get("layerscale_value", 1.0),
            "reg_tokens": vision["num_register_tokens"],
            "pos_embed": "none",
            "rope": RopeConfig(temperature=vision["rope_theta"]),
            "mlp_layer": "swiglu" if vision.get("use_gated_mlp") else "mlp",
            "qkv_bias": any(vision.get(f"{name}_bias", name != "key") for name in ("query", "key", "value")),
            "dynamic_img_size": True,
        }
    if family == "clip":
        return {"pre_norm": True}
    if family == "siglip":
        classifies = _classifies(config)
        return {"class_token": False, "global_pool": "avg" if classifies else "map", "fc_norm": False}
    return {}


def _num_classes(family: str, config: Mapping[str, Any]) -> int:
    architectures = config.get("architectures") or []
    if family == "clip" and any(a in ("CLIPModel", "CLIPVisionModelWithProjection") for a in architectures):
        return int(config.get("projection_dim", 512))
    if family.startswith("dino") or family == "clip" or not _classifies(config):
        return 0  # DINOv2's and CLIP's classifiers have other inputs than our head
    return len(config.get("id2label") or ()) or 2  # transformers omits its default, two labels


def _classifies(config: Mapping[str, Any]) -> bool:
    return any("ForImageClassification" in a for a in config.get("architectures") or ())


def data_config_from_processor(processor: Mapping[str, Any]) -> DataConfig:
    """Returns the DataConfig of a preprocessor_config.json; raises ValueError if DataConfig cannot represent it."""
    if not processor.get("do_rescale", True) or not math.isclose(processor.get("rescale_factor", 1 / 255), 1 / 255):
        raise ValueError("it does not scale pixels to [0, 1]")
    is_vit = _class_name(processor).startswith("ViT")
    resized, crop, squashes = _sizes(processor)
    crop_pct = crop / resized
    if math.floor(crop / crop_pct) != resized:
        crop_pct = math.nextafter(crop_pct, 0)
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if processor.get("do_normalize", True):
        if not is_vit and not {"image_mean", "image_std"} <= set(processor):
            raise ValueError("it has no image_mean and image_std")
        mean = tuple(processor.get("image_mean", (0.5, 0.5, 0.5)))
        std = tuple(processor.get("image_std", (0.5, 0.5, 0.5)))
    return DataConfig(
        mean=mean,
        std=std,
        interpolation=_PIL_FILTERS[processor.get("resample", 2 if is_vit else 3)],
        crop_pct=crop_pct,
        crop_mode="squash" if squashes else "center",
    )


def _sizes(processor: Mapping[str, Any]) -> tuple[int, int, bool]:
    """Returns the sizes after resizing and after cropping, in pixels, and True if both sides are resized."""
    size, crops = processor.get("size", 224), bool(processor.get("do_center_crop", False))
    if isinstance(size, Mapping):
        squashes = "height" in size
        resized = size["height"] if squashes else size["shortest_edge"]
        if squashes and size["height"] != size["width"]:
            raise ValueError(f"it resizes to {size['height']}x{size['width']}, not a square")
    else:  # old format: one number means both sides for ViT and DeiT, the shorter side for CLIP
        squashes = not crops or _class_name(processor).startswith(("ViT", "DeiT"))
        resized = size
    if not crops and not squashes:
        raise ValueError("it preserves the aspect ratio without a crop")
    crop = processor.get("crop_size", resized) if crops else resized
    if isinstance(crop, Mapping):
        crop = crop.get("height", crop.get("shortest_edge"))
    return resized, crop, squashes


def _class_name(processor: Mapping[str, Any]) -> str:
    """Returns the class of the processor; old files of ViT omit it."""
    return str(processor.get("image_processor_type") or processor.get("feature_extractor_type") or "ViT")

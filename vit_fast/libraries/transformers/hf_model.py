"""Vision models of transformers: weight names, configuration files, a peer with our weights, and models for export.

Files contain the weight names of transformers 4; models in memory have the names of the installed version.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from ...config import DataConfig, Interpolation, RopeConfig, ViTConfig
from ...errors import pair, raise_unsupported
from ..interface.image_model import Facts, ImageModel, comes_from, required_input_reasons, switch
from ..interface.weight_names import PLAIN_VIT, Converted, Rule, config_reasons, parts, rename, with_key_biases
from .attention_functions import is_plain, mask_unless_plain, plain_attention, plain_functions

NAME = "transformers"
CONFIG_KEYS = {"model_type"}  # one of them is in every config.json of the library
SIGNATURE = r"(^|\.)embeddings\.(patch_embeddings(\.projection)?|patch_embedding)\.weight$"

_VIT_PREFIX = r"(?:vit\.|deit\.|dinov2\.|dinov2_with_registers\.|dinov3_vit\.)?"
_VIT_BLOCK = _VIT_PREFIX + r"(?:encoder\.|model\.)?layers?\.(\d+)\."
_W = r"\.(weight|bias)"

VIT_RULES: tuple[Rule, ...] = (
    (_VIT_PREFIX + r"embeddings\.cls_token", "cls_token"),
    (_VIT_PREFIX + r"embeddings\.distillation_token", "dist_token"),
    (_VIT_PREFIX + r"embeddings\.register_tokens", "reg_token"),
    (_VIT_PREFIX + r"embeddings\.position_embeddings", "pos_embed"),
    (_VIT_PREFIX + r"embeddings\.patch_embeddings(?:\.projection)?" + _W, r"patch_embed.proj.\1"),
    (_VIT_PREFIX + r"(?:embeddings\.mask_token|pooler\..+)", None),
    (_VIT_BLOCK + r"(?:layernorm_before|norm1)" + _W, r"blocks.\1.norm1.\2"),
    (_VIT_BLOCK + r"(?:layernorm_after|norm2)" + _W, r"blocks.\1.norm2.\2"),
    *parts(_VIT_BLOCK + r"attention\.attention\.NAME" + _W, ("query", "key", "value"), r"blocks.\1.attn.qkv.\2"),
    *parts(_VIT_BLOCK + r"attention\.NAME_proj" + _W, "qkv", r"blocks.\1.attn.qkv.\2"),
    (_VIT_BLOCK + r"attention\.(?:output\.dense|o_proj)" + _W, r"blocks.\1.attn.proj.\2"),
    (_VIT_BLOCK + r"(?:intermediate\.dense|mlp\.fc1|mlp\.weights_in)" + _W, r"blocks.\1.mlp.fc1.\2"),
    (_VIT_BLOCK + r"(?:output\.dense|mlp\.fc2|mlp\.weights_out|mlp\.down_proj)" + _W, r"blocks.\1.mlp.fc2.\2"),
    (_VIT_BLOCK + r"layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
    (_VIT_PREFIX + r"(?:layer)?norm" + _W, r"norm.\1"),
    (r"(?:cls_)?classifier" + _W, r"head.\1"),
    (r"distillation_classifier" + _W, r"head_dist.\1"),
)

PLAIN_MLP_RULES: tuple[Rule, ...] = ((_VIT_BLOCK + r"mlp\.up_proj" + _W, r"blocks.\1.mlp.fc1.\2"),)
GATED_MLP_RULES = parts(_VIT_BLOCK + r"mlp\.NAME_proj" + _W, ("gate", "up"), r"blocks.\1.mlp.fc1.\2")

_TOWER = r"(?:vision_model\.)?"
_TOWER_BLOCK = _TOWER + r"encoder\.layers\.(\d+)\."

TOWER_RULES: tuple[Rule, ...] = (
    (_TOWER + r"embeddings\.class_embedding", "cls_token"),
    (_TOWER + r"embeddings\.patch_embedding" + _W, r"patch_embed.proj.\1"),
    (_TOWER + r"embeddings\.position_embedding\.weight", "pos_embed"),
    (_TOWER + r"embeddings\.position_ids", None),
    (_TOWER + r"pre_layrnorm" + _W, r"norm_pre.\1"),
    (_TOWER + r"post_layernorm" + _W, r"norm.\1"),
    (_TOWER_BLOCK + r"layer_norm([12])" + _W, r"blocks.\1.norm\2.\3"),
    *parts(_TOWER_BLOCK + r"self_attn\.NAME_proj" + _W, "qkv", r"blocks.\1.attn.qkv.\2"),
    (_TOWER_BLOCK + r"self_attn\.out_proj" + _W, r"blocks.\1.attn.proj.\2"),
    (_TOWER_BLOCK + r"mlp\.fc([12])" + _W, r"blocks.\1.mlp.fc\2.\3"),
    (_TOWER + r"head\.probe", "attn_pool.latent"),
    (_TOWER + r"head\.attention\.in_proj_(weight|bias)", r"attn_pool.in_proj.\1"),
    (_TOWER + r"head\.attention\.out_proj" + _W, r"attn_pool.proj.\1"),
    (_TOWER + r"head\.layernorm" + _W, r"attn_pool.norm.\1"),
    (_TOWER + r"head\.mlp\.fc([12])" + _W, r"attn_pool.mlp.fc\1.\2"),
    (r"visual_projection\.weight", "head.weight"),
    (r"classifier" + _W, r"head.\1"),
    (r"text_model\..+|text_projection\..+|logit_scale|logit_bias", None),
)


def convert(state: Mapping[str, Tensor], config: ViTConfig) -> Converted:
    """Converts transformers' names to timm's. Concatenates q, k and v, and adds a batch axis to embedding tables."""
    reads_token = f"the head reads the class token: global_pool must be 'token', got {config.global_pool!r}"
    token_problem = None if config.global_pool == "token" else reads_token
    unsupported = "which ViTConfig does not support"
    if not any(name.endswith("embeddings.patch_embedding.weight") for name in state):
        mlp_rules = GATED_MLP_RULES if any(".mlp.gate_proj." in name for name in state) else PLAIN_MLP_RULES
        state = with_key_biases(state, r"(.+\.attention\.)q(_proj\.bias)")  # DINOv3
        converted = rename(state, f"{NAME} ViT/DeiT/DINOv2", VIT_RULES + mlp_rules)
        converted.fold_class_position(config)
        converted.head_problem = token_problem
        if any("layer_scale1.lambda1" in name for name in state):
            reads = "DINOv2's classifier reads the class token and the mean of the patches"
            converted.head_problem = f"{reads}, {unsupported}"
        return converted

    is_clip = any("class_embedding" in name for name in state)
    converted = rename(state, f"{NAME} {'CLIP' if is_clip else 'SigLIP'}", TOWER_RULES)
    converted.add_batch_axis()
    for suffix in ("weight", "bias"):  # splits the packed projection of MultiheadAttention into timm's q and kv
        if (packed := converted.tensors.pop(f"attn_pool.in_proj.{suffix}", None)) is not None:
            origin, C = converted.origins.pop(f"attn_pool.in_proj.{suffix}"), packed.shape[0] // 3
            for name, part in ((f"attn_pool.q.{suffix}", packed[:C]), (f"attn_pool.kv.{suffix}", packed[C:])):
                converted.tensors[name], converted.origins[name] = part, origin
    if "visual_projection.weight" in state:
        converted.add_head_bias("visual_projection")
        converted.head_problem = token_problem
    elif "classifier.weight" in state and is_clip:
        reads = "CLIPForImageClassification's classifier reads patches before the final norm"
        converted.head_problem = f"{reads}, {unsupported}"
    elif "classifier.weight" in state and (config.global_pool != "avg" or config.norm_after_pool):
        needed = "the model must have global_pool='avg' and fc_norm=False"
        converted.head_problem = f"the head reads the mean of the normalized patches: {needed}"
    return converted


# transformers' names of our activations; the peer gets the first name of an activation.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu", "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip
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


def read_config(config: Mapping[str, Any]) -> Facts:
    """Reads transformers' config.json: shape, head and class names."""
    vit, labels = ViTConfig(**vit_fields(config)), config.get("id2label") or {}
    names = tuple(str(labels[key]) for key in sorted(labels, key=int))
    return Facts(config=vit, class_names=names if names and vit.num_classes == len(names) else None)


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
    C, mlp_ratio = vision["hidden_size"], vision.get("mlp_ratio")
    if mlp_ratio is None or vision.get("use_swiglu_ffn"):
        hidden = vision["intermediate_size"] if mlp_ratio is None else (int(int(C * mlp_ratio) * 2 / 3) + 7) // 8 * 8
        mlp_ratio = hidden / C
        if int(C * mlp_ratio) != hidden:
            mlp_ratio = (hidden + 0.5) / C  # half a unit more, because ViTConfig rounds down
    return {
        "img_size": vision["image_size"], "patch_size": vision["patch_size"], "in_chans": vision["num_channels"],
        "embed_dim": C, "depth": vision["num_hidden_layers"], "num_heads": vision["num_attention_heads"],
        "mlp_ratio": mlp_ratio, "qkv_bias": vision.get("qkv_bias", True),
        "act_layer": ACTIVATIONS[vision["hidden_act"]], "norm_eps": vision["layer_norm_eps"],
        **_family_fields(family, config, vision),
    }  # fmt: skip


def _family_fields(family: str, config: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    architectures = config.get("architectures") or []
    classifies = any("ForImageClassification" in name for name in architectures)
    labels = len(config.get("id2label") or ()) or 2  # transformers omits its default, two labels
    head = {"num_classes": labels if classifies else 0}
    if family == "siglip":
        return head | {"class_token": False, "global_pool": "avg" if classifies else "map", "fc_norm": False}
    if family in ("vit", "deit"):
        return head | {"distilled": family == "deit"}
    # DINOv2's and CLIP's classifiers have other inputs than our head
    if family == "clip":
        projects = {"CLIPModel", "CLIPVisionModelWithProjection"} & set(architectures)
        return {"num_classes": int(config.get("projection_dim", 512)) if projects else 0, "pre_norm": True}
    fields = {"num_classes": 0, "init_values": vision.get("layerscale_value", 1.0)}
    if family == "dinov3_vit":
        return fields | {
            "reg_tokens": vision["num_register_tokens"],
            "pos_embed": "none",
            "rope": RopeConfig(temperature=vision["rope_theta"]),
            "mlp_layer": "swiglu" if vision.get("use_gated_mlp") else "mlp",
            "qkv_bias": any(vision.get(f"{name}_bias", name != "key") for name in ("query", "key", "value")),
            "dynamic_img_size": True,
        }
    if family == "dinov2_with_registers" and (registers := vision["num_register_tokens"]):
        fields |= {"reg_tokens": registers, "no_embed_class": True}
    return fields | ({"mlp_layer": "swiglu", "act_layer": "silu"} if vision.get("use_swiglu_ffn") else {})


def data_config_from_processor(processor: Mapping[str, Any]) -> DataConfig:
    """Returns the DataConfig of a preprocessor_config.json; raises ValueError if DataConfig cannot represent it."""
    if not processor.get("do_rescale", True) or not math.isclose(processor.get("rescale_factor", 1 / 255), 1 / 255):
        raise ValueError("it does not scale pixels to [0, 1]")
    name = str(processor.get("image_processor_type") or processor.get("feature_extractor_type") or "ViT")
    is_vit = name.startswith("ViT")  # also old files, which omit the name
    size, crops = processor.get("size", 224), bool(processor.get("do_center_crop", False))
    if isinstance(size, Mapping):
        squashes = "height" in size
        if not squashes and "shortest_edge" not in size:
            raise ValueError(f"size must contain height and width, or shortest_edge, got {', '.join(size)}")
        resized = size["height"] if squashes else size["shortest_edge"]
        if squashes and size["height"] != size["width"]:
            raise ValueError(f"it resizes to {size['height']}x{size['width']}, not a square")
    else:  # old format: one number means both sides for ViT and DeiT, the shorter side for CLIP
        squashes, resized = not crops or name.startswith(("ViT", "DeiT")), size
    if not crops and not squashes:
        raise ValueError("it resizes only the shorter side and does not crop, so images would have different sizes")
    crop = processor.get("crop_size", resized) if crops else resized
    if isinstance(crop, Mapping):
        crop = crop.get("height", crop.get("shortest_edge"))
    crop_pct = crop / resized
    if math.floor(crop / crop_pct) != resized:
        crop_pct = math.nextafter(crop_pct, 0)
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if processor.get("do_normalize", True):
        if not is_vit and not {"image_mean", "image_std"} <= set(processor):
            raise ValueError("it must contain image_mean and image_std")
        mean, std = (tuple(processor.get(f"image_{name}", (0.5, 0.5, 0.5))) for name in ("mean", "std"))
    resample = processor.get("resample", 2 if is_vit else 3)
    if resample not in _PIL_FILTERS:
        raise ValueError(f"resample must be one of {_PIL_FILTERS}, got {resample!r}")
    return DataConfig(
        mean=mean, std=std, interpolation=_PIL_FILTERS[resample], crop_pct=crop_pct,
        crop_mode="squash" if squashes else "center",
    )  # fmt: skip


def build_peer(config: ViTConfig) -> nn.Module:
    """Builds transformers' model of this shape; raises UnsupportedInputError with all reasons if there is none."""
    raise_unsupported("transformers' ViT", config_reasons(config, **PLAIN_VIT))
    from transformers import ViTConfig as HFViTConfig
    from transformers import ViTForImageClassification

    hf_config = HFViTConfig(
        hidden_size=config.embed_dim, num_hidden_layers=config.depth, num_attention_heads=config.num_heads,
        intermediate_size=config.hidden_dim, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        hidden_act=next(name for name, act_layer in ACTIVATIONS.items() if act_layer == config.act_layer),
        layer_norm_eps=config.norm_eps, image_size=list(config.image_hw), patch_size=list(config.patch_hw),
        num_channels=config.in_chans, qkv_bias=config.qkv_bias, num_labels=config.num_classes,
        attn_implementation="sdpa",
    )  # fmt: skip
    return ViTForImageClassification(hf_config)


_ATTENTION_NAME = "vit_fast_export"


def recognize(model: Any) -> ImageModel | None:
    """Describes a vision model of transformers for export; returns None for other models."""
    if not comes_from(NAME, model) or not hasattr(getattr(model, "config", None), "patch_size"):
        return None
    config = model.config
    reasons = required_input_reasons(model)
    complex_buffers = [name for name, buffer in model.named_buffers() if buffer.is_complex()]
    reasons += [f"buffer {name} must be real, got complex numbers" for name in complex_buffers]
    raise_unsupported(f"export of transformers' {type(model).__name__}", reasons)
    labels = getattr(config, "id2label", None) or {}
    names = tuple(labels[i] for i in sorted(labels, key=int))
    classifies = "ForImageClassification" in type(model).__name__
    are_placeholders = all(re.fullmatch(r"LABEL_\d+", name) for name in names)
    return TransformersModel(
        model=model, library=NAME, name=getattr(config, "name_or_path", "") or type(model).__name__,
        image_hw=pair("image_size", config.image_size), in_chans=int(config.num_channels),
        patch_hw=pair("patch_size", config.patch_size),
        blocks=_block_list(model, int(config.num_hidden_layers)),
        num_classes=int(config.num_labels) if classifies else 0,
        class_names=names if classifies and not are_placeholders else None, config=config.to_diff_dict(),
    )  # fmt: skip


class TransformersModel(ImageModel):
    def make_exportable(self, undo: contextlib.ExitStack, dynamic_size: bool) -> None:
        """Selects an attention function that gets a mask only if one is necessary: images have no padding."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(_ATTENTION_NAME, plain_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION_NAME, mask_unless_plain)
        configs: list[Any] = [getattr(module, "config", None) for module in self.model.modules()]
        for config in {id(c): c for c in configs if hasattr(c, "_attn_implementation")}.values():
            name = config._attn_implementation
            is_eager = name == "eager" and name not in ALL_ATTENTION_FUNCTIONS
            if is_eager or is_plain(name, ALL_ATTENTION_FUNCTIONS, plain_functions()):
                switch(undo, config, "_attn_implementation", _ATTENTION_NAME)

    def run(self, images: Tensor, wanted: Collection[str], dynamic_size: bool) -> dict[str, Tensor]:
        model: Any = self.model
        calls: list[Any] = []  # outputs of the model and of its parts, in the order in which they end
        with contextlib.ExitStack() as undo:
            for part in (model, *model.children()):
                undo.callback(part.register_forward_hook(lambda *call: calls.append(call[2])).remove)
            outputs = model(pixel_values=images, **({"interpolate_pos_encoding": True} if dynamic_size else {}))
        results = {"logits": getattr(outputs, "logits", None)} if self.num_classes else {}
        encoders = [call for call in calls if getattr(call, "last_hidden_state", None) is not None]
        if encoders and (tokens := encoders[-1].last_hidden_state).ndim == 3:
            names = [(y, name) for y in (outputs, encoders[-1]) for name in ("pooler_output", "image_embeds")]
            pooled = [y for y in (getattr(*each, None) for each in names) if y is not None]
            results |= {"tokens": tokens, "features": pooled[0] if pooled else tokens[:, 0]}
        elif encoders:
            results["tokens"] = tokens.movedim(1, -1)
        return {name: y for name, y in results.items() if y is not None}


def _block_list(model: nn.Module, depth: int) -> str:
    """Returns the name of the list of `depth` encoder blocks: the largest, because other layers are smaller."""
    lists = {
        name: part for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == depth
    }
    return max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()), default="")

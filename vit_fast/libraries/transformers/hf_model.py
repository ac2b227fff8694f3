"""Vision models of transformers: weight names, a peer with our weights, and models for export.

The weight names are those of ViT, DeiT, DINOv2 (with registers), DINOv3, and of the image towers of CLIP and SigLIP.
Files contain the names of transformers 4, models in memory those of the installed version.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...config import ViTConfig
from ..interface.image_model import (
    Head,
    ImageModel,
    comes_from,
    pair,
    raise_unsupported,
    required_input_reasons,
    switch,
)
from ..interface.weight_names import Converted, Rule, parts, plain_vit_reasons, rename, with_key_biases
from .hf_config import ACTIVATIONS

NAME = "transformers"
PEER = "transformers' ViTForImageClassification, attn_implementation='sdpa'"
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
    (_VIT_PREFIX + r"embeddings\.mask_token", None),
    (_VIT_PREFIX + r"pooler\..+", None),
    (_VIT_BLOCK + r"(?:layernorm_before|norm1)" + _W, r"blocks.\1.norm1.\2"),
    (_VIT_BLOCK + r"(?:layernorm_after|norm2)" + _W, r"blocks.\1.norm2.\2"),
    *parts(_VIT_BLOCK + r"attention\.attention\.NAME" + _W, ("query", "key", "value"), r"blocks.\1.attn.qkv.\2"),
    *parts(_VIT_BLOCK + r"attention\.NAME_proj" + _W, "qkv", r"blocks.\1.attn.qkv.\2"),
    (_VIT_BLOCK + r"attention\.(?:output\.dense|o_proj)" + _W, r"blocks.\1.attn.proj.\2"),
    (_VIT_BLOCK + r"(?:intermediate\.dense|mlp\.fc1)" + _W, r"blocks.\1.mlp.fc1.\2"),
    (_VIT_BLOCK + r"(?:output\.dense|mlp\.fc2)" + _W, r"blocks.\1.mlp.fc2.\2"),
    (_VIT_BLOCK + r"mlp\.(?:weights_out|down_proj)" + _W, r"blocks.\1.mlp.fc2.\2"),
    (_VIT_BLOCK + r"mlp\.weights_in" + _W, r"blocks.\1.mlp.fc1.\2"),
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
    if any(name.endswith("embeddings.patch_embedding.weight") for name in state):
        return _convert_tower(state)
    gated = any(".mlp.gate_proj." in name for name in state)
    state = with_key_biases(state, r"(.+\.attention\.)q(_proj\.bias)")  # DINOv3
    converted = rename(state, f"{NAME} ViT/DeiT/DINOv2", VIT_RULES + (GATED_MLP_RULES if gated else PLAIN_MLP_RULES))
    converted.fold_class_position(config)
    if any("layer_scale1.lambda1" in name for name in state):
        converted.mark_head_unsupported("DINOv2's classifier reads class token and mean patch (2 * embed_dim)")
    else:
        converted.head_problem = _token_head_problem
    return converted


def _convert_tower(state: Mapping[str, Tensor]) -> Converted:
    is_clip = any("class_embedding" in name for name in state)
    converted = rename(state, f"{NAME} {'CLIP' if is_clip else 'SigLIP'}", TOWER_RULES)
    converted.add_batch_axis()
    for suffix in ("weight", "bias"):
        _split_pool_projection(converted, suffix)
    if "visual_projection.weight" in state:
        converted.add_head_bias("visual_projection")
        converted.head_problem = _token_head_problem
    elif "classifier.weight" in state and is_clip:
        converted.mark_head_unsupported("CLIPForImageClassification's classifier reads patches before the final norm")
    elif "classifier.weight" in state:
        converted.head_problem = _siglip_head_problem
    return converted


def _split_pool_projection(converted: Converted, suffix: str) -> None:
    """Splits the packed projection of MultiheadAttention into timm's q and kv."""
    packed = converted.tensors.pop(f"attn_pool.in_proj.{suffix}", None)
    if packed is not None:
        origin, C = converted.origins.pop(f"attn_pool.in_proj.{suffix}"), packed.shape[0] // 3
        for name, part in (("q", packed[:C]), ("kv", packed[C:])):
            converted.tensors[f"attn_pool.{name}.{suffix}"] = part
            converted.origins[f"attn_pool.{name}.{suffix}"] = origin


def _token_head_problem(config: ViTConfig) -> str | None:
    if config.global_pool == "token":
        return None
    return f"the head reads the class token: global_pool must be 'token', got {config.global_pool!r}"


def _siglip_head_problem(config: ViTConfig) -> str | None:
    if config.global_pool == "avg" and not config.norm_after_pool:
        return None
    return "the head reads the mean of the normalized patches: the model must have global_pool='avg' and fc_norm=False"


# --- peer with our weights -------------------------------------------------------------------------------------


def build_peer(config: ViTConfig) -> nn.Module:
    """Builds transformers' model of this shape; raises UnsupportedInputError with all reasons if there is none."""
    raise_unsupported("transformers' ViT", plain_vit_reasons(config))
    from transformers import ViTConfig as TheirConfig
    from transformers import ViTForImageClassification

    model: nn.Module = ViTForImageClassification(
        TheirConfig(
            hidden_size=config.embed_dim,
            num_hidden_layers=config.depth,
            num_attention_heads=config.num_heads,
            intermediate_size=config.hidden_dim,
            hidden_act=next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.act_layer),
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            layer_norm_eps=config.norm_eps,
            image_size=list(config.image_hw),
            patch_size=list(config.patch_hw),
            num_channels=config.in_chans,
            qkv_bias=config.qkv_bias,
            num_labels=config.num_classes,
            attn_implementation="sdpa",
        )
    )
    return model


# --- export ---------------------------------------------------------------------------------------------------

_ATTENTION_NAME = "vit_fast_export"


def recognise(model: Any) -> ImageModel | None:
    """Describes a vision model of transformers for export; returns None for other models."""
    if not comes_from(NAME, model) or not hasattr(getattr(model, "config", None), "patch_size"):
        return None
    config = model.config
    reasons = required_input_reasons(model)
    complex_buffers = [name for name, buffer in model.named_buffers() if buffer.is_complex()]
    reasons += [f"its positions are complex numbers ({name})" for name in complex_buffers]
    raise_unsupported(f"export of transformers' {type(model).__name__}", reasons)
    labels = getattr(config, "id2label", None) or {}
    names = tuple(labels[i] for i in sorted(labels, key=int))
    if all(re.fullmatch(r"LABEL_\d+", name) for name in names):  # transformers' placeholders
        names = ()
    classifies = "ForImageClassification" in type(model).__name__
    depth = int(config.num_hidden_layers)
    pooling = any("MultiheadAttentionPoolingHead" in type(module).__name__ for module in model.modules())
    return TransformersModel(
        model=model,
        library=NAME,
        name=getattr(config, "name_or_path", "") or type(model).__name__,
        image_hw=pair(config.image_size),
        in_chans=int(config.num_channels),
        patch_hw=pair(config.patch_size),
        depth=depth,
        attentions=depth + pooling,
        num_classes=int(config.num_labels) if classifies else 0,
        class_names=names or None if classifies else None,
        config=config.to_diff_dict(),
    )


class TransformersModel(ImageModel):
    def make_exportable(self, undo: contextlib.ExitStack, dynamic_size: bool) -> None:
        """Selects an attention function for which transformers creates no mask, because images have no padding."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if _ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS:
            ALL_ATTENTION_FUNCTIONS.register(_ATTENTION_NAME, _attention_without_mask)
        configs = [getattr(module, "config", None) for module in self.model.modules()]
        for config in {id(c): c for c in configs if hasattr(c, "_attn_implementation")}.values():
            switch(undo, config, "_attn_implementation", _ATTENTION_NAME)

    def run(self, images: Tensor, head: Head, dynamic_size: bool) -> Tensor:
        model: Any = self.model
        options = {"interpolate_pos_encoding": True} if dynamic_size else {}
        result: Tensor
        if head == "logits":
            result = model(pixel_values=images, **options).logits
            return result
        base = model.base_model if "ForImageClassification" in type(model).__name__ else model
        outputs = base(pixel_values=images, **options)
        pooled: Tensor | None = getattr(outputs, "pooler_output", None)
        pooled = getattr(outputs, "image_embeds", None) if pooled is None else pooled
        return outputs.last_hidden_state[:, 0] if pooled is None else pooled


def _attention_without_mask(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return mixed.transpose(1, 2), None

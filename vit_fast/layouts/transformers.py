"""Hugging Face transformers' names: ViT, DeiT, DINOv2 (with registers), and the CLIP and SigLIP image towers.

Both generations: transformers 4's, which files on the Hub have and transformers 5 still writes, and 5's in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..config import ViTConfig
from .rename import Converted, Rule, rename

NAME = "transformers"
SIGNATURE = r"(^|\.)embeddings\.(patch_embeddings\.projection|patch_embedding)\.weight$"

_VIT_PREFIX = r"(?:vit\.|deit\.|dinov2\.|dinov2_with_registers\.)?"
_VIT_BLOCK = _VIT_PREFIX + r"(?:encoder\.)?layers?\.(\d+)\."
_W = r"\.(weight|bias)"

VIT_RULES: tuple[Rule, ...] = (
    (_VIT_PREFIX + r"embeddings\.cls_token", "cls_token"),
    (_VIT_PREFIX + r"embeddings\.distillation_token", "dist_token"),
    (_VIT_PREFIX + r"embeddings\.register_tokens", "reg_token"),
    (_VIT_PREFIX + r"embeddings\.position_embeddings", "pos_embed"),
    (_VIT_PREFIX + r"embeddings\.patch_embeddings\.projection" + _W, r"patch_embed.proj.\1"),
    (_VIT_PREFIX + r"embeddings\.mask_token", None),
    (_VIT_PREFIX + r"pooler\..+", None),
    (_VIT_BLOCK + r"(?:layernorm_before|norm1)" + _W, r"blocks.\1.norm1.\2"),
    (_VIT_BLOCK + r"(?:layernorm_after|norm2)" + _W, r"blocks.\1.norm2.\2"),
    (_VIT_BLOCK + r"attention\.(?:attention\.query|q_proj)" + _W, r"blocks.\1.attn.qkv.\2@0of3"),
    (_VIT_BLOCK + r"attention\.(?:attention\.key|k_proj)" + _W, r"blocks.\1.attn.qkv.\2@1of3"),
    (_VIT_BLOCK + r"attention\.(?:attention\.value|v_proj)" + _W, r"blocks.\1.attn.qkv.\2@2of3"),
    (_VIT_BLOCK + r"attention\.(?:output\.dense|o_proj)" + _W, r"blocks.\1.attn.proj.\2"),
    (_VIT_BLOCK + r"(?:intermediate\.dense|mlp\.fc1)" + _W, r"blocks.\1.mlp.fc1.\2"),
    (_VIT_BLOCK + r"(?:output\.dense|mlp\.fc2)" + _W, r"blocks.\1.mlp.fc2.\2"),
    (_VIT_BLOCK + r"layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
    (_VIT_PREFIX + r"layernorm" + _W, r"norm.\1"),
    (r"(?:cls_)?classifier" + _W, r"head.\1"),
    (r"distillation_classifier" + _W, r"head_dist.\1"),
)

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
    (_TOWER_BLOCK + r"self_attn\.q_proj" + _W, r"blocks.\1.attn.qkv.\2@0of3"),
    (_TOWER_BLOCK + r"self_attn\.k_proj" + _W, r"blocks.\1.attn.qkv.\2@1of3"),
    (_TOWER_BLOCK + r"self_attn\.v_proj" + _W, r"blocks.\1.attn.qkv.\2@2of3"),
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
    """Separate query, key and value become timm's qkv; positions stored as an embedding table get a batch axis."""
    if any(name.endswith("embeddings.patch_embedding.weight") for name in state):
        return _convert_tower(state)
    converted = rename(state, f"{NAME} ViT/DeiT/DINOv2", VIT_RULES)
    if config.no_embed_class and {"cls_token", "pos_embed"} <= set(converted.tensors):
        converted.fold_class_position()
    if any("layer_scale1.lambda1" in name for name in state):
        converted.head_problem = _dinov2_head_problem
    else:
        converted.head_problem = _token_head_problem
    return converted


def _convert_tower(state: Mapping[str, Tensor]) -> Converted:
    is_clip = any("class_embedding" in name for name in state)
    converted = rename(state, f"{NAME} {'CLIP' if is_clip else 'SigLIP'}", TOWER_RULES)
    for name, tensor in list(converted.tensors.items()):
        if name in ("cls_token", "pos_embed"):
            converted.tensors[name] = tensor.reshape(1, -1, tensor.shape[-1])
        elif name.startswith("attn_pool.in_proj."):
            _split_pool_projection(converted, name, tensor)
    if "visual_projection.weight" in state:
        weight = converted.tensors["head.weight"]
        converted.tensors["head.bias"] = weight.new_zeros(weight.shape[0])
        converted.origins["head.bias"] = ("zeros: visual_projection has no bias",)
        converted.head_problem = _token_head_problem
    elif "classifier.weight" in state:
        converted.head_problem = _clip_head_problem if is_clip else _siglip_head_problem
    return converted


def _split_pool_projection(converted: Converted, name: str, packed: Tensor) -> None:
    """MultiheadAttention packs query, key, value; timm's pooling keeps the query apart."""
    suffix = name.rpartition(".")[2]
    C = packed.shape[0] // 3
    converted.tensors[f"attn_pool.kv.{suffix}"] = packed[C:]
    converted.origins[f"attn_pool.kv.{suffix}"] = converted.origins[name]
    converted.move(name, f"attn_pool.q.{suffix}", packed[:C])


def _token_head_problem(config: ViTConfig) -> str | None:
    if config.global_pool == "token":
        return None
    return f"it reads the class token, this model pools by global_pool={config.global_pool!r}"


def _siglip_head_problem(config: ViTConfig) -> str | None:
    if config.global_pool == "avg" and not config.norm_after_pool:
        return None
    return "it reads the mean of the normalised patches: accepted is a model with global_pool='avg', fc_norm=False"


def _clip_head_problem(config: ViTConfig) -> str:
    return "CLIPForImageClassification's classifier reads patches before the final norm, which no config here does"


def _dinov2_head_problem(config: ViTConfig) -> str:
    return "DINOv2's classifier reads class token and mean patch together, twice embed_dim, which no config here does"

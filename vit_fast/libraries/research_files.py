"""Weight names in files of research code: Google's JAX models, and CLIP of OpenAI and OpenCLIP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace

from torch import Tensor

from ..config import ViTConfig
from .interface.weight_names import Converted, Rule, parts, rename

# Google's .npz files: vision_transformer and big_vision, also with SigLIP's attention pooling
_BLOCK = r"Transformer/encoderblock_(\d+)/"
_MHA = r"MultiHeadDotProductAttention_\d/"
_MLP = r"MlpBlock_\d/Dense_"
_POOL = r"MAPHead_0/"

_RULES: tuple[Rule, ...] = (
    (r"cls", "cls_token"),
    (r"pos_embedding|Transformer/posembed_input/pos_embedding", "pos_embed"),
    (r"embedding/(weight|bias)", r"patch_embed.proj.\1"),
    (_BLOCK + r"LayerNorm_0/(weight|bias)", r"blocks.\1.norm1.\2"),
    (_BLOCK + r"LayerNorm_[12]/(weight|bias)", r"blocks.\1.norm2.\2"),
    *parts(_BLOCK + _MHA + r"NAME/(weight|bias)", ("query", "key", "value"), r"blocks.\1.attn.qkv.\2"),
    (_BLOCK + _MHA + r"out/(weight|bias)", r"blocks.\1.attn.proj.\2"),
    (_BLOCK + _MLP + r"0/(weight|bias)", r"blocks.\1.mlp.fc1.\2"),
    (_BLOCK + _MLP + r"1/(weight|bias)", r"blocks.\1.mlp.fc2.\2"),
    (r"Transformer/encoder_norm/(weight|bias)", r"norm.\1"),
    (_POOL + r"probe", "attn_pool.latent"),
    (_POOL + r"LayerNorm_0/(weight|bias)", r"attn_pool.norm.\1"),
    (_POOL + _MHA + r"query/(weight|bias)", r"attn_pool.q.\1"),
    *parts(_POOL + _MHA + r"NAME/(weight|bias)", ("key", "value"), r"attn_pool.kv.\1"),
    (_POOL + _MHA + r"out/(weight|bias)", r"attn_pool.proj.\1"),
    (_POOL + _MLP + r"0/(weight|bias)", r"attn_pool.mlp.fc1.\1"),
    (_POOL + _MLP + r"1/(weight|bias)", r"attn_pool.mlp.fc2.\1"),
    (r"head/(weight|bias)", r"head.\1"),
    (r"pre_logits/.+", None),
    # optimizer state and SigLIP's text tower; the prefix of the image tower was removed
    (r"(?:opt|params|txt)/.*|t|b", None),
)

_PREFIX = re.compile(r"(.*/)?embedding/kernel")
_STACKED = "Transformer/encoderblock/"


def _convert(state: Mapping[str, Tensor], config: ViTConfig) -> Converted:
    """Converts Google's names to timm's: transposes kernels to [out, in], flattens heads, and unstacks blocks."""
    prefix = next(m[1] or "" for m in map(_PREFIX.fullmatch, sorted(state, key=len)) if m)
    tensors: dict[str, Tensor] = {}
    source_of: dict[str, str] = {}
    for name, array in state.items():
        inner, layers = name.removeprefix(prefix), {"": array}
        if inner.startswith(_STACKED):  # a parameter of all blocks, as in files of models that use flax's nn.scan
            layers = {f"Transformer/encoderblock_{i}/": layer for i, layer in enumerate(array.unbind(0))}
        for block, layer in layers.items():
            renamed = re.sub(r"/(kernel|scale)$", "/weight", block + inner.removeprefix(_STACKED if block else ""))
            tensors[renamed], source_of[renamed] = _to_torch(inner, layer), name
    converted = rename(tensors, "Google JAX", _RULES)
    converted.ignored = sorted({source_of[name] for name in converted.ignored})
    converted.origins = {name: tuple(source_of[one] for one in origins) for name, origins in converted.origins.items()}
    converted.add_batch_axis()
    if any(name.startswith(f"{prefix}pre_logits/") for name in state):
        converted.head_problem = "the source has a hidden layer pre_logits, which ViTConfig does not support"
    return converted


def _to_torch(name: str, array: Tensor) -> Tensor:
    """Transposes a JAX kernel: HWIO of convolutions, [C, H, D] of q, k and v, [H, D, C] of the output projection."""
    if not name.endswith("/kernel"):
        return array.flatten() if name.endswith("/bias") else array
    if array.dim() == 4:
        return array.permute(3, 2, 0, 1).contiguous()
    array = array.flatten(1) if re.search(r"/(query|key|value)/kernel$", name) else array.flatten(0, -2)
    return array.t().contiguous()


GOOGLE = SimpleNamespace(NAME="Google JAX", SIGNATURE=r"(^|/)embedding/kernel$", convert=_convert)


_CLIP_BLOCK = r"visual\.transformer\.resblocks\.(\d+)\."

_CLIP_RULES: tuple[Rule, ...] = (
    (r"visual\.class_embedding", "cls_token"),
    (r"visual\.positional_embedding", "pos_embed"),
    (r"visual\.proj", "head.weight"),
    (r"visual\.conv1\.weight", "patch_embed.proj.weight"),
    (r"visual\.ln_pre\.(weight|bias)", r"norm_pre.\1"),
    (r"visual\.ln_post\.(weight|bias)", r"norm.\1"),
    (_CLIP_BLOCK + r"ln_([12])\.(weight|bias)", r"blocks.\1.norm\2.\3"),
    (_CLIP_BLOCK + r"attn\.in_proj_(weight|bias)", r"blocks.\1.attn.qkv.\2"),
    (_CLIP_BLOCK + r"attn\.out_proj\.(weight|bias)", r"blocks.\1.attn.proj.\2"),
    (_CLIP_BLOCK + r"mlp\.c_fc\.(weight|bias)", r"blocks.\1.mlp.fc1.\2"),
    (_CLIP_BLOCK + r"mlp\.c_proj\.(weight|bias)", r"blocks.\1.mlp.fc2.\2"),
    (r"(?!visual\.).+", None),  # the text tower has no prefix
)


def _convert_clip(state: Mapping[str, Tensor], config: ViTConfig) -> Converted:
    """Converts CLIP's names to timm's, transposes the projection, and adds zeros as its bias."""
    converted = rename(state, "OpenAI CLIP", _CLIP_RULES)
    converted.add_batch_axis()
    if "head.weight" in converted.tensors:
        converted.tensors["head.weight"] = converted.tensors["head.weight"].t().contiguous()
        converted.add_head_bias("the projection")
    return converted


CLIP = SimpleNamespace(NAME="OpenAI CLIP", SIGNATURE=r"^visual\.conv1\.weight$", convert=_convert_clip)

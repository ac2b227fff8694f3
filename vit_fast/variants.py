"""Configurations of named models, under timm's names."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from .config import DataConfig, RopeConfig, ViTConfig
from .errors import check_type

# The sizes that names contain, such as "base" in vit_base_patch16_224.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "medium": {"embed_dim": 512, "depth": 12, "num_heads": 8},
    "mediumd": {"embed_dim": 512, "depth": 20, "num_heads": 8, "qkv_bias": False},
    "betwixt": {"embed_dim": 640, "depth": 12, "num_heads": 10},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "so400m": {"embed_dim": 1152, "depth": 27, "num_heads": 16, "mlp_ratio": 3.7362},
    "huge": {"embed_dim": 1280, "depth": 32, "num_heads": 16},
    "giant": {"embed_dim": 1536, "depth": 40, "num_heads": 24, "mlp_ratio": 2.66667},
    "gigantic": {"embed_dim": 1536, "depth": 50, "num_heads": 16, "mlp_ratio": 8960 / 1536, "class_token": False},
    "7b": {"embed_dim": 4096, "depth": 40, "num_heads": 32, "mlp_ratio": 2.0},
}

INCEPTION = DataConfig()
IMAGENET = DataConfig(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
OPENAI = DataConfig(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
INCEPTION_FULL, IMAGENET_FULL, OPENAI_FULL = (replace(data, crop_pct=1.0) for data in (INCEPTION, IMAGENET, OPENAI))
MNIST = DataConfig(mean=(0.1307,), std=(0.3081,), crop_pct=1.0)


class Variant(NamedTuple):
    """Architecture and preprocessing of a named model."""

    config: ViTConfig
    data: DataConfig


_VARIANTS: dict[str, Variant] = {}


def _add(data: DataConfig, *patterns: str, **fields: Any) -> None:
    """Adds variants, e.g. vit_{tiny,small}_patch16_224, with the sizes in their names; `fields` take precedence."""
    for name in itertools.chain.from_iterable(map(_expand, patterns)):
        shape = next((SIZES[word] for word in name.split("_") if word in SIZES), {})
        patch, img = re.search(r"patch(\d+)", name), re.search(r"_(\d+)$", name)
        sizes = {"patch_size": int(patch[1])} if patch else {}
        sizes |= {"img_size": int(img[1])} if img else {}
        _VARIANTS[name] = Variant(ViTConfig(**{**shape, **sizes, **fields}), data)


def _expand(pattern: str) -> Iterable[str]:
    """Expands alternatives in braces, as a shell does."""
    return map("".join, itertools.product(*(part.split(",") for part in re.split("[{}]", pattern))))


_add(INCEPTION, "vit_{tiny,small,base,large}_patch16_224", "vit_{small,base,large}_patch32_224")
_add(INCEPTION, "vit_base_patch8_224", "vit_large_patch14_224")
_add(INCEPTION, "vit_huge_patch14_224", num_classes=0)
_add(INCEPTION_FULL, "vit_{tiny,small,base,large}_patch16_384", "vit_{small,base,large}_patch32_384")
_add(IMAGENET, "vit_small_patch8_224", num_classes=0)

_add(IMAGENET, "deit_{tiny,small,base}_patch16_224")
_add(IMAGENET_FULL, "deit_base_patch16_384")
_add(IMAGENET, "deit_{tiny,small,base}_distilled_patch16_224", distilled=True)
_add(IMAGENET_FULL, "deit_base_distilled_patch16_384", distilled=True)

DEIT3: dict[str, Any] = {"no_embed_class": True, "init_values": 1e-6}
_add(IMAGENET, "deit3_{small,medium,base,large}_patch16_224", "deit3_huge_patch14_224", **DEIT3)
_add(IMAGENET_FULL, "deit3_{small,base,large}_patch16_384", **DEIT3)

SWIGLU = {"mlp_layer": "swiglu", "act_layer": "silu"}
DINOV2: dict[str, Any] = {"img_size": 518, "init_values": 1e-5, "num_classes": 0}
for _name, _fields in (("dinov2", {}), ("reg4_dinov2", {"reg_tokens": 4, "no_embed_class": True})):
    _add(IMAGENET_FULL, "vit_{small,base,large}_patch14_" + _name, **DINOV2, **_fields)
    _add(IMAGENET_FULL, "vit_giant_patch14_" + _name, **DINOV2, **_fields, **SWIGLU)

CLIP: dict[str, Any] = {"pre_norm": True, "norm_eps": 1e-5}
for _name, _projection in (("base_patch{16,32}", 512), ("large_patch14", 768), ("huge_patch14", 1024)):
    _add(OPENAI, f"vit_{_name}_clip_224", **CLIP, num_classes=_projection)
    _add(OPENAI, f"vit_{_name}_clip_quickgelu_224", **CLIP, num_classes=_projection, act_layer="quick_gelu")

SIGLIP: dict[str, Any] = {"class_token": False, "global_pool": "map", "num_classes": 0}
_add(INCEPTION, "vit_base_patch16_siglip_{224,256,384,512}", "vit_large_patch16_siglip_{256,384}", **SIGLIP)
_add(INCEPTION, "vit_so400m_patch14_siglip_{224,378}", **SIGLIP)
_add(INCEPTION, "vit_so400m_patch16_siglip_{256,384,512}", **SIGLIP, act_layer="gelu_tanh")

DINOV3: dict[str, Any] = {
    "img_size": 256, "class_token": True, "reg_tokens": 4, "pos_embed": "none", "rope": RopeConfig(),
    "init_values": 1e-5, "norm_eps": 1e-5, "global_pool": "avg", "fc_norm": False, "num_classes": 0,
    "dynamic_img_size": True,
}  # fmt: skip
for _name, _bias in (("dinov3", False), ("dinov3_qkvb", True)):
    _add(IMAGENET_FULL, "vit_{small,base,large}_patch16_" + _name, **DINOV3, qkv_bias=_bias)
    _add(IMAGENET_FULL, "vit_small_plus_patch16_" + _name, **DINOV3, **SWIGLU, qkv_bias=_bias)
    _add(IMAGENET_FULL, "vit_huge_plus_patch16_" + _name, **DINOV3, **SWIGLU, qkv_bias=_bias, num_heads=20)
_add(IMAGENET_FULL, "vit_7b_patch16_dinov3", **DINOV3, **SWIGLU, qkv_bias=False)

AXIAL = RopeConfig(coordinates="index", layout="interleaved", columns_first=True)
EVA_ROPE = replace(AXIAL, temperature=10000.0, reference_grid=(16, 16), columns_first=False)
EVA02: dict[str, Any] = {**SWIGLU, "mlp_ratio": 4 * 2 / 3, "rope": EVA_ROPE}
for _name, _norm in (("eva02_{tiny,small}_patch14_", False), ("eva02_{base,large}_patch14_", True)):
    _add(OPENAI, f"{_name}224", **EVA02, scale_mlp_norm=_norm, global_pool="avg", num_classes=0)
_add(OPENAI_FULL, "eva02_{tiny,small}_patch14_336", **EVA02, global_pool="avg")
_add(
    replace(OPENAI_FULL, crop_mode="squash"), "eva02_{base,large}_patch14_448",
    **EVA02, scale_mlp_norm=True, global_pool="avg",
)  # fmt: skip
EVA02_CLIP: dict[str, Any] = {**EVA02, "scale_attn_norm": True, "scale_mlp_norm": True}
_add(OPENAI, "eva02_base_patch16_clip_224", **EVA02_CLIP, num_classes=512)
_add(OPENAI, "eva02_large_patch14_clip_224", **EVA02_CLIP, num_classes=768)
_add(OPENAI_FULL, "eva02_large_patch14_clip_336", **EVA02_CLIP, num_classes=768)


def _add_pe(*patterns: str, **fields: Any) -> None:
    """Adds Perception Encoders; patch indices start at one if there is a class token."""
    for name in itertools.chain.from_iterable(map(_expand, patterns)):
        patch, side = (int(number) for number in re.findall(r"\d+", name))
        grid, offset = (side // patch, side // patch), 0.0 if "gigantic" in name else 1.0
        rope = replace(AXIAL, temperature=10000.0, reference_grid=grid, offset=offset)
        _add(INCEPTION_FULL, f"vit_pe_{name}", **CLIP, rope=rope, **fields)


PE_CORE: dict[str, Any] = {"global_pool": "map", "pool_heads": 8, "pool_mlp_ratio": 4.0, "pool_include_prefix": True}
PE_TOWER: dict[str, Any] = {"global_pool": "avg", "final_norm": False, "num_classes": 0}
_add_pe("core_{tiny,small}_patch16_384", **PE_CORE, num_classes=512)
_add_pe("core_base_patch16_224", "core_large_patch14_336", **PE_CORE, num_classes=1024)
_add_pe("core_gigantic_patch14_448", **PE_CORE, num_classes=1280)
_add_pe("lang_large_patch14_448", **PE_TOWER, init_values=0.1, depth=23)
_add_pe("lang_gigantic_patch14_448", **PE_TOWER, init_values=0.1, depth=47)
_add_pe("spatial_{tiny,small,base}_patch16_512", "spatial_large_patch14_448", **PE_TOWER)
_add_pe("spatial_gigantic_patch14_448", **PE_TOWER, init_values=0.1)

GAP: dict[str, Any] = {
    "class_token": False, "pos_embed": "none", "init_values": 1e-5, "rope": EVA_ROPE, "global_pool": "avg",
}  # fmt: skip
_add(replace(INCEPTION, crop_pct=0.95), "vit_{medium,mediumd,base}_patch16_rope_reg1_gap_256", **GAP, reg_tokens=1)
_add(replace(OPENAI, crop_pct=0.95), "vit_betwixt_patch16_rope_reg4_gap_256", **GAP, reg_tokens=4)
_add(IMAGENET, "vit_{small,base,large}_patch16_rope_224", init_values=1e-5, rope=AXIAL, pos_embed="none")
_add(IMAGENET, "vit_{small,base,large}_patch16_rope_ape_224", init_values=1e-5, rope=AXIAL, no_embed_class=True)

AIMV2: dict[str, Any] = {
    **SWIGLU, "depth": 24, "class_token": False, "global_pool": "avg", "fc_norm": False, "qkv_bias": False,
    "proj_bias": False, "norm_layer": "rms_norm", "norm_eps": 1e-5, "embed_norm": True, "num_classes": 0,
}  # fmt: skip
for _name, _width, _ratio in (("large", 1024, 2.75), ("huge", 1536, 2.6667), ("1b", 2048, 2.75), ("3b", 3072, 2.6667)):
    _shape = {"embed_dim": _width, "num_heads": _width // 128, "mlp_ratio": _ratio}
    _add(OPENAI_FULL, f"aimv2_{_name}_patch14_" + "{224,336,448}", **AIMV2, **_shape)

# Hybrids (arXiv 2010.11929, section 3.1): a token covers 16 x 16 pixels, i.e. 1 x 1 or 4 x 4 elements of a feature map.
_add(INCEPTION, "vit_small_hybrid_patch1_224", stem_channels=(48, 96, 192, 384))
_add(INCEPTION, "vit_base_hybrid_patch4_224", stem_channels=(64, 128))

# A small model for tests.
_add(INCEPTION, "vit_test", embed_dim=64, depth=2, num_heads=2, img_size=32, patch_size=8, num_classes=10)

# For images of digits: the model of tutorials that build a ViT from scratch, and a larger one.
GRAY: dict[str, Any] = {"in_chans": 1, "num_classes": 10}
_add(MNIST, "vit_mnist", **GRAY, img_size=28, patch_size=4, embed_dim=8, depth=2, num_heads=2, pos_embed="sincos1d")
_add(
    MNIST, "vit_micro_patch7_28", **GRAY, embed_dim=64, depth=4, num_heads=4, pos_embed="sincos2d",
    class_token=False, global_pool="avg",
)  # fmt: skip


def list_models(pattern: str = "*") -> list[str]:
    """Returns the sorted names of models that match a shell-style pattern, e.g. `list_models("vit_base_*_224")`."""
    check_type("pattern", pattern, str)
    return sorted(fnmatch.filter(_VARIANTS, pattern))


def get_variant(name: str) -> Variant:
    """Returns the configuration of a named model."""
    if name not in _VARIANTS:
        nearest = difflib.get_close_matches(name, _VARIANTS, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(nearest)}?" if nearest else "see `vit-fast models` or list_models()"
        raise ValueError(f"unknown model {name!r}: {hint}")
    return _VARIANTS[name]

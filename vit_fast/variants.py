"""Configurations of named models, under timm's names."""

from __future__ import annotations

import difflib
import fnmatch
from dataclasses import dataclass
from typing import Any

from .config import DataConfig, RopeConfig, ViTConfig
from .errors import check_type

Shape = dict[str, Any]

TINY: Shape = {"embed_dim": 192, "depth": 12, "num_heads": 3}
SMALL: Shape = {"embed_dim": 384, "depth": 12, "num_heads": 6}
MEDIUM: Shape = {"embed_dim": 512, "depth": 12, "num_heads": 8}
BASE: Shape = {"embed_dim": 768, "depth": 12, "num_heads": 12}
LARGE: Shape = {"embed_dim": 1024, "depth": 24, "num_heads": 16}
HUGE: Shape = {"embed_dim": 1280, "depth": 32, "num_heads": 16}
GIGANTIC: Shape = {"embed_dim": 1536, "depth": 50, "num_heads": 16, "mlp_ratio": 8960 / 1536, "class_token": False}
SO400M: Shape = {"embed_dim": 1152, "depth": 27, "num_heads": 16, "mlp_ratio": 3.7362}

DEIT3 = {"no_embed_class": True, "init_values": 1e-6}
DINOV2 = {"img_size": 518, "patch_size": 14, "init_values": 1e-5, "num_classes": 0}
DINOV2_REG4 = {**DINOV2, "reg_tokens": 4, "no_embed_class": True}
GIANT: Shape = {"embed_dim": 1536, "depth": 40, "num_heads": 24, "mlp_ratio": 2.66667}
CLIP = {"pre_norm": True, "norm_eps": 1e-5}
SIGLIP = {"class_token": False, "global_pool": "map", "num_classes": 0}

DINOV3 = {
    "img_size": 256, "class_token": True, "reg_tokens": 4, "pos_embed": "none", "rope": RopeConfig(),
    "qkv_bias": False, "init_values": 1e-5, "norm_eps": 1e-5, "global_pool": "avg", "fc_norm": False,
    "num_classes": 0, "dynamic_img_size": True,
}  # fmt: skip
DINOV3_BIASES = {**DINOV3, "qkv_bias": True}
SWIGLU: Shape = {"mlp_layer": "swiglu", "act_layer": "silu"}
EVA02 = {
    **SWIGLU, "patch_size": 14, "mlp_ratio": 4 * 2 / 3,
    "rope": RopeConfig(coordinates="index", temperature=10000.0, layout="interleaved", reference_grid=(16, 16)),
    "global_pool": "avg",
}  # fmt: skip

EVA02_CLIP = {**EVA02, "global_pool": "token", "scale_attn_norm": True, "scale_mlp_norm": True}
PE_CORE: Shape = {**CLIP, "global_pool": "map", "pool_heads": 8, "pool_mlp_ratio": 4.0, "pool_include_prefix": True}
PE_TOWER: Shape = {**CLIP, "global_pool": "avg", "final_norm": False, "num_classes": 0}
ROPE_AXIAL: Shape = {
    "init_values": 1e-5, "rope": RopeConfig(coordinates="index", layout="interleaved", columns_first=True),
}  # fmt: skip
ROPE_GAP: Shape = {
    "img_size": 256, "class_token": False, "reg_tokens": 1, "pos_embed": "none", "init_values": 1e-5,
    "rope": EVA02["rope"], "global_pool": "avg",
}  # fmt: skip
AIMV2: Shape = {
    "patch_size": 14, "depth": 24, "class_token": False, "global_pool": "avg", "fc_norm": False, "qkv_bias": False,
    "proj_bias": False, "norm_layer": "rms_norm", "norm_eps": 1e-5, "embed_norm": True, "num_classes": 0,
}  # fmt: skip

INCEPTION = DataConfig()
INCEPTION_FULL = DataConfig(crop_pct=1.0)
IMAGENET = DataConfig(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
IMAGENET_FULL = DataConfig(mean=IMAGENET.mean, std=IMAGENET.std, crop_pct=1.0)
OPENAI = DataConfig(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
OPENAI_FULL = DataConfig(mean=OPENAI.mean, std=OPENAI.std, crop_pct=1.0)
OPENAI_SQUASHED = DataConfig(mean=OPENAI.mean, std=OPENAI.std, crop_pct=1.0, crop_mode="squash")


@dataclass(frozen=True)
class Variant:
    """Architecture and preprocessing of a named model."""

    config: ViTConfig
    data: DataConfig


_VARIANTS: dict[str, Variant] = {}

# timm models that ViTConfig cannot represent, with the reason.
NOT_HERE = {
    "eva02_enormous_patch14_clip_224": "its blocks normalize the outputs of attention and MLP, not their inputs",
    "vit_*_rope_mixed*_224": "each of its blocks learns its own rotary angles",
}


def _add(name: str, data: DataConfig, *shapes: Shape, **fields: Any) -> None:
    merged = {field: value for shape in (*shapes, fields) for field, value in shape.items()}
    _VARIANTS[name] = Variant(ViTConfig(**merged), data)


for _size, _shape, _patches in (
    ("tiny", TINY, (16,)),
    ("small", SMALL, (32, 16)),
    ("base", BASE, (32, 16)),
    ("large", LARGE, (32, 16)),
):
    for _patch in _patches:
        _add(f"vit_{_size}_patch{_patch}_224", INCEPTION, _shape, patch_size=_patch)
        _add(f"vit_{_size}_patch{_patch}_384", INCEPTION_FULL, _shape, patch_size=_patch, img_size=384)
_add("vit_small_patch8_224", IMAGENET, SMALL, patch_size=8, num_classes=0)
_add("vit_base_patch8_224", INCEPTION, BASE, patch_size=8)
_add("vit_large_patch14_224", INCEPTION, LARGE, patch_size=14)
_add("vit_huge_patch14_224", INCEPTION, HUGE, patch_size=14, num_classes=0)

for _size, _shape in (("tiny", TINY), ("small", SMALL), ("base", BASE)):
    _add(f"deit_{_size}_patch16_224", IMAGENET, _shape)
    _add(f"deit_{_size}_distilled_patch16_224", IMAGENET, _shape, distilled=True)
_add("deit_base_patch16_384", IMAGENET_FULL, BASE, img_size=384)
_add("deit_base_distilled_patch16_384", IMAGENET_FULL, BASE, img_size=384, distilled=True)

for _size, _shape in (("small", SMALL), ("medium", MEDIUM), ("base", BASE), ("large", LARGE)):
    _add(f"deit3_{_size}_patch16_224", IMAGENET, _shape, DEIT3)
    if _size != "medium":
        _add(f"deit3_{_size}_patch16_384", IMAGENET_FULL, _shape, DEIT3, img_size=384)
_add("deit3_huge_patch14_224", IMAGENET, HUGE, DEIT3, patch_size=14)

for _size, _shape in (("small", SMALL), ("base", BASE), ("large", LARGE), ("giant", GIANT | SWIGLU)):
    _add(f"vit_{_size}_patch14_dinov2", IMAGENET_FULL, _shape, DINOV2)
    _add(f"vit_{_size}_patch14_reg4_dinov2", IMAGENET_FULL, _shape, DINOV2_REG4)

for _size, _shape, _patch, _projection in (
    ("base", BASE, 32, 512),
    ("base", BASE, 16, 512),
    ("large", LARGE, 14, 768),
    ("huge", HUGE, 14, 1024),
):
    _stem = f"vit_{_size}_patch{_patch}_clip"
    _add(f"{_stem}_224", OPENAI, _shape, CLIP, patch_size=_patch, num_classes=_projection)
    _add(
        f"{_stem}_quickgelu_224",
        OPENAI,
        _shape,
        CLIP,
        patch_size=_patch,
        num_classes=_projection,
        act_layer="quick_gelu",
    )

for _img in (224, 256, 384, 512):
    _add(f"vit_base_patch16_siglip_{_img}", INCEPTION, BASE, SIGLIP, img_size=_img)
for _img in (256, 384):
    _add(f"vit_large_patch16_siglip_{_img}", INCEPTION, LARGE, SIGLIP, img_size=_img)
for _img in (224, 378):
    _add(f"vit_so400m_patch14_siglip_{_img}", INCEPTION, SO400M, SIGLIP, patch_size=14, img_size=_img)
for _img in (256, 384, 512):
    _add(
        f"vit_so400m_patch16_siglip_{_img}",
        INCEPTION,
        SO400M,
        SIGLIP,
        patch_size=16,
        img_size=_img,
        act_layer="gelu_tanh",
    )

for _size, _shape in (
    ("small", SMALL),
    ("small_plus", SMALL | SWIGLU),
    ("base", BASE),
    ("large", LARGE),
    ("huge_plus", HUGE | SWIGLU | {"num_heads": 20}),
):
    _add(f"vit_{_size}_patch16_dinov3", IMAGENET_FULL, _shape, DINOV3)
    _add(f"vit_{_size}_patch16_dinov3_qkvb", IMAGENET_FULL, _shape, DINOV3_BIASES)
_add("vit_7b_patch16_dinov3", IMAGENET_FULL, SWIGLU, DINOV3, embed_dim=4096, depth=40, num_heads=32, mlp_ratio=2.0)

for _size, _shape, _img, _data in (
    ("tiny", TINY, 336, OPENAI_FULL),
    ("small", SMALL, 336, OPENAI_FULL),
    ("base", BASE | {"scale_mlp_norm": True}, 448, OPENAI_SQUASHED),
    ("large", LARGE | {"scale_mlp_norm": True}, 448, OPENAI_SQUASHED),
):
    _add(f"eva02_{_size}_patch14_224", OPENAI, _shape, EVA02, num_classes=0)
    _add(f"eva02_{_size}_patch14_{_img}", _data, _shape, EVA02, img_size=_img)

for _size, _shape, _patch, _img, _data, _projection in (
    ("base", BASE, 16, 224, OPENAI, 512),
    ("large", LARGE, 14, 224, OPENAI, 768),
    ("large", LARGE, 14, 336, OPENAI_FULL, 768),
):
    _fields = {"patch_size": _patch, "img_size": _img, "num_classes": _projection}
    _add(f"eva02_{_size}_patch{_patch}_clip_{_img}", _data, _shape, EVA02_CLIP, _fields)


def _add_pe(kind: str, size: str, patch: int, img: int, *shapes: Shape, **fields: Any) -> None:
    """Adds a Perception Encoder; patch indices start at one if there is a class token."""
    rope = RopeConfig(
        coordinates="index",
        temperature=10000.0,
        layout="interleaved",
        reference_grid=(img // patch, img // patch),
        offset=0.0 if size == "gigantic" else 1.0,
        columns_first=True,
    )
    name = f"vit_pe_{kind}_{size}_patch{patch}_{img}"
    _add(name, INCEPTION_FULL, *shapes, patch_size=patch, img_size=img, rope=rope, **fields)


for _size, _shape, _patch, _img, _projection in (
    ("tiny", TINY, 16, 384, 512),
    ("small", SMALL, 16, 384, 512),
    ("base", BASE, 16, 224, 1024),
    ("large", LARGE, 14, 336, 1024),
    ("gigantic", GIGANTIC, 14, 448, 1280),
):
    _add_pe("core", _size, _patch, _img, _shape, PE_CORE, num_classes=_projection)
for _size, _shape in (("large", LARGE | {"depth": 23}), ("gigantic", GIGANTIC | {"depth": 47})):
    _add_pe("lang", _size, 14, 448, _shape, PE_TOWER, init_values=0.1)
for _size, _shape, _patch, _img in (
    ("tiny", TINY, 16, 512),
    ("small", SMALL, 16, 512),
    ("base", BASE, 16, 512),
    ("large", LARGE, 14, 448),
    ("gigantic", GIGANTIC | {"init_values": 0.1}, 14, 448),
):
    _add_pe("spatial", _size, _patch, _img, _shape, PE_TOWER)

for _name, _shape, _data in (
    ("medium_patch16_rope_reg1", MEDIUM, INCEPTION),
    ("mediumd_patch16_rope_reg1", MEDIUM | {"depth": 20, "qkv_bias": False}, INCEPTION),
    ("betwixt_patch16_rope_reg4", {"embed_dim": 640, "num_heads": 10, "reg_tokens": 4}, OPENAI),
    ("base_patch16_rope_reg1", BASE, INCEPTION),
):
    _data = DataConfig(mean=_data.mean, std=_data.std, crop_pct=0.95)
    _add(f"vit_{_name}_gap_256", _data, ROPE_GAP, _shape)
for _size, _shape in (("small", SMALL), ("base", BASE), ("large", LARGE)):
    _add(f"vit_{_size}_patch16_rope_224", IMAGENET, _shape, ROPE_AXIAL, pos_embed="none")
    _add(f"vit_{_size}_patch16_rope_ape_224", IMAGENET, _shape, ROPE_AXIAL, no_embed_class=True)

for _size, _shape in (
    ("large", {"embed_dim": 1024, "num_heads": 8, "mlp_ratio": 2.75}),
    ("huge", {"embed_dim": 1536, "num_heads": 12, "mlp_ratio": 2.6667}),
    ("1b", {"embed_dim": 2048, "num_heads": 16, "mlp_ratio": 2.75}),
    ("3b", {"embed_dim": 3072, "num_heads": 24, "mlp_ratio": 2.6667}),
):
    for _img in (224, 336, 448):
        _add(f"aimv2_{_size}_patch14_{_img}", OPENAI_FULL, SWIGLU, AIMV2, _shape, img_size=_img)

# Section 3.1's hybrid: 16-pixel tokens made of a stride-16 feature map (patch 1) or of a stride-4 one (patch 4).
_add("vit_small_hybrid_patch1_224", INCEPTION, SMALL, patch_size=1, stem_channels=(48, 96, 192, 384))
_add("vit_base_hybrid_patch4_224", INCEPTION, BASE, patch_size=4, stem_channels=(64, 128))

# For tests: every code path of a real model in less than a millisecond of GPU time.
_add("vit_test", INCEPTION, embed_dim=64, depth=2, num_heads=2, img_size=32, patch_size=8, num_classes=10)

# The model of tutorials that build a ViT from scratch, and one that is large enough for digits.
MNIST = {"img_size": 28, "patch_size": 4, "in_chans": 1, "num_classes": 10}
GREY = DataConfig(mean=(0.1307,), std=(0.3081,), crop_pct=1.0)  # mean and std of MNIST
_add("vit_mnist", GREY, MNIST, embed_dim=8, depth=2, num_heads=2, pos_embed="sincos1d")
SMALL_DATA = {"pos_embed": "sincos2d", "class_token": False, "global_pool": "avg"}  # fewer learned parameters
_add("vit_micro_patch7_28", GREY, MNIST, SMALL_DATA, patch_size=7, embed_dim=64, depth=4, num_heads=4)


def list_models(pattern: str = "*") -> list[str]:
    """Returns the sorted names of models that match a shell-style pattern (`*`, `?`, `[...]`).

    Example: `list_models("vit_base_*_224")`.
    """
    check_type("pattern", pattern, str)
    return sorted(fnmatch.filter(_VARIANTS, pattern))


def get_variant(name: str) -> Variant:
    """Returns the configuration of a named model."""
    if name not in _VARIANTS:
        for pattern, reason in NOT_HERE.items():
            if fnmatch.fnmatchcase(name, pattern):
                raise ValueError(f"model {name!r} is not supported, because {reason}: call timm.create_model")
        nearest = difflib.get_close_matches(name, _VARIANTS, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(nearest)}?" if nearest else "list_models() lists all names"
        raise ValueError(f"unknown model {name!r}: {hint}")
    return _VARIANTS[name]

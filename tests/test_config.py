"""Tests that configurations check themselves, and that the named variants are the published ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

import vit_fast
from vit_fast.commands.info import model_rows
from vit_fast.config import DataConfig, RopeConfig, ViTConfig
from vit_fast.variants import get_variant
from vit_fast.work import total, work


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"embed_dim": 100, "num_heads": 3}, r"embed_dim must be a multiple of num_heads=3, got 100"),
        ({"img_size": 225}, r"img_size must be a multiple of 16 pixels in height .*got 225"),
        ({"img_size": (224, 230), "patch_size": (16, 14)}, r"img_size .* 14 pixels in width .*got 230"),
        ({"img_size": 224.0}, "img_size must be a positive integer .*, got 224.0"),
        ({"img_size": 16 * 10**9}, "img_size must be at most"),
        ({"in_chans": 0}, "in_chans must be an integer >= 1, got 0"),
        ({"depth": 10**5}, "depth must be at most 1024, got 100000"),
        ({"mlp_ratio": 1e300}, r"mlp_ratio times embed_dim must be .*, got 1e\+300"),
        ({"norm_eps": 0.0}, "norm_eps must be positive, got 0.0"),
        ({"init_values": "1e-5"}, "init_values must be a finite number, got '1e-5'"),
        ({"drop_path_rate": -0.1}, r"drop_path_rate must be in \[0, 1\), got -0.1"),
        ({"stem_channels": 64}, "stem_channels must be a tuple of integers, got 64"),
        ({"stem_channels": (64, 64), "img_size": 224}, "img_size .* 64 pixels .*stem stride 4"),
        ({"pos_embed": "rope"}, "pos_embed must be one of 'learn', 'sincos1d', 'sincos2d', 'none', got 'rope'"),
        ({"qkv_bias": 2}, "qkv_bias must be one of True, False, got 2"),
        ({"class_token": False}, "global_pool must be .*class_token=False, got 'token'"),
        ({"distilled": True, "global_pool": "avg"}, "distilled=True requires .*global_pool='token'"),
        ({"distilled": True, "reg_tokens": 4}, "reg_tokens must be 0 for distilled=True, got 4"),
        ({"embed_dim": 6, "num_heads": 1, "pos_embed": "sincos2d"}, "embed_dim must be a multiple of 4 .*, got 6"),
        ({"pool_mlp_ratio": 4.0}, "pool_mlp_ratio require global_pool='map', got 'token'"),
        ({"pool_mlp_ratio": 0.0, "global_pool": "map"}, "pool_mlp_ratio times embed_dim must be between 1"),
        ({"final_norm": False, "fc_norm": True}, "final_norm must be True for fc_norm=True, got False"),
        ({"rope": RopeConfig(), "embed_dim": 60, "num_heads": 6}, "head_dim must be a multiple of 4"),
        ({"rope": {"offset": 1.0}}, "offset require coordinates='index', got 'centred'"),
        ({"widht": 3}, "ViTConfig fields must be .*embed_dim.*, got widht"),
    ],
)
def test_invalid_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ViTConfig.from_dict(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"std": (1, 0, 1)}, "std must be positive, got 0"),
        ({"mean": (1,)}, "mean and std must have equal lengths"),
        ({"crop_pct": 0}, "crop_pct must be .*, got 0"),
        ({"interpolation": "area"}, "interpolation must be one of .*, got 'area'"),
    ],
)
def test_invalid_preprocessing(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields)


def test_configs_are_frozen_and_converted_to_json() -> None:
    config = ViTConfig(img_size=(64, 96), patch_size=(8, 16), stem_channels=(8,), rope=RopeConfig())
    with pytest.raises(AttributeError):
        config.depth = 3  # type: ignore[misc]
    assert ViTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    data = DataConfig(mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0), crop_pct=0.5)
    assert DataConfig.from_dict(json.loads(json.dumps(data.to_dict()))) == data


@pytest.mark.parametrize(
    ("name", "layers", "width", "mlp", "heads", "parameters", "gflop"),
    [
        ("vit_small_patch16_224", 12, 384, 1536, 6, 22e6, 9.2),
        ("vit_base_patch16_224", 12, 768, 3072, 12, 86e6, 35.1),
        ("vit_large_patch16_224", 24, 1024, 4096, 16, 307e6, 123.1),
        ("vit_huge_patch14_224", 32, 1280, 5120, 16, 632e6, 334.6),
    ],
)
def test_variants_are_the_published_ones(
    name: str, layers: int, width: int, mlp: int, heads: int, parameters: float, gflop: float
) -> None:
    """Table 1 of arXiv 2010.11929."""
    config = get_variant(name).config
    assert (config.depth, config.embed_dim, config.hidden_dim, config.num_heads) == (layers, width, mlp, heads)
    assert model_rows(name)[0]["parameters"] == pytest.approx(parameters, rel=0.02)
    assert round(total(work(config, 1).values()).flop / 1e9, 1) == gflop


def test_list_models_supports_wildcards() -> None:
    names = [f"vit_{size}_patch14_reg4_dinov2" for size in ("base", "giant", "large", "small")]
    assert vit_fast.list_models("vit_*_patch14_reg4_dinov2") == names
    assert len(vit_fast.list_models()) >= 122 and vit_fast.list_models("nothing*") == []


def test_models_of_22_billion_parameters_and_of_a_thousand_layers() -> None:
    """ViT-22B (arXiv 2302.05442) and DeepNet (arXiv 2203.00555)."""
    for fields, parameters in (
        ({"embed_dim": 6144, "depth": 48, "num_heads": 48, "patch_size": 14, "num_classes": 30_000}, 21.9e9),
        ({"depth": 1000, "embed_dim": 512, "num_heads": 8}, 3.2e9),
    ):
        model = vit_fast.create_model("vit_base_patch16_224", device="meta", **fields)
        assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(parameters, rel=0.02)

"""Tests that configurations check themselves, and that the named variants are the published ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

import vit_fast
from vit_fast.config import DataConfig, RopeConfig, ViTConfig


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (ViTConfig, {"embed_dim": 100, "num_heads": 3}, r"embed_dim must be a multiple of num_heads=3, got 100"),
        (ViTConfig, {"img_size": 225}, r"img_size must be a multiple of 16 pixels in height .*got 225"),
        (ViTConfig, {"img_size": (224, 230), "patch_size": (16, 14)}, r"img_size .* 14 pixels in width .*got 230"),
        (ViTConfig, {"img_size": 224.0}, "img_size must be a positive integer .*, got 224.0"),
        (ViTConfig, {"img_size": 16 * 10**9}, "img_size must be at most"),
        (ViTConfig, {"in_chans": 0}, "in_chans must be an integer >= 1, got 0"),
        (ViTConfig, {"depth": 10**5}, "depth must be at most 1024, got 100000"),
        (ViTConfig, {"mlp_ratio": 1e300}, r"mlp_ratio times embed_dim must be .*, got 1e\+300"),
        (ViTConfig, {"norm_eps": 0.0}, "norm_eps must be positive, got 0.0"),
        (ViTConfig, {"init_values": "1e-5"}, "init_values must be a finite number, got '1e-5'"),
        (ViTConfig, {"drop_path_rate": -0.1}, r"drop_path_rate must be in \[0, 1\), got -0.1"),
        (ViTConfig, {"stem_channels": 64}, "stem_channels must be a tuple of integers, got 64"),
        (ViTConfig, {"stem_channels": (64, 64), "img_size": 224}, "img_size .* 64 pixels .*stem stride 4"),
        (
            ViTConfig,
            {"pos_embed": "rope"},
            "pos_embed must be one of 'learn', 'sincos1d', .*, got 'rope'",
        ),
        (ViTConfig, {"qkv_bias": 2}, "qkv_bias must be one of True, False, got 2"),
        (ViTConfig, {"class_token": False}, "global_pool must be .*class_token=False, got 'token'"),
        (ViTConfig, {"distilled": True, "global_pool": "avg"}, "distilled=True requires .*global_pool='token'"),
        (ViTConfig, {"distilled": True, "reg_tokens": 4}, "reg_tokens must be 0 for distilled=True, got 4"),
        (
            ViTConfig,
            {"embed_dim": 6, "num_heads": 1, "pos_embed": "sincos2d"},
            "must be a multiple of 4 .*, got 6",
        ),
        (ViTConfig, {"pool_mlp_ratio": 4.0}, "pool_mlp_ratio require global_pool='map', got 'token'"),
        (ViTConfig, {"pool_mlp_ratio": 0.0, "global_pool": "map"}, "pool_mlp_ratio times embed_dim must be between 1"),
        (ViTConfig, {"final_norm": False, "fc_norm": True}, "final_norm must be True for fc_norm=True, got False"),
        (ViTConfig, {"rope": RopeConfig(), "embed_dim": 60, "num_heads": 6}, "head_dim must be a multiple of 4"),
        (ViTConfig, {"rope": {"offset": 1.0}}, "offset require coordinates='index', got 'centred'"),
        (ViTConfig, {"widht": 3}, "ViTConfig fields must be .*embed_dim.*, got widht"),
        (DataConfig, {"std": (1, 0, 1)}, "std must be positive, got 0"),
        (DataConfig, {"mean": (1,)}, "mean and std must have equal lengths"),
        (DataConfig, {"crop_pct": 0}, "crop_pct must be .*, got 0"),
        (DataConfig, {"interpolation": "area"}, "interpolation must be one of .*, got 'area'"),
    ],
)
def test_invalid_fields(config: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.from_dict(fields)


def test_configs_are_frozen_and_converted_to_json() -> None:
    config = ViTConfig(img_size=(64, 96), patch_size=(8, 16), stem_channels=(8,), rope=RopeConfig())
    with pytest.raises(AttributeError):
        config.depth = 3  # type: ignore[misc]
    assert ViTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    data = DataConfig(mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0), crop_pct=0.5)
    assert DataConfig.from_dict(json.loads(json.dumps(data.to_dict()))) == data


def test_list_models_supports_wildcards() -> None:
    names = [f"vit_{size}_patch14_reg4_dinov2" for size in ("base", "giant", "large", "small")]
    assert vit_fast.list_models("vit_*_patch14_reg4_dinov2") == names
    assert len(vit_fast.list_models()) >= 122 and vit_fast.list_models("nothing*") == []

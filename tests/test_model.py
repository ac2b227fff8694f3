"""Our model and its configuration: invalid fields and images, positions, dropout, attention maps, backends."""

from __future__ import annotations

import copy
import json
import math
import pickle
from typing import Any

import pytest
import torch
from spellings import Net, Packed
from torch import nn

import vit_fast
from vit_fast.apps.classifiers import rows
from vit_fast.apps.data import load_images, sample_image
from vit_fast.config import DataConfig, RopeConfig, ViTConfig
from vit_fast.figures import record_activations
from vit_fast.layers import DropPath
from vit_fast.model import VisionTransformer
from vit_fast.positions import fixed_pos_embed


def make(backend: str = "sdpa", **overrides) -> VisionTransformer:
    return vit_fast.create_model("vit_test", backend=backend, **overrides)


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, 3, 32, 32), generator=torch.Generator().manual_seed(3))


def test_invalid_images():
    fixed, dynamic = make(), make(dynamic_img_size=True)
    for model, bad, message in (
        (fixed, images(1, 3, 64, 48), "32x32, got 64x48.*dynamic_img_size"),
        (dynamic, images(1, 3, 36, 32), "multiples of the patch size 8x8, got 36x32"),
        (fixed, images(3, 32, 32), r"images must have shape \[B, 3, height, width\], got"),
        (fixed, images(1, 4, 32, 32), r"images must have shape \[B, 3, height, width\], got"),
        (fixed, images().to(torch.uint8), r"floating dtype, got torch\.uint8"),
        (fixed, images().double(), r"of the weights, torch\.float32, got torch\.float64"),
        (fixed, images().numpy(), r"images must be a torch\.Tensor, got numpy\.ndarray"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            model(bad)
    with torch.autocast("cpu", torch.bfloat16):
        assert make()(images().bfloat16()).isfinite().all()


@pytest.mark.parametrize("kind", ["sincos1d", "sincos2d"])
def test_fixed_positions_follow_the_formula(kind):
    rows, columns, dim = 3, 5, 16

    def encode(position: int, width: int) -> torch.Tensor:
        angles = position / 10000 ** (torch.arange(width // 2, dtype=torch.float64) / (width // 2))
        return torch.cat([angles.sin(), angles.cos()]).float()

    both = [torch.cat([encode(x, dim // 2), encode(y, dim // 2)]) for y in range(rows) for x in range(columns)]
    expected = both if kind == "sincos2d" else [encode(position, dim) for position in range(rows * columns)]
    assert torch.allclose(fixed_pos_embed(kind, (rows, columns), dim)[0], torch.stack(expected), atol=1e-6)
    model = make(pos_embed=kind, dynamic_img_size=True)
    assert "pos_embed" not in model.state_dict()
    patches, grid = model.patch_embed(images(1, 3, 64, 16))
    expected = patches + fixed_pos_embed(kind, grid, 64)
    assert torch.allclose(model.embed(images(1, 3, 64, 16))[:, 1:], expected, atol=1e-6)


def test_attention_maps():
    model = make(depth=3)
    maps = model.attention_maps(images(), blocks=[0, -1])
    assert sorted(maps) == [0, 2] and sorted(model.attention_maps(images())) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"indices in blocks must be between -3 and 2, got 3"):
        model.attention_maps(images(), blocks=[3])
    model.blocks[1] = nn.Sequential(model.blocks[1])
    with pytest.raises(ValueError, match=r"blocks\.1 must be a vit_fast\.model\.Block, got Sequential"):
        model.attention_maps(images())


def test_drop_path_drops_whole_images_and_preserves_the_mean():
    rates = [block.drop_path1.drop_prob for block in make(depth=5, drop_path_rate=0.4).blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    per_image = DropPath(0.25).train()(torch.ones(4000, 6))
    assert ((per_image == 0).all(1) | (per_image == 1 / 0.75).all(1)).all()
    assert abs(per_image.mean() - 1) < 0.05


@pytest.mark.parametrize("rate", ["drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"])
def test_every_dropout_acts_in_training_only(rate):
    model, plain = make(**{rate: 0.5}), make()
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model(images()), plain(images()))
    model.train()
    outputs = [model(images()) for _ in range(2)]
    assert not torch.equal(*outputs)
    outputs[0].sum().backward()


def test_set_backend_and_auto():
    model = make("auto")
    assert {block.vit_fast_backend for block in model.blocks} == {"sdpa"}  # on a CPU
    vit_fast.set_backend(model, "eager")
    assert {block.attn.vit_fast_backend for block in model.blocks} == {"eager"}
    with pytest.raises(ValueError, match=r"backend must be one of 'auto', 'eager', 'sdpa', 'triton', got 'fast'"):
        vit_fast.set_backend(model, "fast")


def test_copies_dtypes_and_meta():
    model = make(global_pool="map", class_token=False, dtype=torch.float64)
    x = images().double()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x)) and not other.training
    assert model(x[:0]).shape == (0, 10)
    with torch.device("meta"):
        assert VisionTransformer(ViTConfig())(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


def test_another_default_device(tmp_path):
    """The device "meta" stands for a GPU: computing with values on it, or with tensors on two devices, fails."""
    model, x = make(), images()
    expected = model(x).detach()
    vit_fast.save(model, tmp_path / "m.safetensors")
    activations, inputs = record_activations(model, x), load_images([sample_image()], model)
    unknown = Net(Packed).eval()
    flow, far = activations.rollout(), activations.distances((8, 8))
    with torch.device("meta"):
        assert make().head.weight.is_meta
        loaded = make(device="cpu", weights=tmp_path / "m.safetensors")
        vit_fast.calibrate(loaded, x)
        vit_fast.fuse(loaded)
        vit_fast.freeze(loaded)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), expected)
        assert torch.equal(vit_fast.GraphRunner(model, x, fallback="eager")(x), expected)
        activations = record_activations(model, x)
        assert torch.equal(activations.rollout(), flow) and torch.equal(activations.distances((8, 8)), far)
        assert torch.equal(load_images([sample_image()], model), inputs)
        vit_fast.fuse(unknown, "sdpa", example=x).require_all()
        row = next(iter(rows(model, [sample_image()], "abcdefghij")))
        assert math.isfinite(row["probability"])


INVALID_FIELDS: tuple[tuple[Any, dict[str, Any], str], ...] = (
    (ViTConfig, {"embed_dim": 100, "num_heads": 3}, r"embed_dim must be a multiple of num_heads=3, got 100"),
    (ViTConfig, {"img_size": (224, 230), "patch_size": (16, 14)}, r"img_size .* 14 pixels in width .*got 230"),
    (ViTConfig, {"img_size": 224.0}, "img_size must be a positive integer .*, got 224.0"),
    (ViTConfig, {"img_size": 16 * 10**9}, "img_size must be at most"),
    (ViTConfig, {"depth": 10**5}, "depth must be at most 1024, got 100000"),
    (ViTConfig, {"mlp_ratio": 1e300}, r"mlp_ratio times embed_dim must be .*, got 1e\+300"),
    (ViTConfig, {"norm_eps": 0.0}, "norm_eps must be positive, got 0.0"),
    (ViTConfig, {"drop_path_rate": -0.1}, r"drop_path_rate must be in \[0, 1\), got -0.1"),
    (ViTConfig, {"qkv_bias": 2}, "qkv_bias must be one of True, False, got 2"),
    (ViTConfig, {"class_token": False}, "global_pool must be .*class_token=False, got 'token'"),
    (ViTConfig, {"distilled": True, "global_pool": "avg"}, "global_pool must be 'token' for distilled=True, got 'avg'"),
    (ViTConfig, {"distilled": True, "reg_tokens": 4}, "reg_tokens must be 0 for distilled=True, got 4"),
    (ViTConfig, {"embed_dim": 6, "num_heads": 1, "pos_embed": "sincos2d"}, "must be a multiple of 4 .*, got 6"),
    (ViTConfig, {"pool_mlp_ratio": 4.0}, "pool_mlp_ratio requires global_pool='map', got 'token'"),
    (ViTConfig, {"pool_mlp_ratio": 0.0, "global_pool": "map"}, "pool_mlp_ratio times embed_dim must be between 1"),
    (ViTConfig, {"final_norm": False, "fc_norm": True}, "final_norm must be True for fc_norm=True, got False"),
    (ViTConfig, {"rope": RopeConfig(), "embed_dim": 60, "num_heads": 6}, "embed_dim / num_heads must be a multiple"),
    (ViTConfig, {"rope": {"offset": 1.0}}, "offset require coordinates='index', got 'centred'"),
    (ViTConfig, {"widht": 3}, "ViTConfig fields must be .*embed_dim.*, got widht"),
    (DataConfig, {"std": (1, 0, 1)}, "std must be positive, got 0"),
    (DataConfig, {"mean": (1,)}, "mean and std must have equal lengths"),
    (DataConfig, {"crop_pct": 0}, "crop_pct must be .*, got 0"),
)  # fmt: skip


def test_invalid_fields() -> None:
    for config, fields, message in INVALID_FIELDS:
        with pytest.raises((ValueError, TypeError), match=message):
            config.from_dict(fields)


def test_configs_are_frozen_and_converted_to_json() -> None:
    config = ViTConfig(img_size=(64, 96), patch_size=(8, 16), stem_channels=(8,), rope=RopeConfig())
    with pytest.raises(AttributeError):
        config.depth = 3
    assert ViTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    data = DataConfig(mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0), crop_pct=0.5)
    assert DataConfig.from_dict(json.loads(json.dumps(data.to_dict()))) == data


def test_list_models_supports_wildcards() -> None:
    names = [f"vit_{size}_patch14_reg4_dinov2" for size in ("base", "giant", "large", "small")]
    assert vit_fast.list_models("vit_*_patch14_reg4_dinov2") == names
    assert len(vit_fast.list_models()) >= 122 and vit_fast.list_models("nothing*") == []

"""Tests of repositories in the Hub's cache: head size, preprocessing, class names, shards, and no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from weights_peers import SMALL

from vit_fast import DataConfig, create_model, load_weights
from vit_fast.libraries.transformers.hf_model import data_config_from_processor
from vit_fast.weights import WeightsError
from vit_fast.weights.source import open_source

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TIMM_CONFIG = {
    "architecture": "vit_tiny_patch16_224", "num_classes": 5, "model_args": SMALL,
    "label_names": ["n1", "n2", "n3", "n4", "n5"], "label_descriptions": {"n1": "tench, Tinca tinca"},
    "pretrained_cfg": {
        "input_size": [3, 64, 64], "crop_pct": 0.95, "crop_mode": "center", "interpolation": "bilinear",
        "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "num_classes": 5, "pool_size": None,
    },
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns an empty cache, and disables the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def _publish(cache: Path, repo_id: str, files: dict[str, Any], revision: str = "main") -> str:
    """Writes files in the layout of huggingface_hub's cache."""
    folder = cache / f"models--{repo_id.replace('/', '--')}"
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / revision).write_text(COMMIT)
    for name, content in files.items():
        path = folder / "snapshots" / COMMIT / name
        path.write_text(json.dumps(content)) if name.endswith(".json") else save_file(content, path)
    return repo_id


@pytest.fixture
def state() -> dict[str, Tensor]:
    model = create_model("vit_tiny_patch16_224", img_size=64, num_classes=5, **SMALL)
    return {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}


def test_a_timm_repository(cache: Path, state: dict[str, Tensor]) -> None:
    repository = _publish(cache, "timm/vit_tiny.test", {"config.json": TIMM_CONFIG, "model.safetensors": state})
    model = create_model("vit_tiny_patch16_224", weights=repository, img_size=64, **SMALL)
    assert model.config.num_classes == 5 and torch.equal(model.head.weight, state["head.weight"])
    assert model.data_config == DataConfig(
        mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), interpolation="bilinear", crop_pct=0.95, crop_mode="center"
    )
    assert model.class_names == ("tench, Tinca tinca", "n2", "n3", "n4", "n5")
    for name in (f"hf-hub:{repository}", f"{repository}@main"):
        model = create_model(name)
        assert model.config.image_hw == (64, 64) and model.config.embed_dim == 64
    model = create_model(repository, num_classes=3)
    assert model.head.weight.shape == (3, 64) and model.class_names is None
    with pytest.raises(ValueError, match="its own weights"):
        create_model(repository, weights=repository)


def test_a_transformers_repository(cache: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, image_size=64, patch_size=16,
        id2label={i: f"class {i}" for i in range(12)},
    )  # fmt: skip
    peer = transformers.ViTForImageClassification(config).eval()
    processor = {"size": {"height": 64, "width": 64}, "resample": 3, "image_mean": [0.5, 0.4, 0.3]}
    files = {
        "config.json": {**config.to_dict(), "architectures": ["ViTForImageClassification"]},
        "model.safetensors": peer.state_dict(),
    }
    _publish(cache, "org/vit", files | {"preprocessor_config.json": processor}, revision="v2")
    model = create_model("vit_tiny_patch16_224", weights="org/vit@v2", img_size=64, **SMALL)
    assert model.class_names == tuple(f"class {i}" for i in range(12))  # in number order, not "10" before "2"
    assert model.config.norm_eps == 1e-12
    assert model.data_config == DataConfig(mean=(0.5, 0.4, 0.3), crop_pct=1.0, crop_mode="squash")
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert (model(images) - peer(images).logits).abs().max() < 1e-5
    source = open_source(_publish(cache, "org/other", files))
    assert source.data_config is None and any("the model keeps its preprocessing" in note for note in source.notes)


def test_weights_in_shards(cache: Path, state: dict[str, Tensor], tmp_path: Path) -> None:
    names = sorted(state)
    shards = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    index = {"weight_map": {name: file for file, inside in shards.items() for name in inside}}
    files = {file: {name: state[name] for name in inside} for file, inside in shards.items()}
    files |= {"config.json": TIMM_CONFIG, "model.safetensors.index.json": index}
    assert torch.equal(create_model(_publish(cache, "org/sharded", files)).pos_embed, state["pos_embed"])
    (tmp_path / "model").mkdir()
    for invalid in (["a"], None, {"x": 1}, {"x": "../a.safetensors"}, {"x": "/a.safetensors"}):
        (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": invalid}))
        with pytest.raises(WeightsError, match="weight_map must map each tensor to a file"):
            open_source(tmp_path / "model")


def test_without_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    with pytest.raises(WeightsError, match=r"google/vit-base-patch16-224.* not in the local cache"):
        create_model("vit_tiny_patch16_224", weights="google/vit-base-patch16-224")
    requested = []

    def unreachable(repo_id: str, filename: str, *, revision: str) -> str:
        requested.append(filename)
        raise LocalEntryNotFoundError("no route to host")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    _publish(cache, "org/config_only", {"config.json": TIMM_CONFIG})
    with pytest.raises(WeightsError, match=r"model.safetensors .* not in the local cache"):
        create_model("org/config_only")
    assert requested == ["model.safetensors"], "it must wait for the network only once"


def test_invalid_repositories(state: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(state, tmp_path / "model.safetensors")
    model = create_model("vit_tiny_patch16_224", img_size=64, num_classes=5, **SMALL)
    assert "no config.json" in load_weights(model, tmp_path).notes[0]
    for content, message in (
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "must contain a JSON object, got list"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": [1]}', "malformed"),
        ('{"model_type": "vit", "hidden_size": "wide"}', "an unsupported model|malformed"),
        ('{"model_type": "swin"}', "model_type must be one of vit, .*'swin'"),
        ('{"model_type": "vit", "hidden_act": "mish"}', "hidden_act must be one of .*'mish'"),
        ('{"model_type": "dinov3_vit", "mlp_bias": false}', "mlp_bias"),
        ('{"architecture": "vit_tiny_patch16_224", "model_args": {"attn_layer": "diff"}}', "attn_layer"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(WeightsError, match=message) as caught:
            load_weights(model, tmp_path)
        assert "\n" not in str(caught.value)


SQUASHED = {"size": {"height": 256, "width": 256}}
CROPPED = {"do_center_crop": True, "crop_size": {"height": 224, "width": 224}}
OLD = {"do_center_crop": True, "crop_size": 224, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5] * 3, "resample": 3}
CLIP, DEIT = {"feature_extractor_type": "CLIPFeatureExtractor"}, {"feature_extractor_type": "DeiTFeatureExtractor"}


@pytest.mark.parametrize(
    ("processor", "mean", "interpolation", "crop_pct", "crop_mode"),
    [
        ({"resample": 2, "size": 224}, 0.5, "bilinear", 1.0, "squash"),  # the old format of google/vit-base-patch16-224
        (OLD | CLIP | {"size": 224}, 0.4, "bicubic", 1.0, "center"),
        (OLD | DEIT | {"size": 256}, 0.4, "bicubic", 0.875, "squash"),  # one number, yet both sides
        (CROPPED | {"size": {"shortest_edge": 256}, "resample": 3}, 0.5, "bicubic", 0.875, "center"),
        (CROPPED | SQUASHED, 0.5, "bilinear", 0.875, "squash"),
        (SQUASHED | {"do_normalize": False, "resample": 1}, 0.0, "lanczos", 1.0, "squash"),
    ],
)
def test_preprocessor_configs(
    processor: dict[str, Any], mean: float, interpolation: str, crop_pct: float, crop_mode: str
) -> None:
    found = data_config_from_processor(processor)
    assert (found.mean[1], found.interpolation, found.crop_pct, found.crop_mode) == (
        mean, interpolation, crop_pct, crop_mode,
    )  # fmt: skip


def test_unsupported_preprocessor_configs() -> None:
    for processor in (
        {"do_rescale": False},
        {"rescale_factor": 1 / 127.5},
        {"image_processor_type": "CLIPImageProcessor"},
        {"size": {"height": 224, "width": 448}},
        {"size": {"shortest_edge": 224}},
    ):
        with pytest.raises(ValueError, match="it "):
            data_config_from_processor(processor)

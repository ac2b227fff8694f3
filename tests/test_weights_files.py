"""Weights from files and from the Hub's cache: formats, errors that change nothing, heads, preprocessing, saving."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from fused_models import SMALL
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import vit_fast
from vit_fast import DataConfig, create_model, load, load_weights, save
from vit_fast.libraries.transformers.hf_model import data_config_from_processor
from vit_fast.weights import WeightsError
from vit_fast.weights.source import open_source


def _state() -> dict[str, Tensor]:
    """Returns random weights that bf16 can represent."""
    state = create_model("vit_test").state_dict()
    return {name: torch.randn_like(tensor).bfloat16().float() for name, tensor in state.items()}


def _arrays(state: dict[str, Tensor], bf16: bool = False) -> dict[str, Any]:
    """Converts to numpy; bfloat16 as numpy gets it from JAX."""
    return {n: t.bfloat16().view(torch.int16).numpy().view("V2") if bf16 else t.numpy() for n, t in state.items()}


WRITERS: dict[str, Callable[[dict[str, Tensor], Path], None]] = {
    ".safetensors": save_file,
    ".pth": torch.save,
    ".pt": lambda state, path: torch.save({"model": state, "epoch": 3, "args": None}, path),
    ".bin": lambda state, path: torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, path),
    ".npz": lambda state, path: np.savez(path, **_arrays(state)),
    ".bf16.npz": lambda state, path: np.savez(path, **_arrays(state, bf16=True)),
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format(suffix: str, tmp_path: Path) -> None:
    state, path = _state(), tmp_path / f"weights{suffix}"
    WRITERS[suffix](state, path)
    for name, tensor in create_model("vit_test", weights=path).state_dict().items():
        assert torch.equal(tensor, state[name]), name
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"not weights at all"):
        path.write_bytes(damaged)
        with pytest.raises(WeightsError) as caught:
            create_model("vit_test", weights=path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


class _Payload:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch executed",)


def test_unreadable_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("weights.h5").touch()
    torch.save([torch.zeros(1)], "list.pth")
    torch.save({"epoch": 1}, "empty.pth")
    torch.save({"model": _state(), "payload": _Payload()}, "code.pth")
    Path("code.bin").write_bytes(pickle.dumps(_Payload(), protocol=2))
    np.savez("code.npz", payload=np.array([_Payload()], dtype=object))
    for source, message in (
        (Path("absent.safetensors"), "no such file"),
        ("absent.pth", "no such file"),
        ("folder/absent.safetensors", "no such file"),  # not a repository in the Hub
        (Path("org/name"), "no such file"),
        ("weights.h5", "must end in one of .safetensors"),
        ("list.pth", "must contain a state dict, got list"),
        ("empty.pth", "must contain tensors, got none"),
        ("code.pth", "run code"),
        ("code.bin", "run code|cannot be read"),
        ("code.npz", "pickle"),
        (tmp_path, "must contain one of model.safetensors"),
        ({"layer1.weight": torch.zeros(1)}, "names of one of .*, got layer1.weight"),
    ):
        with pytest.raises(WeightsError, match=message):
            load_weights(create_model("vit_test"), source)
    assert not Path("executed").exists()


def test_an_error_lists_everything_and_leaves_the_model_unchanged() -> None:
    model = create_model("vit_test")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = _state()
    del state["norm.bias"], state["blocks.1.attn.qkv.weight"]
    state["blocks.0.mlp.fc1.weight"] = torch.zeros(3, 64)
    state["pos_embed"] = torch.zeros(1, 15, 64)  # not a square of patches after the class token
    state["cls_token"] = torch.zeros(1, 1, 64, dtype=torch.int64)
    state["blocks.2.norm1.weight"] = state["surprise"] = torch.zeros(64)
    with pytest.raises(WeightsError) as caught:
        load_weights(model, state)
    for part in (
        "missing: blocks.1.attn.qkv.weight, norm.bias",
        "unexpected: blocks.2.norm1.weight, surprise",
        "shape of blocks.0.mlp.fc1.weight: 3x64 in the source, 256x64 in the model",
        "shape of pos_embed: 1x15x64 in the source, 1x17x64 in the model",
        "dtype of cls_token: torch.int64 in the source, torch.float32 in the model",
    ):
        assert part in str(caught.value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_head_of_another_size_is_replaced_only_if_requested(tmp_path: Path) -> None:
    model = create_model("vit_test", num_classes=4)
    state, head = _state(), model.head.weight.clone()
    with pytest.raises(WeightsError, match=r"(?s)shape of head.weight: 10x64 .* 4x64.*replace_head=True"):
        load_weights(model, state)
    report = load_weights(model, state, replace_head=True)
    assert torch.equal(model.head.weight, head) and torch.equal(model.norm.weight, state["norm.weight"])
    assert report.replaced == [
        "head.weight: 10x64 in the source, the model keeps its 4x64",
        "head.bias: 10 in the source, the model keeps its 4",
    ]
    fitting = create_model("vit_test")
    assert load_weights(fitting, state, replace_head=True).replaced == []
    report = load_weights(create_model("vit_test", num_classes=0), state)
    assert "ignored head.weight, head.bias" in str(report)
    torch.save(state, tmp_path / "plain.pth")
    for path in (save(fitting, tmp_path / "ten.safetensors"), tmp_path / "plain.pth"):  # num_classes requests it
        assert create_model("vit_test", weights=path, num_classes=4).head.weight.shape == (4, 64)


def test_positions_of_a_rectangular_grid(tmp_path: Path) -> None:
    """16 patches as 2x8 could also be a 4x4 square: the config of the file decides."""
    wide = create_model("vit_test", img_size=(16, 64))
    path = save(wide, tmp_path / "wide.safetensors")
    assert torch.equal(load(path).pos_embed, wide.pos_embed)
    assert load_weights(create_model("vit_test", img_size=(16, 64)), path).interpolated == []
    square = create_model("vit_test")
    report = load_weights(square, path)
    assert report.interpolated == ["pos_embed: 2x8 -> 4x4 patches"]
    expected = vit_fast.positions.resample_pos_embed(wide.pos_embed, (2, 8), (4, 4), 1)
    assert torch.equal(square.pos_embed, expected)


def test_save_and_load_return_the_whole_model(tmp_path: Path) -> None:
    model = create_model(
        "vit_test", reg_tokens=3, init_values=0.1, act_layer="gelu_tanh", img_size=(32, 40), drop_path_rate=0.1
    )
    model.data_config = DataConfig(mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0), crop_pct=0.95, crop_mode="squash")
    model.class_names = tuple(f"name {i} é" for i in range(10))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight  # tied
    path = save(model.bfloat16(), tmp_path / "model.safetensors")
    fp32 = vit_fast.VisionTransformer(model.config)
    report = load_weights(fp32, path)
    assert (report.layout, report.renamed, fp32.head.weight.dtype) == ("vit-fast", [], torch.float32)
    again = load(path, backend="eager")
    assert (again.config, again.data_config, again.class_names) == (model.config, model.data_config, model.class_names)
    assert again.blocks[0].vit_fast_request == "eager" and not again.training
    assert all(parameter.requires_grad for parameter in again.parameters())
    for name, tensor in again.state_dict().items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, model.state_dict()[name]), name


def test_damaged_metadata(tmp_path: Path) -> None:
    path = save(create_model("vit_test"), tmp_path / "m.safetensors")
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["vit_fast"])
    assert metadata["version"] == vit_fast.__version__
    damaged = [metadata | damage for damage in ({"class_names": "0123456789"}, {"config": 1}, {"data_config": None})]
    for text in ("{", "{}", "[" * 100_000, *map(json.dumps, damaged)):
        save_file(_state(), path, metadata={"vit_fast": text})
        reason = "'config' is missing" if text == "{}" else ""
        with pytest.raises(WeightsError, match=f"its vit-fast metadata cannot be read: {reason}"):
            load(path)
    for field, size, message in (("depth", 10**6, "depth must be at most 1024, got 1000000"), ("depth", 3, "missing")):
        described = metadata | {"config": metadata["config"] | {field: size}}
        save_file(_state(), path, metadata={"vit_fast": json.dumps(described)})
        with pytest.raises(WeightsError, match=message):
            load(path)


def test_errors_of_save_and_load(tmp_path: Path) -> None:
    model = create_model("vit_test")
    with pytest.raises(ValueError, match=r"path must end in \.safetensors, got"):
        save(model, tmp_path / "model.pth")
    vit_fast.fuse(model, normalize=((0.5,) * 3, (0.5,) * 3))
    with pytest.raises(ValueError, match="unfuse first"):
        save(model, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())
    save_file(_state(), tmp_path / "foreign.safetensors")
    with pytest.raises(WeightsError, match="has no config"):
        load(tmp_path / "foreign.safetensors")


def test_configs_are_compared_if_shapes_are_equal(tmp_path: Path) -> None:
    path = save(create_model("vit_test", act_layer="relu"), tmp_path / "relu.safetensors")
    with pytest.raises(WeightsError, match="num_heads: the source has 2, the model 4"):
        create_model("vit_test", weights=path, num_heads=4)
    assert create_model("vit_test", weights=path).config.act_layer == "relu"
    report = load_weights(create_model("vit_test"), path)
    assert report.notes == ["act_layer: the source has 'relu', the model 'gelu'"]


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
    with pytest.raises(ValueError, match="if weights are given"):
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
    assert source.data_config is None and any("preprocessor_config.json is not used" in note for note in source.notes)


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
        with pytest.raises(WeightsError, match="weight_map must map each tensor name to a file"):
            open_source(tmp_path / "model")


def test_without_network(cache: Path) -> None:
    _publish(cache, "org/config_only", {"config.json": TIMM_CONFIG})
    for repository, missing in (("org/absent", "config.json"), ("org/config_only", "model.safetensors")):
        with pytest.raises(WeightsError, match=f"{repository}@main: {missing} cannot be downloaded: .* local cache"):
            create_model(repository)


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
    sizes = ({"height": 224, "width": 448}, {"shortest_edge": 224})
    others = ({"do_rescale": False}, {"rescale_factor": 1 / 127.5}, {"image_processor_type": "CLIPImageProcessor"})
    for processor in (*others, *({"size": size} for size in sizes)):
        with pytest.raises(ValueError, match="it "):
            data_config_from_processor(processor)

"""Options of export_onnx: sizes, rotary embeddings, preprocessing, outputs, bf16, external data, metadata."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from fused_models import SUBJECTS
from onnx_models import FAMILIES, NAMES, make
from PIL import Image
from torch import Tensor, nn

import vit_fast
from vit_fast.apps.data import make_transform, per_channel, read_image, read_images, sample_image
from vit_fast.config import DataConfig
from vit_fast.errors import UnsupportedInputError
from vit_fast.export import OnnxRunner, export_onnx, graphs, inspect_onnx
from vit_fast.export.options import BUDGETS
from vit_fast.export.preprocessing import preprocessing_model
from vit_fast.export.report import loss_of
from vit_fast.libraries.interface.image_model import Outputs
from vit_fast.libraries.known import recognize

CENTER = DataConfig(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), crop_pct=0.875, interpolation="bilinear")


def test_dynamic_size_and_batch(tmp_path: Path) -> None:
    """The output matches a model that interpolates its positions, also for sizes that were not verified."""
    model: Any = make("vit")
    report = export_onnx(model, tmp_path / "m.onnx", dynamic_size=True, target="ort-cpu")
    assert report.verified and len({check.image_hw for check in report.checks}) == 3
    reference = vit_fast.VisionTransformer(model.config.replace(dynamic_img_size=True)).eval()
    reference.load_state_dict(model.state_dict())
    runner = OnnxRunner(tmp_path / "m.onnx", "cpu")
    assert runner.info.inputs[0]["shape"] == ["batch", 3, "8*rows", "8*columns"]
    for batch, *size in [(1, 32, 32), (3, 32, 64), (8, 64, 32), (1, 40, 48), (3, 96, 96), (8, 8, 8)]:
        images = torch.randn(batch, 3, *size)
        with torch.inference_mode():
            expected = reference(images).numpy()
        atol = 1e-5 * max(1, np.abs(expected).max())
        np.testing.assert_allclose(runner(images.numpy()), expected, rtol=0, atol=atol)


SIZES: dict[str, Any] = {"dynamic_size": True, "target": "ort-cpu"}


@pytest.mark.fast_cases("vit_pe_lang_gigantic_patch14_448-options8")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, SIZES) for name in ("dinov2_registers", "sincos", "timm-vit", "transformers-vit")),
        *((name, SIZES) for name in ("transformers-dinov3", "eva02_tiny_patch14_224")),
        ("transformers-vit", {"output": "features", "dynamic_batch": False}),
        ("eva02_base_patch16_clip_224", {"target": "ort-cpu"}),
        ("vit_pe_lang_gigantic_patch14_448", {"target": "ort-cpu"}),
    ],
)
def test_positions_of_every_kind_and_features(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    if name in FAMILIES:
        model = make(name)
    elif name in SUBJECTS:
        model = SUBJECTS[name].build().eval()
    else:
        size = 3 * vit_fast.variants.get_variant(name).config.patch_hw[0]
        model = vit_fast.create_model(name, depth=1, embed_dim=64, num_heads=2, img_size=size)
    vit_fast.fuse(model, backend="sdpa")
    report = export_onnx(model, tmp_path / "m.onnx", **options)
    assert report.verified and report.output == options.get("output", report.output)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("crop_mode", ["center", "squash"])
def test_preprocessing_matches_pillow_to_one_gray_level(interpolation: Any, crop_mode: Any) -> None:
    """Compares pixel by pixel: up- and downscaling, odd sizes, margins that do not halve, one channel."""
    cases = ((224, 224), 0.9, (512, 600), 3), ((33, 47), 0.875, (201, 77), 3), ((96, 96), 1.0, (60, 41), 1)
    for image_hw, crop_pct, size, in_chans in cases:
        data_config = replace(CENTER, interpolation=interpolation, crop_mode=crop_mode, crop_pct=crop_pct)
        image = read_image(sample_image()).resize(size).convert("RGB" if in_chans == 3 else "L")
        graph = preprocessing_model(data_config, image_hw, in_chans, opset=18)
        ((planes,),) = graphs.run_graph(graph, [np.asarray(image).reshape(1, *reversed(size), in_chans)])
        difference = np.abs(planes[0] - make_transform(data_config, image_hw, in_chans=in_chans)(image).numpy())
        levels = difference * 255 * np.reshape(per_channel(data_config.std, in_chans), (-1, 1, 1))
        assert levels.max() < 1.01 and (levels > 0.5).mean() < 0.01


@pytest.mark.slow
def test_a_model_that_contains_its_normalization(tmp_path: Path) -> None:
    """With fuse(normalize=...), the model takes bytes. Its file matches that of the original model."""
    data, pixels = CENTER.to_dict(), np.asarray(read_image(sample_image()))[None]
    model = make("timm-vit")
    export_onnx(model, tmp_path / "plain.onnx", preprocess=True, data_config=data)
    vit_fast.fuse(model, backend="sdpa", normalize=(CENTER.mean, CENTER.std))
    export_onnx(model, tmp_path / "bytes.onnx", preprocess=True, data_config=data)
    plain, of_bytes = (OnnxRunner(tmp_path / f"{name}.onnx", "cpu") for name in ("plain", "bytes"))
    np.testing.assert_allclose(of_bytes(pixels), plain(pixels), atol=1e-4 * np.abs(plain(pixels)).max())
    assert of_bytes.data_config is not None and of_bytes.data_config.mean == (0, 0, 0)


def test_calibration_is_spread_over_all_files(tmp_path: Path) -> None:
    """Reads evenly spaced files from the first to the last, and none twice."""
    for i in range(90):
        Image.new("L", (4, 4), i).save(tmp_path / f"{i:02}.png")
    for count in (30, 90):
        levels = [int(np.asarray(image).flat[0]) for image in read_images([tmp_path], count)]
        gaps = np.diff(levels)
        assert (len(levels), levels[0], levels[-1]) == (count, 0, 89)
        assert gaps.min() >= 1 and gaps.max() <= gaps.min() + 1


def test_features_of_transformers_are_the_class_token() -> None:
    model: Any = make("transformers-vit")
    images = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        expected = model.vit(images).last_hidden_state[:, 0]
        torch.testing.assert_close(recognize(model).outputs(images, Outputs(names=("features",)))["features"], expected)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_probabilities_are_checked_as_strictly_as_logits(precision: Any) -> None:
    """With many classes, all probabilities are small: unrelated ones must not pass."""
    logits, unrelated = torch.randn(2, 8, 1000, dtype=torch.float64)
    broken = logits.where(logits != logits[3, 5], torch.nan)

    def passes(other: torch.Tensor) -> bool:
        loss = loss_of(other.softmax(-1).float().numpy(), (3 * logits).softmax(-1).numpy(), "probabilities")
        return loss.acceptable() if precision == "int8" else loss.max_error <= BUDGETS[precision]

    assert passes(3 * logits) and not passes(3 * broken) and not passes(unrelated) and not passes(3 * unrelated)
    assert precision != "fp16" or (passes((3 * logits).half().double()) and not passes(3.15 * logits))


def test_report_and_metadata(tmp_path: Path) -> None:
    """Export does not modify the model."""
    model: Any = make("vit").half().train()
    before = {name: (id(p), p.dtype) for name, p in model.named_parameters()}
    options: dict[str, Any] = {"precision": "fp16", "target": "ort-cuda", "class_names": NAMES, "source": "a test"}
    report = export_onnx(model, tmp_path / "m.onnx", **options)
    assert {name: (id(p), p.dtype) for name, p in model.named_parameters()} == before
    assert model.training and model.blocks[0].vit_fast_backend == "eager"
    content = json.loads(report.to_json())
    assert content["verified"] and content["nodes"]["MatMul"]
    assert content["bytes"] == (tmp_path / "m.onnx").stat().st_size and "fp64" in str(report)
    info = inspect_onnx(tmp_path / "m.onnx")
    assert info.class_names == tuple(NAMES) and info.data_config == DataConfig() and info.output == "logits"
    assert info.metadata["source"] == "a test" and info.metadata["config"]["embed_dim"] == 32
    assert info.metadata["verification"]["reference"].startswith("eager fp64")
    assert set(info.metadata["versions"]) >= {"vit-fast", "torch", "onnx"}
    assert b"/site-packages/" not in (tmp_path / "m.onnx").read_bytes(), "no path of this machine"


def test_unsupported_preprocessing_of_timm_is_reported(tmp_path: Path) -> None:
    model: Any = make("timm-vit")
    model.pretrained_cfg = {"mean": (0.1,) * 3, "std": (0.2,) * 3, "crop_mode": "border"}
    found, reason = recognize(model), "preprocessing is not supported .*crop_mode must be .*'border'"
    assert found.data_config is None and re.search(reason, found.no_data_config)
    with pytest.raises(ValueError, match=f"must be given for preprocess=True: .*{reason}"):
        export_onnx(model, tmp_path / "m.onnx", preprocess=True)
    report = export_onnx(model, tmp_path / "m.onnx", verify=False)
    assert any(re.search(reason, warning) for warning in report.warnings)


@pytest.mark.fast_cases("given0-18-8")
@pytest.mark.parametrize(
    ("given", "opset", "ir_version"),
    [
        ({"ir_version": 8, "precision": "int8", "target": "ort-cpu"}, 18, 8),
        ({"opset": 19, "ir_version": 9, "precision": "int8", "target": "ort-cpu", "external_data": True}, 19, 9),
        ({"ir_version": 9, "preprocess": True}, 20, 9),
    ],
)
def test_ir_version(given: dict[str, Any], opset: int, ir_version: int, tmp_path: Path) -> None:
    """The final file has the version, after quantization and with the metadata; also int8 with old opsets."""
    is_int8 = given.get("precision") == "int8"  # random weights: not accurate in int8 on every CPU
    given["calibration"] = [sample_image()] if is_int8 else None
    report = export_onnx(make("vit"), tmp_path / "m.onnx", verify=not is_int8, **given)
    assert report.verified != is_int8 and (report.opset, report.ir_version) == (opset, ir_version)
    assert OnnxRunner(tmp_path / "m.onnx", "cpu").providers
    proto, info = onnx.load(tmp_path / "m.onnx", load_external_data=False), inspect_onnx(tmp_path / "m.onnx")
    assert proto.ir_version == info.ir_version == info.facts()["IR version"] == ir_version
    assert {entry.version for entry in proto.opset_import if not entry.domain} == {opset}


@pytest.mark.skipif(torch.cuda.is_available(), reason="bf16 files are verified on CUDA")
def test_bf16_needs_cuda_to_be_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = export_onnx(make("vit"), tmp_path / "m.onnx", precision="bf16", target="ort-cuda", verify=False)
    assert report.opset == 22, "the first that has a bf16 Conv"
    assert not report.verified and "not verified: verify=False (--no-verify)" in report.warnings
    proto = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(proto)
    assert {t.data_type for t in proto.graph.initializer if len(t.dims) == 2} == {onnx.TensorProto.BFLOAT16}
    monkeypatch.setattr("vit_fast.export.graphs.capture", None)  # before any work
    with pytest.raises(UnsupportedInputError, match=r"bf16 on CUDA only, .*\n.*--no-verify"):
        export_onnx(make("vit"), tmp_path / "new" / "m.onnx", precision="bf16")


def test_matmuls_have_the_names_of_their_layers(tmp_path: Path) -> None:
    """Also of layers with equal weights and equal biases."""
    model = vit_fast.create_model("vit_test")
    for block in model.blocks:
        for parameter in (*block.attn.proj.parameters(), *block.mlp.fc2.parameters()):
            nn.init.zeros_(parameter)
    export_onnx(model, tmp_path / "m.onnx", verify=False)
    nodes = onnx.load(tmp_path / "m.onnx").graph.node
    expected = [name for name, module in model.blocks.named_modules(prefix="blocks") if isinstance(module, nn.Linear)]
    assert [node.name for node in nodes if node.name.startswith("blocks")] == expected


class Awkward(nn.Module):
    """Computed weights, hooks, nested inputs and outputs whose names collide."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.utils.weight_norm(nn.Linear(8, 8))
        self.layer.register_forward_hook(lambda module, inputs, y: 2 * y)

    def forward(self, given: dict[str, Tensor], given_x: Tensor) -> dict[Any, Any]:
        y = self.layer(given["x"])
        return {"a": {"b": y}, "a_b": -y, "given_x": (given_x + 1).to(torch.int32), 0: y.argmax(-1), 1: None}


def test_names_that_collide_and_inputs_of_other_dtypes(tmp_path: Path) -> None:
    """Floating-point inputs and outputs are fp32; a compiled model in fp16, with computed weights, is exported."""
    model, x = Awkward().half(), torch.randn(2, 4, 8)
    example = {"given": {"x": x.half()}, "given_x": torch.tensor([3, 4], dtype=torch.int32)}
    report = export_onnx(torch.compile(model), tmp_path / "m.onnx", example=example)
    assert report.inputs == {"given_x": "float ['batch', 4, 8]", "given_x_input": "int32 ['batch']"}
    assert report.verified and list(report.outputs) == ["a_b", "a_b_output", "given_x_output", "0"]
    inputs = {"given_x": x.half().float(), "given_x_input": example["given_x"]}
    found = OnnxRunner(tmp_path / "m.onnx", "cpu")(inputs)
    expected = model.float()({"x": x.half().float()}, example["given_x"])
    torch.testing.assert_close(found["a_b"], -found["a_b_output"])
    torch.testing.assert_close(found["given_x_output"], expected["given_x"])
    assert found["a_b"].dtype == torch.float32

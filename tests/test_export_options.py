"""Options of export_onnx: sizes, rotary embeddings, preprocessing, outputs, bf16, external data, metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from fused_models import SUBJECTS, timm_subject
from onnx_models import make, ours, randomised, timm_vit
from PIL import Image
from torch import nn

import vit_fast
from vit_fast.apps.data import make_transform, read_image, read_images, sample_image
from vit_fast.config import DataConfig
from vit_fast.errors import UnsupportedInputError
from vit_fast.export import OnnxRunner, export_onnx, graphs, inspect_onnx, verification
from vit_fast.export.options import ExportOptions
from vit_fast.export.preprocessing import preprocessing_model
from vit_fast.libraries.known import recognise

CENTRE = DataConfig(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), crop_pct=0.875, interpolation="bilinear")


def remade(model: Any, family: str) -> Any:
    """The same model in eager mode for any size."""
    if family == "transformers_vit":
        return lambda images: model(pixel_values=images, interpolate_pos_encoding=True).logits
    dynamic: Any = timm_vit(dynamic_img_size=True) if family == "timm" else None
    dynamic = dynamic or vit_fast.VisionTransformer(model.config.replace(dynamic_img_size=True))
    dynamic.load_state_dict(model.state_dict())
    return dynamic.eval()


@pytest.mark.fast_cases("vit")
@pytest.mark.parametrize("family", ["vit", "dinov2_registers", "sincos", "timm", "transformers_vit"])
def test_dynamic_size_and_batch(family: str, tmp_path: Path) -> None:
    model: Any = make(family)
    report = export_onnx(model, tmp_path / "m.onnx", dynamic_size=True, target="ort-cpu")
    assert report.verified and len({check.image_hw for check in report.checks}) == 3
    reference, runner = remade(model, family), OnnxRunner(tmp_path / "m.onnx", "cpu")
    assert inspect_onnx(tmp_path / "m.onnx").inputs[0]["shape"] == ["batch", 3, "8*rows", "8*columns"]
    for size in [(32, 32), (32, 64), (64, 32), (40, 48), (96, 96), (8, 8)]:
        images = torch.randn(8, 3, *size)
        with torch.inference_mode():
            expected = reference(images).numpy()
        for batch in (1, 3, 8):
            got = runner(images[:batch].numpy())
            np.testing.assert_allclose(got, expected[:batch], rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


ROTARY = {
    "timm-dinov3": (SUBJECTS["timm-dinov3"], 16),
    "timm-eva02": (timm_subject("eva02_tiny_patch14_224", size=28, dynamic_img_size=True), 14),
    "transformers-dinov3": (SUBJECTS["transformers-dinov3"], 16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROTARY)
def test_dynamic_size_with_rotary_embeddings(name: str, tmp_path: Path) -> None:
    subject, patch = ROTARY[name]
    model = subject.build().eval()
    vit_fast.fuse(model, backend="sdpa")
    assert export_onnx(model, tmp_path / "m.onnx", dynamic_size=True, target="ort-cpu").verified
    assert not any("get_embed" in vars(module) for module in model.modules()), "timm's own is back"
    runner = OnnxRunner(tmp_path / "m.onnx", "cpu")
    (key,) = subject.inputs()
    for rows, columns in ((2, 2), (3, 5), (4, 1)):
        images = torch.randn(2, 3, rows * patch, columns * patch)
        with torch.inference_mode():
            tokens = subject.run(model, {key: images})
            expected = (tokens[:, 0] if name.startswith("transformers") else tokens).numpy()
        np.testing.assert_allclose(runner(images.numpy()), expected, rtol=0, atol=1e-4 * max(1, np.abs(expected).max()))


def test_rotary_embeddings_of_one_size_are_refused(tmp_path: Path) -> None:
    model = timm_subject("vit_small_patch16_rope_mixed_ape_224").build().eval()
    with pytest.raises(UnsupportedInputError, match=r"\(RotaryEmbeddingMixed\) are computed for one size only"):
        export_onnx(model, tmp_path / "m.onnx", dynamic_size=True)


@pytest.mark.fast_cases("vit_pe_lang_gigantic_patch14_448")
@pytest.mark.parametrize("name", ["eva02_base_patch16_clip_224", "vit_pe_lang_gigantic_patch14_448"])
def test_a_model_with_every_norm_it_has(name: str, tmp_path: Path) -> None:
    size = 3 * vit_fast.variants.get_variant(name).config.patch_hw[0]
    model = vit_fast.create_model(name, depth=1, embed_dim=64, num_heads=2, img_size=size)
    assert export_onnx(model, tmp_path / "m.onnx", target="ort-cpu").verified


@pytest.mark.fast_cases("bilinear_rectangle")
@pytest.mark.parametrize(
    ("data_config", "shape"),
    [
        (CENTRE, {"img_size": (48, 32)}),
        (DataConfig(crop_mode="squash", crop_pct=1.0), {"in_chans": 1}),  # means and deviations are averaged
    ],
    ids=["bilinear_rectangle", "squash_grey"],
)
def test_preprocessing_in_the_graph(data_config: DataConfig, shape: dict[str, Any], tmp_path: Path) -> None:
    model: Any = randomised(ours(**shape))
    model.data_config = data_config
    export_onnx(model, tmp_path / "m.onnx", preprocess=True, output="probabilities")
    runner, in_chans = OnnxRunner(tmp_path / "m.onnx", "cpu"), shape.get("in_chans", 3)
    transform = make_transform(data_config, model.config.image_hw, in_chans=in_chans)
    for size in (read_image(sample_image()).size, (300, 120), (77, 200)):
        image = read_image(sample_image()).resize(size).convert("RGB" if in_chans == 3 else "L")
        prepared = transform(image)[None]
        with torch.inference_mode():
            expected = model(prepared).softmax(-1).numpy()
            shifted = model(prepared + 0.5).softmax(-1).numpy()
        got = runner(np.asarray(image).reshape(1, image.height, image.width, in_chans))
        np.testing.assert_allclose(got.sum(), 1, atol=1e-5)
        # One grey level of rounding in some pixels; a real difference of preprocessing moves the output much further.
        assert np.abs(got - expected).max() < 2e-2 * np.abs(shifted - expected).max()


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("crop_mode", ["center", "squash"])
def test_preprocessing_equals_pillow_to_one_grey_level(interpolation: Any, crop_mode: Any) -> None:
    """Pixel by pixel, up- and downscaling, odd sizes, margins that do not halve."""
    sizes = ((224, 224), 0.9, (512, 600)), ((33, 47), 0.875, (201, 77)), ((96, 96), 1.0, (60, 41))
    for image_hw, crop_pct, size in sizes:
        data_config = DataConfig(interpolation=interpolation, crop_mode=crop_mode, crop_pct=crop_pct)
        image = read_image(sample_image()).resize(size)
        graph = preprocessing_model(data_config, image_hw, 3, opset=18)
        ((planes,),) = graphs.run_graph(graph, [np.asarray(image)[None]])
        levels = np.abs(planes[0] - make_transform(data_config, image_hw)(image).numpy()) * 127.5
        assert levels.max() < 1.01 and (levels > 0.5).mean() < 0.01


@pytest.mark.slow
def test_a_model_with_its_normalisation_folded_in(tmp_path: Path) -> None:
    """fuse(normalize=...) makes a model of bytes: the file says so, and both files agree on the same image."""
    data, pixels = CENTRE.to_dict(), np.asarray(read_image(sample_image()))[None]
    model = make("timm")
    export_onnx(model, tmp_path / "plain.onnx", preprocess=True, data_config=data)
    vit_fast.fuse(model, backend="sdpa", normalize=(CENTRE.mean, CENTRE.std))
    export_onnx(model, tmp_path / "bytes.onnx", preprocess=True, data_config=data)
    plain, of_bytes = (OnnxRunner(tmp_path / f"{name}.onnx", "cpu")(pixels) for name in ("plain", "bytes"))
    np.testing.assert_allclose(of_bytes, plain, atol=1e-4 * np.abs(plain).max())
    info = inspect_onnx(tmp_path / "bytes.onnx")
    assert info.data_config is not None and info.data_config.mean == (0, 0, 0)


def test_calibration_is_spread_over_all_files(tmp_path: Path) -> None:
    """Sorted by class: every third of the files is seen, none twice."""
    for i in range(90):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(tmp_path / f"{i:02}.png")
    for count in (30, 90):
        reds = [image.getpixel((0, 0))[0] for image in read_images([tmp_path], count)]  # type: ignore[index]  # RGB
        assert reds == list(range(0, 90, 90 // count))
    assert len(read_images([tmp_path / "00.png", tmp_path / "01.png"], 5)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["timm", "transformers_vit", "torchvision"])
def test_features(family: str, tmp_path: Path) -> None:
    model: Any = make(family)
    report = export_onnx(model, tmp_path / "m.onnx", output="features", dynamic_batch=False)
    assert report.output == "features" and report.top1_agreement is None
    images = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        if family == "transformers_vit":
            expected = model.vit(images).last_hidden_state[:, 0]
        elif family == "torchvision":
            model.heads = nn.Identity()
            expected = model(images)
        else:
            expected = model.forward_head(model.forward_features(images), pre_logits=True)
    np.testing.assert_allclose(OnnxRunner(tmp_path / "m.onnx", "cpu")(images), expected, atol=1e-5)
    assert inspect_onnx(tmp_path / "m.onnx").inputs[0]["shape"] == [1, 3, 32, 32]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_probabilities_are_checked_as_strictly_as_logits(precision: Any) -> None:
    """All probabilities of many classes are small: unrelated ones, and logits 5 % too large, must not pass."""
    options = ExportOptions(precision=precision, output="probabilities")
    generator = torch.Generator().manual_seed(0)
    logits, unrelated = (torch.randn(8, 1000, generator=generator, dtype=torch.float64) for _ in range(2))
    logits = 3 * logits
    expected = logits.softmax(-1).numpy()

    def passes(other: torch.Tensor) -> bool:
        return verification._compare(other.softmax(-1).float().numpy(), expected, 8, (32, 32), options).passed

    broken = logits.clone()
    broken[3, 5] = torch.nan
    assert passes(logits) and not passes(broken)
    assert not passes(unrelated) and not passes(3 * unrelated)
    if precision == "fp16":
        assert not passes(1.05 * logits) and passes(logits.half().double())


@pytest.mark.slow
def test_external_weights_of_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above protobuf's limit (lowered here), weights are external by default; inside is refused."""
    model = make("vit")
    monkeypatch.setattr(graphs, "PROTOBUF_LIMIT", 10_000)
    report = export_onnx(model, tmp_path / "big.onnx")
    assert report.external_data == "big.onnx.data" and report.verified
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.onnx", "big.onnx.data"]
    assert (tmp_path / "big.onnx").stat().st_size < 60_000
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        np.testing.assert_allclose(OnnxRunner(tmp_path / "big.onnx", "cpu")(images), model(images), atol=1e-5)
    with pytest.raises(ValueError, match="exceed protobuf's limit of 2 GB per file"):
        export_onnx(model, tmp_path / "inside.onnx", external_data=False)
    assert not (tmp_path / "inside.onnx").exists()


@pytest.mark.slow(minutes=True)
def test_a_model_over_two_gigabytes(tmp_path: Path) -> None:
    """ViT-H in fp32 with random weights: 2.5 GB."""
    report = export_onnx(vit_fast.create_model("vit_huge_patch14_224"), tmp_path / "huge.onnx", target="ort-cpu")
    assert report.verified and report.external_data == "huge.onnx.data" and report.bytes > 2**31


def test_report_and_metadata_and_the_model_stays_as_it_was(tmp_path: Path) -> None:
    names = [f"class {i}" for i in range(10)]
    model: Any = make("vit").half().train()
    before = {name: (id(p), p.dtype) for name, p in model.named_parameters()}
    options: dict[str, Any] = {"precision": "fp16", "target": "ort-cuda", "class_names": names, "source": "a test"}
    report = export_onnx(model, tmp_path / "m.onnx", **options)
    assert {name: (id(p), p.dtype) for name, p in model.named_parameters()} == before
    assert model.training and model.blocks[0].vit_fast_backend == "eager"
    content = json.loads(report.to_json())
    assert content["verified"] and content["nodes"]["MatMul"] and content["seconds"]["verify"] > 0
    assert content["bytes"] == (tmp_path / "m.onnx").stat().st_size and "fp64" in str(report)
    info = inspect_onnx(tmp_path / "m.onnx")
    assert info.class_names == tuple(names) and info.data_config == DataConfig() and info.output == "logits"
    assert info.metadata["source"] == "a test" and info.metadata["config"]["embed_dim"] == 32
    assert info.metadata["verification"]["reference"].startswith("eager fp64")
    assert set(info.metadata["versions"]) >= {"vit-fast", "torch", "onnx"}
    text = (tmp_path / "m.onnx").read_bytes()
    assert b"/site-packages/" not in text and str(Path.home()).encode() not in text  # no path of this machine


@pytest.mark.slow
def test_bf16_without_verification(tmp_path: Path) -> None:
    report = export_onnx(make("vit"), tmp_path / "m.onnx", precision="bf16", target="ort-cuda", verify=False)
    assert report.opset == 22, "the first that has a bf16 Conv"
    assert not report.verified and "not verified: verify=False" in report.warnings
    kinds = {t.data_type for t in onnx.load(tmp_path / "m.onnx").graph.initializer if len(t.dims) == 2}
    assert kinds == {onnx.TensorProto.BFLOAT16}
    onnx.checker.check_model(str(tmp_path / "m.onnx"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="bf16 files are verified on CUDA")
def test_bf16_that_cannot_be_verified_is_refused_before_the_capture(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("vit_fast.export.exporter.capture", None)
    with pytest.raises(UnsupportedInputError, match=r"bf16 on CUDA only, .*\n.*--no-verify"):
        export_onnx(make("vit"), tmp_path / "new" / "m.onnx", precision="bf16")
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_ours_is_called_by_its_own_name():
    """ViT-B and DeiT-B have one shape; their images are prepared differently."""
    for name in ("vit_base_patch16_224", "deit_base_patch16_224", "vit_test"):
        model = vit_fast.create_model(name, device="meta").to_empty(device="cpu")
        assert recognise(model).name == name

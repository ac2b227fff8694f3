"""Invalid input to export raises one clear error and writes no file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from command_line import run
from fused_models import SUBJECTS, torchvision_vit
from onnx_models import NAMES, make, own_vit, randomized
from torch import nn

import vit_fast
from vit_fast.apps.data import ImageError
from vit_fast.errors import UnsupportedInputError
from vit_fast.export import VerificationError, export_onnx
from vit_fast.export.options import BUDGETS


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return make("vit")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"opset": 17}, ValueError, "opset must be an integer >= 18, got 17"),
        ({"opset": 99}, ValueError, "opset must be at most .*, got 99"),
        ({"dynamic_batch": "no"}, TypeError, "dynamic_batch must be a bool, got 'no'"),
        ({"precision": "fp9"}, ValueError, "precision must be one of 'fp32', 'fp16'"),
        ({"precision": "int8"}, ValueError, "must be image files or folders for int8"),
        ({"calibration": ["x"]}, ValueError, "calibration images require precision int8"),
        ({"precision": "fp8", "calibration": []}, ImageError, "must contain at least one image file"),
        ({"images": ["absent.jpg"]}, ImageError, r"absent\.jpg: no such file"),
        ({"class_names": ["one"]}, ValueError, "class_names must have 10 names, one per class, got 1"),
        (
            {"precision": "int8-dynamic", "target": "tensorrt", "preprocess": True, "dynamic_size": True},
            UnsupportedInputError,
            r"must not be int8-dynamic for TensorRT\n(.|\n)*antialiased Resize(.|\n)*resizes all images to one size",
        ),
        ({"precision": "bf16", "target": "ort-cpu"}, UnsupportedInputError, "CPU provider has no Conv"),
        ({"ir_version": "9"}, ValueError, "ir_version must be an integer >= 1, got '9'"),
        ({"ir_version": 99}, ValueError, "ir_version must be at most .*, got 99"),
        ({"ir_version": 8, "opset": 20}, UnsupportedInputError, "at least 9 for opset 20, got 8"),
        ({"ir_version": 7}, UnsupportedInputError, "ir_version must be at least 8 for opset 18, got 7"),
        ({"precision": "bf16", "ir_version": 9}, UnsupportedInputError, "at least 10 for opset 22, got 9"),
        ({"precision": "bf16", "opset": 21}, UnsupportedInputError, "opset must be at least 22 for bf16 Conv"),
        ({"precision": "fp8", "target": "ort-cpu"}, UnsupportedInputError, "target must be .* for fp8, got ort-cpu"),
        ({"precision": "fp8", "opset": 18}, UnsupportedInputError, "opset must be at least 19 for quantization scales"),
        ({"validation": "absent"}, FileNotFoundError, "absent"),
        ({"validation": ".", "output": "features"}, UnsupportedInputError, "must output classes, got features"),
        ({"data_config": {"sharpness": 1}}, ValueError, "sharpness"),
        ({"class_names": "0123456789"}, TypeError, "class_names must be"),
        ({"path": "m.md"}, ValueError, r"path must end in \.onnx, got"),
    ],
)
def test_invalid_arguments_raise_before_any_work(
    model: nn.Module, options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = tmp_path / options.pop("path", "m.onnx")
    with pytest.raises(error, match=message):
        export_onnx(model, path, **options)
    assert not list(tmp_path.iterdir())


def with_act(forward: Any) -> nn.Module:
    model: Any = make("timm-vit")
    model.blocks[1].mlp.act = nn.Module()
    model.blocks[1].mlp.act.forward = forward
    return model


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda: nn.Linear(3, 3), {}, "model must be a ViT"),
        (lambda: own_vit().to("meta"), {}, "meta device"),
        (SUBJECTS["transformers-siglip2"].make, {}, r"Siglip2VisionModel(.|\n)*pixel_attention_mask"),
        (lambda: own_vit(num_classes=0), {"output": "probabilities"}, "no classification head"),
        (torchvision_vit, {"dynamic_size": True}, "one image size only"),
        (torchvision_vit, {"preprocess": True}, "data_config must be given"),
        (
            lambda: SUBJECTS["timm-rope-mixed"].make().eval(), {"dynamic_size": True},
            r"\(RotaryEmbeddingMixed\) are computed for one size only",
        ),
        (lambda: timm.create_model("swin_tiny_patch4_window7_224"), {}, "export of .*SwinTransformer"),
        (lambda: with_act(lambda x: x if x.sum() > 0 else -x), {}, "torch cannot export the model: .* data-dependent"),
        (lambda: with_act(torch.special.airy_ai), {}, "torch cannot export the model: .*airy_ai"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_exported(build: Any, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        export_onnx(build(), tmp_path / "m.onnx", **options)
    assert not list(tmp_path.iterdir())


def test_an_incorrect_file_is_removed(model: nn.Module, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(BUDGETS, "fp32", 0.0)
    (tmp_path / "m.onnx").write_text("the old file")
    with pytest.raises(VerificationError, match=r"fp32 file differs from eager .* allowed: max error <= 0"):
        export_onnx(model, tmp_path / "m.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_text() == "the old file"


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vit_fast.save(randomized(vit_fast.create_model("vit_test")), tmp_path / "w.safetensors")
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    assert not run(
        "export", "vit_test", "-o", str(tmp_path / "m.onnx"), "--weights", str(tmp_path / "w.safetensors"),
        "--target", "ort-cpu", "--preprocess", "--returns", "probabilities", "--classes", str(tmp_path / "names.txt"),
        "--triton-repository", str(tmp_path / "models"), "--json",
    )  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert report["verified"] and report["output"] == "probabilities" and not report["warnings"]
    assert (tmp_path / "models" / "m" / "config.pbtxt").is_file()
    assert not run("export", "--inspect", str(tmp_path / "m.onnx"), "--json")
    info = json.loads(capsys.readouterr().out)
    assert info["class_names"][3] == "thing 3" and info["metadata"]["model"] == "vit_test"
    assert info["metadata"]["source"] == f"vit_test, {tmp_path / 'w.safetensors'}"
    assert not run("export", "--inspect", str(tmp_path / "m.onnx"))
    assert "[batch, height, width, channels]" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert not run("export", "vit_test", "-o", str(tmp_path / "r.onnx"), "--no-verify", "--json")
    assert "the weights are random: pass --weights" in json.loads(capsys.readouterr().out)["warnings"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "pass MODEL or --weights, and -o FILE.onnx"),
        ("vit_tset -o m.onnx", "unknown model 'vit_tset': did you mean vit_test"),
        ("vit_test -o m.onnx --precision int8 --calibrate absent", "absent: no such file"),
        ("vit_test -o m.onnx --triton-repository models", "already exists"),
        ("vit_test -o x.onnx --precision fp8 --target tensorrt --triton-repository new", "must be one of fp32, fp16"),
        ("--inspect absent.onnx", "absent.onnx: no such file"),
    ],
)
def test_invalid_commands(arguments: str, message: str, capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "m").mkdir(parents=True)
    assert run("export", *arguments.split()) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["models"]

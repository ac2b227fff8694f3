"""`vit-fast predict`: probabilities, class names, and one line for invalid input."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run, uninstall
from PIL import Image

from vit_fast import DataConfig, create_model, load, save
from vit_fast.apps.classifiers import read_class_names
from vit_fast.apps.data import load_images, sample_image

PHOTO = str(sample_image())


@pytest.fixture
def weights(tmp_path: Path) -> str:
    model = create_model("vit_test")
    model.data_config = DataConfig(mean=(0.4, 0.4, 0.4), std=(0.2, 0.2, 0.2), crop_pct=0.8)
    model.class_names = tuple(f"name {i}" for i in range(10))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return str(save(model, tmp_path / "weights.safetensors"))


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert run("predict", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_probabilities_are_the_softmax_of_the_logits(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = _json(capsys, PHOTO, "--weights", weights, "--top-k", "10")
    model = load(weights)
    with torch.no_grad():
        expected = model(load_images([PHOTO], model))[0].softmax(dim=0)
    assert result["image"] == PHOTO
    probabilities = [row["probability"] for row in result["top"]]
    assert probabilities == sorted(probabilities, reverse=True) and abs(sum(probabilities) - 1) < 1e-12
    for row in result["top"]:
        assert abs(row["probability"] - expected[row["index"]]) < 1e-6
        assert row["class"] == f"name {row['index']}"


def test_folders_and_single_images_agree(weights: str, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(40):  # more than one batch
        Image.new("RGB", (40, 40), (6 * i, 255 - 6 * i, 0)).save(folder / f"{i:02}.png")
    together = _json(capsys, str(folder), "--weights", weights)
    assert [Path(result["image"]).name for result in together] == [f"{i:02}.png" for i in range(40)]
    (alone,) = _json(capsys, str(folder / "37.png"), "--weights", weights)
    assert [row["index"] for row in alone["top"]] == [row["index"] for row in together[37]["top"]]
    assert run("predict", PHOTO, "--weights", weights, "--top-k", "2", "--device", "cpu") == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == PHOTO and len(lines) == 2 and all("%" in line and "name" in line for line in lines)


def test_class_names_from_a_file(tmp_path: Path) -> None:
    names = ["tench", "great white shark"]
    for name, content in (
        ("names.txt", "tench\ngreat white shark\n"),
        ("list.json", json.dumps(names)),
        ("object.json", '{"1": "great white shark", "0": "tench"}'),
    ):
        (tmp_path / name).write_text(content)
        assert read_class_names(tmp_path / name) == names


def test_a_state_dict_needs_the_models_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, classes = str(tmp_path / "weights.pth"), tmp_path / "names.txt"
    torch.save(create_model("vit_test").state_dict(), path)
    classes.write_text("\n".join(f"given {i}" for i in range(10)))
    for options, kind in (((), "class"), (("--classes", str(classes)), "given")):
        (result,) = _json(capsys, PHOTO, "--weights", path, "--model", "vit_test", *options)
        assert result["top"][0]["class"] == f"{kind} {result['top'][0]['index']}"
    assert run("predict", PHOTO, "--weights", path) == 2 and "--model" in capsys.readouterr().err


def test_invalid_input_ends_in_one_line_and_status_2(
    weights: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (
        ("text.png", "no image"), ("three.txt", "a\nb\nc\n"), ("deep.json", "[" * 100_000),
        ("gap.json", '{"0": "a", "2": "b"}'),
    ):  # fmt: skip
        Path(name).write_text(content)
    os.mkfifo("pipe.png")
    save(create_model("vit_test", num_classes=0), "features.safetensors")
    nan = create_model("vit_test")
    torch.nn.init.constant_(nan.head.bias, float("nan"))
    save(nan, "nan.safetensors")
    for options, message in (
        (("pipe.png",), "must be a regular file"),
        (("--weights", "absent.safetensors"), "no such file"),
        (("--weights", "text.png"), "must end in one of"),
        (("--weights", "features.safetensors"), "must have a classification head"),
        (("--weights", "nan.safetensors"), "not finite"),
        (("--weights", "m.onnx", "--data-config", "absent.json"), "--data-config"),
        (("--weights", "m.onnx", "--data-config", "three.txt"), "must be a JSON file, got"),
        (("--model", "vit_tset"), "vit_test"),
        (("--model", "vit_tiny_patch16_224"), "does not fit"),
        (("--top-k", "0"), "--top-k must be an integer >= 1, got 0"),
        (("--classes", "three.txt"), "got 3"),
        (("--classes", "gap.json"), "class names"),
        (("--classes", "deep.json"), "class names"),
        (("--classes", "absent.txt"), "no such file"),
        (("--backend", "cuda"), "cuda"),
        *((("--device", device), "device must") for device in ("tpu", "cuda:99")),
    ):
        assert run("predict", PHOTO, "--weights", weights, *options) == 2, options
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and captured.out == "", captured.err
    uninstall(monkeypatch, "onnxruntime")
    assert run("predict", PHOTO, "--weights", "m.onnx") == 2
    assert "onnxruntime not installed: pip install 'vit-fast[export]'" in capsys.readouterr().err

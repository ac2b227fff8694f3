"""`vit-fast predict`, run as a user does: probabilities, names from everywhere, and one line for bad input."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run, uninstall
from PIL import Image

from vit_fast import DataConfig, create_model, save
from vit_fast.apps.data import load_images, sample_image


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = create_model("vit_test")
    model.data_config = DataConfig(mean=(0.4, 0.4, 0.4), std=(0.2, 0.2, 0.2), crop_pct=0.8)
    model.class_names = tuple(f"name {i}" for i in range(10))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return save(model, tmp_path / "weights.safetensors")


def _run(*arguments: str | Path) -> int:
    return run("predict", *map(str, arguments))


def _json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[dict[str, Any]]:
    assert _run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_probabilities_are_the_softmax_of_the_models_logits(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vit_fast import load

    (result,) = _json(capsys, sample_image(), "--weights", weights, "--top-k", "10")
    model = load(weights)
    with torch.no_grad():
        expected = model(load_images([sample_image()], model))[0].softmax(dim=0)
    assert result["image"] == str(sample_image())
    probabilities = [row["probability"] for row in result["top"]]
    assert probabilities == sorted(probabilities, reverse=True)
    assert abs(sum(probabilities) - 1) < 1e-12
    for row in result["top"]:
        assert abs(row["probability"] - expected[row["index"]]) < 1e-6
        assert row["class"] == f"name {row['index']}"


def test_folders_are_classified_whole_and_images_apart(weights: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(20):  # more than one batch
        Image.new("RGB", (40, 40), (12 * i, 255 - 12 * i, 0)).save(folder / f"{i:02}.png")
    together = _json(capsys, folder, "--weights", weights)
    assert [Path(result["image"]).name for result in together] == [f"{i:02}.png" for i in range(20)]
    (alone,) = _json(capsys, folder / "17.png", "--weights", weights)
    assert len(alone["top"]) == 5
    for row, same in zip(alone["top"], together[17]["top"], strict=True):
        assert row["index"] == same["index"] and abs(row["probability"] - same["probability"]) < 1e-6


def test_text_output_shows_the_top_classes(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(sample_image(), "--weights", weights, "--top-k", "2", "--device", "cpu") == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == str(sample_image()) and len(lines) == 2
    assert all("%" in line and "name" in line for line in lines)


@pytest.mark.parametrize("kind", ["lines", "list", "object"])
def test_class_names_from_a_file(kind: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"given {i}" for i in range(10)]
    path = tmp_path / ("names.txt" if kind == "lines" else "names.json")
    given: Any = names if kind == "list" else {str(i): names[i] for i in reversed(range(10))}
    path.write_text("\n".join(names) + "\n" if kind == "lines" else json.dumps(given))
    (result,) = _json(capsys, sample_image(), "--weights", weights, "--classes", path)
    assert all(row["class"] == names[row["index"]] for row in result["top"])


def test_a_state_dict_needs_the_models_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(create_model("vit_test").state_dict(), tmp_path / "weights.pth")
    (result,) = _json(capsys, sample_image(), "--weights", tmp_path / "weights.pth", "--model", "vit_test")
    assert result["top"][0]["class"] == f"class {result['top'][0]['index']}"
    assert _run(sample_image(), "--weights", tmp_path / "weights.pth") == 2
    assert "--model" in capsys.readouterr().err


def test_bad_input_ends_in_one_line_and_status_2(weights: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "three.txt").write_text("a\nb\nc\n")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "gap.json").write_text('{"0": "a", "2": "b"}')
    (tmp_path / "empty").mkdir()
    no_head = save(create_model("vit_test", num_classes=0), tmp_path / "features.safetensors")
    nan = create_model("vit_test")
    torch.nn.init.constant_(nan.head.bias, float("nan"))
    nan_weights = save(nan, tmp_path / "nan.safetensors")
    photo = sample_image()
    os.mkfifo(tmp_path / "pipe.png")
    for arguments, message in (
        ((tmp_path / "pipe.png", "--weights", weights), "must be a regular file"),
        ((tmp_path / "absent.png", "--weights", weights), "no such file"),
        ((tmp_path / "text.png", "--weights", weights), "not an image"),
        ((tmp_path / "empty", "--weights", weights), "no image in this folder"),
        ((photo, "--weights", tmp_path / "absent.safetensors"), "no such file"),
        ((photo, "--weights", tmp_path / "text.png"), "must end in one of"),
        ((photo, "--weights", weights, "--model", "vit_tset"), "vit_test"),
        ((photo, "--weights", weights, "--model", "vit_tiny_patch16_224"), "does not fit"),
        ((photo, "--weights", weights, "--top-k", "0"), "--top-k must be an integer >= 1, got 0"),
        ((photo, "--weights", weights, "--classes", tmp_path / "three.txt"), "got 3"),
        ((photo, "--weights", weights, "--classes", tmp_path / "gap.json"), "class names"),
        ((photo, "--weights", weights, "--classes", tmp_path / "deep.json"), "class names"),
        ((photo, "--weights", weights, "--classes", tmp_path / "absent.txt"), "no such file"),
        ((photo, "--weights", weights, "--backend", "cuda"), "cuda"),
        ((photo, "--weights", "m.onnx", "--data-config", tmp_path / "absent.json"), "--data-config"),
        ((photo, "--weights", "m.onnx", "--data-config", tmp_path / "three.txt"), "must be a JSON file, got"),
        ((photo, "--weights", no_head), "must be of a model with a classification head"),
        ((photo, "--weights", nan_weights), "not finite"),
        *(((photo, "--weights", weights, "--device", d), f"--device {d}") for d in ("tpu", "cuda:99", "meta")),
    ):
        assert _run(*arguments) == 2, arguments
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1, captured.err
        assert captured.out == ""


def test_an_onnx_file_without_its_packages(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    uninstall(monkeypatch, "onnxruntime")
    assert _run(sample_image(), "--weights", tmp_path / "m.onnx") == 2
    assert "onnxruntime not installed: pip install 'vit-fast[export]'" in capsys.readouterr().err

"""`vit-fast predict` and `vit-fast evaluate`: probabilities, accuracy, comparison of two models, and errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run, uninstall
from digits import digits, digits_vit, inputs, write_digits
from PIL import Image

from vit_fast import create_model, save
from vit_fast.apps.classifiers import evaluate, labeled_images, read_class_names
from vit_fast.apps.data import sample_image
from vit_fast.export import export_onnx

FIRST, LAST = 1600, 1797
PHOTO = str(sample_image())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("images"), FIRST, LAST)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model as weights and as an ONNX file, and weights that never predict the digit 3."""
    place, model = tmp_path_factory.mktemp("models"), digits_vit()
    model.class_names = tuple(f"digit {i}" for i in range(10))
    save(model, place / "m.safetensors")
    export_onnx(model, place / "m.onnx", verify=False)
    with torch.no_grad():
        model.head.bias[3] = -1000
    save(model, place / "without3.safetensors")
    return place


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    with torch.inference_mode():
        return digits_vit()(inputs()[FIRST:LAST])


def _run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert run(*map(str, arguments)) == 0
    return capsys.readouterr().out


def _json(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    return json.loads(_run(capsys, *arguments, "--json"))


def test_predict(models: Path, folder: Path, logits: torch.Tensor, capsys: Any) -> None:
    results = _json(capsys, "predict", folder, "--weights", models / "m.safetensors", "--top-k", "10")
    assert len(results) == len(logits)
    for result in results:
        expected = logits[int(Path(result["image"]).stem) - FIRST].softmax(0)
        top, order = result["top"], expected.argsort(descending=True)
        assert abs(sum(row["probability"] for row in top) - 1) < 1e-6
        assert top[0]["index"] == order[0]
        for row, probability in zip(top, expected[order]):
            assert abs(row["probability"] - probability) < 1e-6 and row["class"] == f"digit {row['index']}"
    text = _run(capsys, "predict", PHOTO, "--weights", models / "m.onnx", "--top-k", "2", "--device", "cpu")
    first, *lines = text.splitlines()
    assert first == PHOTO and len(lines) == 2 and all("%" in line and "digit" in line for line in lines)


def test_class_names_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, names = tmp_path / "weights.pth", [f"given {i}" for i in range(10)]
    torch.save(create_model("vit_test").state_dict(), path)
    for file, content in (
        ("names.txt", "\n".join(names)),
        ("list.json", json.dumps(names)),
        ("object.json", json.dumps(dict(reversed([*enumerate(names)])))),
    ):
        (tmp_path / file).write_text(content)
        assert read_class_names(tmp_path / file) == names
    for options, kind in (((), "class"), (("--classes", tmp_path / "names.txt"), "given")):
        (result,) = _json(capsys, "predict", PHOTO, "--weights", path, "--model", "vit_test", *options)
        assert result["top"][0]["class"] == f"{kind} {result['top'][0]['index']}"
    assert run("predict", PHOTO, "--weights", str(path)) == 2 and "--model" in capsys.readouterr().err


def test_errors_are_one_line_and_status_2(models: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("three.txt").write_text("a\nb\nc\n")
    Path("list.json").write_text("[]")
    Path("gap.json").write_text('{"0": "a", "2": "b"}')
    os.mkfifo("pipe.png")
    save(create_model("vit_test", num_classes=0), "features.safetensors")
    nan = create_model("vit_test")
    torch.nn.init.constant_(nan.head.bias, float("nan"))
    save(nan, "nan.safetensors")
    predict, both = ("predict", PHOTO), ("evaluate", ".", "--weights", "a", "--against", "b")
    for arguments, message in (
        (("evaluate", "."), "--weights"),
        ((*both, "--data-config", "x"), "data-config requires an ONNX file, got a and b"),
        ((*both, "--confusion", "."), "must be a file name such as"),
        (("predict", "pipe.png"), "must be a regular file"),
        ((*predict, "--weights", "features.safetensors"), "must have a classification head"),
        ((*predict, "--weights", "nan.safetensors"), "not finite"),
        ((*predict, "--weights", "m.onnx", "--data-config", "absent.json"), "absent.json: cannot be read as JSON"),
        ((*predict, "--weights", "m.onnx", "--data-config", "three.txt"), "three.txt: cannot be read as JSON"),
        ((*predict, "--weights", "m.onnx", "--data-config", "list.json"), "must contain a JSON object"),
        ((*predict, "--weights", "m.onnx", "--model", "vit_test"), "--model vit_test requires PyTorch weights"),
        ((*predict, "--model", "vit_tset"), "vit_test"),
        ((*predict, "--model", "vit_tiny_patch16_224"), "does not fit"),
        ((*predict, "--top-k", "0"), "--top-k must be an integer >= 1, got 0"),
        ((*predict, "--classes", "three.txt"), "got 3"),
        ((*predict, "--classes", "gap.json"), "gap.json: must be a JSON list of names, or an object"),
        ((*predict, "--classes", "absent.txt"), "no such file"),
        ((*predict, "--device", "cuda:99"), "device must"),
    ):
        if arguments[0] == "predict" and "--weights" not in arguments:
            arguments = (*arguments, "--weights", models / "m.safetensors")
        assert run(*map(str, arguments)) == 2, arguments
        captured = capsys.readouterr()
        assert message in captured.err and captured.out == "", captured.err
        assert captured.err.count("\n") == 1 or arguments == ("evaluate", ".")  # typer prints several lines
    uninstall(monkeypatch, "onnxruntime")
    assert run(*predict, "--weights", "m.onnx") == 2
    assert "onnxruntime not installed: pip install 'vit-fast[export]'" in capsys.readouterr().err


@pytest.mark.parametrize("weights", ["m.safetensors", "m.onnx"])
def test_unreadable_images_are_skipped_and_listed(weights: str, models: Path, tmp_path: Path, capsys: Any) -> None:
    """Skips bad images, too. Also prints names that are not valid UTF-8, of images and of classes."""
    whole, latin = Path(PHOTO).read_bytes(), os.fsdecode(b"caf\xe9")
    for place in ("3", latin):
        (tmp_path / place).mkdir()
        (tmp_path / place / "good.jpg").write_bytes(whole)
        (tmp_path / place / "bad.jpg").write_bytes(whole[: len(whole) // 2])
    arguments = ("--weights", str(models / weights), "--device", "cpu")
    assert run("predict", str(tmp_path), *arguments) == 0
    captured = capsys.readouterr()
    bad, uri = f"unreadable image: {tmp_path}/3/bad.jpg: ", f"file://{tmp_path}/caf%E9/"
    assert captured.out.count("%  digit") == 10 and f"{uri}good.jpg\n" in captured.out
    assert bad in captured.err and f"unreadable image: {uri}bad.jpg" in captured.err
    assert captured.err.endswith("4 images, 2 unreadable\n")
    rows = _json(capsys, "predict", tmp_path, *arguments)
    assert [(row["image"], len(row["top"]), "truncated" in row.get("error", "")) for row in rows] == [
        (f"{tmp_path}/3/bad.jpg", 0, True), (f"{tmp_path}/3/good.jpg", 5, False),
        (f"{uri}bad.jpg", 0, True), (f"{uri}good.jpg", 5, False),
    ]  # fmt: skip
    assert run("predict", str(tmp_path / "3" / "bad.jpg"), *arguments) == 2
    assert "no image can be read" in capsys.readouterr().err
    (tmp_path / "names.txt").write_text("3\ncaf%E9\n" + "\n".join(map(str, range(10, 18))))
    labeled = ("evaluate", tmp_path, *arguments, "--classes", tmp_path / "names.txt")
    content = _json(capsys, *labeled, "--against", models / "m.safetensors")
    assert (content["images"], len(content["unreadable"])) == (2, 2) and not content["disagreements"]
    assert [row["class"] for row in content["classes"]] == ["3", "caf%E9"]
    assert "2 images (2 others are unreadable): top-1 " in _run(capsys, *labeled)
    assert run(*map(str, labeled), "--device", "x") == 2 and "device must be" in capsys.readouterr().err


@pytest.mark.parametrize("weights", ["m.safetensors", "m.onnx"])
def test_accuracy(weights: str, folder: Path, models: Path, logits: torch.Tensor, tmp_path: Path, capsys: Any) -> None:
    names = tmp_path / "names.txt"
    names.write_text("\n".join(map(str, range(10))))
    content = _json(capsys, "evaluate", folder, "--weights", models / weights, "--classes", names)
    labels = digits()[1][FIRST:LAST]
    hits = logits.topk(5).indices == labels[:, None]
    assert content["images"] == LAST - FIRST
    assert content["top1"] == pytest.approx(hits[:, 0].float().mean().item())
    assert content["top5"] == pytest.approx(hits.any(1).float().mean().item())
    confusion = np.zeros((10, 10), int)
    np.add.at(confusion, (labels.numpy(), logits.argmax(1).numpy()), 1)
    assert content["confusion"] == confusion.tolist()
    assert [row["images"] for row in content["classes"]] == confusion.sum(1).tolist()


def test_comparison(folder: Path, models: Path, logits: torch.Tensor, tmp_path: Path, capsys: Any) -> None:
    """The models disagree exactly on the images that the ONNX file classifies as 3."""
    arguments = ("evaluate", folder, "--weights", models / "without3.safetensors", "--against", models / "m.onnx")
    content = _json(capsys, *arguments)
    assert all(row["against"] == "digit 3" and row["predicted"] != "digit 3" for row in content["disagreements"])
    threes = int((logits.argmax(1) == 3).sum())
    assert len(content["disagreements"]) == threes > 10
    assert content["classes"][3]["top1"] == 0 and content["classes"][3]["confused_with"] is not None
    assert content["against"]["top1"] > content["top1"] + 0.05
    text = _run(capsys, *arguments, "--confusion", tmp_path / "c.png")
    assert f"the models disagree on {threes} images" in text
    assert text.index("0.00%  digit 3 (") < text.index("against:"), "the worst class comes first"
    assert Image.open(tmp_path / "c.png").width > 400


def test_folders_become_classes(tmp_path: Path) -> None:
    def labels(classes: int, names: list[str] | None, *folders: str) -> list[int]:
        for name in folders:
            (tmp_path / "-".join(folders) / name).mkdir(parents=True)
            Image.new("L", (8, 8)).save(tmp_path / "-".join(folders) / name / "a.png")
        return [label for _, label in labeled_images(tmp_path / "-".join(folders), classes, names)]

    assert labels(3, ["cat", "bird", "dog"], "dog", "cat") == [0, 2], "by name"
    assert labels(11, None, "2", "10") == [10, 2], "by index"
    assert labels(3, ["tench", "shark", "ray"], "n02", "n01", "n03") == [0, 1, 2], "in alphabetical order"
    with pytest.raises(ValueError, match=r"one subfolder per class .3., got 2: no class is named 'hen', 'owl'"):
        labels(3, ["tench", "shark", "ray"], "owl", "hen")
    with pytest.raises(ValueError, match="labels must be between 0 and 1, got 5"):
        evaluate([(Path("x"), 5)], [[0.1, 0.9]])


def test_the_first_of_equal_probabilities_wins() -> None:
    found = evaluate([(Path("x"), 1), (Path("y"), 0)], [[0.5, 0.5], [1, 0]])
    assert found.predicted[:, 0].tolist() == [0, 0] and found.top5 == 1.0

"""`vit-fast evaluate`: accuracy as counted by hand, of weights and of ONNX files, and what two models differ in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run
from digits import digits, digits_vit, inputs, write_digits
from PIL import Image

from vit_fast.apps.classifiers import draw_confusion, evaluate, labeled_images
from vit_fast.export import export_onnx
from vit_fast.weights import save

FIRST, LAST = 1600, 1797


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("images"), FIRST, LAST)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model as weights and as an ONNX file, and one whose head forgot the digit 3."""
    place = tmp_path_factory.mktemp("models")
    model = digits_vit()
    save(model, place / "m.safetensors")
    export_onnx(model, place / "m.onnx", verify=False)
    with torch.no_grad():
        model.head.bias[3] = -1000
    save(model, place / "forgetful.safetensors")
    return place


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    with torch.inference_mode():
        return digits_vit()(inputs()[FIRST:LAST])


def _run(capsys: Any, *arguments: Any) -> str:
    assert run("evaluate", *map(str, arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("weights", ["m.safetensors", "m.onnx"])
def test_accuracy_is_the_one_counted_by_hand(
    weights: str, folder: Path, models: Path, logits: torch.Tensor, capsys: Any
) -> None:
    content = json.loads(_run(capsys, folder, "--weights", models / weights, "--json"))
    labels = digits()[1][FIRST:LAST]
    hits = logits.topk(5).indices == labels[:, None]
    assert content["images"] == LAST - FIRST
    assert content["top1"] == pytest.approx(hits[:, 0].float().mean().item())
    assert content["top5"] == pytest.approx(hits.any(1).float().mean().item())
    confusion = np.zeros((10, 10), int)
    np.add.at(confusion, (labels.numpy(), logits.argmax(1).numpy()), 1)
    assert content["confusion"] == confusion.tolist()
    assert [row["images"] for row in content["classes"]] == confusion.sum(1).tolist()


def test_two_models_side_by_side(folder: Path, models: Path, logits: torch.Tensor, tmp_path: Path, capsys: Any) -> None:
    """A model that forgot a digit differs from the file on just the images that the file takes for that digit."""
    arguments = (folder, "--weights", models / "forgetful.safetensors", "--against", models / "m.onnx")
    content = json.loads(_run(capsys, *arguments, "--json"))
    assert all(row["against"] == "3" and row["predicted"] != "3" for row in content["disagreements"])
    threes = int((logits.argmax(1) == 3).sum())
    assert len(content["disagreements"]) == threes > 10
    assert content["classes"][3]["top1"] == 0 and content["classes"][3]["confused_with"] is not None
    assert all(row["answer"] == row["predicted"] for row in content["disagreements"]), "former name"
    assert all(row["taken for"] == row["confused_with"] for row in content["classes"]), "former name"
    assert content["against"]["top1"] > content["top1"] + 0.05
    text = _run(capsys, *arguments, "--confusion", tmp_path / "c.png")
    assert f"the models disagree on {threes} images" in text
    assert text.index("0.00%  3 (") < text.index("against:"), "the worst class comes first"
    assert Image.open(tmp_path / "c.png").width > 400


def test_folders_become_classes(tmp_path: Path) -> None:
    def labels(classes: int, names: list[str] | None, *folders: str) -> list[int]:
        for name in folders:
            (tmp_path / "-".join(folders) / name).mkdir(parents=True)
            Image.new("L", (8, 8)).save(tmp_path / "-".join(folders) / name / "a.png")
        return [label for _, label in labeled_images(tmp_path / "-".join(folders), classes, names)]

    assert labels(3, ["cat", "bird", "dog"], "dog", "cat") == [0, 2], "by name"
    assert labels(11, None, "2", "10") == [10, 2], "by number"
    assert labels(3, ["tench", "shark", "ray"], "n02", "n01", "n03") == [0, 1, 2], "in alphabetical order"
    with pytest.raises(ValueError, match=r"there must be 3 subfolders, .*got 2, among them 'hen', 'owl'"):
        labels(3, ["tench", "shark", "ray"], "owl", "hen")
    with pytest.raises(ValueError, match="labels must be between 0 and 1, got 5"):
        evaluate([(Path("x"), 5)], [[0.1, 0.9]])


def test_what_is_refused(tmp_path: Path, capsys: Any) -> None:
    for arguments, message in (
        ([], "--weights"),
        (["--weights", "a", "--against", "b", "--data-config", "x"], "data-config requires an ONNX file, got a and b"),
        (["--weights", "a", "--confusion", "."], "must be a file name such as"),
    ):
        assert run("evaluate", str(tmp_path), *arguments) == 2
        assert message in capsys.readouterr().err


def test_ties_few_classes_and_many(tmp_path: Path) -> None:
    """Two classes have no top-5; of equal probabilities the first class wins; 200 classes show no counts."""
    found = evaluate([(Path("x"), 1), (Path("y"), 0)], [[0.5, 0.5], [1, 0]])
    assert found.predicted[:, 0].tolist() == [0, 0] and found.top5 == 1.0
    found = evaluate([(Path(str(i)), i) for i in range(200)], np.eye(200))
    draw_confusion(found, [str(i) for i in range(200)], tmp_path / "c.png")
    assert Image.open(tmp_path / "c.png").size[0] < 2500

"""Damaged, foreign and unsafe ONNX files: refused by name, and nothing outside the model's folder is read."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx_models import NAMES, with_metadata
from rich.console import Console
from triton_server import read_config

from vit_fast.apps.data import sample_image
from vit_fast.export import ModelFileError, OnnxRunner, inspect_onnx, write_card, write_triton_repository


@pytest.fixture(scope="module")
def folder(exported: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    shutil.copy(exported("plain"), folder / "plain.onnx")
    ir.save(ir.load(folder / "plain.onnx"), folder / "beside.onnx", external_data="beside.onnx.data")
    return folder


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.99])
def test_truncated(folder: Path, tmp_path: Path, share: float) -> None:
    content = (folder / "plain.onnx").read_bytes()
    (tmp_path / "m.onnx").write_bytes(content[: int(share * len(content))])
    with pytest.raises(ModelFileError, match=r"m\.onnx: "):
        OnnxRunner(tmp_path / "m.onnx", "cpu")


def test_foreign_and_missing(tmp_path: Path) -> None:
    shutil.copy(sample_image(), tmp_path / "photo.onnx")
    (tmp_path / "text.onnx").write_text("not a model\n" * 100)
    os.mkfifo(tmp_path / "pipe.onnx")  # which would be waited for
    messages = {
        "photo.onnx": "not an ONNX", "text.onnx": "not an ONNX", "absent.onnx": "no such file", ".": "is a folder",
        "pipe.onnx": "is not a regular file",
    }  # fmt: skip
    for name, message in messages.items():
        for read in (inspect_onnx, OnnxRunner):
            with pytest.raises(ModelFileError, match=message):
                read(tmp_path / name)


def test_a_model_that_takes_no_images(tmp_path: Path) -> None:
    relu = "g (float[1, 5] tokens) => (float[1, 5] y) { y = Relu (tokens) }"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {relu}'), tmp_path / "m.onnx")
    with pytest.raises(ModelFileError, match=r"input tokens must be .*, got float \[1, 5\]"):
        OnnxRunner(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data_config", '{"mean": ', ""),
        ("data_config", "[" * 100_000, ""),
        ("class_names", '"0123456789"', ": class_names must be a list"),
        ("output", '"classes"', ": output must be one of"),
        ("image_hw", "32", ": image_hw must be"),
        ("class_names", json.dumps(NAMES[:7]), ": 7 class names for 10 outputs"),
        ("image_hw", '["a", "b"]', ": image_hw must be"),
        ("patch_hw", "[0, 8]", ": patch_hw must be"),
    ],
)
def test_damaged_metadata(key: str, value: str, message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"its metadata is damaged{message}"):
        OnnxRunner(with_metadata(folder / "plain.onnx", tmp_path / "m.onnx", key, value))


@pytest.mark.parametrize(("key", "value"), [("verification", {}), ("accuracy", 1), ("eight_bit", {"kept": 0})])
def test_no_card_of_damaged_metadata(key: str, value: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="its metadata is damaged"):
        write_card(with_metadata(folder / "plain.onnx", tmp_path / "m.onnx", key, json.dumps(value)))
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_a_card_of_a_file_with_former_field_names(folder: Path, tmp_path: Path) -> None:
    facts = json.dumps({"products": 7, "kept": ["head"], "methods": {}})
    card = write_card(with_metadata(folder / "plain.onnx", tmp_path / "m.onnx", "eight_bit", facts))
    assert "7 MatMuls; in float, to limit the loss: head" in card.read_text()


def test_names_in_a_file_are_text(folder: Path, tmp_path: Path) -> None:
    """Neither markup of the table, nor syntax of the server's configuration."""
    proto = onnx.load(folder / "plain.onnx")
    del proto.metadata_props[:]
    onnx.helper.set_model_props(proto, {"[/red]": "[bold]"})
    name = 'images"\n[/red]'
    proto.graph.input[0].name = name
    for node in proto.graph.node:
        node.input[:] = [name if each == "images" else each for each in node.input]
    onnx.save(proto, tmp_path / "[m].onnx")
    Console(width=200, file=(shown := io.StringIO())).print(inspect_onnx(tmp_path / "[m].onnx").to_table())
    text = shown.getvalue()
    assert "[/red]" in text and "[bold]" in text and "[m].onnx" in text
    config = read_config(write_triton_repository(tmp_path / "[m].onnx", tmp_path / "models", name="m"))
    assert config.input[0].name == name


def test_metadata_of_others_means_nothing_here(folder: Path, tmp_path: Path) -> None:
    proto = onnx.load(folder / "plain.onnx")
    del proto.metadata_props[:]
    onnx.helper.set_model_props(proto, {"dynamic_size": "yes", "patch_hw": "large", "image_hw": "7"})
    onnx.save(proto, tmp_path / "m.onnx")
    runner = OnnxRunner(tmp_path / "m.onnx", "cpu")
    assert runner.image_hw == (32, 32)
    assert runner(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def _with_location(folder: Path, tmp_path: Path, location: str, **fields: str) -> Path:
    proto = onnx.load(folder / "beside.onnx", load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
            elif entry.key in fields:
                entry.value = fields[entry.key]
    inside = tmp_path / "inside"
    inside.mkdir(exist_ok=True)
    (inside / "m.onnx").write_bytes(proto.SerializeToString())
    return inside / "m.onnx"


def test_external_data_cannot_leave_the_folder(folder: Path, tmp_path: Path) -> None:
    """Every way out is refused, though the bytes there are the right ones."""
    secret = tmp_path / "secret.data"
    shutil.copy(folder / "beside.onnx.data", secret)
    path = _with_location(folder, tmp_path, "weights.data")
    weights = path.parent / "weights.data"

    hard, symbolic, none = (lambda: os.link(secret, weights)), (lambda: weights.symlink_to(secret)), (lambda: None)
    for make, message in ((hard, "hard link"), (symbolic, "symbolic link"), (none, "does not exist")):
        make()
        for read in (OnnxRunner, inspect_onnx):
            with pytest.raises(ModelFileError, match=message):
                read(path)
        weights.unlink(missing_ok=True)
    (path.parent / "sub").symlink_to(tmp_path, target_is_directory=True)
    for location in ("sub/secret.data", "../secret.data", str(secret), "x/../../secret.data", "", ".", "C:\\x.data"):
        with pytest.raises(ModelFileError, match="external data rejected"):
            OnnxRunner(_with_location(folder, tmp_path, location))
    shutil.copy(secret, weights)
    runner = OnnxRunner(_with_location(folder, tmp_path, "weights.data"), "cpu")
    assert runner(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_external_data_too_short(folder: Path, tmp_path: Path) -> None:
    path = _with_location(folder, tmp_path, "weights.data")
    whole = (folder / "beside.onnx.data").read_bytes()
    short = r"must have at least \d+ bytes, got \d+"
    cases = (-5000, {}, short), (None, {"offset": "99999999999"}, short), (None, {"length": "many"}, "not a number")
    for end, fields, message in cases:
        (path.parent / "weights.data").write_bytes(whole[:end])
        with pytest.raises(ModelFileError, match=message):
            OnnxRunner(_with_location(folder, tmp_path, "weights.data", **fields))


def test_weights_with_the_name_of_the_model_in_a_repository(folder: Path, tmp_path: Path) -> None:
    """They would replace the model that is copied to model.onnx."""
    path = _with_location(folder, tmp_path, "model.onnx")
    shutil.copy(folder / "beside.onnx.data", path.parent / "model.onnx")
    with pytest.raises(ModelFileError, match=r"weights file must not be named model\.onnx"):
        write_triton_repository(path, tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_external_data_lies_beside_the_name_given(folder: Path, tmp_path: Path) -> None:
    """A link to a model: what ONNX Runtime reads, beside the link, is what is checked."""
    link, weights = (tmp_path / name for name in ("beside.onnx", "beside.onnx.data"))
    link.symlink_to(folder / "beside.onnx")
    with pytest.raises(ModelFileError, match="does not exist"):
        OnnxRunner(link, "cpu")
    shutil.copy(folder / weights.name, weights)
    assert OnnxRunner(link, "cpu")(torch.zeros(1, 3, 32, 32)).shape == (1, 10)

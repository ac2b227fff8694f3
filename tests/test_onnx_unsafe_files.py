"""Damaged, foreign and unsafe ONNX files raise an error that names them; nothing outside their folder is read."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx_models import with_metadata
from rich.console import Console
from triton_server import read_config

from vit_fast.apps.data import sample_image
from vit_fast.export import ModelFileError, OnnxRunner, inspect_onnx, write_card, write_triton_repository


def runs(path: Path) -> bool:
    return len(OnnxRunner(path, "cpu")(torch.zeros(1, 3, 32, 32))) == 1


def test_files_that_are_not_models(exported: Any, tmp_path: Path) -> None:
    content = exported("plain").read_bytes()
    messages = {"absent.onnx": "no such file", ".": "got a folder", "pipe.onnx": "got a folder, pipe or device"}
    for number, share in enumerate((0.0, 0.2, 0.5, 0.99)):
        (tmp_path / f"part{number}.onnx").write_bytes(content[: int(share * len(content))])
        messages[f"part{number}.onnx"] = r"part\d\.onnx: "
    shutil.copy(sample_image(), tmp_path / "photo.onnx")
    (tmp_path / "text.onnx").write_text("not a model\n" * 100)
    os.mkfifo(tmp_path / "pipe.onnx")  # reading it would block
    relu = "g (float[1, 5] tokens) => (float[1, 5] y) { y = Relu (tokens) }"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {relu}'), tmp_path / "relu.onnx")
    messages |= {"photo.onnx": "not an ONNX", "text.onnx": "not an ONNX"}
    messages |= {"relu.onnx": r"only input must be images, .*, got tokens float \[1, 5\]"}
    for name, message in messages.items():
        with pytest.raises(ModelFileError, match=message):
            OnnxRunner(tmp_path / name, "cpu")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data_config", '{"mean": ', ""),
        ("data_config", "[" * 100_000, ""),
        ("class_names", '"0123456789"', ": class_names must be a list"),
        ("output", '"classes"', ": output must be one of"),
        ("image_hw", "[32]", ": image_hw must be"),
        ("patch_hw", "[0, 0]", ": patch_hw must be"),
    ],
)
def test_damaged_metadata(key: str, value: str, message: str, exported: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"its metadata is damaged{message}"):
        OnnxRunner(with_metadata(exported("plain"), tmp_path / "m.onnx", key, value))


def test_a_card_of_damaged_metadata(exported: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="its metadata is damaged: checked must be a dict"):
        write_card(with_metadata(exported("plain"), tmp_path / "m.onnx", "checked", "[]"))


def test_names_in_a_file_are_text(exported: Any, tmp_path: Path) -> None:
    """They are neither markup of the table nor syntax of the server's configuration; unknown metadata has no effect."""
    proto = onnx.load(exported("plain"))
    del proto.metadata_props[:]
    foreign = {"[/red]": "[bold]", "dynamic_size": "yes", "patch_hw": "large", "image_hw": "7"}
    onnx.helper.set_model_props(proto, foreign)
    name = 'images"\n[/red]'
    proto.graph.input[0].name = name
    for node in proto.graph.node:
        node.input[:] = [name if each == "images" else each for each in node.input]
    onnx.save(proto, tmp_path / "[m].onnx")
    shown = io.StringIO()
    Console(file=shown, width=200).print(inspect_onnx(tmp_path / "[m].onnx").to_table())
    assert all(part in shown.getvalue() for part in ("[/red]", "[bold]", "[m].onnx"))
    config = read_config(write_triton_repository(tmp_path / "[m].onnx", tmp_path / "models", name="m"))
    assert config.input[0].name == name
    assert OnnxRunner(tmp_path / "[m].onnx", "cpu").image_hw == (32, 32) and runs(tmp_path / "[m].onnx")


def _with_location(exported: Any, tmp_path: Path, location: str, **fields: str) -> Path:
    proto = onnx.load(exported("fixed"), load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            entry.value = {"location": location, **fields}.get(entry.key, entry.value)
    inside = tmp_path / "inside"
    inside.mkdir(exist_ok=True)
    (inside / "m.onnx").write_bytes(proto.SerializeToString())
    return inside / "m.onnx"


def test_external_data_cannot_leave_the_folder(exported: Any, tmp_path: Path) -> None:
    """Rejects each way out, even if the bytes there are correct."""
    secret = tmp_path / "secret.data"
    shutil.copy(exported("fixed").with_suffix(".onnx.data"), secret)
    path = _with_location(exported, tmp_path, "weights.data")
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
            OnnxRunner(_with_location(exported, tmp_path, location))

    whole = secret.read_bytes()
    for end, fields in ((-5000, {}), (None, {"offset": "99999999999"}), (None, {"length": "many"})):
        weights.write_bytes(whole[:end])
        for read in (OnnxRunner, write_card, lambda path: write_triton_repository(path, tmp_path / "new")):
            with pytest.raises(ModelFileError, match=r"must have at least .* bytes|is not an integer"):
                read(_with_location(exported, tmp_path, "weights.data", **fields))
    assert runs(_with_location(exported, tmp_path, "weights.data"))

    (path.parent / "linked").mkdir()
    link = path.parent / "linked" / "m.onnx"  # ONNX Runtime reads weights beside a link to a model
    link.symlink_to(path)
    with pytest.raises(ModelFileError, match="does not exist"):
        OnnxRunner(link, "cpu")
    shutil.copy(weights, link.parent)
    assert runs(link)


def test_weights_in_a_repository(exported: Any, tmp_path: Path) -> None:
    """Copies the weights of inner graphs; rejects weights that would replace the model."""
    (tmp_path / "branch.data").write_bytes(bytes(12))
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
        g (float[1, 3] x) => (float[3] z) <bool yes = {1}>
        { z = If (yes) <then_branch = b () => (float[3] y) <float[3] w = {0, 0, 0}> { y = Identity (w) },
                        else_branch = b () => (float[3] y) { y = Constant <value_floats = [0.0, 0.0, 0.0]> () }> }""")
    (inner,) = model.graph.node[0].attribute[0].g.initializer
    inner.ClearField("float_data")
    inner.data_location = onnx.TensorProto.EXTERNAL
    inner.external_data.add(key="location", value="branch.data")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    copied = write_triton_repository(tmp_path / "m.onnx", tmp_path / "models", device="cpu") / "1"
    assert sorted(path.name for path in copied.iterdir()) == ["branch.data", "model.onnx"]

    path = _with_location(exported, tmp_path, "model.onnx")
    shutil.copy(exported("fixed").with_suffix(".onnx.data"), path.parent / "model.onnx")
    with pytest.raises(ModelFileError, match=r"weights file must not be named model\.onnx"):
        write_triton_repository(path, tmp_path / "new")
    assert not (tmp_path / "new").exists()

"""`vit-fast predict --out`, locally and on a Ray cluster: each image once, also after interruptions."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing.context
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest
import torch
from command_line import run, uninstall
from PIL import Image

from vit_fast import calibrate, create_model, save
from vit_fast.apps import classifiers, prediction
from vit_fast.apps.data import find_images, load_images, read_image
from vit_fast.apps.prediction import Predicted, PredictionError, _share, predict_to_parquet
from vit_fast.errors import MissingPackageError
from vit_fast.files import encodable
from vit_fast.model import VisionTransformer

pq = pytest.importorskip("pyarrow.parquet")
COUNT, BAD = 23, ("05.png", "17.png")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> VisionTransformer:
    monkeypatch.setattr(prediction, "PART", 4)
    monkeypatch.setattr(classifiers, "BATCH_SIZE", 3)
    model = create_model("vit_test")
    model.class_names = tuple(f"name {i}" for i in range(10))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator, folder = np.random.default_rng(0), tmp_path / "images"
    folder.mkdir()
    for i in range(COUNT):
        Image.fromarray(generator.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(folder / f"{i:02}.png")
    for name in BAD:
        (folder / name).write_bytes(b"no image")
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.parquet"


def _predict(model: VisionTransformer, folder: Path, out: Path, **options: Any) -> Predicted:
    return predict_to_parquet(model, find_images([folder]), out, class_names=model.class_names, **options)


def _check(model: VisionTransformer, folder: Path, out: Path) -> None:
    """Compares the file with the model's outputs for single images."""
    rows = pq.read_table(out).to_pylist()
    assert [row["path"] for row in rows] == [str(folder / f"{i:02}.png") for i in range(COUNT)]
    for row in rows:
        path = Path(row["path"])
        if path.name in BAD:
            assert "not an image" in row.pop("error") and row.pop("path")
            assert set(row.values()) == {None}
            continue
        with torch.no_grad():
            tokens = model.forward_features(load_images([path], model))
            expected = model.forward_head(tokens)[0].double().softmax(0)
            embedding = model.forward_head(tokens, pre_logits=True)[0]
        assert row["error"] is None
        assert row["index"] == expected.argmax() and row["label"] == f"name {row['index']}"
        assert row["probability"] == pytest.approx(expected.max().item(), rel=1e-5)
        np.testing.assert_allclose(row["probabilities"], expected.numpy(), rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(row["embedding"], embedding.numpy(), rtol=1e-4, atol=1e-5)
    assert not out.with_name("out.parquet.parts").exists()


@pytest.mark.parametrize(("workers", "calibrated"), [(0, True), (1, False)])
def test_file_contains_the_models_outputs(
    model: Any, folder: Path, out: Path, workers: int, calibrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # workers do not inherit memory, as with Python 3.14
    monkeypatch.setattr(
        multiprocessing.context._default_context, "_actual_context", multiprocessing.get_context("spawn")
    )
    if calibrated:  # adds 0-dimensional scales to the weights
        calibrate(model, torch.randn(4, 3, *model.config.image_hw))
    done = _predict(model, folder, out, workers=workers)
    assert (done.images, done.resumed, [Path(path).name for path, _ in done.bad]) == (COUNT, 0, list(BAD))
    _check(model, folder, out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["images", "out.parquet"]


def test_an_interrupted_run_resumes(model: Any, folder: Path, out: Path) -> None:
    def interrupt(images: int) -> None:
        if images == 8:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        _predict(model, folder, out, on_part=interrupt)
    parts = out.with_name("out.parquet.parts")
    (parts / "00000000.parquet").unlink()
    (parts / ".vit-fast-partial-killed").mkdir()
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other.head.bias)
    with pytest.raises(PredictionError, match="another model, class names or images"):
        _predict(other, folder, out)
    part = parts / "00000001.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(PredictionError, match=r"00000001\.parquet: damaged: .*: remove it and re-run"):
        _predict(model, folder, out)
    assert not out.exists()
    part.unlink()
    assert _predict(model, folder, out).resumed == COUNT - 4
    _check(model, folder, out)
    assert _predict(model, folder, out).resumed == 0, "a finished run is repeated"


@pytest.mark.parametrize(("removed", "resumed"), [(0, COUNT), (3, 11), (6, 0), (7, 0)])
def test_a_run_killed_while_removing_its_parts_resumes(
    model: Any, folder: Path, out: Path, monkeypatch: Any, removed: int, resumed: int
) -> None:
    unlink, left = Path.unlink, iter([True] * removed)

    def killed(path: Path, **options: object) -> None:
        if next(left, None) is None:
            raise InterruptedError
        unlink(path, **options)

    with monkeypatch.context() as patch, contextlib.suppress(InterruptedError):
        patch.setattr(Path, "unlink", killed)
        patch.setattr(prediction.shutil, "rmtree", lambda path, **how: None)
        _predict(model, folder, out)
    assert _predict(model, folder, out).resumed == resumed
    _check(model, folder, out)


@pytest.mark.parametrize("always", [False, True])
def test_killed_readers_are_replaced_unless_they_always_die(
    model: Any, folder: Path, out: Path, always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> Image.Image:
        if path.name == "13.png" and (always or not out.with_name("killed").exists()):
            out.with_name("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return read_image(path)

    parts: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(classifiers, "read_image", read)
        if always:
            with pytest.raises(PredictionError, match=r"^.*png to .*png: a worker .* was lost.*: re-run"):
                _predict(model, folder, out, workers=1)
        else:
            done = _predict(model, folder, out, workers=1, on_part=parts.append)
            assert (done.images, done.resumed, len(done.lost)) == (COUNT, 0, 1)
            assert parts == [*range(4, COUNT, 4), COUNT], "finished parts are not repeated"
    assert not always or _predict(model, folder, out).resumed in (8, 12)
    _check(model, folder, out)


def test_names_that_are_not_utf_8(model: Any, folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of images, also of unreadable ones, and of the output; a resumed run finds them."""
    latin = folder.rename(folder.with_name(os.fsdecode(b"caf\xe9")))
    (latin / "00.png").rename(latin / os.fsdecode(b"\xff 1%.png"))
    (latin / "b\u00e9.png").write_bytes(b"no image")
    parquet = latin.parent / os.fsdecode(b"\xe8.parquet")

    def interrupt(images: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        _predict(model, latin, parquet, on_part=interrupt)
    done = _predict(model, latin, parquet)
    assert (done.images, done.resumed, len(done.bad)) == (COUNT + 1, 4, 3)
    rows = pq.read_table(parquet.rename(out)).to_pylist()
    assert all(row["path"].startswith("file:///") for row in rows)
    decoded = [Path(os.fsdecode(unquote_to_bytes(row["path"].removeprefix("file://")))) for row in rows]
    assert decoded == find_images([latin])
    assert [row["error"] for row in rows if row["error"]] == [reason for _, reason in done.bad]
    assert encodable(Path("bé")) == "bé" and encodable(Path("file:///a")) == "file:/a"


def test_errors(model: Any, folder: Path, out: Path, monkeypatch: Any, capsys: Any) -> None:
    weights, mine, files = save(model, out.with_name("m.safetensors")), out.with_name("mine"), find_images([folder])
    with pytest.raises(ValueError, match=r"must be given once, got .*00\.png more than once"):
        predict_to_parquet(model, [*files, files[0]], out, class_names=model.class_names)
    with pytest.raises(IsADirectoryError, match="got a folder"):
        _predict(model, folder, folder)
    mine.with_name("mine.parts").mkdir()
    mine.with_name("mine.parts").joinpath("notes.txt").touch()
    with pytest.raises(PredictionError, match="because this run saves its progress there"):
        _predict(model, folder, mine)
    for options in (
        ["--workers", "2"], ["--engine", "ray"], ["--out", "x", "--workers", "-1"], ["--out", "x", "--engine", "spark"],
        ["--out", "x", "--weights", "m.onnx"],
    ):  # fmt: skip
        assert run("predict", str(folder), "--weights", str(weights), *options) == 2
        assert capsys.readouterr().err.count("\n") == 1
    for package, extra in (("pyarrow", "predict"), ("ray", "ray")):
        with monkeypatch.context() as patch, pytest.raises(MissingPackageError, match=rf"vit-fast\[{extra}\]"):
            uninstall(patch, package)
            _predict(model, folder, out, engine="ray")
    torch.nn.init.constant_(model.head.bias, float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        _predict(model, folder, out)
    assert not list(out.parent.glob("out*"))


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Starts a cluster of two cores on this machine."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("always", [False, True])
def test_killed_ray_workers_are_replaced_unless_they_always_die(
    ray: Any, model: Any, folder: Path, out: Path, always: bool
) -> None:
    Image.new("RGB", (40, 36), (255, 255, 255)).save(folder / "21.png")
    killed, caller = out.with_name("killed"), os.getpid()

    def kill(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        assert os.getpid() != caller
        if any(image.min() > 0.9 for image in args[0]) and (always or not killed.exists()):  # the white one
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    failure = pytest.raises(PredictionError, match=r"^3 workers died while processing .*20.png to .*22.png$")
    with model.patch_embed.register_forward_pre_hook(kill), failure if always else contextlib.nullcontext():
        done = _predict(model, folder, out, engine="ray", workers=2)
        assert (done.images, done.resumed, len(done.bad)) == (COUNT, 0, 2)
    assert killed.exists() and ray.is_initialized()
    if always:
        finished = len(list(out.with_name("out.parquet.parts").glob("[0-9]*.parquet")))
        assert finished <= 5
        assert _predict(model, folder, out).resumed == 4 * finished, "a local run resumes the run on the cluster"
    _check(model, folder, out)


@pytest.mark.slow
def test_ray_command(ray: Any, model: Any, folder: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = save(model, out.with_name("weights.safetensors"))
    for options, code, printed in (
        (["--workers", "2"], 0, f"{COUNT} images, 2 unreadable"),
        (["--workers", "3"], 2, "workers must be between 1 and 2, the number of cores of the cluster, got 3"),
        (["--device", "cuda"], 2, "the cluster has no GPU"),
        (["--device", "cuda:1"], 2, "device with engine ray must be one of 'auto', 'cpu', 'cuda', got 'cuda:1'"),
    ):
        arguments = ("predict", str(folder), "--weights", str(weights), "--out", str(out), "--engine", "ray")
        assert run(*arguments, *options) == code
        assert printed in "".join(capsys.readouterr())
    _check(model, folder, out)
    torch.nn.init.constant_(model.head.bias, float("nan"))
    with pytest.raises(PredictionError, match=r"^/.*00.png: the model's logits are not finite$"):
        _predict(model, folder, out, engine="ray", workers=1)


def test_shares_of_a_cluster() -> None:
    two = {"CPU": 16.0, "GPU": 2.0}
    assert _share({"CPU": 16.0}, None, "auto") == (16, 0.0)
    assert [_share(two, count, "auto") for count in (None, 3, 1)] == [(16, 1 / 8), (3, 1 / 2), (1, 1.0)]
    assert _share(two, 5, "cpu") == (5, 0.0)

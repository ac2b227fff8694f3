"""`vit-fast predict --out`: every image once, with the model's own answers; bad images listed; kills lose nothing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run, uninstall
from prediction_support import named_model, predict, write_images

from vit_fast import calibrate, load, save
from vit_fast.apps import classifiers, prediction
from vit_fast.apps.data import find_images, load_images
from vit_fast.apps.prediction import PredictionError, predict_to_parquet
from vit_fast.errors import MissingPackageError
from vit_fast.model import VisionTransformer

pq = pytest.importorskip("pyarrow.parquet")
ROOT = Path(__file__).resolve().parents[1]
COUNT, BAD = 23, ("05.png", "17.png")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return save(named_model(), tmp_path / "weights.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images", COUNT, BAD)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "PART", 4)
    monkeypatch.setattr(classifiers, "BATCH_SIZE", 3)


def _check(model: VisionTransformer, folder: Path, out: Path) -> None:
    """The file against the model asked directly."""
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


@pytest.mark.parametrize(("workers", "scaled"), [(0, True), (2, False)])
def test_the_file_says_what_the_model_does(
    folder: Path, weights: Path, tmp_path: Path, workers: int, scaled: bool
) -> None:
    model = load(weights)
    if scaled:  # its weights then contain scales without an axis
        calibrate(model, torch.randn(4, 3, *model.config.image_hw))
    done = predict(model, folder, tmp_path / "out.parquet", workers=workers)
    assert (done.images, done.taken, [Path(path).name for path, _ in done.bad]) == (COUNT, 0, list(BAD))
    _check(load(weights), folder, tmp_path / "out.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "out.parquet", "weights.safetensors"]


class _Interrupted(Exception):
    pass


def test_a_run_goes_on_where_it_was(folder: Path, weights: Path, tmp_path: Path) -> None:
    model, out = load(weights), tmp_path / "out.parquet"

    def interrupt(images: int) -> None:
        if images == 8:
            raise _Interrupted

    with pytest.raises(_Interrupted):
        predict(model, folder, out, on_part=interrupt)
    assert not out.exists()
    parts = tmp_path / "out.parquet.parts"
    (parts / "00000000.parquet").unlink()  # a gap, as when a disk lost it
    (parts / ".vit-fast-partial-killed").mkdir()  # with half a part
    other = load(weights)
    with torch.no_grad():
        other.head.bias += 1
    with pytest.raises(PredictionError, match="another model or other images"):
        predict(other, folder, out)
    part = parts / "00000001.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(PredictionError, match=r"00000001\.parquet: is damaged: .*: remove it and re-run"):
        predict(model, folder, out)
    assert not out.exists()
    part.unlink()
    done = predict(model, folder, out)
    assert done.taken == COUNT - 4
    _check(model, folder, out)
    assert not parts.exists()
    assert predict(model, folder, out).taken == 0, "a finished run is made anew"


def test_it_may_be_killed_while_it_ends(folder: Path, weights: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Whichever file was the last that went: what is left is taken, or made again."""
    model, out = load(weights), tmp_path / "out.parquet"
    unlink = Path.unlink
    for removed in (0, 3, 6, 7):
        left = iter([True] * removed)

        def killed(path: Path, left: Iterator[bool] = left, **options: object) -> None:
            if next(left, None) is None:
                raise _Interrupted
            unlink(path, **options)

        with monkeypatch.context() as patch, contextlib.ExitStack() as ended:
            patch.setattr(Path, "unlink", killed)
            if removed < 7:
                ended.enter_context(pytest.raises(_Interrupted))
            else:
                patch.setattr(prediction.shutil, "rmtree", lambda path, **how: None)
            predict(model, folder, out)
        _check(model, folder, out)
        assert predict(model, folder, out).taken == {0: COUNT, 3: 11, 6: 0, 7: 0}[removed]
        _check(model, folder, out)
        assert not (tmp_path / "out.parquet.parts").exists()


def test_a_full_disk_keeps_the_parts_and_nothing_else(
    folder: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = load(weights), tmp_path / "new" / "out.parquet"
    out.parent.mkdir()
    write = pq.ParquetWriter.write_table

    def full(writer: object, table: object, **how: object) -> None:
        write(writer, table, **how)
        if not (out.parent / "out.parquet.parts" / "00000005.parquet").exists():
            return
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(pq.ParquetWriter, "write_table", full)
        predict(model, folder, out)
    assert [path.name for path in out.parent.iterdir()] == ["out.parquet.parts"]
    assert predict(model, folder, out).taken == COUNT
    _check(model, folder, out)


@pytest.mark.slow
def test_killed_for_good(folder: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.parquet"
    code = (
        "import os, signal, sys, typer\n"
        "from vit_fast.apps import prediction\n"
        "prediction.PART = 4\n"
        "typer.echo = lambda text, err: text.startswith('12 of') and os.kill(os.getpid(), signal.SIGKILL)\n"
        "from vit_fast.cli import main; main(sys.argv[1:])"
    )
    arguments = ["predict", str(folder), "--weights", str(weights), "--out", str(out), "--workers", "1"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    assert run(*arguments) == 0
    captured = capsys.readouterr()
    assert f"{COUNT} images, 12 of them from an earlier run, 2 unreadable" in captured.out
    for name in BAD:
        assert f"unreadable image: {folder / name}" in captured.err
    _check(load(weights), folder, out)


def test_a_killed_reader_costs_a_part_at_most(folder: Path, weights: Path, tmp_path: Path) -> None:
    model, out = load(weights), tmp_path / "out.parquet"

    def kill(images: int) -> None:
        if images == 4:
            for process in multiprocessing.active_children():
                process.kill()

    parts: list[int] = []
    done = predict(model, folder, out, workers=2, on_part=lambda images: (kill(images), parts.append(images)))
    assert (done.images, done.taken) == (COUNT, 0)
    assert len(done.lost) == 1 and "a worker that reads images ended with exit code -9" in done.lost[0]
    assert parts == [*range(4, COUNT, 4), COUNT], "what was done is not done again"
    _check(model, folder, out)
    assert not multiprocessing.active_children()


def test_readers_that_always_die_end_in_one_line(
    folder: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prediction, "PART", 12)
    features = VisionTransformer.forward_features
    calls = 0

    def killing(self: VisionTransformer, images: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        for process in multiprocessing.active_children() if calls > 4 else ():  # behind the first part
            process.kill()
        return features(self, images)

    arguments = ["predict", str(folder), "--weights", str(weights), "--out", str(tmp_path / "out.parquet")]
    with monkeypatch.context() as patch:
        patch.setattr(VisionTransformer, "forward_features", killing)
        assert run(*arguments, "--workers", "1") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "a worker that reads images ended" in error and "for the second time between" in error
    assert str(folder / "12.png") in error and str(folder / "22.png") in error
    assert run(*arguments, "--workers", "0") == 0 and "12 of them from an earlier run" in capsys.readouterr().out
    _check(load(weights), folder, tmp_path / "out.parquet")


def test_what_cannot_be_written_says_so(
    folder: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, nan = load(weights), named_model()
    files = find_images([folder])
    with pytest.raises(ValueError, match="must not contain duplicates"):
        predict_to_parquet(model, [*files, files[0]], tmp_path / "out.parquet", class_names=model.class_names)
    (tmp_path / "mine.parquet.parts").mkdir()
    (tmp_path / "mine.parquet.parts" / "notes.txt").touch()
    torch.nn.init.constant_(nan.head.bias, float("nan"))
    for asked, out, error, message in (
        (model, folder, IsADirectoryError, "is a folder"),
        (model, tmp_path / "mine.parquet", PredictionError, "contain the parts of this run"),
        (nan, tmp_path / "nan.parquet", ValueError, "not finite"),
    ):
        with pytest.raises(error, match=message):
            predict(asked, folder, out)
    for options in (
        ["--workers", "2"], ["--engine", "ray"], ["--out", "x", "--workers", "-1"], ["--out", "x", "--engine", "spark"],
        ["--out", "x", "--weights", "m.onnx"],
    ):  # fmt: skip
        assert run("predict", str(folder), "--weights", str(weights), *options) == 2
        assert capsys.readouterr().err.count("\n") == 1
    uninstall(monkeypatch, "pyarrow")
    with pytest.raises(MissingPackageError, match=r"vit-fast\[predict\]"):
        predict(model, folder, tmp_path / "out.parquet")

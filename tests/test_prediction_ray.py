"""`vit-fast predict --engine ray`: a local cluster of two workers gives what this process gives, whoever is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run, uninstall
from PIL import Image
from prediction_support import named_model, predict, write_images

from vit_fast import load, save
from vit_fast.apps import prediction
from vit_fast.apps.prediction import PredictionError
from vit_fast.apps.prediction_ray import _share
from vit_fast.errors import MissingPackageError
from vit_fast.model import VisionTransformer

pq = pytest.importorskip("pyarrow.parquet")
COUNT = 37


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster of two cores, of this machine, that every test here joins."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.fixture
def model() -> VisionTransformer:
    return named_model()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images", COUNT, ("07.png",))


def _check(model: VisionTransformer, folder: Path, out: Path) -> None:
    """Every image once, in order, with what this process says of it."""
    predict(model, folder, out.with_suffix(".local"))
    found, expected = (pq.read_table(path).to_pylist() for path in (out, out.with_suffix(".local")))
    assert [row["path"] for row in found] == [str(folder / f"{i:02}.png") for i in range(COUNT)]
    for row, same in zip(found, expected, strict=True):
        assert all(row[name] == same[name] for name in ("label", "index", "error"))
        if row["error"] is None:  # another batch: other roundings
            np.testing.assert_allclose(row["probabilities"], same["probabilities"], rtol=1e-4, atol=1e-7)
            np.testing.assert_allclose(row["embedding"], same["embedding"], rtol=1e-4, atol=1e-5)


def _with(model: VisionTransformer, hook: Callable[..., None]) -> VisionTransformer:
    """The model with something to happen in the workers at each of their batches; a function of a function travels."""
    model.patch_embed.register_forward_pre_hook(hook)
    return model


@pytest.mark.slow
def test_a_killed_worker_loses_and_doubles_nothing(
    ray: Any, model: VisionTransformer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "PART", 4)
    batches, killed = tmp_path / "batches", tmp_path / "killed"

    def kill_once(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        with batches.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if len(batches.read_text().split()) == 4:
            killed.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

    done = predict(_with(model, kill_once), folder, tmp_path / "out.parquet", engine="ray", workers=2)
    pids = batches.read_text().split()
    assert killed.read_text() in pids and len(pids) > 10, "the parts of ten, and those that were lost with it"
    assert len(set(pids)) >= 2 and str(os.getpid()) not in pids
    assert (done.images, done.taken, len(done.bad)) == (COUNT, 0, 1)
    assert not (tmp_path / "out.parquet.parts").exists() and ray.is_initialized()
    _check(model, folder, tmp_path / "out.parquet")


@pytest.mark.slow
def test_what_kills_every_worker_is_named_and_the_rest_is_kept(
    ray: Any, model: VisionTransformer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "PART", 4)
    Image.new("RGB", (40, 36), (255, 255, 255)).save(folder / "21.png")

    def kill(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        if any(image.min() > 0.9 for image in args[0]):  # the white one
            os.kill(os.getpid(), signal.SIGKILL)

    out = tmp_path / "out.parquet"
    with pytest.raises(PredictionError, match=r"3 workers died between .*20.png and .*23.png"):
        predict(_with(model, kill), folder, out, engine="ray", workers=2)
    kept = len(list((tmp_path / "out.parquet.parts").glob("[0-9]*.parquet")))
    assert 0 < kept <= 5
    model.patch_embed._forward_pre_hooks.clear()
    assert predict(model, folder, out).taken == 4 * kept, "this process goes on where the cluster was"
    _check(model, folder, out)


@pytest.mark.slow
def test_command(ray: Any, model: VisionTransformer, folder: Path, tmp_path: Path, capsys: Any) -> None:
    weights = save(model, tmp_path / "weights.safetensors")
    arguments = ["predict", str(folder), "--weights", str(weights), "--out", str(tmp_path / "out.parquet")]
    for options, code, said in (
        (["--workers", "2"], 0, f"{COUNT} images, 1 unreadable"),
        (["--workers", "3"], 2, "workers must be between 1 and 2, the number of cores of the cluster, got 3"),
        (["--device", "cuda"], 2, "the cluster has no GPU"),
        (["--device", "cuda:1"], 2, "device must be one of auto, cpu, cuda with engine='ray', got 'cuda:1'"),
    ):
        assert run(*arguments, "--engine", "ray", *options) == code
        assert said in "".join(capsys.readouterr())
        assert not (tmp_path / "out.parquet.parts").exists(), "what is refused begins nothing"
    _check(load(weights), folder, tmp_path / "out.parquet")
    torch.nn.init.constant_(model.head.bias, float("nan"))
    with pytest.raises(PredictionError, match=r"^/.*00.png: the model's logits are not finite$"):
        predict(model, folder, tmp_path / "nan.parquet", engine="ray", workers=1)


def test_shares_of_a_cluster() -> None:
    assert _share({"CPU": 16.0}, None, "auto") == (16, 0.0)
    assert _share({"CPU": 16.0, "GPU": 2.0}, None, "auto") == (16, 1 / 8)
    assert _share({"CPU": 16.0, "GPU": 2.0}, 3, "cuda") == (3, 1 / 2)
    assert _share({"CPU": 16.0, "GPU": 2.0}, 1, "auto") == (1, 1.0)
    assert _share({"CPU": 16.0, "GPU": 2.0}, 5, "cpu") == (5, 0.0)


def test_without_ray(model: VisionTransformer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uninstall(monkeypatch, "ray")
    with pytest.raises(MissingPackageError, match=r"vit-fast\[ray\]"):
        predict(model, folder, tmp_path / "out.parquet", engine="ray")
    assert not list(tmp_path.glob("out*"))

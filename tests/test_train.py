"""Training: it learns, repeats, resumes to the bit, and takes the same steps whatever computes them."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run, uninstall
from PIL import Image
from safetensors.torch import load_file
from train_support import settings, small_model

from vit_fast import create_model, load, save
from vit_fast.apps.data import ImageError, ImageFolder, ReaderLostError, load_images, sample_image
from vit_fast.apps.datasets import PreparedImages, open_data
from vit_fast.apps.trainer import Measure, config_for
from vit_fast.apps.training import TrainConfig, Trainer, TrainingError, train
from vit_fast.weights import WeightsError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes that differ in texture, not in mean colour: stripes across or along, cut from noise."""
    rng = np.random.default_rng(0)
    for label in ("across", "along"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for i in range(12):
            stripes = np.where(np.arange(40) // 4 % 2, 200, 50)[:, None].repeat(40, 1)
            pixels = np.clip((stripes if label == "across" else stripes.T) + rng.normal(0, 25, (40, 40)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "images" / label / f"{i:02}.png")
    return tmp_path / "images"


def test_it_learns_and_what_it_saves_knows_the_classes(folder: Path, tmp_path: Path) -> None:
    rows = train(small_model(), open_data(folder, folder), tmp_path / "out", settings(epochs=6, augment=False))
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert rows[-1]["accuracy"] == 1.0
    assert [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()] == rows
    saved = load(tmp_path / "out" / "model.safetensors")
    assert saved.class_names == ("across", "along")
    with torch.no_grad():
        assert (saved(load_images([folder / "along"], saved)).argmax(1) == 1).all()
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"model.safetensors", "checkpoint.pth", "log.jsonl"}


class _Interrupted(Exception):
    pass


@pytest.mark.fast_cases("options1")
@pytest.mark.parametrize(
    "options",
    [{"augment": False}, {"ema_decay": 0.9, "mixup": 0.4, "accumulation": 2, "layer_decay": 0.7, "patience": 3}],
)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(
    folder: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    config, data = settings(**options), open_data(folder, folder)
    whole = small_model()
    rows = train(whole, data, tmp_path / "whole", config)

    def interrupt(row: object) -> None:
        raise _Interrupted

    with pytest.raises(_Interrupted):
        train(small_model(), data, tmp_path / "parts", config, on_epoch=interrupt)
    torch.rand(5)  # whatever else happened in between
    for _ in range(2):  # a run that was interrupted, and one that is finished
        resumed = create_model("vit_test", num_classes=2, drop_path_rate=0.1)
        assert train(resumed, data, tmp_path / "parts", config, resume=True) == rows
        torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit(folder: Path, tmp_path: Path) -> None:
    """Killed as no process can prevent, after its first epoch."""
    code = (
        "import os, signal, sys, typer\n"
        "typer.echo = lambda text: text.startswith('epoch 1/') and os.kill(os.getpid(), signal.SIGKILL)\n"
        "from vit_fast.cli import main; main(sys.argv[1:])"
    )
    options = ["--model", "vit_test", "--epochs", "2", "--drop-path", "0.1", "--batch-size", "8", "--workers", "1"]
    arguments = ["train", str(folder), *options, "--out"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, str(tmp_path / "killed")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
    )
    assert done.returncode == -signal.SIGKILL
    for out, more in (("killed", ["--resume"]), ("whole", [])):
        assert run(*arguments, str(tmp_path / out), *more) == 0
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert (killed / "log.jsonl").read_text() == (whole / "log.jsonl").read_text()
    # the file's header is in no order
    torch.testing.assert_close(*(load_file(out / "model.safetensors") for out in (killed, whole)), rtol=0, atol=0)


def test_augmentation_depends_on_epoch_and_seed_alone(folder: Path) -> None:
    model = small_model()
    for source in (ImageFolder(folder), open_data().train):
        torch.rand(3)  # torch's own numbers are neither used nor changed
        state = torch.get_rng_state()
        assert PreparedImages(source, model, augment=True)[0][0].shape == (3, 32, 32)
        assert torch.equal(torch.get_rng_state(), state)
        first, second, third = (PreparedImages(source, model, augment=True, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(first[3][0], second[3][0])
        second.epoch = 1
        for other in (second, third, PreparedImages(source, model)):
            assert not torch.equal(first[3][0], other[3][0])


@pytest.mark.slow
def test_a_killed_reader_is_named_and_the_run_resumed(folder: Path, tmp_path: Path) -> None:
    data, config = open_data(folder), settings(batch_size=2)
    rows = train(small_model(), data, tmp_path / "whole", config)

    def kill(epoch: int, step: int, steps: int, measure: Measure) -> None:
        for process in multiprocessing.active_children() if epoch == 1 and step == 1 else ():
            process.kill()

    with pytest.raises(ReaderLostError, match="ended with exit code -9"):
        train(small_model(), data, tmp_path / "out", config, workers=1, on_step=kill)
    assert not multiprocessing.active_children()
    assert train(small_model(), data, tmp_path / "out", config, resume=True) == rows


def test_crops_are_those_of_random_resized_crop(folder: Path) -> None:
    """Areas of 35 to 100 percent, of 3:4 to 4:3 where they fit, from anywhere, half of them mirrored."""
    across = np.linspace(0, 255, 160).astype(np.uint8)
    ramps = np.stack(np.broadcast_arrays(across, across[:, None], np.uint8(0)), -1)
    Image.fromarray(ramps).save(folder / "along" / "00.png")
    source = ImageFolder(folder)
    index = next(i for i, (file, _) in enumerate(source.files) if file == folder / "along" / "00.png")
    model = small_model()
    images = PreparedImages(source, model, augment=True)
    mean, std = (np.reshape(values, (3, 1, 1)) for values in (model.data_config.mean, model.data_config.std))
    shares = []
    for images.epoch in range(200):
        red, green, _ = images[index][0].numpy() * std + mean
        shares.append((red[0, -1] - red[0, 0], green[-1, 0] - green[0, 0], min(red[0, 0], red[0, -1])))
    widths, heights, lefts = np.array(shares).T
    areas, ratios = np.abs(widths) * heights, np.abs(widths) / heights
    assert 0.3 < areas.min() < 0.4 and 0.85 < areas.max() <= 1.01
    assert 0.7 < ratios.min() < 0.8 and 1.25 < ratios.max() < 1.42
    assert 60 < (widths < 0).sum() < 140 and lefts.min() < 0.05 and lefts.max() > 0.25


def test_weights_that_know_their_shape_are_a_model(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    save(small_model(depth=1, num_classes=10), tmp_path / "start.safetensors")
    assert run("train", str(folder), "--model", "start.safetensors", "--epochs", "1", "--out", "out") == 0
    trained = load("out/model.safetensors")
    assert (trained.config.depth, trained.config.num_classes) == (1, 2)


def _losses_of_32_steps(backend: str = "eager", **options: object) -> torch.Tensor:
    """Trains on crops of a photo, labelled by their location, and returns the losses."""
    photograph = load_images([sample_image()], create_model("vit_test", img_size=128))[0]
    crops = photograph.unfold(1, 32, 32).unfold(2, 32, 32).permute(1, 2, 0, 3, 4).reshape(16, 3, 32, 32)
    trainer = Trainer(small_model(backend=backend, drop_path_rate=0.0), settings(**options), 32, 4)
    return torch.tensor([trainer.step(crops, torch.arange(16) // 4 % 2).loss for _ in range(32)])


@pytest.fixture(scope="module")
def eager_losses() -> torch.Tensor:
    return _losses_of_32_steps()


@pytest.mark.fast_cases("other0")
@pytest.mark.parametrize(
    "other", [{"backend": "sdpa"}, {"grad_checkpointing": True}, {"dtype": "bf16"}, {"accumulation": 4}]
)
def test_losses_of_32_steps_match_eager(other: dict[str, object], eager_losses: torch.Tensor) -> None:
    assert eager_losses[-1] < 0.5 * eager_losses[0]
    difference = (_losses_of_32_steps(**other) - eager_losses).abs()
    if other.get("dtype") == "bf16":  # the loss jumps from step 10 on; rounding decides when, by torch's version
        assert difference[:9].max() <= 5e-3 and difference[-8:].max() <= 5e-2
    else:
        assert difference.max() <= 2e-5


def test_patience_stops_and_keeps_the_best_weights(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from vit_fast.apps import training as module

    accuracies = iter([3, 5, 4, 5, 9])
    kept = []

    def measure(trainer: Trainer, *args: object) -> Measure:
        kept.append(trainer.model.head.weight.detach().clone())
        return Measure(1.0, next(accuracies), 10)

    monkeypatch.setattr(module, "_measure", measure)
    model = small_model()
    rows = train(model, open_data(folder, folder), tmp_path / "out", settings(epochs=9, patience=2))
    assert [row["accuracy"] for row in rows] == [0.3, 0.5, 0.4, 0.5]
    assert torch.equal(load(tmp_path / "out" / "model.safetensors").head.weight, kept[1])
    assert torch.equal(model.head.weight, kept[1])
    with pytest.raises(ValueError, match="patience must be 0"):
        train(small_model(), open_data(folder), tmp_path / "new", settings(patience=2))


def test_what_cannot_go_on_says_so(folder: Path, tmp_path: Path) -> None:
    data, out, once, more = open_data(folder), tmp_path / "out", settings(epochs=1), {"resume": True}
    with pytest.raises(TrainingError, match="no run to resume"):
        train(small_model(), data, out, settings(), resume=True)
    train(small_model(), data, out, once)
    new = tmp_path / "new"
    for model, place, config, options, message in (
        ({}, out, once, {}, "earlier run"),
        ({}, out, settings(epochs=3, lr=2e-3), more, r"the config \(epochs, lr\)"),
        ({"embed_dim": 32, "depth": 3}, out, once, more, r"the model \(depth, embed_dim\)"),
        ({"global_pool": ""}, new, once, {}, "a model that pools"),
        ({"num_classes": 10}, new, once, {}, "got 10 and 2"),
        ({}, new, once, {"workers": -1}, "workers must be an integer >= 0, got -1"),
        ({}, new, settings(accumulation=3), {}, "accumulation, 1 x 3, got 8"),
    ):
        with pytest.raises(TrainingError if place is out else ValueError, match=message):
            train(small_model(**model), data, place, config, **options)
    (folder / "along" / "00.png").unlink()
    with pytest.raises(TrainingError, match=r"the images \(24, here 23\)"):
        train(small_model(), open_data(folder), out, once, resume=True)
    for path in (folder / "along", tmp_path / "absent"):
        with pytest.raises(ImageError, match="at least two classes"):
            ImageFolder(path)
    trainer = Trainer(small_model(), settings(), 4, 0)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(TrainingError, match="loss must be finite, got nan"):
        trainer.step(torch.full((2, 3, 32, 32), float("nan")), torch.zeros(2, dtype=torch.int64))
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_damaged_and_foreign_checkpoints_are_refused(folder: Path, tmp_path: Path, capsys: Any) -> None:
    data, out = open_data(folder), tmp_path / "out"
    train(small_model(), data, out, settings(epochs=1))
    checkpoint = out / "checkpoint.pth"
    whole = checkpoint.read_bytes()
    state = torch.load(checkpoint, weights_only=True)
    del state["model"]["head.weight"]
    for content, message in (
        (whole[: len(whole) // 2], "cannot be read"),
        (b"", "cannot be read"),
        (b"no checkpoint at all", "cannot be read"),
        (small_model(), "cannot be read"),
        (small_model().state_dict(), "must be a checkpoint of vit-fast train"),
        (state | {"about": None}, "must be a checkpoint of vit-fast train"),
        (state, "does not fit this model"),
    ):
        if isinstance(content, bytes):
            checkpoint.write_bytes(content)
        else:
            torch.save(content, checkpoint)
        with pytest.raises(TrainingError, match=message):
            train(small_model(), data, out, settings(epochs=1), resume=True)
    (out / "model.safetensors").write_bytes(b"damaged")
    checkpoint.write_bytes(whole)
    with pytest.raises(WeightsError, match=r"model\.safetensors: cannot be read"):
        train(small_model(), data, out, settings(epochs=1), resume=True)
    checkpoint.write_bytes(b"")
    arguments = ["train", str(folder), "--out", str(out), "--model", "vit_test", "--resume"]
    assert run(*arguments) == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0), ("batch_size", 0), ("accumulation", 0), ("layer_decay", 1.5), ("layer_decay", 0.0),
        ("label_smoothing", 1.0), ("ema_decay", 1.0), ("mixup", -0.1), ("max_grad_norm", float("inf")),
        ("patience", -1), ("schedule", "linear"), ("lr", 0.0), ("weight_decay", -1.0),
        ("warmup_epochs", float("nan")), ("dtype", "int8"), ("epochs", 1.5), ("augment", "maybe"), ("seed", 0.5),
        ("seed", 2**63),
    ],
)  # fmt: skip
def test_bad_fields_are_named(field: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{field} must be"):
        TrainConfig(**{field: value})


def test_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", str(folder), "--out", str(tmp_path / "out"), "--model", "vit_test", "--epochs", "1"]
    wrong = [["--lr", "-1"], *(["--set", each] for each in ("mixup", "mixup=x", "lrr=1", "epochs=1", "dtype=int8"))]
    for options, code in ((["--set", "mixup=0.2"], 0), ([], 2), *((options, 2) for options in wrong)):
        assert run(*arguments, "--img-size", "16", "--validation", str(folder), *options) == code
    captured = capsys.readouterr()
    assert "epoch 1/1: loss" in captured.out and "validation accuracy: " in captured.out
    assert captured.err.count("\n") == 1 + len(wrong)
    assert torch.load(tmp_path / "out" / "checkpoint.pth", weights_only=True)["config"]["mixup"] == 0.2
    assert load(tmp_path / "out" / "model.safetensors").config.image_hw == (16, 16)
    with Image.open(tmp_path / "out" / "curve.png") as curve:
        assert curve.format == "PNG" and np.asarray(curve.convert("L")).std() > 5


def test_the_tutorials_model_trains_by_its_own_recipe(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    model = create_model("vit_mnist")
    assert (model.config.num_patches, model.config.seqlen, model.config.head_dim) == (49, 50, 4)
    assert model.pos_embed is None
    assert run("train", "--model", "vit_mnist", "--epochs", "1", "--out", str(tmp_path / "out")) == 0
    captured = capsys.readouterr()
    assert "validation loss: " in captured.out
    assert "epoch 1/1  loss " in captured.err and "images/s" in captured.err
    state = torch.load(tmp_path / "out" / "checkpoint.pth", weights_only=True)
    recipe = {"epochs": 1, "batch_size": 128, "lr": 5e-3, "weight_decay": 0.0, "schedule": "constant", "augment": False}
    assert state["config"].items() >= recipe.items()
    assert config_for("vit_mnist", {}).epochs == 5
    assert state["step"] == 12  # 1,437 images


def test_tensorboard_gets_every_row(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["train", str(folder), "--model", "vit_test", "--epochs", "2", "--tensorboard", "--out"]
    if importlib.util.find_spec("tensorboard") is not None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        assert run(*arguments, str(tmp_path / "with")) == 0
        written = EventAccumulator(str(tmp_path / "with" / "tensorboard")).Reload()
        rows = [json.loads(line) for line in (tmp_path / "with" / "log.jsonl").read_text().splitlines()]
        assert [event.value for event in written.Scalars("loss")] == pytest.approx([row["loss"] for row in rows])
    uninstall(monkeypatch, "tensorboard")
    assert run(*arguments, str(tmp_path / "without")) == 2
    assert not (tmp_path / "without").exists()


@pytest.mark.parametrize("steps", [4, pytest.param(50, marks=pytest.mark.slow(minutes=True))])
def test_losses_of_the_kernels_match_eager(steps: int) -> None:
    """Under the interpreter where there is no GPU: a block of one head, five tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = torch.randn(4, 3, 16, 16), torch.arange(4) % 2
    losses = {}
    for backend in ("eager", "triton"):
        model = small_model(img_size=16, embed_dim=16, depth=1, num_heads=1, drop_path_rate=0.0, backend=backend)
        trainer = Trainer(model.to(device), settings(weight_decay=0.05, ema_decay=0.9), 50, 4)
        losses[backend] = torch.tensor([trainer.step(images, labels).loss for _ in range(steps)])
    assert losses["eager"][-1] < losses["eager"][0]
    assert (losses["triton"] - losses["eager"]).abs().max() <= (2e-5 if device == "cpu" else 1e-2)  # there TF32

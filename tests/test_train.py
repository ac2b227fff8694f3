"""Training: it learns, repeats, resumes to the bit, and takes the same steps whatever computes them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vit_fast import create_model, load
from vit_fast.cli import main
from vit_fast.data import ImageError, default_photograph, load_images
from vit_fast.image_folder import ImageFolder
from vit_fast.model import VisionTransformer
from vit_fast.train import TrainConfig, Trainer, TrainingError, learning_rate_factor, parameter_groups, train


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


def _model(**overrides: object) -> VisionTransformer:
    torch.manual_seed(0)
    return create_model("vit_test", **{"num_classes": 2, "drop_path_rate": 0.1, **overrides})


def _config(**overrides: object) -> TrainConfig:
    return TrainConfig(**{"epochs": 2, "batch_size": 8, "lr": 1e-3, **overrides})


def test_it_learns_and_what_it_saves_knows_the_classes(folder: Path, tmp_path: Path) -> None:
    rows = train(_model(), folder, tmp_path / "out", _config(epochs=6, augment=False), validation=folder)
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert rows[-1]["accuracy"] == 1.0
    assert [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()] == rows
    saved = load(tmp_path / "out" / "model.safetensors")
    assert saved.class_names == ("across", "along")
    with torch.no_grad():
        predicted = saved(load_images([folder / "along"], saved)).argmax(1)
    assert (predicted == 1).all()
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"model.safetensors", "checkpoint.pth", "log.jsonl"}


class _Interrupted(Exception):
    pass


@pytest.mark.parametrize("augment", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(folder: Path, tmp_path: Path, augment: bool) -> None:
    config = _config(augment=augment)
    whole = _model()
    rows = train(whole, folder, tmp_path / "whole", config)

    def interrupt(row: object) -> None:
        raise _Interrupted

    with pytest.raises(_Interrupted):
        train(_model(), folder, tmp_path / "parts", config, on_epoch=interrupt)
    torch.rand(5)  # whatever else happened in between
    resumed = create_model("vit_test", num_classes=2, drop_path_rate=0.1)
    assert train(resumed, folder, tmp_path / "parts", config, resume=True) == rows
    for name, parameter in resumed.state_dict().items():
        assert torch.equal(parameter, whole.state_dict()[name]), name


def test_augmentation_depends_on_epoch_and_seed_alone(folder: Path) -> None:
    model = _model()
    first, second = (ImageFolder(folder, model, augment=True, seed=1) for _ in range(2))
    assert torch.equal(first[3][0], second[3][0])
    second.epoch = 1
    assert not torch.equal(first[3][0], second[3][0])
    assert not torch.equal(first[3][0], ImageFolder(folder, model, augment=True, seed=2)[3][0])
    assert not torch.equal(first[3][0], ImageFolder(folder, model)[3][0])


def _losses_of_32_steps(backend: str = "eager", **options: object) -> torch.Tensor:
    """On crops of a real photograph, told apart by where they come from."""
    photograph = load_images([default_photograph()], create_model("vit_test", img_size=128))[0]
    crops = photograph.unfold(1, 32, 32).unfold(2, 32, 32).permute(1, 2, 0, 3, 4).reshape(16, 3, 32, 32)
    trainer = Trainer(_model(backend=backend, drop_path_rate=0.0), _config(**options), 32, 4)
    return torch.tensor([trainer.step(crops, torch.arange(16) // 4 % 2) for _ in range(32)])


@pytest.fixture(scope="module")
def eager_losses() -> torch.Tensor:
    return _losses_of_32_steps()


@pytest.mark.parametrize("other", [{"backend": "sdpa"}, {"grad_checkpointing": True}, {"dtype": "bfloat16"}])
def test_32_steps_take_the_same_losses_as_eager(other: dict[str, object], eager_losses: torch.Tensor) -> None:
    assert eager_losses[-1] < 0.5 * eager_losses[0]
    tolerance = 5e-2 if other.get("dtype") == "bfloat16" else 2e-5
    assert (_losses_of_32_steps(**other) - eager_losses).abs().max() <= tolerance


def test_learning_rate_warms_up_and_decays() -> None:
    factors = [learning_rate_factor(step, 4, 20) for step in range(21)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0 and factors[12] == pytest.approx(0.5) and factors[20] == pytest.approx(0.0)
    assert all(later < earlier for earlier, later in pairwise(factors[4:]))
    assert learning_rate_factor(0, 0, 1) == 1.0


def test_only_matrices_decay() -> None:
    model = _model(init_values=0.1, reg_tokens=2)
    decayed, plain = (group["params"] for group in parameter_groups(model, 0.05))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed_names = {names[id(parameter)] for parameter in decayed}
    assert {"patch_embed.proj.weight", "head.weight", "blocks.0.attn.qkv.weight"} <= decayed_names
    plain_names = {names[id(parameter)] for parameter in plain}
    assert {"pos_embed", "cls_token", "reg_token", "norm.weight", "head.bias", "blocks.0.ls1.gamma"} <= plain_names
    assert len(decayed) + len(plain) == len(names)


def test_what_cannot_go_on_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="nothing to resume"):
        train(_model(), folder, tmp_path / "out", _config(), resume=True)
    train(_model(), folder, tmp_path / "out", _config(epochs=1))
    with pytest.raises(TrainingError, match="earlier run"):
        train(_model(), folder, tmp_path / "out", _config(epochs=1))
    with pytest.raises(TrainingError, match="another epochs, lr"):
        train(_model(), folder, tmp_path / "out", _config(epochs=3, lr=2e-3), resume=True)
    with pytest.raises(ValueError, match="10 classes"):
        train(_model(num_classes=10), folder, tmp_path / "new", _config())
    for path in (folder / "along", tmp_path / "absent"):
        with pytest.raises(ImageError, match="at least two classes"):
            ImageFolder(path, _model())
    trainer = Trainer(_model(), _config(), 4, 0)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(TrainingError, match="loss is nan"):
        trainer.step(torch.full((2, 3, 32, 32), float("nan")), torch.zeros(2, dtype=torch.int64))
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("batch_size", 0),
        ("lr", 0.0),
        ("weight_decay", -1.0),
        ("warmup_epochs", float("nan")),
        ("dtype", "int8"),
    ],
)
def test_bad_fields_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        TrainConfig(**{field: value})


def test_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", str(folder), "--out", str(tmp_path / "out"), "--model", "vit_test", "--epochs", "1"]
    for options, code in (((), 0), ((), 2), (("--lr", "-1"), 2)):
        with pytest.raises(SystemExit) as exit_:
            main([*arguments, "--img-size", "16", "--validation", str(folder), *options])
        assert int(exit_.value.code or 0) == code
    captured = capsys.readouterr()
    assert "epoch 1/1: loss" in captured.out and "accuracy" in captured.out
    assert captured.err.count("\n") == 2
    assert load(tmp_path / "out" / "model.safetensors").config.image_hw == (16, 16)

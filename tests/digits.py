"""A small ViT, trained in seconds on the bundled digits, and the same function with an outlier channel.

The first 1,200 of the 1,797 shuffled images [8, 8] are for training, the others for tests.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchlib_once  # noqa: F401  # halves the time of every export
from PIL import Image
from torch import Tensor, nn

import vit_fast
from vit_fast.apps.data import make_transform
from vit_fast.apps.training import TrainConfig, Trainer
from vit_fast.config import DataConfig
from vit_fast.files import file_aside

TRAINED_ON, EPOCHS, BATCH = 1200, 12, 50
MASSIVE = (5, 40)  # channels
DATA_CONFIG = DataConfig(mean=(0.5,), std=(0.5,), crop_pct=1.0)


@functools.cache
def digits() -> tuple[list[Image.Image], Tensor]:
    """All images and their labels [1797], shuffled, because images of one writer follow each other."""
    order = np.random.default_rng(0).permutation(1797)
    bundled = resources.files("vit_fast.apps").joinpath("digits.npz")
    with bundled.open("rb") as file, np.load(file) as arrays:
        pixels, labels = arrays["images"][order], arrays["labels"][order]
    return [Image.fromarray((image * 15.9).astype(np.uint8)) for image in pixels], torch.from_numpy(labels).long()


@functools.cache
def inputs() -> Tensor:
    """All images as inputs of the model, [1797, 1, 8, 8] fp32."""
    transform = make_transform(DATA_CONFIG, (8, 8), in_chans=1)
    with torch.inference_mode(False):  # a later caller may train on them
        return torch.stack([transform(image) for image in digits()[0]])


@functools.cache
def _trained(massive: float = 0) -> vit_fast.VisionTransformer:
    """Trains the model, or loads it from build/ if this file and the training code have not changed."""
    package = Path(vit_fast.__file__).parent
    names = ("model.py", "layers.py", "positions.py", "apps/training.py", "apps/trainer.py")
    sources = b"".join(path.read_bytes() for path in (Path(__file__), *(package / name for name in names)))
    key = hashlib.sha256(torch.__version__.encode() + sources).hexdigest()[:16]
    path = Path(__file__).parents[1] / "build" / "digits" / f"{key}-{massive:g}.pth"
    with torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(0)
        model = vit_fast.create_model(
            "vit_test", backend="sdpa", img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=3,
            num_heads=4,
        )  # fmt: skip
        model.data_config, model.class_names = DATA_CONFIG, tuple(map(str, range(10)))
        if not path.exists():
            _train(model, massive)
            with file_aside(path) as aside:
                torch.save(model.state_dict(), aside)
        model.load_state_dict(torch.load(path))
    return model.eval()


def _train(model: Any, massive: float) -> None:
    for name, parameter in model.named_parameters():  # preserve variances, because twelve epochs are few
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.5 if "pos" in name else parameter[0].numel() ** -0.5)
    if massive:  # in two channels of the residual stream, as in large ViTs
        with torch.no_grad():
            model.pos_embed[..., MASSIVE[0]], model.pos_embed[..., MASSIVE[1]] = massive, -massive
            for norm in [model.norm, *(norm for block in model.blocks for norm in (block.norm1, block.norm2))]:
                norm.weight.mul_(massive * (2 / 64) ** 0.5)  # about the standard deviation
                norm.weight[list(MASSIVE)] /= massive
    images, labels = inputs()[:TRAINED_ON], digits()[1][:TRAINED_ON]
    steps = TRAINED_ON // BATCH
    trainer = Trainer(model, TrainConfig(epochs=EPOCHS, batch_size=BATCH, lr=1e-3), EPOCHS * steps, steps)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(TRAINED_ON).split(BATCH):
            trainer.step(images[chosen], labels[chosen])


def digits_vit(outlier: float = 1.0, massive: float = 0) -> Any:
    """Returns the trained model, or with `massive` one with two channels of that size in the residual stream.

    `outlier` scales one channel of each norm, and its inverse the next linear: the same function, larger activations.
    """
    model: Any = copy.deepcopy(_trained(massive))
    with torch.no_grad():
        for number, block in enumerate(model.blocks):
            for norm, linear in ((block.norm1, block.attn.qkv), (block.norm2, block.mlp.fc1)):
                channel = 7 + 5 * number
                norm.weight[channel] *= outlier
                norm.bias[channel] *= outlier
                linear.weight[:, channel] /= outlier
    return model


def held_out() -> tuple[Tensor, Tensor]:
    """Images and labels of the test set, which are never used for training or calibration."""
    return inputs()[TRAINED_ON:], digits()[1][TRAINED_ON:]


def write_digits(folder: Path, first: int, last: int) -> Path:
    images, labels = digits()
    for i in range(first, last):
        (folder / str(labels[i].item())).mkdir(parents=True, exist_ok=True)
        images[i].save(folder / str(labels[i].item()) / f"{i:04}.png")
    return folder

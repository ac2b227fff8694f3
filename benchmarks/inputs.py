"""Inputs of the candidates: batches of real photographs, and weights that make every mistake visible."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vit_fast.apps.data import make_transform, read_image
from vit_fast.config import ViTConfig
from vit_fast.measure.clock import cold_copies
from vit_fast.model import VisionTransformer

from .models import Model

# Preparing an image costs milliseconds; more different ones than this make no batch more real.
MAX_VIEWS = 64


def random_weights(config: ViTConfig, seed: int = 0) -> dict[str, Tensor]:
    """Parameters under our names, fp32, on the CPU, none of them zero or alike.

    A fresh model has zero biases, unit norms and near-zero tokens, behind which a candidate that forgets one of them is
    right. Here every parameter moves the logits, attention is far from uniform (queries and keys are doubled), and
    tokens and positions are small enough beside the patches that the logits depend on the image: between two images
    they differ by about ten times what the check allows in bf16.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = VisionTransformer(config)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            owner = model.get_submodule(name.rpartition(".")[0])
            parameter.copy_(_draw(name, parameter, owner, generator))
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _draw(name: str, parameter: Tensor, owner: nn.Module, generator: torch.Generator) -> Tensor:
    noise = torch.randn(parameter.shape, generator=generator)
    if isinstance(owner, nn.LayerNorm | nn.GroupNorm):
        return 1 + 0.2 * noise if name.endswith("weight") else 0.2 * noise
    if name.endswith("gamma"):
        return 0.5 + 0.2 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    if isinstance(owner, nn.Linear | nn.Conv2d):
        weight = noise / math.sqrt(parameter[0].numel())
        if name.endswith("attn.qkv.weight"):
            weight[: 2 * weight.shape[1]] *= 2
        return weight
    return 0.3 * noise


def weights_of(model: Model, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """A model's parameters in a dtype, its own or random ones; None of a model that was given with them inside.

    Those of a whole model are the same object for every batch size; nobody writes to them.
    """
    if model.operator is not None:
        return rounded(model.operator.weights(), dtype)
    return None if model.config is None else _of_whole(model, dtype)


@functools.lru_cache(maxsize=2)
def _of_whole(model: Model, dtype: torch.dtype) -> dict[str, Tensor]:
    assert model.config is not None
    return rounded(random_weights(model.config) if model.weights is None else model.weights, dtype)


def rounded(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights in a dtype, so that every candidate, and the fp64 definition, starts from the same numbers."""
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def image_views(paths: Sequence[Path], model: Model, count: int, seed: int = 0) -> Tensor:
    """Views of photographs, prepared as for prediction: [count, *model.shape], fp32, on the CPU.

    The first are the photographs whole; further ones are random crops of them (35 to 100 % of the area, aspect ratio
    3:4 to 4:3, mirrored half of the time), so that a batch larger than the number of photographs is still of real,
    different images. What takes no photographs is given random numbers.
    """
    if model.data is None:
        return torch.randn(count, *model.shape, generator=torch.Generator().manual_seed(seed))
    transform = make_transform(model.data, model.image_hw, model.in_chans)
    images = [read_image(path) for path in paths[:count]]
    generator = np.random.default_rng(seed)
    views = []
    for number in range(count):
        image = images[number % len(images)]
        views.append(transform(image if number < len(images) else _random_crop(image, generator)))
    return torch.stack(views)


def rotating_batches(views: Tensor, batch_size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Batches of views on the device, each in memory of its own; enough of them that the next is never in cache.

    A batch larger than the number of views takes them in turn. No two batches are alike unless there is one view.
    """
    nbytes = batch_size * views[0].numel() * dtype.itemsize
    on_device = views.to(device=device, dtype=dtype)
    batches = []
    for number in range(cold_copies(nbytes, device)):
        rows = (torch.arange(batch_size, device=device) + number * (batch_size + 1)) % len(views)
        batches.append(on_device[rows])
    return batches


def _random_crop(image: Image.Image, generator: np.random.Generator) -> Image.Image:
    area = image.width * image.height * generator.uniform(0.35, 1.0)
    ratio = math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
    width = min(image.width, max(1, round(math.sqrt(area * ratio))))
    height = min(image.height, max(1, round(math.sqrt(area / ratio))))
    left = int(generator.integers(0, image.width - width + 1))
    top = int(generator.integers(0, image.height - height + 1))
    crop = image.crop((left, top, left + width, top + height))
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if generator.random() < 0.5 else crop

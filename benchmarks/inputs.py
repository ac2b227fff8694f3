"""Inputs of the candidates: batches of images, and random weights; models with images for other commands."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vit_fast.apps.data import as_pixels, make_transform, read_image
from vit_fast.config import ViTConfig
from vit_fast.measure.clock import cold_copies
from vit_fast.model import VisionTransformer

from .builders import define
from .configuration import make_configuration
from .models import MAX_VIEWS, Model, Task


def random_weights(config: ViTConfig, seed: int = 0) -> dict[str, Tensor]:
    """Draws parameters under our names in fp32 on the CPU, none of them zero or alike.

    A fresh model has zero biases, unit norms and near-zero tokens, so a candidate that ignores one of them would pass.
    Here every parameter changes the logits, attention is far from uniform (queries and keys are doubled), and tokens
    and positions are small enough that the logits depend on the image: between two images they differ by about ten
    times the allowed error in bf16.
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
    """Returns a model's parameters, its own or random ones, in a dtype; None for a model with weights inside."""
    if model.operator is not None:
        return rounded(model.operator.weights(), dtype)
    return None if model.config is None else _of_whole(model, dtype)


@functools.lru_cache(maxsize=2)
def _of_whole(model: Model, dtype: torch.dtype) -> dict[str, Tensor]:
    assert model.config is not None
    return rounded(random_weights(model.config) if model.weights is None else model.weights, dtype)


def rounded(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Converts weights to a dtype: every candidate and the fp64 reference start from these numbers."""
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def image_views(paths: Sequence[Path], model: Model, count: int, seed: int = 0) -> Tensor:
    """Prepares views of images [count, *model.shape] in fp32 on the CPU, or random numbers for other inputs.

    The first ones are the whole images, further ones random crops (35 to 100 % of the area, aspect ratio 3:4 to
    4:3, mirrored half of the time), so that large batches consist of different images.
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
    """Makes different batches of views on a device, so many that the next one is never in the cache."""
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


OTHER_BATCHES = 3  # to measure agreement


@dataclass(frozen=True)
class Opened:
    """A model with images.

    Attributes:
        model: Its name, size and preprocessing.
        module: The model in evaluation mode, in fp32 on its device; ours on the eager backend.
        example: A batch of images.
        others: More batches.
        image_files: Their files.
    """

    model: Model
    module: nn.Module
    example: Tensor
    others: list[Tensor]
    image_files: tuple[Path, ...]


def open_model(
    name: str, batch: int, images: Sequence[Path], device: str = "auto", img_size: Sequence[int] | None = None
) -> Opened:
    """Opens a model that `vit-fast bench` takes, with images.

    Args:
        name: See models.py.
        batch: Images per call.
        images: Files and folders; empty means the sample image of matplotlib.
        device: "auto" (CUDA if available), or a device of torch.
        img_size: Height and width in pixels, or one for both; None means the model's own.
    Raises:
        ValueError: an argument is unknown, out of range or unreadable, or the name means several models.
    """
    from vit_fast.measure.runtimes import OnnxFile

    configuration = make_configuration(
        images, models=[name], batch_sizes=[batch], dtypes=["fp32"], img_size=img_size, device=device
    )
    on, paths = configuration.device, configuration.images
    if len(configuration.models) > 1:
        names = ", ".join(model.name for model in configuration.models)
        raise ValueError(f"the model must be one of {names}, got {name!r}")
    (model,) = configuration.models
    if model.onnx is not None:
        module: Any = OnnxFile(model.onnx, on, img_size if img_size is None else model.image_hw)
    elif model.kind not in ("ours", "given"):
        raise ValueError(f"the model must be a whole model, got {name}")
    else:
        weights = model.weights if model.config is None or model.weights else random_weights(model.config)
        task = Task(model, weights, torch.float32, on, batch)
        module = define(task)
    count = max(batch, min(MAX_VIEWS, batch * (1 + OTHER_BATCHES)))
    if model.onnx is None:
        views = image_views(paths, model, count)
    elif module.runner.takes_pixels:
        views = torch.from_numpy(as_pixels(read_image(paths[0]), count, module.runner.in_chans))
    else:
        one = torch.from_numpy(module.runner.example(1, np.random.default_rng(0)))
        views = image_views(paths, model, count).to(one.dtype)
    batches = [part for part in views.to(on).split(batch) if len(part) == batch]
    return Opened(model, module, batches[0], batches[1:], paths)

"""A model by the name that the command line takes, with photographs that suit it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vit_fast.apps.data import as_pixels, read_image
from vit_fast.measure.runtimes import OnnxFile

from .candidates import Task
from .candidates_models import define
from .inputs import MAX_VIEWS, image_views, random_weights
from .models import Model
from .plan import make_plan

# Batches beside the example, to judge agreement on.
OTHER_BATCHES = 3


@dataclass(frozen=True)
class Opened:
    """A model to work with.

    Attributes:
        model: Its name, size and preprocessing.
        module: It, in evaluation mode, in fp32 on its device; one of ours on the eager backend, a file as it is.
        example: A batch of photographs as it takes them.
        others: More such batches.
        photographs: The files that they were made of.
    """

    model: Model
    module: nn.Module
    example: Tensor
    others: list[Tensor]
    photographs: tuple[Path, ...]


def open_model(
    name: str, batch: int, images: Sequence[Path], device: str = "auto", img_size: Sequence[int] | None = None
) -> Opened:
    """A model that `vit-fast bench` takes, and images for it.

    Args:
        name: See vit_fast.benchmarks.models.
        batch: Images a call.
        images: Files and folders; none means the photograph inside matplotlib's wheel.
        device: "auto" (CUDA where there is one), or what torch.device takes.
        img_size: Height and width in pixels, or one for both; None means the model's own.
    Raises:
        ValueError: anything is unknown, out of range or unreadable, or the name means several models.
    """
    plan = make_plan(images, models=[name], batch_sizes=[batch], dtypes=["fp32"], img_size=img_size, device=device)
    if len(plan.models) > 1:
        raise ValueError(f"{name!r} means {', '.join(model.name for model in plan.models)}: expected one of them")
    (model,) = plan.models
    if model.onnx is not None:
        module: nn.Module = OnnxFile(model.onnx, plan.device, img_size if img_size is None else model.image_hw)
    elif model.kind not in ("ours", "given"):
        raise ValueError(f"{name}: expected whole models")
    else:
        weights = model.weights if model.config is None or model.weights else random_weights(model.config)
        task = Task(model, weights, torch.float32, plan.device, batch)
        module = define(task)
    count = max(batch, min(MAX_VIEWS, batch * (1 + OTHER_BATCHES)))
    if isinstance(module, OnnxFile):
        views = _of_file(module, plan.images, model, count).to(plan.device)
    else:
        views = image_views(plan.images, model, count).to(plan.device)
    batches = [part for part in views.split(batch) if len(part) == batch]
    return Opened(model, module, batches[0], batches[1:], plan.images)


def _of_file(file: OnnxFile, images: Sequence[Path], model: Model, count: int) -> Tensor:
    if file.runner.takes_pixels:
        return torch.from_numpy(as_pixels(read_image(images[0]), count, file.runner.in_chans))
    one = torch.from_numpy(file.runner.example(1, np.random.default_rng(0)))
    return image_views(images, model, count).to(one.dtype)

"""A model by the name that the command line takes, with photographs that suit it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vit_fast.benchmarks.inputs import MAX_VIEWS, image_views, random_weights
from vit_fast.benchmarks.models import Model
from vit_fast.benchmarks.plan import make_plan
from vit_fast.benchmarks.subjects import Task
from vit_fast.benchmarks.subjects_models import define

# Batches beside the example, to judge agreement on.
OTHER_BATCHES = 3


@dataclass(frozen=True)
class Opened:
    """A model to work with.

    Attributes:
        model: Its name, size and preprocessing.
        module: It, in evaluation mode, in fp32 on its device; one of ours on the eager backend.
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
    """A model that `vit-fast bench` takes, but for files.onnx, and images for it.

    Args:
        name: See vit_fast.benchmarks.models.
        batch: Images a call.
        images: Files and folders; none means the photograph inside matplotlib's wheel.
        device: "auto" (CUDA where there is one), or what torch.device takes.
        img_size: Height and width in pixels, or one for both; None means the model's own.
    Raises:
        ValueError: anything is unknown, out of range or unreadable, or the name means several models or a file.onnx.
    """
    plan = make_plan(images, models=[name], batch_sizes=[batch], dtypes=["fp32"], img_size=img_size, device=device)
    if len(plan.models) > 1:
        raise ValueError(f"{name!r} means {', '.join(model.name for model in plan.models)}: accepted is one of them")
    (model,) = plan.models
    if model.kind not in ("ours", "given"):
        raise ValueError(f"{name}: accepted are models of torch, of which ONNX files are one form that is tried")
    weights = model.weights if model.config is None or model.weights else random_weights(model.config)
    task = Task(model, weights, torch.float32, plan.device, batch)
    views = image_views(plan.images, model, max(batch, min(MAX_VIEWS, batch * (1 + OTHER_BATCHES)))).to(plan.device)
    batches = [part for part in views.split(batch) if len(part) == batch]
    return Opened(model, define(task), batches[0], batches[1:], plan.images)

"""Figures of a model's attention and features, drawn with matplotlib, for notebooks and `vit-fast show`.

    from vit_fast import figures

    figures.attention(model, "cat.jpg", blocks=[0, -1]).savefig("attention.png")

The functions support each model that `vit_fast.fuse` supports, and do not change it. They need no display.
`activations.py` records the activations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor, nn

from vit_fast.benchmarks.report import ACCENT, FAINT, INK
from vit_fast.errors import check_integer

from .activations import (
    Activations,
    ModelImage,
    components,
    open_image,
    patch_filters,
    position_embedding,
    record_activations,
)

__all__ = [
    "Activations", "ModelImage", "attention", "attention_distance", "features", "filters", "open_image", "patches",
    "positions", "record_activations", "rollout",
]  # fmt: skip

GivenImage = str | Path | Image.Image | ModelImage | None


def patches(model: nn.Module, image: GivenImage = None) -> Figure:
    """Draws an image, cut into the model's patches.

    Args:
        model: A model that `vit_fast.fuse` supports.
        image: A file, a Pillow image or a ModelImage; None means matplotlib's sample image.
    """
    image, activations = _recorded(model, image)
    rows, columns = activations.grid
    height, width = image.shown.shape[0] // rows, image.shown.shape[1] // columns
    shown = image.shown[: rows * height, : columns * width]
    title = f"{rows} x {columns} = {rows * columns} patches of {height} x {width} pixels"
    return _drawn(title, {"": _tiled(shown.reshape(rows, height, columns, width, 3).swapaxes(1, 2))})


def positions(model: nn.Module, image: GivenImage = None) -> Figure:
    """Draws the cosine similarity of each position embedding to all others. Arguments as in `patches`.

    Raises:
        UnsupportedInputError: the model has no learned position embedding.
    Source: "An Image is Worth 16x16 Words", arXiv 2010.11929, figure 7 (middle).
    """
    grid = _recorded(model, image)[1].grid
    found = torch.nn.functional.normalize(position_embedding(model, math.prod(grid)), dim=-1)
    similarity = (found @ found.T).reshape(*grid, *grid)
    # draw at most 14 x 14 positions
    rows, columns = (np.unique(np.linspace(0, count - 1, min(count, 14)).round().astype(int)) for count in grid)
    title = "cosine similarity of each position embedding to all others, from -1 (dark) to 1 (light)"
    return _drawn(title, {"": _tiled(similarity[rows][:, columns].numpy())}, cmap="viridis", vmin=-1, vmax=1)


def filters(model: nn.Module, count: int = 28) -> Figure:
    """Draws the principal components of the patch embedding's filters as RGB.

    Args:
        model: A model whose patch embedding is a convolution.
        count: Number of components.
    Source: "An Image is Worth 16x16 Words", arXiv 2010.11929, figure 7 (left).
    """
    check_integer("count", count, 1)
    weight = patch_filters(model)
    found, _ = components(weight.flatten(1), count)
    shown = found.unflatten(1, weight.shape[1:]).permute(0, 2, 3, 1)
    columns = min(7, len(shown))
    rows = math.ceil(len(shown) / columns)
    tiles = np.ones((rows * columns, *shown.shape[1:3], 3), np.float32)
    tiles[: len(shown)] = _stretched(shown, (1, 2, 3)).numpy()
    title = f"patch embedding: {len(shown)} principal components of {len(weight)} filters"
    return _drawn(title, {"": _tiled(tiles.reshape(rows, columns, *tiles.shape[1:]))})


def attention(
    model: nn.Module, image: GivenImage = None, *, blocks: Sequence[int] = (0, -1), heads: Sequence[int] | None = None
) -> Figure:
    """Draws the attention of the class token over the image, per block and head.

    Without a class token, it draws the mean attention of all patches.

    Args:
        model: A model that `vit_fast.fuse` supports.
        image: As in `patches`.
        blocks: Block indices; negative ones count from the end.
        heads: Head indices; None means all heads.
    Raises:
        ValueError: a block or head does not exist.
    """
    image, activations = _recorded(model, image)
    depth, count = len(activations.attention), activations.attention[0].shape[1]
    heads = range(count) if heads is None else heads
    for name, indices, least, most in (("blocks", blocks, -depth, depth - 1), ("heads", heads, 0, count - 1)):
        for index in indices:
            if not isinstance(index, int) or not least <= index <= most:
                raise ValueError(f"{name} must be between {least} and {most}, got {index}")
    if not len(blocks) or not len(heads):
        raise ValueError("blocks and heads must contain at least one index each, got none")
    maps = {
        f"block {block % depth}, head {head}": _of_class_token(
            activations.attention[block][0, head, :, activations.prefix :], activations
        )
        for block in blocks
        for head in heads
    }
    title = "attention of the class token" if activations.prefix else "mean attention of all patches"
    return _drawn(title, maps, len(heads), over=image)


def rollout(model: nn.Module, image: GivenImage = None) -> Figure:
    """Draws attention rollout: the contribution of each patch to the class token. Arguments as in `patches`.

    Without a class token, it draws the mean contribution to all patches.
    Source: "Quantifying Attention Flow in Transformers", arXiv 2005.00928.
    """
    image, activations = _recorded(model, image)
    reached = _of_class_token(activations.rollout()[0], activations)
    return _drawn("attention rollout", {"image": None, "rollout": reached}, 2, over=image)


def attention_distance(model: nn.Module, image: GivenImage = None) -> Figure:
    """Draws the mean attention distance in pixels per block and head. Arguments as in `patches`.

    Source: "An Image is Worth 16x16 Words", arXiv 2010.11929, figure 11 (appendix D.7).
    """
    image, activations = _recorded(model, image)
    sides = [side / count for side, count in zip(image.shown.shape[:2], activations.grid)]
    found = activations.distances(sides).numpy()
    depth, heads = found.shape
    figure, axes = _figure(f"{heads} heads per block, and their mean", 5.5, 3.6)
    axes = axes.item()
    for head in range(heads):
        axes.scatter(range(depth), found[:, head], s=18, color=ACCENT, alpha=0.75, linewidths=0)
    axes.plot(range(depth), found.mean(1), color=FAINT, linewidth=1)
    axes.set_xlabel("block", color=INK)
    axes.set_ylabel("mean attention distance, pixels", color=INK)
    axes.set_ylim(0, 1.1 * found.max())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=FAINT)
    return figure


def features(model: nn.Module, image: GivenImage = None) -> Figure:
    """Draws the first three principal components of the patch features as RGB. Arguments as in `patches`.

    Source: "DINOv2: Learning Robust Visual Features without Supervision", arXiv 2304.07193, figure 1.
    """
    image, activations = _recorded(model, image)
    found = activations.features[0]
    _, coordinates = components(found.flatten(0, 1), 3)
    colors = _stretched(coordinates.unflatten(0, found.shape[:2]), (0, 1))
    title = "patch features: three principal components as colors"
    return _drawn(title, {"image": image.shown, "features": colors.numpy()}, 2)


def _recorded(model: nn.Module, image: GivenImage) -> tuple[ModelImage, Activations]:
    image = image if isinstance(image, ModelImage) else open_image(model, image)
    return image, record_activations(model, image.images)


def _of_class_token(values: Tensor, activations: Activations) -> Tensor:
    """Returns the class token's row of values [tokens, patches], or the mean over all patches, on the patch grid."""
    return (values[0] if activations.prefix else values.mean(0)).reshape(activations.grid)


def _drawn(
    title: str, images: Mapping[str, Any], columns: int = 1, over: ModelImage | None = None, **options: Any
) -> Figure:
    """Draws images by name; with `over`, as heat maps over that image, or only that image for None."""
    height, width = (next(iter(images.values())) if over is None else over.shown).shape[:2]
    rows, scale = math.ceil(len(images) / columns), max(1.6, 5.0 / columns) / max(height, width)  # inches per pixel
    label = 0.25 if columns > 1 else 0.0
    figure, axes = _figure(title, columns * scale * width, rows * (scale * height + label), rows, columns)
    extent = (0, width, height, 0)
    for place, (name, values) in zip(axes.flat, images.items(), strict=True):
        place.set_axis_off()
        place.set_title(name, fontsize=7, color=FAINT, pad=2)
        if over is None:
            place.imshow(values, extent=extent, **options)
            continue
        below = over.shown if values is None else over.shown.mean(-1)
        place.imshow(below, cmap="gray", vmin=0, vmax=1, extent=extent)
        if values is not None:
            place.imshow(values.numpy(), cmap="inferno", alpha=0.65, interpolation="bilinear", extent=extent)
    return figure


def _figure(title: str, width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """Creates a figure with a title above axes [rows, columns] of `width` x `height` inches in total."""
    size = (max(width, 4.8), height + 0.4)  # room for the title
    figure = Figure(figsize=size, dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.02, ha="left", size=8.5, color=INK, weight="bold")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _tiled(tiles: np.ndarray) -> np.ndarray:
    """Arranges tiles [rows, columns, height, width] or [..., 3] in one image, with white gaps."""
    rows, columns, height, width = tiles.shape[:4]
    gap = max(1, width // 8)
    blank = np.nan if tiles.ndim == 4 else 1.0
    sheet = np.full((rows, height + gap, columns, width + gap, *tiles.shape[4:]), blank, np.float32)
    sheet[:, :height, :, :width] = tiles.swapaxes(1, 2)
    return sheet.reshape(rows * (height + gap), columns * (width + gap), *tiles.shape[4:])[:-gap, :-gap]


def _stretched(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Scales values to 0..1 over some axes."""
    low, high = values.amin(axes, keepdim=True), values.amax(axes, keepdim=True)
    return (values - low) / (high - low).clamp_min(1e-12)

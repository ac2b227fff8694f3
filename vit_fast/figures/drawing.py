"""Draws matplotlib figures in the style of the benchmark's plot. No display is needed."""

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

from vit_fast.arguments import check_integer
from vit_fast.benchmarks.rendering import FAINT, INK, OURS

from .activations import (
    Activations,
    ModelImage,
    components,
    open_image,
    patch_filters,
    position_embedding,
    record_activations,
)

PANEL_INCHES, TITLE_INCHES, MIN_INCHES = 1.6, 0.4, 4.8
HEAT, MAP = "inferno", "viridis"

Given = str | Path | Image.Image | ModelImage | None


def patches(model: nn.Module, image: Given = None) -> Figure:
    """Draws an image, cut into the model's patches.

    Args:
        model: A model that `vit_fast.fuse` supports.
        image: A file, a Pillow image or a ModelImage; None means matplotlib's sample image.
    """
    image = _opened(model, image)
    rows, columns = record_activations(model, image.images).grid
    height, width = (side // count for side, count in zip(image.shown.shape[:2], (rows, columns)))
    shown = image.shown[: rows * height, : columns * width]
    title = f"{rows} x {columns} = {rows * columns} patches of {height} x {width} pixels"
    figure, axes = _figure(title, 5.0 * columns / max(rows, columns), 5.0 * rows / max(rows, columns))
    _show(axes[0, 0], _tiled(shown.reshape(rows, height, columns, width, 3).swapaxes(1, 2)))
    return figure


def positions(model: nn.Module, image: Given = None) -> Figure:
    """Draws the cosine similarity of each position embedding to all others. Arguments as in `patches`.

    Raises:
        UnsupportedInputError: the model has no learned position embedding.
    Source: "An Image is Worth 16x16 Words", arXiv 2010.11929, figure 7 (middle).
    """
    grid = record_activations(model, _opened(model, image).images).grid
    found = torch.nn.functional.normalize(position_embedding(model, math.prod(grid)), dim=-1)
    similarity = (found @ found.T).reshape(*grid, *grid)
    # draw at most 14 x 14 positions
    rows, columns = (np.unique(np.linspace(0, count - 1, min(count, 14)).round().astype(int)) for count in grid)
    title = "cosine similarity of each position embedding to all others, from -1 (dark) to 1 (light)"
    figure, axes = _figure(title, 6.0, 6.0 * len(rows) / len(columns))
    _show(axes[0, 0], _tiled(similarity[rows][:, columns].numpy()), cmap=MAP, vmin=-1, vmax=1)
    return figure


def filters(model: nn.Module, count: int = 28) -> Figure:
    """Draws the principal components of the patch embedding's filters as RGB.

    Args:
        model: A model whose patch embedding is a convolution.
        count: Number of components.
    Source: "An Image is Worth 16x16 Words", arXiv 2010.11929, figure 7 (left).
    """
    check_integer("count", count, 1)
    weight = patch_filters(model)
    found, _ = components(weight.flatten(1), min(count, *weight.flatten(1).shape))
    shown = found.unflatten(1, weight.shape[1:]).permute(0, 2, 3, 1)
    columns = min(7, len(shown))
    rows = math.ceil(len(shown) / columns)
    title = f"patch embedding: {len(shown)} principal components of {len(weight)} filters"
    figure, axes = _figure(title, columns * 0.8, rows * 0.8)
    tiles = np.ones((rows * columns, *shown.shape[1:3], 3), np.float32)
    tiles[: len(shown)] = torch.stack([_stretched(component) for component in shown]).numpy()
    _show(axes[0, 0], _tiled(tiles.reshape(rows, columns, *tiles.shape[1:])))
    return figure


def attention(
    model: nn.Module, image: Given = None, *, blocks: Sequence[int] = (0, -1), heads: Sequence[int] | None = None
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
    image = _opened(model, image)
    activations = record_activations(model, image.images)
    depth, of_head = len(activations.attention), range(activations.attention[0].shape[1])
    for block in blocks:
        if not isinstance(block, int) or not -depth <= block < depth:
            raise ValueError(f"blocks must be between {-depth} and {depth - 1}, got {block}")
    heads = of_head if heads is None else heads
    for head in heads:
        if head not in of_head:
            raise ValueError(f"heads must be between 0 and {len(of_head) - 1}, got {head}")
    maps = {
        (f"block {block % depth}", f"head {head}"): _attended(activations, activations.attention[block][0, head])
        for block in blocks
        for head in heads
    }
    title = "attention of the class token" if activations.prefix else "mean attention of all patches"
    return _over(image, maps, len(heads), title)


def rollout(model: nn.Module, image: Given = None) -> Figure:
    """Draws attention rollout: the contribution of each patch to the class token. Arguments as in `patches`.

    Without a class token, it draws the mean contribution to all patches.
    Source: "Quantifying Attention Flow in Transformers", arXiv 2005.00928.
    """
    image = _opened(model, image)
    activations = record_activations(model, image.images)
    flow = activations.rollout()[0]
    reached = (flow[0] if activations.prefix else flow.mean(0)).reshape(activations.grid)
    return _over(image, {("image", ""): None, ("rollout", ""): reached}, 2, "attention rollout")


def attention_distance(model: nn.Module, image: Given = None) -> Figure:
    """Draws the mean attention distance in pixels per block and head. Arguments as in `patches`.

    Source: "An Image is Worth 16x16 Words", arXiv 2010.11929, figure 11 (appendix D.7).
    """
    image = _opened(model, image)
    activations = record_activations(model, image.images)
    sides = [side / count for side, count in zip(image.shown.shape[:2], activations.grid)]
    found = activations.distances(sides).numpy()
    depth, heads = found.shape
    figure, ((axes,),) = _figure(f"{heads} heads per block, and their mean", 5.5, 3.6)
    for head in range(heads):
        axes.scatter(range(depth), found[:, head], s=18, color=OURS, alpha=0.75, linewidths=0)
    axes.plot(range(depth), found.mean(1), color=FAINT, linewidth=1)
    axes.set_xlabel("block", color=INK)
    axes.set_ylabel("mean attention distance, pixels", color=INK)
    axes.set_ylim(0, 1.1 * found.max())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=FAINT)
    return figure


def features(model: nn.Module, image: Given = None) -> Figure:
    """Draws the first three principal components of the patch features as RGB. Arguments as in `patches`.

    Source: "DINOv2: Learning Robust Visual Features without Supervision", arXiv 2304.07193, figure 1.
    """
    image = _opened(model, image)
    found = record_activations(model, image.images).features[0]
    _, coordinates = components(found.flatten(0, 1), min(3, *found.flatten(0, 1).shape))
    colors = _stretched(coordinates.unflatten(0, found.shape[:2]), by_channel=True)
    height, width = (2.6 * side / max(image.shown.shape[:2]) for side in image.shown.shape[:2])
    figure, axes = _figure("patch features: three principal components as colors", 2 * width, height, columns=2)
    _show(axes[0, 0], image.shown)
    _show(axes[0, 1], colors.numpy())
    return figure


def _opened(model: nn.Module, image: Given) -> ModelImage:
    return image if isinstance(image, ModelImage) else open_image(model, image)


def _attended(activations: Activations, weights: Tensor) -> Tensor:
    """Returns the attention [rows, columns] of the class token, or the mean over all patches."""
    row = weights[0, activations.prefix :] if activations.prefix else weights.mean(0)
    return row.reshape(activations.grid)


def _over(image: ModelImage, maps: Mapping[tuple[str, str], Tensor | None], columns: int, title: str) -> Figure:
    """Draws maps over the image; None draws only the image."""
    if not maps:
        raise ValueError("blocks and heads must contain at least one index each, got none")
    rows = math.ceil(len(maps) / columns)
    height, width = image.shown.shape[:2]
    panel_inches = PANEL_INCHES * height / max(height, width) + 0.25
    figure, axes = _figure(title, columns * PANEL_INCHES, rows * panel_inches, rows, columns)
    for place, ((block, head), values) in zip(axes.flat, maps.items(), strict=True):
        _show(place, image.shown if values is None else image.shown.mean(-1), cmap="gray", vmin=0, vmax=1)
        if values is not None:
            place.imshow(values.numpy(), cmap=HEAT, alpha=0.65, interpolation="bilinear", extent=(0, width, height, 0))
        place.set_title(", ".join(word for word in (block, head) if word), fontsize=7, color=FAINT, pad=2)
    return figure


def _figure(title: str, width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """Creates a figure with a title above axes [rows, columns] of `width` x `height` inches in total."""
    size = (max(width, MIN_INCHES), height + TITLE_INCHES)
    figure = Figure(figsize=size, dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.02, ha="left", size=8.5, color=INK, weight="bold")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _show(axes: Any, pixels: Any, **how: Any) -> None:
    axes.set_axis_off()
    rows, columns = np.asarray(pixels).shape[:2]
    axes.imshow(pixels, extent=(0, columns, rows, 0), **how)


def _tiled(tiles: np.ndarray) -> np.ndarray:
    """Arranges tiles [rows, columns, height, width] or [..., 3] in one image, with white gaps."""
    rows, columns, height, width = tiles.shape[:4]
    gap = max(1, width // 8)
    blank = np.nan if tiles.ndim == 4 else 1.0
    sheet = np.full((rows, height + gap, columns, width + gap, *tiles.shape[4:]), blank, np.float32)
    sheet[:, :height, :, :width] = tiles.swapaxes(1, 2)
    return sheet.reshape(rows * (height + gap), columns * (width + gap), *tiles.shape[4:])[:-gap, :-gap]


def _stretched(values: Tensor, by_channel: bool = False) -> Tensor:
    """Scales values [rows, columns, channels] to 0..1, per channel or over all channels."""
    over = (0, 1) if by_channel else (0, 1, 2)
    low, high = values.amin(over, keepdim=True), values.amax(over, keepdim=True)
    return (values - low) / (high - low).clamp_min(1e-12)

"""Real images to verify and calibrate with: files as they are, and random crops of them where more are needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vit_fast.apps.data import ImageError, default_photograph, find_images, make_transform, read_image
from vit_fast.config import DataConfig, Size

CALIBRATION_IMAGES = 32
MIN_CROP_SHARE = 0.4  # of each side


def photographs(paths: Iterable[str | Path] | None, count: int, seed: int = 0) -> list[Image.Image]:
    """Returns `count` images: evenly spread over more files, or with random crops if there are fewer files.

    Evenly, since files lie sorted, often by class: the first ones would all show the same things.

    Args:
        paths: Image files and folders; None means the photograph in matplotlib's wheel.
        count: How many.
        seed: Of the crops.
    Raises:
        ImageError: a file is missing or is no image, or there is none.
    """
    files = find_images([default_photograph()] if paths is None else paths)
    if not files:
        raise ImageError("calibration and images must contain at least one image file or folder, got none")
    whole = [read_image(file) for file in _spread(files, count)]
    generator = np.random.default_rng(seed)
    crops = [_random_crop(whole[i % len(whole)], generator) for i in range(count - len(whole))]
    return whole + crops


def left_over(files: Sequence[Path], count: int) -> list[Path]:
    """Returns the files that photographs(files, count) does not use."""
    taken = set(_spread(files, count))
    return [file for file in files if file not in taken]


def _spread(files: Sequence[Path], count: int) -> list[Path]:
    taken = min(count, len(files))
    return [files[i * len(files) // taken] for i in range(taken)]


def as_inputs(images: list[Image.Image], data_config: DataConfig | None, image_hw: Size, in_chans: int) -> Tensor:
    """Photographs as a model takes them, [B, in_chans, height, width] fp32, by data_config or DataConfig's defaults."""
    colours = in_chans if in_chans in (1, 3) else 3
    transform = make_transform(data_config or DataConfig(), image_hw, colours)
    planes = torch.stack([transform(image) for image in images])
    # more than three channels (depth, infrared): repeat those of the image
    return planes if colours == in_chans else planes.repeat(1, -(-in_chans // 3), 1, 1)[:, :in_chans].contiguous()


def as_pixels(image: Image.Image, count: int, in_chans: int) -> np.ndarray:
    """Returns crops of one image, all of one size: uint8 [count, height, width, in_chans]."""
    image = image.convert("L" if in_chans == 1 else "RGB")
    pixels = np.asarray(image).reshape(image.height, image.width, -1)
    height, width = (max(1, side * 3 // 4) for side in pixels.shape[:2])
    generator = np.random.default_rng(0)
    tops = generator.integers(0, pixels.shape[0] - height + 1, count)
    lefts = generator.integers(0, pixels.shape[1] - width + 1, count)
    return np.stack([pixels[t : t + height, x : x + width] for t, x in zip(tops, lefts)])


def _random_crop(image: Image.Image, generator: np.random.Generator) -> Image.Image:
    width, height = (max(1, int(side * generator.uniform(MIN_CROP_SHARE, 1))) for side in image.size)
    left = int(generator.integers(0, image.width - width + 1))
    top = int(generator.integers(0, image.height - height + 1))
    crop = image.crop((left, top, left + width, top + height))
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if generator.random() < 0.5 else crop

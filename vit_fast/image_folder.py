"""Labelled images in a folder with one subfolder a class, with an augmentation that a seed repeats."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from .data import ImageError, find_images, make_transform, read_image
from .model import VisionTransformer


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The images below a folder; each subfolder is a class, in alphabetical order.

    Args:
        folder: Holds at least two subfolders with images.
        model: Says size and preprocessing.
        augment: Random crops of 35 to 100 percent of the image, and random mirroring.
        seed: Of the augmentation.
    Raises:
        ImageError: no such folder, fewer than two classes, or one without images.
    """

    def __init__(self, folder: Path, model: VisionTransformer, *, augment: bool = False, seed: int = 0) -> None:
        self.class_names = class_names_of(folder)
        self.files = [
            (file, label) for label, name in enumerate(self.class_names) for file in find_images([folder / name])
        ]
        self.image_hw, self.augment, self.seed, self.epoch = model.config.image_hw, augment, seed, 0
        self.transform = make_transform(model.data_config, self.image_hw, model.config.in_chans)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, label = self.files[index]
        image = read_image(file)
        return self.transform(self._crop_and_mirror(image, index) if self.augment else image), label

    def _crop_and_mirror(self, image: Image.Image, index: int) -> Image.Image:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch, index))
        share, x, y, mirror = torch.rand(4, generator=generator).tolist()
        side = math.sqrt(0.35 + 0.65 * share)
        width, height = max(1, round(image.width * side)), max(1, round(image.height * side))
        left, top = round(x * (image.width - width)), round(y * (image.height - height))
        image = image.crop((left, top, left + width, top + height))
        return ImageOps.mirror(image) if mirror < 0.5 else image


def class_names_of(folder: Path) -> tuple[str, ...]:
    """The subfolders' names, in order.

    Raises:
        ImageError: no such folder, or fewer than two.
    """
    names = tuple(sorted(p.name for p in folder.iterdir() if p.is_dir())) if folder.is_dir() else ()
    if len(names) < 2:
        raise ImageError(f"{folder}: accepted is a folder with a subfolder for each of at least two classes")
    return names


def mixed_seed(*parts: int) -> int:
    """One seed of several small numbers, the same on every machine."""
    seed = 0
    for part in parts:
        seed = (seed * 1_000_003 + part + 1) % 2**63
    return seed

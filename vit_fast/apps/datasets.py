"""Training data: image folders, torchvision's MNIST, Fashion-MNIST and CIFAR-10, and the bundled digits.

digits.npz contains images and labels of scikit-learn's load_digits: 1,797 images [8, 8] with values from 0 to 16 (UCI
"Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, CC BY 4.0).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import require_packages
from ..model import VisionTransformer
from .data import ImageError, ImageFolder, make_transform, read_image, reason

_OF_TORCHVISION = {"MNIST": "MNIST/raw", "FashionMNIST": "FashionMNIST/raw", "CIFAR10": "cifar-10-batches-py"}
_DIGITS = tuple(map(str, range(10)))
_TEST_EVERY = 5  # every fifth bundled digit is in the test set

LabeledImages = ImageFolder | Sequence[tuple[Image.Image, int]]


class TrainingData(NamedTuple):
    """Training and validation images: pairs of a Pillow image and the index of its class."""

    train: LabeledImages
    held_out: LabeledImages | None
    class_names: tuple[str, ...]
    mirrored: bool = True  # a flipped image belongs to the same class, unlike a digit


def open_data(path: str | Path | None = None, validation: str | Path | None = None) -> TrainingData:
    """Opens training data.

    Args:
        path: A folder with one subfolder of images per class, or the folder into which torchvision downloaded MNIST,
            FashionMNIST or CIFAR10. None means the bundled digits.
        validation: A folder of validation images with the same subfolders. Other data contain a test set.
    Raises:
        ImageError: path has another structure, or a file is damaged.
        MissingPackageError: the data need torchvision, which is not installed.
        OSError: path cannot be read.
        ValueError: validation is given for data with a test set, or has other classes.
    """
    roots = [] if path is None else [Path(path), Path(path).parent]
    found = [
        (name, root)
        for name, folder in _OF_TORCHVISION.items()
        for root in roots
        if (root / folder).is_dir() and (root / folder).is_relative_to(roots[0])
    ]
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise ImageError(f"{path}: must contain one torchvision data set, got {names}: pass the folder of one data set")
    if path is not None and not found:
        train, held_out = ImageFolder(path), None if validation is None else ImageFolder(validation)
        if held_out is not None and held_out.class_names != train.class_names:
            classes = f"the classes of the training images, {train.class_names}, got {held_out.class_names}"
            raise ValueError(f"validation images must have {classes}")
        return TrainingData(train, held_out, train.class_names)
    if validation is not None:
        raise ValueError(f"validation must be None for data that contain a test set, got {validation}")
    if found:
        return _of_torchvision(*found[0])
    with np.load(Path(__file__).with_name("digits.npz")) as arrays:
        pixels = (arrays["images"] * 15.9375).astype(np.uint8)
        digits = list(zip(map(Image.fromarray, pixels), arrays["labels"].tolist()))
    train_digits = [digit for i, digit in enumerate(digits) if i % _TEST_EVERY]
    return TrainingData(train_digits, digits[::_TEST_EVERY], _DIGITS, mirrored=False)


def _of_torchvision(name: str, root: Path) -> TrainingData:
    require_packages("train", "torchvision")
    from torchvision import datasets

    try:
        train, test = (getattr(datasets, name)(root, train=train) for train in (True, False))
        for part in (train, test) if "MNIST" in name else ():  # torchvision compares CIFAR-10 with checksums
            if not 0 < len(part.data) == len(part.targets) or not {*np.asarray(part.targets).tolist()} <= {*range(10)}:
                raise ValueError("the images must have one label each, between 0 and 9")
    except Exception as error:  # for damaged files, torchvision raises exceptions of many types
        why = str(error) or type(error).__name__
        raise ImageError(f"{root}: torchvision cannot read it as {name}: {why}") from None
    if name == "MNIST":  # torchvision's class names are "0 - zero" and so on
        return TrainingData(train, test, _DIGITS, mirrored=False)
    return TrainingData(train, test, tuple(train.classes))


class PreparedImages(Dataset[tuple[Tensor, int]]):
    """Labeled images as inputs of a model. The augmentation depends only on seed, epoch and index.

    `augment` crops image files at random like torchvision's RandomResizedCrop: 35 to 100 % of the area, aspect ratios
    from 3:4 to 4:3. Other images are shifted by up to an eighth of the side. `mirror` flips half of the images.
    """

    def __init__(
        self, source: LabeledImages, model: VisionTransformer, augment: bool = False, mirror: bool = True, seed: int = 0
    ) -> None:
        self.source, self.augment, self.mirror, self.seed, self.epoch = source, augment, mirror, seed, 0
        data_config = model.data_config
        if augment and isinstance(source, ImageFolder):  # the random crop replaces the center crop
            data_config = dataclasses.replace(data_config, crop_pct=1.0, crop_mode="squash")
        self.transform = make_transform(data_config, model.config.image_hw, model.config.in_chans)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.source[index]
        if self.augment:
            generator = torch.Generator("cpu").manual_seed(mixed_seed(self.seed, self.epoch, index))
            x, y, flip, share, shape = torch.rand(5, generator=generator, device="cpu").tolist()
            if not isinstance(self.source, ImageFolder):
                right, down = ((2 * part - 1) / 8 * side for part, side in zip((x, y), image.size))
                matrix = (1.0, 0.0, right, 0.0, 1.0, down)
                image = image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
            else:
                area, ratio = (0.35 + 0.65 * share) * image.width * image.height, (4 / 3) ** (2 * shape - 1)
                width = min(image.width, max(1, round(math.sqrt(area * ratio))))
                height = min(image.height, max(1, round(math.sqrt(area / ratio))))
                left, top = round(x * (image.width - width)), round(y * (image.height - height))
                image = image.crop((left, top, left + width, top + height))
            if flip < 0.5 and self.mirror:
                image = ImageOps.mirror(image)
        return self.transform(image), label


def unreadable(indices: Sequence[int], images: PreparedImages) -> list[tuple[int, str]]:
    """Decodes image files; returns the indices of those that cannot be read or prepared, with the reasons."""
    assert isinstance(images.source, ImageFolder)
    found = []
    for index in indices:
        file, _ = images.source.files[index]
        try:
            width, height = read_image(file, shrink=True).size
            if not 0.5 < width / height < 2:  # only then, preparing it may fail
                images[index]
        except ImageError as error:
            found.append((index, reason(file, error)))
    return found


def mixed_seed(*parts: int) -> int:
    """Combines small numbers into one seed that is the same on every machine."""
    seed = 0
    for part in parts:
        seed = (seed * 1_000_003 + part + 1) % 2**63
    return seed

"""What can be trained on: image folders, MNIST, Fashion-MNIST, CIFAR-10, and the digits that come with the package.

digits.npz holds the 1,797 images [8, 8] of 0 to 16 and the labels of scikit-learn's load_digits (UCI "Optical
Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, CC BY 4.0).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from ..apps.data import ImageError, make_transform
from ..apps.image_folder import ImageFolder
from ..config import Size
from ..model import VisionTransformer
from .archives import Pixels, find_cifar, read_cifar, read_idx

FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_IDX_FOLDERS = ("", "raw", "MNIST/raw", "FashionMNIST/raw")  # as downloaded, and as torchvision keeps them
_TEST_EVERY = 5  # of the bundled digits, every fifth is for the test


class LabelledImages(Protocol):
    """Images with the index of their class."""

    class_names: tuple[str, ...]

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, int]: ...


class SmallImages:
    """Images that lie in memory.

    Args:
        pixels: [n, height, width] grey or [n, height, width, 3] RGB.
        labels: [n].
        class_names: Of the labels.
        mirrored: Whether an image shows the same class in a mirror, as no digit does.
    Raises:
        ImageError: there is none, or pixels, labels and names do not fit together.
    """

    def __init__(self, pixels: Pixels, labels: Pixels, class_names: tuple[str, ...], *, mirrored: bool) -> None:
        if pixels.ndim not in (3, 4) or labels.ndim != 1 or len(pixels) != len(labels) or not pixels.size:
            raise ImageError(
                f"images of shape {list(pixels.shape)}, labels of {list(labels.shape)}: do not fit together"
            )
        if labels.max() >= len(class_names):
            raise ImageError(f"a label is {labels.max()}: accepted are 0 to {len(class_names) - 1}")
        self.pixels, self.labels, self.class_names, self.mirrored = pixels, labels, class_names, mirrored

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.pixels[index]), int(self.labels[index])


@dataclass(frozen=True)
class TrainingData:
    """What to train on, and what to measure on, if anything; both with the same classes.

    Raises:
        ValueError: they have other classes.
    """

    train: LabelledImages
    held_out: LabelledImages | None

    def __post_init__(self) -> None:
        if self.held_out is not None and self.held_out.class_names != self.train.class_names:
            raise ValueError(
                f"validation has classes {self.held_out.class_names}, training {self.train.class_names}: accepted are "
                "the same"
            )


def open_data(path: Path | None = None, validation: Path | None = None) -> TrainingData:
    """The data behind a path.

    Args:
        path: A folder of images with a subfolder a class; a folder with the IDX files of MNIST or Fashion-MNIST, also
            gzipped (Fashion-MNIST's classes get their names where "fashion" is in the path); CIFAR-10's python version,
            the archive or its folder; None is the bundled digits. All but the first bring a test set of their own.
        validation: A folder of images with the same classes, to measure on, for a path without a test set.
    Raises:
        ImageError: it is none of these, or is damaged.
        ValueError: validation beside data that has a test set, or with other classes.
    """
    if path is not None and not path.exists():
        raise ImageError(f"{path}: no such file or folder")
    data = _digits() if path is None else _idx(path) or _cifar(path)
    if data is None:
        assert path is not None
        return TrainingData(ImageFolder(path), None if validation is None else ImageFolder(validation))
    if validation is not None:
        raise ValueError(f"validation={validation}: accepted for image folders, this data has a test set of its own")
    return data


def _digits() -> TrainingData:
    with np.load(Path(__file__).with_name("digits.npz")) as arrays:
        pixels, labels = (arrays["images"] * 15.9375).astype(np.uint8), arrays["labels"]
    names = tuple(map(str, range(10)))
    test = np.arange(len(pixels)) % _TEST_EVERY == 0
    return TrainingData(*(SmallImages(pixels[part], labels[part], names, mirrored=False) for part in (~test, test)))


def _idx(path: Path) -> TrainingData | None:
    for folder in (path / name for name in _IDX_FOLDERS):
        if _idx_file(folder, "train", "images-idx3") is not None:
            break
    else:
        return None
    fashion = "fashion" in str(folder.resolve()).lower()
    names = FASHION if fashion else tuple(map(str, range(10)))
    parts = []
    for part in ("train", "t10k"):
        arrays = []
        for kind in ("images-idx3", "labels-idx1"):
            if (file := _idx_file(folder, part, kind)) is None:
                raise ImageError(f"{folder}: lacks {part}-{kind}-ubyte, also with .gz")
            arrays.append(read_idx(file))
        try:
            parts.append(SmallImages(arrays[0], arrays[1], names, mirrored=fashion))
        except ImageError as error:
            raise ImageError(f"{folder}: {part}: {error}") from None
    return TrainingData(*parts)


def _idx_file(folder: Path, part: str, kind: str) -> Path | None:
    names = (f"{part}-{kind}-ubyte", f"{part}-{kind.replace('-', '.')}-ubyte")
    return next(
        (folder / f"{name}{end}" for name in names for end in ("", ".gz") if (folder / f"{name}{end}").is_file()), None
    )


def _cifar(path: Path) -> TrainingData | None:
    if (found := find_cifar(path)) is None:
        return None
    train, test, names = read_cifar(found)
    return TrainingData(*(SmallImages(*part, names, mirrored=True) for part in (train, test)))


class PreparedImages(Dataset[tuple[Tensor, int]]):
    """Labelled images as a model's inputs, with an augmentation that seed, epoch and index decide.

    Args:
        source: The images.
        model: Says size and preprocessing.
        augment: Of photographs, random crops of 35 to 100 percent and random mirroring, by torchvision's transforms
            where it is installed (whose crops also change the aspect ratio), else by Pillow; of small images, shifts by
            up to an eighth of the side, and mirroring where a mirrored one shows the same.
        seed: Of the augmentation.
    Attributes:
        augmented_by: "torchvision" or "pillow"; None where nothing is augmented.
    """

    def __init__(
        self, source: LabelledImages, model: VisionTransformer, *, augment: bool = False, seed: int = 0
    ) -> None:
        self.source, self.augment, self.seed, self.epoch = source, augment, seed, 0
        image_hw, in_chans = model.config.image_hw, model.config.in_chans
        self.transform = make_transform(model.data_config, image_hw, in_chans)
        self.augmented_by = "pillow" if augment else None
        if augment and not isinstance(source, SmallImages) and importlib.util.find_spec("torchvision") is not None:
            self.augmented_by = "torchvision"
            self.transform = make_transform(dataclasses.replace(model.data_config, crop_pct=1.0), image_hw, in_chans)
            self.crop_and_mirror = _crop_and_mirror(image_hw, model.data_config.interpolation)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.source.read(index)
        return self.transform(self._augmented(image, index) if self.augment else image), label

    def _augmented(self, image: Image.Image, index: int) -> Image.Image:
        seed = mixed_seed(self.seed, self.epoch, index)
        if self.augmented_by == "torchvision":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return self.crop_and_mirror(image)
        generator = torch.Generator().manual_seed(seed)
        share, x, y, mirror = torch.rand(4, generator=generator).tolist()
        if isinstance(self.source, SmallImages):
            by = tuple((2 * part - 1) / 8 * side for part, side in ((x, image.width), (y, image.height)))
            matrix = (1.0, 0.0, by[0], 0.0, 1.0, by[1])
            image = image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
            return ImageOps.mirror(image) if self.source.mirrored and mirror < 0.5 else image
        side = math.sqrt(0.35 + 0.65 * share)
        width, height = max(1, round(image.width * side)), max(1, round(image.height * side))
        left, top = round(x * (image.width - width)), round(y * (image.height - height))
        image = image.crop((left, top, left + width, top + height))
        return ImageOps.mirror(image) if mirror < 0.5 else image


def _crop_and_mirror(image_hw: Size, interpolation: str) -> Callable[[Image.Image], Image.Image]:
    """Of a photograph, by torchvision: it comes out as large as the model takes it."""
    from torchvision.transforms import v2

    filter_ = v2.InterpolationMode(interpolation)
    return v2.Compose([v2.RandomResizedCrop(image_hw, (0.35, 1.0), interpolation=filter_), v2.RandomHorizontalFlip()])


def mixed_seed(*parts: int) -> int:
    """One seed of several small numbers, the same on every machine."""
    seed = 0
    for part in parts:
        seed = (seed * 1_000_003 + part + 1) % 2**63
    return seed

"""Finds, reads and preprocesses images like timm's evaluation transform, without torchvision."""

from __future__ import annotations

import importlib.util
import math
import signal
import struct
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from ..config import DataConfig, Size
from ..errors import VitFastError, check_type
from ..files import encodable

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from ..model import VisionTransformer

CALIBRATION_IMAGES = 32
MIN_CROP_SHARE = 0.4  # smallest side of a random crop, relative to the image
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})

# Exceptions that Pillow's decoders raise for damaged files.
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error)


class ImageError(VitFastError, ValueError):
    """An image cannot be found, read or preprocessed; the message contains the reason."""


class ReaderLostError(VitFastError, RuntimeError):
    """A worker process that reads images ended early."""


def batches_of(loader: DataLoader[Any]) -> Generator[Any]:
    """Yields the batches of a loader; raises ReaderLostError if a worker died, e.g. because memory ran out."""
    handler = signal.getsignal(signal.SIGCHLD)
    with torch.device("cpu"):  # a user may have set another default device
        batches = iter(loader)
    if signal.getsignal(signal.SIGCHLD) is not handler:
        signal.signal(signal.SIGCHLD, handler)  # torch's handler may raise at any time, e.g. while the caller writes
    try:
        yield from batches
    except (RuntimeError, ConnectionError, EOFError) as error:  # the last two: the worker's pipe closed before its exit
        if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker"):
            raise
        raise ReaderLostError(f"a worker that reads images was lost: {str(error).strip()}") from None


def sample_image() -> Path:
    """Returns the path of a sample image: the portrait of Grace Hopper in matplotlib's wheel."""
    spec = importlib.util.find_spec("matplotlib")  # not imported, because the import takes a quarter of a second
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "mpl-data" / "sample_data" / "grace_hopper.jpg"
        if path.is_file():
            return path
    raise ImageError("matplotlib's sample image is not installed: pass an image, or pip install matplotlib")


def find_images(paths: Iterable[str | Path]) -> list[Path]:
    """Returns the given files, and the image files in the given folders and their subfolders, sorted per folder."""
    if isinstance(paths, str | Path):
        raise TypeError(f"images must be a list, got {str(paths)!r}; pass [{str(paths)!r}]")
    check_type("images", paths, Iterable)
    found: list[Path] = []
    problems: list[str] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            # also dangling links and pipes, so that the reader reports them
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and not p.is_dir())
            if not inside:
                problems.append(f"{path}: no image in this folder ({', '.join(sorted(IMAGE_SUFFIXES))})")
            found += inside
        elif path.is_file():
            found.append(path)
        else:  # reading a pipe or a device might never end
            problems.append(f"{path}: {'must be a regular file' if path.exists() else 'no such file or folder'}")
    if problems:
        raise ImageError("; ".join(problems))
    return found


def read_image(path: str | Path, shrink: bool = False) -> Image.Image:
    """Reads an image file as 8-bit RGB and applies its EXIF orientation.

    Repeats gray values in three channels, keeps the upper 8 of 16 bits, and drops alpha. With `shrink`, reads a JPEG
    file at an eighth of its height and width, which takes a third of the time.
    """
    path = Path(path)
    if not path.is_file():
        reason = "must be an image file, got a folder, pipe or device" if path.exists() else "no such file"
        raise ImageError(f"{path}: {reason}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as opened:
                if shrink:
                    opened.draft(None, (1, 1))  # None leaves the mode unchanged
                image = ImageOps.exif_transpose(opened)
                if image.mode == "F":
                    raise ImageError("pixels must be integers, got floating point")
                if image.mode == "I" or image.mode.startswith("I;16"):
                    # Pillow's convert would clip at 255; keep the upper byte, as Pillow does for 16-bit RGB PNG files
                    upper = np.clip(np.asarray(image).astype(np.int64), 0, 65535) >> 8
                    image = Image.fromarray(upper.astype(np.uint8))
                if image.mode in ("P", "PA", "LA") or "transparency" in image.info:
                    image = image.convert("RGBA")
                return image.convert("RGB")
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise ImageError(f"{path}: rejected as a possible decompression bomb: {error}") from None
    except Image.UnidentifiedImageError:
        raise ImageError(f"{path}: not an image in a format that Pillow supports") from None
    except _DECODER_ERRORS as error:
        raise ImageError(f"{path}: cannot be read as an image: {error}") from None


def reason(path: Path, error: ImageError) -> str:
    """Returns the message of an error with the path of the image, as text that UTF-8 can encode."""
    text = str(error) if str(path) in str(error) else f"{path}: {error}"
    return text.replace(str(path), encodable(path))


def make_transform(data_config: DataConfig, image_hw: Size, in_chans: int = 3) -> Callable[[Image.Image], Tensor]:
    """Builds timm's evaluation transform: resize, center crop, scale to [0, 1], normalize.

    For one input channel, averages the three values of the mean, and of the standard deviation.
    """
    if in_chans not in (1, 3):
        raise ValueError(f"in_chans must be 1 (gray) or 3 (RGB) for image files, got {in_chans}")
    mean, std = (
        torch.tensor(per_channel(each, in_chans), device="cpu").view(-1, 1, 1)
        for each in (data_config.mean, data_config.std)
    )
    # a partial function, so that data loaders can send it to processes that spawn starts
    return partial(_transform, data_config=data_config, image_hw=image_hw, mean=mean, std=std)


def _transform(image: Image.Image, data_config: DataConfig, image_hw: Size, mean: Tensor, std: Tensor) -> Tensor:
    image, in_chans = image.convert("L" if len(mean) == 1 else "RGB"), len(mean)
    height, width = image_hw
    hw = math.floor(height / data_config.crop_pct), math.floor(width / data_config.crop_pct)
    if data_config.crop_mode != "squash":  # the smallest size that covers hw, rounded like timm
        if hw[0] == hw[1]:
            short = min(image.size)
            hw = hw[0] * image.height // short, hw[0] * image.width // short
        else:
            ratio = min(image.height / hw[0], image.width / hw[1])
            hw = round(image.height / ratio), round(image.width / ratio)
    if hw[0] * hw[1] > (Image.MAX_IMAGE_PIXELS or math.inf):
        size, resized = f"{image.height}x{image.width}", f"{hw[0]}x{hw[1]}"
        raise ImageError(f"the aspect ratio is too large: {size} would be resized to {resized} pixels")
    image = image.resize((hw[1], hw[0]), Image.Resampling[data_config.interpolation.upper()])
    top, left = round((hw[0] - height) / 2.0), round((hw[1] - width) / 2.0)
    image = image.crop((left, top, left + width, top + height))
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8)).reshape(height, width, in_chans).permute(2, 0, 1)
    return (pixels.contiguous().float().div_(255) - mean) / std


def per_channel(values: Sequence[float], in_chans: int) -> tuple[float, ...]:
    """Returns one value per channel: averages three values for one channel, and repeats a single value."""
    if in_chans == 1 and len(values) == 3:
        values = (sum(values) / 3,)
    if len(values) not in (1, in_chans):
        raise ValueError(f"data_config must have one mean and std, or one per channel ({in_chans}), got {len(values)}")
    return tuple(values) * (in_chans // len(values))


class ImageFolder:
    """Labeled images of a folder with one subfolder per class; classes are in alphabetical order."""

    def __init__(self, folder: str | Path) -> None:
        names = sorted(p.name for p in Path(folder).iterdir() if p.is_dir())
        if len(names) < 2:
            raise ImageError(f"{folder}: must contain at least two subfolders, one per class, got {len(names)}")
        self.class_names = tuple(map(encodable, names))
        self.files = [(file, label) for label, name in enumerate(names) for file in find_images([Path(folder, name)])]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        file, label = self.files[index]
        return read_image(file), label


def load_images(paths: Sequence[str | Path], model: VisionTransformer) -> Tensor:
    """Loads image files and folders as inputs of a model: fp32 [B, in_chans, height, width], on the CPU."""
    images = [read_image(file) for file in find_images(paths)]
    if not images:
        raise ValueError("paths must contain at least one image or folder, got none")
    return as_inputs(images, model.data_config, model.config.image_hw, model.config.in_chans)


def read_images(paths: Iterable[str | Path] | None, count: int, seed: int = 0) -> list[Image.Image]:
    """Reads `count` evenly spaced files. If there are fewer files, also returns random crops of their images.

    The files are evenly spaced, because the first files might all be of one class. None: matplotlib's sample image.
    """
    files = find_images([sample_image()] if paths is None else paths)
    if not files:
        raise ImageError("calibration (or images) must contain at least one image file or folder, got none")
    whole = [read_image(files[i]) for i in spread(len(files), count)]
    generator = np.random.default_rng(seed)
    return whole + [random_crop(whole[i % len(whole)], generator) for i in range(count - len(whole))]


def left_over(files: Sequence[Path], count: int) -> list[Path]:
    """Returns the files that read_images(files, count) does not use."""
    taken = {files[i] for i in spread(len(files), count)}
    return [file for file in files if file not in taken]


def spread(count: int, most: int) -> list[int]:
    """Returns at most `most` indices below `count`: evenly spaced, including the first and the last."""
    return [round(i * (count - 1) / max(most - 1, 1)) for i in range(most)] if count > most else list(range(count))


def random_crop(image: Image.Image, generator: np.random.Generator) -> Image.Image:
    """Returns a crop of 40 to 100 % of each side, flipped horizontally with probability 0.5."""
    width, height = (max(1, int(side * generator.uniform(MIN_CROP_SHARE, 1))) for side in image.size)
    left = int(generator.integers(0, image.width - width + 1))
    top = int(generator.integers(0, image.height - height + 1))
    crop = image.crop((left, top, left + width, top + height))
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if generator.random() < 0.5 else crop


def channels_of(model: nn.Module) -> int:
    """Returns the number of image channels that the first convolution of a model takes; 3 without one."""
    return next((part.in_channels for part in model.modules() if isinstance(part, nn.Conv2d)), 3)


def as_inputs(images: Sequence[Image.Image], data_config: DataConfig | None, image_hw: Size, in_chans: int) -> Tensor:
    """Returns transformed images, fp32 [B, in_chans, height, width]; more than three channels repeat RGB."""
    colors = in_chans if in_chans in (1, 3) else 3
    transform = make_transform(data_config or DataConfig(), image_hw, colors)
    planes = torch.stack([transform(image) for image in images])
    return planes if colors == in_chans else planes.repeat(1, -(-in_chans // 3), 1, 1)[:, :in_chans].contiguous()


def as_pixels(image: Image.Image, count: int, in_chans: int) -> np.ndarray:
    """Returns random crops of one image, resized to the same size: uint8 [count, height, width, in_chans]."""
    image, generator = image.convert("L" if in_chans == 1 else "RGB"), np.random.default_rng(0)
    width, height = (max(1, side * 3 // 4) for side in image.size)
    crops = [np.asarray(random_crop(image, generator).resize((width, height))) for _ in range(count)]
    return np.reshape(crops, (count, height, width, in_chans))

"""Images: finding, reading and preparing them exactly as timm's evaluation transform, without torchvision."""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import signal
import struct
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ..config import DataConfig, Size
from ..errors import VitFastError, check_type

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from ..model import VisionTransformer

CALIBRATION_IMAGES = 32
MIN_CROP_SHARE = 0.4  # of each side
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})

# What Pillow's decoders raise for damaged files, beside OSError.
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error)


class ImageError(VitFastError, ValueError):
    """An image that cannot be found or read; names the path and the reason."""


def sample_image() -> Path:
    """Finds a sample image on this machine: the portrait of Grace Hopper in matplotlib's wheel.

    Raises:
        ImageError: matplotlib is not installed, or came without its sample data.
    """
    spec = importlib.util.find_spec("matplotlib")  # located, not imported: that would cost a quarter of a second
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "mpl-data" / "sample_data" / "grace_hopper.jpg"
        if path.is_file():
            return path
    raise ImageError("no sample image: matplotlib's sample data is not installed; name an image")


def find_images(paths: Iterable[str | Path]) -> list[Path]:
    """Finds image files: a file is returned as given, a folder is searched recursively by suffix and sorted.

    Raises:
        ImageError: a path does not exist or is a pipe or a device, or a folder holds no image; names all of them.
        TypeError: paths is a single path.
    """
    if isinstance(paths, str | Path):
        raise TypeError(f"paths must be a list, got {str(paths)!r}; pass [{str(paths)!r}]")
    check_type("images", paths, Iterable)
    found: list[Path] = []
    problems: list[str] = []
    for given in paths:
        check_type("images", given, str, os.PathLike)
        path = Path(given)
        if path.is_dir():
            images = (p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
            inside = sorted(p for p in images if p.is_file() or (p.is_symlink() and not p.exists()))
            if not inside:
                problems.append(f"{path}: no image in this folder ({', '.join(sorted(IMAGE_SUFFIXES))})")
            found += inside
        elif path.is_file():
            found.append(path)
        elif path.exists():  # a pipe would be waited for, a device read for ever
            problems.append(f"{path}: is no regular file")
        else:
            problems.append(f"{path}: no such file or folder")
    if problems:
        raise ImageError("; ".join(problems))
    return found


def read_image(path: str | Path) -> Image.Image:
    """Reads an image file as 8-bit RGB, rotated as its EXIF orientation says.

    Grey becomes three equal channels, 16 bits become the upper 8, alpha is dropped (as timm and torchvision do).

    Raises:
        ImageError: missing, a folder, not an image, damaged, or with more pixels than Pillow's limit against
            decompression bombs.
    """
    check_type("path", path, str, os.PathLike)
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ImageError(f"{path}: is {'a folder' if path.is_dir() else 'no regular file'}, not an image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                return _to_rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError:
        what = f"is a link to {path.readlink()}, which does not exist" if path.is_symlink() else "no such file"
        raise ImageError(f"{path}: {what}") from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise ImageError(f"{path}: refused as a possible decompression bomb: {error}") from None
    except Image.UnidentifiedImageError:
        raise ImageError(f"{path}: not an image that Pillow knows") from None
    except _DECODER_ERRORS as error:
        raise ImageError(f"{path}: cannot be read as an image: {error}") from None


def make_transform(data_config: DataConfig, image_hw: Size, in_chans: int = 3) -> Callable[[Image.Image], Tensor]:
    """Makes timm's evaluation transform: resize, centre crop, scale to [0, 1], normalise.

    For one input channel, three-channel means and standard deviations are averaged.

    Returns:
        A function of a PIL image that gives a float32 tensor [in_chans, *image_hw].
    Raises:
        ValueError: in_chans is neither 3 (RGB) nor 1 (grey), or mean and std have another number of channels.
    """
    if in_chans not in (1, 3):
        raise ValueError(f"in_chans must be 1 (grey) or 3 (RGB) for image files, got {in_chans}")
    mean, std = (
        torch.tensor(per_channel(values, in_chans)).view(-1, 1, 1) for values in (data_config.mean, data_config.std)
    )
    height, width = image_hw
    scaled_hw = math.floor(height / data_config.crop_pct), math.floor(width / data_config.crop_pct)
    resample = Image.Resampling[data_config.interpolation.upper()]

    def transform(image: Image.Image) -> Tensor:
        image = image.convert("L" if in_chans == 1 else "RGB")
        hw = scaled_hw if data_config.crop_mode == "squash" else _cover(image, scaled_hw)
        if hw[0] * hw[1] > (Image.MAX_IMAGE_PIXELS or math.inf):
            size, resized = f"{image.height}x{image.width}", f"{hw[0]}x{hw[1]}"
            raise ImageError(f"an image of {size} would be resized to {resized}: too long and narrow")
        image = image.resize((hw[1], hw[0]), resample)
        top, left = round((hw[0] - height) / 2.0), round((hw[1] - width) / 2.0)
        image = image.crop((left, top, left + width, top + height))
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8)).reshape(height, width, in_chans).permute(2, 0, 1)
        return (pixels.contiguous().float().div_(255) - mean) / std

    return transform


class ImageFolder:
    """Labelled images of a folder, whose subfolders are the classes, in alphabetical order.

    Raises:
        ImageError: no such folder, fewer than two classes, or one without images.
    """

    def __init__(self, folder: Path) -> None:
        names = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else ()
        if len(names) < 2:
            raise ImageError(f"{folder}: must be a folder with one subfolder per class, of at least two classes")
        self.class_names = tuple(names)
        self.files = [
            (file, label) for label, name in enumerate(self.class_names) for file in find_images([folder / name])
        ]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> tuple[Image.Image, int]:
        file, label = self.files[index]
        return read_image(file), label


def load_images(paths: Sequence[str | Path], model: VisionTransformer) -> Tensor:
    """Loads image files and folders, prepared for a model: [B, in_chans, height, width], float32, on the CPU.

    Raises:
        ImageError: see find_images and read_image.
        ValueError: there is no path.
    """
    files = find_images(paths)
    if not files:
        raise ValueError("paths must hold at least one image or folder, got none")
    transform = make_transform(model.data_config, model.config.image_hw, model.config.in_chans)
    return torch.stack([transform(read_image(file)) for file in files])


def read_images(paths: Iterable[str | Path] | None, count: int, seed: int = 0) -> list[Image.Image]:
    """Returns `count` images: evenly spread over more files, or with random crops if there are fewer files.

    Files are often sorted by class, so the first ones would be of one class. None means the sample image of matplotlib.

    Raises:
        ImageError: a file is missing or is no image, or there is none.
    """
    files = find_images([sample_image()] if paths is None else paths)
    if not files:
        raise ImageError("calibration and images must contain at least one image file or folder, got none")
    whole = [read_image(file) for file in _spread(files, count)]
    generator = np.random.default_rng(seed)
    return whole + [random_crop(whole[i % len(whole)], generator) for i in range(count - len(whole))]


def left_over(files: Sequence[Path], count: int) -> list[Path]:
    """Returns the files that read_images(files, count) does not use."""
    taken = set(_spread(files, count))
    return [file for file in files if file not in taken]


def _spread(files: Sequence[Path], count: int) -> list[Path]:
    taken = min(count, len(files))
    return [files[i * len(files) // taken] for i in range(taken)]


def random_crop(image: Image.Image, generator: np.random.Generator) -> Image.Image:
    """Returns a crop of 40 to 100 % of each side, mirrored half of the time."""
    width, height = (max(1, int(side * generator.uniform(MIN_CROP_SHARE, 1))) for side in image.size)
    left = int(generator.integers(0, image.width - width + 1))
    top = int(generator.integers(0, image.height - height + 1))
    crop = image.crop((left, top, left + width, top + height))
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if generator.random() < 0.5 else crop


def as_inputs(images: Sequence[Image.Image], data_config: DataConfig | None, image_hw: Size, in_chans: int) -> Tensor:
    """Prepares images as by make_transform: [B, in_chans, height, width] fp32; further channels repeat the three."""
    colours = in_chans if in_chans in (1, 3) else 3
    transform = make_transform(data_config or DataConfig(), image_hw, colours)
    planes = torch.stack([transform(image) for image in images])
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


class ReaderLostError(VitFastError, RuntimeError):
    """A process that reads images ended early."""


def batches_of(loader: DataLoader[Any]) -> Generator[Any]:
    """Yields the batches of a loader.

    If a worker of a DataLoader dies, torch raises from a signal handler, wherever this process is. Here the handler is
    replaced: the loader also notices when it is asked for the next batch.

    Raises:
        ReaderLostError: such a process ended early.
    """
    others = set(multiprocessing.active_children())
    batches = iter(loader)
    readers = set(multiprocessing.active_children()) - others
    handled = bool(readers) and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if handled else None
    try:
        yield from batches
    except Exception:
        for process in readers:
            process.join(0.1)  # its end of the pipe closes a moment before it has an exit code
        ended = [process.exitcode for process in readers if process.exitcode]
        if not ended:
            raise
        raise ReaderLostError(f"a process that reads images has ended, with exit code {ended[0]}") from None
    finally:
        del batches  # ends the others, and waits for them
        if handled:
            signal.signal(signal.SIGCHLD, before)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ImageError(f"{getattr(image, 'filename', 'image')}: floating-point pixels have no agreed range")
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Pillow would clip at 255; a 16-bit PNG in colour, which it reduces itself, keeps the upper byte.
        upper = np.clip(np.asarray(image).astype(np.int64), 0, 65535) >> 8
        image = Image.fromarray(upper.astype(np.uint8))
    if image.mode in ("P", "PA", "LA") or "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def per_channel(values: Sequence[float], in_chans: int) -> tuple[float, ...]:
    """Returns one mean or standard deviation per channel: three are averaged for one, one is repeated."""
    if in_chans == 1 and len(values) == 3:
        values = (sum(values) / 3,)
    if len(values) not in (1, in_chans):
        raise ValueError(f"data_config must have one mean per channel, {in_chans}, got {len(values)}")
    return tuple(values) * (in_chans // len(values))


def _cover(image: Image.Image, target_hw: Size) -> Size:
    """Returns the smallest size of the image's aspect ratio that covers the target, rounded as by timm."""
    if target_hw[0] == target_hw[1]:
        short, long = sorted((image.height, image.width))
        scaled = int(target_hw[0] * long / short)
        return (target_hw[0], scaled) if image.height <= image.width else (scaled, target_hw[0])
    ratio = min(image.height / target_hw[0], image.width / target_hw[1])
    return round(image.height / ratio), round(image.width / ratio)

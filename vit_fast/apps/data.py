"""Images: finding, reading and preparing them exactly as timm's evaluation transform, without torchvision."""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import struct
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import cycle, islice
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

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})

_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
# What Pillow's decoders raise for damaged files, beside OSError.
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error)


class ImageError(VitFastError, ValueError):
    """An image that cannot be found or read; names the path and the reason."""


def default_photograph() -> Path:
    """Finds a sample image on this machine: the portrait of Grace Hopper in matplotlib's wheel.

    Raises:
        ImageError: matplotlib is not installed, or came without its sample data.
    """
    spec = importlib.util.find_spec("matplotlib")  # located, not imported: that would cost a quarter of a second
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "mpl-data" / "sample_data" / "grace_hopper.jpg"
        if path.is_file():
            return path
    raise ImageError("no default photograph: matplotlib's sample data is not installed; name an image")


def find_images(paths: Iterable[str | Path]) -> list[Path]:
    """Finds image files: a file is returned as given, a folder is searched recursively by suffix.

    Args:
        paths: Files or folders.
    Returns:
        Files in the order of paths, each folder's sorted.
    Raises:
        ImageError: a path does not exist or is a pipe or a device, or a folder holds no image; names all of them.
        TypeError: paths is a single path.
    """
    if isinstance(paths, str | Path):
        raise TypeError(f"paths must be a list, got {str(paths)!r}; pass [{str(paths)!r}]")
    check_type("images", paths, Iterable)
    found: list[Path] = []
    problems: list[str] = []
    for path in map(Path, paths):
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

    Args:
        data_config: Interpolation, crop and normalisation. For one input channel, three-channel means and standard
            deviations are averaged.
        image_hw: Height and width of the result, in pixels.
        in_chans: 3 (RGB) or 1 (grey).
    Returns:
        A function of a PIL image that gives a float32 tensor [in_chans, height, width].
    Raises:
        ValueError: in_chans is neither, or mean and std have another number of channels.
    """
    if in_chans not in (1, 3):
        raise ValueError(f"in_chans must be 1 (grey) or 3 (RGB) for image files, got {in_chans}")
    mean, std = _per_channel(data_config.mean, in_chans), _per_channel(data_config.std, in_chans)
    height, width = image_hw
    scaled_hw = (math.floor(height / data_config.crop_pct), math.floor(width / data_config.crop_pct))
    resample = _FILTERS[data_config.interpolation]

    def transform(image: Image.Image) -> Tensor:
        image = image.convert("L" if in_chans == 1 else "RGB")
        hw = scaled_hw if data_config.crop_mode == "squash" else _cover(image, scaled_hw)
        if hw[0] * hw[1] > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise ImageError(
                f"an image of {image.height}x{image.width} would be resized to {hw[0]}x{hw[1]}: too long and narrow"
            )
        image = image.resize((hw[1], hw[0]), resample)
        top, left = round((hw[0] - height) / 2.0), round((hw[1] - width) / 2.0)
        image = image.crop((left, top, left + width, top + height))
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8)).reshape(height, width, in_chans).permute(2, 0, 1)
        return (pixels.contiguous().float().div_(255) - mean) / std

    return transform


class ImageFolder:
    """Labelled images of a folder, whose subfolders are the classes, in alphabetical order.

    Args:
        folder: Holds at least two subfolders with images.
    Raises:
        ImageError: no such folder, fewer than two classes, or one without images.
    """

    def __init__(self, folder: Path) -> None:
        self.class_names = class_names_of(folder)
        self.files = [
            (file, label) for label, name in enumerate(self.class_names) for file in find_images([folder / name])
        ]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> tuple[Image.Image, int]:
        file, label = self.files[index]
        return read_image(file), label


def class_names_of(folder: Path) -> tuple[str, ...]:
    """Returns the subfolders' names, in order.

    Raises:
        ImageError: no such folder, or fewer than two.
    """
    names = tuple(sorted(p.name for p in folder.iterdir() if p.is_dir())) if folder.is_dir() else ()
    if len(names) < 2:
        raise ImageError(f"{folder}: must be a folder with one subfolder per class, of at least two classes")
    return names


def load_images(paths: Sequence[str | Path], model: VisionTransformer, batch_size: int | None = None) -> Tensor:
    """Loads image files and folders, prepared for a model.

    Args:
        paths: As find_images takes them.
        model: Says size, channels and preprocessing.
        batch_size: Images of the batch, repeated in order if there are fewer; None means each image once.
    Returns:
        [B, in_chans, height, width], float32, on the CPU.
    Raises:
        ImageError: see find_images and read_image.
        ValueError: batch_size is below 1, or there is no path.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be an integer >= 1 or None, got {batch_size}")
    files = find_images(paths)[:batch_size]
    if not files:
        raise ValueError("paths must hold at least one image or folder, got none")
    transform = make_transform(model.data_config, model.config.image_hw, model.config.in_chans)
    images = [transform(read_image(file)) for file in files]
    return torch.stack(list(islice(cycle(images), batch_size or len(images))))


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
    readers = [process for process in multiprocessing.active_children() if process not in others]
    handled = bool(readers) and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if handled else None
    ended: list[multiprocessing.process.BaseProcess] = []
    try:
        while not ended:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception:  # torch's for a lost process, or an error of its connection
                gone = multiprocessing.connection.wait([process.sentinel for process in readers], timeout=1.0)
                for process in readers:
                    if process.sentinel in gone:
                        process.join()  # its end of the pipe closes a moment before it has an exit code
                ended = [process for process in readers if process.exitcode]
                if not ended:
                    raise
            else:
                yield batch
    finally:
        del batches  # ends the others, and waits for them
        if handled:
            signal.signal(signal.SIGCHLD, before)
    raise ReaderLostError(f"a process that reads images has ended, with exit code {ended[0].exitcode}")


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


def _per_channel(values: tuple[float, ...], in_chans: int) -> Tensor:
    if in_chans == 1 and len(values) == 3:
        values = (sum(values) / 3,)
    if len(values) == 1:
        values = values * in_chans
    if len(values) != in_chans:
        raise ValueError(f"data_config must have one mean per channel, {in_chans}, got {len(values)}")
    return torch.tensor(values).view(-1, 1, 1)


def _cover(image: Image.Image, target_hw: Size) -> Size:
    """Returns the smallest size of the image's aspect ratio that covers the target, rounded as by timm."""
    if target_hw[0] == target_hw[1]:
        short, long = sorted((image.height, image.width))
        scaled = int(target_hw[0] * long / short)
        return (target_hw[0], scaled) if image.height <= image.width else (scaled, target_hw[0])
    ratio = min(image.height / target_hw[0], image.width / target_hw[1])
    return round(image.height / ratio), round(image.width / ratio)

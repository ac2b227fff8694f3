"""Labelled images in a folder with one subfolder a class."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from .data import ImageError, find_images, read_image


class ImageFolder:
    """The images below a folder; each subfolder is a class, in alphabetical order.

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
    """The subfolders' names, in order.

    Raises:
        ImageError: no such folder, or fewer than two.
    """
    names = tuple(sorted(p.name for p in folder.iterdir() if p.is_dir())) if folder.is_dir() else ()
    if len(names) < 2:
        raise ImageError(f"{folder}: accepted is a folder with a subfolder for each of at least two classes")
    return names

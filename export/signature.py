"""Signature of an ONNX file: its input of images with the fixed dimensions, and its first output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vit_fast.config import Size

from .metadata import OnnxInfo
from .model_files import ModelFileError

_DTYPES = {"float": np.float32, "float16": np.float16, "double": np.float64, "uint8": np.uint8}


@dataclass
class Signature:
    """The input and the output of a file that takes images.

    Attributes:
        path: The file, for messages.
        input: The input's name.
        dtype: The input's numpy dtype; uint8 where the file prepares pixels itself.
        shape: [B, channels, height, width], or [B, height, width, channels] in uint8; None where the file takes any.
        image_hw: Height and width that images are resized to; None if unknown.
        patch_hw: Divisors of height and width if any size is accepted; None if unknown.
        output: The first output's name.
        output_dtype: Its numpy dtype.
        output_tail: Its shape behind the batch. None where the file leaves that or the dtype open: ONNX Runtime then
            makes the output.
    """

    path: Path
    input: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    image_hw: Size | None
    patch_hw: Size | None
    output: str
    output_dtype: np.dtype[Any]
    output_tail: tuple[int, ...] | None

    @property
    def takes_pixels(self) -> bool:
        """True if the file takes uint8 [B, height, width, channels] and contains the preprocessing."""
        return self.dtype == np.uint8

    @property
    def in_chans(self) -> int:
        return self.shape[3 if self.takes_pixels else 1] or 3

    @property
    def classes(self) -> int | None:
        """Width of the output, where it is fixed."""
        return self.output_tail[-1] if self.output_tail else None

    def set_image_hw(self, image_hw: Size) -> None:
        """Sets the size that images are resized to, if the file has no fixed size.

        Raises:
            ValueError: they are not two sizes in pixels, or differ from those of the file.
        """
        if len(image_hw) != 2 or not all(isinstance(side, int) and side > 0 for side in image_hw):
            raise ValueError(f"image_hw must be height and width in pixels, got {image_hw!r}")
        if self.takes_pixels:
            raise ValueError(f"image_hw must be None, because the file prepares images of any size, got {image_hw!r}")
        fixed = self.shape[2:]
        if any(n is not None and n != side for n, side in zip(fixed, image_hw)):
            raise ValueError(f"image_hw must be {fixed} like the file's input, got {image_hw!r}")
        self.image_hw = (image_hw[0], image_hw[1])

    def check(self, images: Any) -> None:
        """Raises ValueError unless dtype and shape of numpy or torch images match the file."""
        shape, problems = tuple(images.shape), []
        dtype = str(images.dtype).removeprefix("torch.")
        wanted = ["batch" if i == 0 else n or "any" for i, n in enumerate(self.shape)]
        if dtype != str(self.dtype):
            problems.append(f"dtype must be {self.dtype}, got {dtype}")
        if len(shape) != 4 or any(n is not None and n != got for n, got in zip(self.shape[1:], shape[1:])):
            problems.append(f"shape must be {wanted}, got {shape}")
        elif self.takes_pixels and 0 in shape[1:]:
            problems.append(f"images must have pixels, got shape {shape}")
        elif self.patch_hw is not None:
            patch_h, patch_w = self.patch_hw
            if shape[2] % patch_h or shape[3] % patch_w or 0 in shape[2:]:
                problems.append(
                    f"height and width must be multiples of the patch's {patch_h}x{patch_w} pixels, got shape {shape}"
                )
        if problems:
            raise ValueError(f"images for {self.path.name}: " + "; ".join(problems))


def read_signature(info: OnnxInfo) -> Signature:
    """Reads the signature from a file's metadata.

    Raises:
        ModelFileError: the file takes no images, or other inputs beside them.
    """
    path = Path(info.path)
    if len(info.inputs) != 1:
        names = ", ".join(entry["name"] for entry in info.inputs)
        raise ModelFileError(f"{path}: must have images as its only input, got {len(info.inputs)} inputs ({names})")
    entry, out = info.inputs[0], info.outputs[0]
    if entry["dtype"] not in _DTYPES or len(entry["shape"]) != 4:
        raise ModelFileError(
            f"{path}: input {entry['name']} must be floating [batch, channels, height, width] or uint8 "
            f"[batch, height, width, channels], got {entry['dtype']} {entry['shape']}"
        )
    dtype: np.dtype[Any] = np.dtype(_DTYPES[entry["dtype"]])
    shape = tuple(dim if isinstance(dim, int) and dim > 0 else None for dim in entry["shape"])
    height, width = shape[1:3] if dtype == np.uint8 else shape[2:]
    said = info.metadata.get("image_hw")
    image_hw: Size | None = (height, width) if height and width else None
    if image_hw is None and isinstance(said, list) and len(said) == 2:
        image_hw = (int(said[0]), int(said[1]))
    patch = info.metadata.get("patch_hw", (1, 1))
    tail = tuple(dim for dim in out["shape"][1:] if isinstance(dim, int) and dim > 0)
    is_known = bool(tail) and len(tail) == len(out["shape"]) - 1 and out["dtype"] in _DTYPES
    return Signature(
        path=path,
        input=entry["name"],
        dtype=dtype,
        shape=shape,
        image_hw=image_hw,
        patch_hw=(patch[0], patch[1]) if info.metadata.get("dynamic_size") is True else None,  # not a foreign text
        output=out["name"],
        output_dtype=np.dtype(_DTYPES.get(out["dtype"], np.float32)),
        output_tail=tail if is_known else None,
    )

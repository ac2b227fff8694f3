"""What builds a TensorRT engine from a file: the shapes it is to take, and the line for trtexec.

Source: docs.nvidia.com, TensorRT developer guide, "Working with Dynamic Shapes" and "trtexec". A strongly typed network
computes in the types that the file says, eight bits included.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from .metadata import OnnxInfo
from .signature import read_signature

Shape = tuple[int, ...]
BATCHES = (1, 8, 64)
"""Least, usual and most images at once."""
SIDES = (0.5, 1.0, 2.0)
"""Least, usual and largest height and width, where the file takes any, in those it was made for."""


@dataclass(frozen=True)
class Profile:
    """Shapes that an engine is built for.

    Attributes:
        input: The input's name.
        least: Smallest shape.
        usual: The shape that it is tuned for.
        most: Largest.
    """

    input: str
    least: Shape
    usual: Shape
    most: Shape


def shape_profile(info: OnnxInfo, batches: tuple[int, int, int] = BATCHES) -> Profile | None:
    """The shapes to build for; None where the file takes one alone.

    Args:
        info: What the file says of itself.
        batches: Least, usual and most images at once.
    Raises:
        ModelFileError: the file takes no images.
    """
    signature = read_signature(info)
    if None not in signature.shape:
        return None
    height, width = signature.image_hw or (224, 224)
    patches = signature.patch_hw or (1, 1)
    shapes = []
    for batch, part in zip(batches, SIDES):
        sides = [max(1, round(side * part / patch)) * patch for side, patch in zip((height, width), patches)]
        wanted = (batch, *sides, signature.in_chans) if signature.takes_pixels else (batch, signature.in_chans, *sides)
        shapes.append(tuple(fixed or size for fixed, size in zip(signature.shape, wanted)))
    return Profile(signature.input, *shapes)


def trtexec_line(info: OnnxInfo, batches: tuple[int, int, int] = BATCHES) -> str:
    """The command that builds FILE.plan beside FILE.onnx."""
    path = Path(info.path)
    words = ["trtexec", f"--onnx={path}", f"--saveEngine={path.with_suffix('.plan')}", "--stronglyTyped"]
    if profile := shape_profile(info, batches):
        for option, shape in (("min", profile.least), ("opt", profile.usual), ("max", profile.most)):
            words.append(f"--{option}Shapes={profile.input}:{'x'.join(map(str, shape))}")
    return shlex.join(words)

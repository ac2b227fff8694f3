"""Patch embedding of uint8 images: folds the normalization (x / 255 - mean) / std into the convolution.

    conv((x / 255 - mean) / std) = conv'(x - 128),  W' = W / (255 std),  b' = b + sum W (128 / 255 - mean) / std

A byte minus 128 is exact in fp16 and bf16, a normalized value is not. POWER keeps W' in the range of normal fp16
numbers. Every forward computes W' and b' from the Parameters in fp32, so that gradients reach the Parameters.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blocks.fused import Finding, FusedModule
from ..blocks.reading import describe

CENTER = 128.0
POWER = 64.0  # divides bytes and multiplies weights


class FusedPatchConv(FusedModule):
    """Convolution of a patch embedding for images in 0..255, uint8 or any floating dtype."""

    kind = "normalization"
    equivalent = False
    vit_fast_mean: tuple[float, ...]
    vit_fast_std: tuple[float, ...]

    @classmethod
    def examine(cls, module: Any) -> Finding:
        if type(module) is not nn.Conv2d:
            return Finding([f"the patch embedding must be torch.nn.Conv2d, got {describe(module)}"])
        reasons = []
        if any(module.padding) if isinstance(module.padding, tuple) else module.padding != "valid":
            reasons.append(f"padding must be 0, got {module.padding}: padding pixels would not be normalized")
        if module.groups != 1:
            reasons.append(f"groups must be 1, got {module.groups}")
        return Finding(reasons, ["the model now takes images in 0..255, uint8 or floating, not normalized ones"])

    def forward(self, input: Tensor) -> Tensor:
        """Maps images in 0..255, [B, channels, height, width], to [B, C, rows, columns]."""
        scale = [POWER / (255.0 * std) for std in self.vit_fast_std]
        shift = [(CENTER / 255.0 - mean) / std for mean, std in zip(self.vit_fast_mean, self.vit_fast_std)]
        channels = self.weight.float().split(1, dim=1)  # factors as Python numbers need no copy to the device
        weight = torch.cat([channel * factor for channel, factor in zip(channels, scale)], dim=1)
        bias: Any = sum(channel.sum(dim=(1, 2, 3)) * offset for channel, offset in zip(channels, shift))
        if self.bias is not None:
            bias = bias + self.bias.float()
        dtype = self.weight.dtype
        centered = ((input.to(dtype) - CENTER) / POWER).to(dtype)
        return F.conv2d(centered, weight.to(dtype), bias.to(dtype), self.stride, self.padding, self.dilation)


def check_normalize(normalize: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns (mean, std) as two tuples of floats; raises ValueError if they are invalid."""
    try:
        mean, std = (tuple(map(float, values)) for values in normalize)
    except (TypeError, ValueError):
        mean, std = (), ()
    if len(mean) != len(std) or not mean or min(std) <= 0 or not all(map(math.isfinite, mean + std)):
        requirement = "normalize must be (mean, std), two tuples with one finite number per channel, and std > 0"
        raise ValueError(f"{requirement}, got {normalize!r}")
    return mean, std

"""8-bit number formats, for the kernels and for ONNX files: scale, rounding, and selection of a range.

int8, uint8        x ~ s (x_q - z), z = 0 for int8; weights are int8 with one scale per output channel
e4m3               x ~ s x_q, s = max |.| / 448, one scale per tensor
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch

from ..ops.reference import E4M3_MAX
from .ranges import Observation, Range, candidate_ranges

T = TypeVar("T")

NEAR = 1.02
"""Candidates within this factor of the smallest loss count as equal; the first of them is selected."""


@dataclass(frozen=True)
class Scheme:
    """An 8-bit number format; with `power_of_two`, scales are powers of two, as the kernels require."""

    kind: Literal["int8", "uint8", "e4m3"]
    power_of_two: bool = False

    def grid(self, limits: Range) -> tuple[float, int]:
        """Returns scale and zero point of a range."""
        if self.kind == "uint8":
            scale = max(limits.high - limits.low, 1e-30) / 255
            return scale, int(np.clip(round(-limits.low / scale), 0, 255))
        peak = max(-limits.low, limits.high)
        if self.kind == "int8":
            return max(peak, 1e-30) / 127, 0
        if self.power_of_two:  # the smallest power of two that covers the range
            return float(np.exp2(np.ceil(np.log2(peak / E4M3_MAX)))) if peak > 0 else 1.0, 0
        return max(peak, 1e-3) / E4M3_MAX, 0  # representable in fp16

    def rounded(self, x: np.ndarray, limits: Range) -> np.ndarray:
        """Returns x, quantized to this range and back, in fp32."""
        scale, zero = self.grid(limits)
        if self.kind == "e4m3":
            inside = torch.from_numpy(np.clip(x / scale, -E4M3_MAX, E4M3_MAX)).to(torch.float8_e4m3fn)
            restored: np.ndarray = inside.float().numpy() * np.float32(scale)
        else:
            least, most = (-128, 127) if self.kind == "int8" else (0, 255)
            restored = (np.clip(np.rint(x / scale) + zero, least, most) - zero) * np.float32(scale)
        return restored

    def rounded_weight(self, weight: np.ndarray) -> np.ndarray:
        """Returns a weight [C, F], quantized and back, in fp32."""
        weight = weight.astype(np.float32)
        if self.kind == "e4m3":
            peak = float(np.abs(weight).max())
            return self.rounded(weight, Range(-peak, peak, "largest"))
        scales = np.maximum(np.abs(weight).max(axis=0), np.finfo(np.float32).tiny * 128) / 127
        restored: np.ndarray = np.clip(np.rint(weight / scales), -127, 127) * scales
        return restored

    def ranges(self, seen: Observation) -> list[Range]:
        """Returns the ranges to try for an activation, the widest first; of equal scales, that of the first method."""
        found = {self.grid(limits)[0]: limits for limits in reversed(candidate_ranges(seen, self.rounded))}
        return [found[scale] for scale in sorted(found, reverse=True)]


def first_near_best(tried: Sequence[tuple[float, T]]) -> tuple[float, T]:
    """Returns the first (loss, candidate) whose loss is within NEAR of the smallest."""
    best = min(loss for loss, _ in tried)
    return next(one for one in tried if one[0] <= NEAR * best)


def fewest_kept(by_damage: Sequence[T], passes: Callable[[Collection[T]], bool], most: int) -> tuple[T, ...] | None:
    """Finds by bisection how many of the most sensitive layers must stay in higher precision.

    Args:
        by_damage: The layers, the most sensitive first. Keeping none of them is known not to pass.
        passes: True if the model is accurate enough with these layers kept.
        most: Largest number of layers that may be kept.
    Returns:
        The layers to keep; None if keeping `most` layers does not pass.
    """
    if most < 1 or not passes(by_damage[:most]):
        return None
    failing, enough = 0, most
    while enough - failing > 1:
        middle = (failing + enough) // 2
        failing, enough = (failing, middle) if passes(by_damage[:middle]) else (middle, enough)
    return tuple(by_damage[:enough])

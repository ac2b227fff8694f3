"""8-bit number formats for the kernels and for ONNX files. x_q represents x with scale s and zero point z:

int8, uint8        x ~ s (x_q - z), z = 0 for int8; weights are int8 with one scale per output channel (weight_scales)
e4m3               x ~ s x_q, s = max |x| / 448; for the kernels, s of an activation is rounded up to a power of two

Ranges come from calibration images. "largest" covers every element, "percentile" clips the largest elements, and "mean
squared error" minimizes |x - Q(x)|^2, where Q quantizes and dequantizes.

Smoothing moves large values of a channel j from an activation x into the weights W: x W = (x / t) (t W) with factors
t_j. Source: SmoothQuant, arxiv.org/abs/2211.10438, alpha = 0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from ..ops.reference import E4M3_MAX

T = TypeVar("T")

PERCENTILES = (99.99, 99.9)
TOKENS_BY_CHANCE, TOKENS_LARGEST = 8, 4  # sampled tokens per image: random ones, and those with the largest elements
MAX_TOKENS = 1536  # sampled tokens per activation; above it, the MAX_TOKENS // 3 largest and as many random ones stay
SHRINK = np.linspace(0.2, 1.0, 17)  # ranges that "mean squared error" tries, relative to the largest
NEAR = 1.02  # candidates within this factor of the smallest loss count as equal; the first is selected


@dataclass(frozen=True)
class Observation:
    """Smallest and largest element of each channel [C] over all calibration images, and a sample of tokens [T, C]."""

    low: np.ndarray
    high: np.ndarray
    tokens: np.ndarray

    @property
    def peak(self) -> np.ndarray:
        """Largest magnitude of each channel [C]."""
        return np.maximum(-self.low, self.high)

    def divided(self, scale: np.ndarray) -> Observation:
        """Returns the observation with each channel divided by `scale` [C] > 0."""
        return Observation(self.low / scale, self.high / scale, self.tokens / scale)


@dataclass(frozen=True)
class Range:
    """The range of one activation, and how it was chosen."""

    low: float
    high: float
    method: str


class Observer:
    """Observes one activation, image by image; `generator` samples the tokens."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator
        self._low: Any = np.inf
        self._high: Any = -np.inf
        self._tokens: list[np.ndarray] = []

    def add(self, rows: np.ndarray) -> bool:
        """Adds the tokens of an image, fp32 [N, C]; returns False if an element is infinite or NaN."""
        if not np.isfinite(rows).all():
            return False
        self._low, self._high = np.minimum(self._low, rows.min(axis=0)), np.maximum(self._high, rows.max(axis=0))
        self._tokens.append(self._sample(rows, TOKENS_LARGEST, TOKENS_BY_CHANCE))
        if sum(map(len, self._tokens)) > MAX_TOKENS:
            self._tokens = [self._sample(np.concatenate(self._tokens), MAX_TOKENS // 3, MAX_TOKENS // 3)]
        return True

    def seen(self) -> Observation:
        """Returns the observation of all images so far; requires at least one image."""
        return Observation(self._low, self._high, np.concatenate(self._tokens))

    def _sample(self, rows: np.ndarray, largest: int, by_chance: int) -> np.ndarray:
        furthest = np.argsort(np.abs(rows).max(axis=1))[-largest:]
        chance = self._generator.choice(len(rows), min(by_chance, len(rows)), replace=False)
        return rows[np.union1d(furthest, chance)]


@dataclass(frozen=True)
class Scheme:
    """An 8-bit number format. For the kernels, scales of e4m3 are powers of two, which are exact in fp16 and bf16."""

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

    def smoothing_scale(self, peak: np.ndarray, weights: Sequence[np.ndarray]) -> np.ndarray:
        """Returns t_j = sqrt(max |x_j| / max |W_j|), or 1 for a channel in which x or W is zero.

        `peak` is max |x_j| [C], and `weights` are the weights [C, F] that read x. Because of the square root, x / t and
        t W do not change if a factor is moved from x to W. For e4m3, t_j is the nearest power of two.
        """
        largest = np.max([np.abs(weight.astype(np.float64)).max(axis=1) for weight in weights], axis=0)
        alive = (peak > 0) & (largest > 0)
        scale: np.ndarray = np.ones_like(largest)
        scale[alive] = np.sqrt(peak[alive].astype(np.float64) / largest[alive])
        return np.asarray(np.exp2(np.rint(np.log2(scale)))) if self.kind == "e4m3" else scale

    def rounded(self, x: np.ndarray, limits: Range) -> np.ndarray:
        """Returns x, quantized to this range and dequantized, in fp32."""
        scale, zero = self.grid(limits)
        if self.kind == "e4m3":
            return np.asarray(_in_e4m3(x / scale) * np.float32(scale))
        least, most = (-128, 127) if self.kind == "int8" else (0, 255)
        return np.asarray((np.clip(np.rint(x / scale) + zero, least, most) - zero) * np.float32(scale))

    def quantized_weight(self, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the quantized numbers of a weight [C, F] in fp32, and the scales [F], or [] for e4m3."""
        if self.kind == "e4m3":
            peak = float(np.abs(weight).max())
            scale = np.asarray(self.grid(Range(-peak, peak, "largest"))[0], weight.dtype)
            return _in_e4m3(weight.astype(np.float32) / scale.astype(np.float32)), scale
        scales = self.weight_scales(weight)
        return np.clip(np.rint(weight.astype(np.float32) / scales.astype(np.float32)), -127, 127), scales

    def weight_scales(self, weight: np.ndarray) -> np.ndarray:
        """Returns the scale of each output channel of an int8 weight [C, F], in the weight's dtype.

        x86 CPUs without VNNI add the products of two input channels with uint8 activations in saturating int16
        (export/saturation.py). The scales for "uint8" exclude saturation for all activations: weights of a pair with
        the same sign add up to at most 127, plus 1 by rounding, and 255 * 128 < 2^15. With 7 bits, all weights would
        lose a bit. uint8 weights do not saturate, but ONNX Runtime multiplies them without VNNI, except on CPUs with
        AVX-VNNI-INT8.

        Rms error of the logits, and time of a batch of 1 and 8 (two threads of an AMD Zen 3 without VNNI, ONNX Runtime
        1.31.1, timm with random weights, digits of the tests, 2026-11-28):

            weights                      digits   vit_tiny   vit_small   vit_tiny, ms   vit_small, ms
            8 bits, exact sums           0.0156   0.0263     0.0318
            8 bits, saturating           0.0718   0.0575     0.0737
            7 bits                       0.0205   0.0426     0.0489
            these scales                 0.0177   0.0284     0.0354      19.5, 148      59.5, 385
            uint8 (error not measured)                                   21.1, 161      65.2, 458
            fp32                                                         23.4, 177      82.0, 550
        """
        peaks = np.abs(weight).max(axis=0)
        if self.kind == "uint8":
            peaks = pair_sums(weight).max(axis=(0, 1))
        return np.asarray(np.maximum(peaks / 127, np.finfo(weight.dtype).tiny))

    def ranges(self, seen: Observation) -> list[Range]:
        """Returns ranges to try for an activation, widest first, without duplicates."""
        low, high = min(float(seen.low.min()), 0.0), max(float(seen.high.max()), 0.0)
        candidates = [Range(low, high, "largest")]
        for percent in PERCENTILES:
            lower, upper = np.percentile(seen.tokens, (100 - percent, percent))
            candidates.append(Range(min(float(lower), 0.0), max(float(upper), 0.0), f"percentile {percent}"))
        shrunk = [Range(low * part, high * part, "mean squared error") for part in SHRINK]
        errors = [np.square(seen.tokens - self.rounded(seen.tokens, limits)).sum() for limits in shrunk]
        candidates.append(shrunk[int(np.argmin(errors))])
        found = {self.grid(limits)[0]: limits for limits in reversed(candidates)}
        return [found[scale] for scale in sorted(found, reverse=True)]


def _in_e4m3(x: np.ndarray) -> np.ndarray:
    inside = torch.from_numpy(np.clip(x, -E4M3_MAX, E4M3_MAX)).to(torch.float8_e4m3fn)
    return np.asarray(inside.float().numpy())


def pair_sums(weight: np.ndarray) -> np.ndarray:
    """Returns the sums of the positive and of the negative weights of each pair, as magnitudes [2, C / 2, F].

    A pair are the weights of two input channels 2 i and 2 i + 1 of a weight [C, F]; 0 is added to an odd C.
    """
    pairs = np.pad(weight, ((0, len(weight) % 2), (0, 0))).reshape(-1, 2, weight.shape[1])
    return np.stack([np.maximum(pairs, 0).sum(1), np.maximum(-pairs, 0).sum(1)])


def first_near_best(tried: Sequence[tuple[float, T]]) -> tuple[float, T]:
    """Returns the first (loss, candidate) whose loss is at most NEAR times the smallest."""
    best = min(loss for loss, _ in tried)
    return next(one for one in tried if one[0] <= NEAR * best)


def fewest_excluded(by_damage: Sequence[T], passes: Callable[[Collection[T]], bool], most: int) -> tuple[T, ...] | None:
    """Finds, by bisection, the fewest layers of `by_damage`, most sensitive first, that must stay in higher precision.

    Assumes that `passes(())` is False. Returns None if excluding the first `most` layers does not pass.
    """
    if most < 1 or not passes(by_damage[:most]):
        return None
    failing, enough = 0, most
    while enough - failing > 1:
        middle = (failing + enough) // 2
        failing, enough = (failing, middle) if passes(by_damage[:middle]) else (middle, enough)
    return tuple(by_damage[:enough])

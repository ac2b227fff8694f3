"""What goes through a model on calibration images, and the range of each activation in eight bits, chosen by layer.

Every way to choose a range is tried on every activation, and the one taken whose products differ least from the float
ones: |(x - Q(x)) W|^2 on a sample of tokens. "largest" keeps every element; "percentile" leaves out the furthest;
"mean square" minimises |x - Q(x)|^2; "entropy" the divergence of the histograms (ONNX Runtime's).
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from vit_fast.errors import VitFastError

from .graphs import run_graph
from .products import Product

PERCENTILES = (99.99, 99.9)
TOKENS_BY_CHANCE, TOKENS_LARGEST = 8, 4
"""An image's tokens that are kept whole: massive activations sit in a few, which chance would miss."""
SHRINK = np.linspace(0.2, 1.0, 17)
"""Parts of the largest magnitude among which "mean square" looks."""

BINS = 256
"""Of the histogram whose entropy is looked at."""


class CalibrationError(VitFastError, ValueError):
    """A calibration cannot be used for this model, or not be made."""


@dataclass(frozen=True)
class Observation:
    """One activation over all calibration images.

    Attributes:
        low: Smallest element of each channel [C].
        high: Largest.
        tokens: A sample [T, C].
    """

    low: np.ndarray
    high: np.ndarray
    tokens: np.ndarray

    @property
    def peak(self) -> np.ndarray:
        """Largest magnitude of each channel [C]."""
        return np.maximum(-self.low, self.high)

    def divided(self, scale: np.ndarray) -> Observation:
        """The same where each channel is divided by `scale` [C] > 0."""
        return Observation(self.low / scale, self.high / scale, self.tokens / scale)


@dataclass(frozen=True)
class Range:
    """The range of one activation, and how it was chosen."""

    low: float
    high: float
    method: str


@dataclass(frozen=True)
class Calibration:
    """What a file in eight bits needs to know of images, and of which model it is known.

    Attributes:
        fingerprint: Of the weights and of what was asked for; another model's calibration is refused.
        images: How many were seen.
        peaks: By activation, the largest magnitude of each channel, before smoothing.
        ranges: By activation, after smoothing.
    """

    fingerprint: str
    images: int
    peaks: dict[str, list[float]]
    ranges: dict[str, Range]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"format": "vit-fast-calibration/1", **asdict(self)}), encoding="utf-8")


def load_calibration(path: Path, fingerprint: str) -> Calibration:
    """A calibration that was saved.

    Raises:
        CalibrationError: the file is missing or damaged, or for other weights or another precision or target.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ranges = {name: Range(**fields) for name, fields in content["ranges"].items()}
        calibration = Calibration(content["fingerprint"], int(content["images"]), dict(content["peaks"]), ranges)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(f"{path}: cannot be read as a calibration: {error}") from None
    if calibration.fingerprint != fingerprint:
        raise CalibrationError(f"{path}: is the calibration of other weights, precision or target: give images anew")
    return calibration


def fingerprint_of(products: Sequence[Product], layout: str) -> str:
    """Tells models, sizes and layouts apart."""
    digest = hashlib.sha256(layout.encode())
    for product in products:
        digest.update(product.name.encode())
        if product.weight is not None:
            digest.update(np.ascontiguousarray(product.weight).view(np.uint8).data)
    return digest.hexdigest()


def observe(model: ir.Model, products: Sequence[Product], batches: Sequence[np.ndarray]) -> dict[str, Observation]:
    """Runs calibration images through the graph.

    Raises:
        CalibrationError: an activation is infinite or undefined.
    """
    values = {str(value.name): value for product in products for value in product.activations}
    lows: dict[str, np.ndarray] = {}
    highs: dict[str, np.ndarray] = {}
    tokens: dict[str, list[np.ndarray]] = {name: [] for name in values}
    generator = np.random.default_rng(0)
    for arrays in run_graph(model, batches, list(values.values())):
        for name, array in zip(values, arrays):
            for image in array.astype(np.float32):  # [N, C], or by head
                rows = image.reshape(-1, image.shape[-1])
                if not np.isfinite(rows).all():
                    raise CalibrationError(f"calibration: {name} is infinite or undefined on these images")
                low, high = rows.min(axis=0), rows.max(axis=0)
                lows[name] = np.minimum(lows.get(name, low), low)
                highs[name] = np.maximum(highs.get(name, high), high)
                furthest = np.argsort(np.abs(rows).max(axis=1))[-TOKENS_LARGEST:]
                chance = generator.choice(len(rows), min(TOKENS_BY_CHANCE, len(rows)), replace=False)
                tokens[name].append(rows[np.union1d(furthest, chance)])
    return {name: Observation(lows[name], highs[name], np.concatenate(tokens[name])) for name in values}


def choose_range(seen: Observation, weights: Sequence[np.ndarray], symmetric: bool) -> Range:
    """The range whose integers change the products with these weights [C, F] least."""
    low, high = min(float(seen.low.min()), 0.0), max(float(seen.high.max()), 0.0)  # zero must stay zero
    candidates = [Range(low, high, "largest")]
    for percent in PERCENTILES:
        lower, upper = np.percentile(seen.tokens, (100 - percent, percent))
        candidates.append(Range(min(float(lower), 0.0), max(float(upper), 0.0), f"percentile {percent}"))
    shrunk = [Range(low * part, high * part, "mean square") for part in SHRINK]
    errors = [np.square(seen.tokens - in_integers(seen.tokens, r, symmetric)).sum() for r in shrunk]
    candidates += [shrunk[int(np.argmin(errors))], _by_entropy(seen, low, high)]

    def damage(candidate: Range) -> float:
        difference = seen.tokens - in_integers(seen.tokens, candidate, symmetric)
        return sum(float(np.square(difference @ weight).sum()) for weight in weights)

    return min(candidates, key=damage)


def grid(low: float, high: float, symmetric: bool) -> tuple[float, int]:
    """Scale and zero point: int8 around zero if symmetric, else uint8."""
    if symmetric:
        return max(-low, high, 1e-30) / 127, 0
    scale = max(high - low, 1e-30) / 255
    return scale, int(np.clip(round(-low / scale), 0, 255))


def in_integers(x: np.ndarray, limits: Range, symmetric: bool) -> np.ndarray:
    """x after a way through integers and back."""
    scale, zero = grid(limits.low, limits.high, symmetric)
    smallest, largest = (-128, 127) if symmetric else (0, 255)
    restored: np.ndarray = (np.clip(np.rint(x / scale) + zero, smallest, largest) - zero) * np.float32(scale)
    return restored


def _by_entropy(seen: Observation, low: float, high: float) -> Range:
    from onnxruntime.quantization.calibrate import HistogramCollector

    peak = max(-low, high, 1e-30)
    collector = HistogramCollector("entropy", False, BINS, BINS // 2, 100, "same")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of empty bins
        histogram = (*np.histogram(seen.tokens, BINS, (-peak, peak)), np.float64(low), np.float64(high))
        lower, upper = collector.get_entropy_threshold(histogram, BINS // 2)
    return Range(max(low, float(lower)), min(high, float(upper)), "entropy")

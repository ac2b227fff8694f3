"""What goes through a model on calibration images, and the range of each activation in eight bits, chosen by layer.

Every method of `vit_fast/quantization/ranges.py` is tried on every activation. The range is taken whose products
differ least from the float ones: |(x - Q(x)) W|^2 on a sample of tokens. "entropy" minimises the divergence of the
histograms (ONNX Runtime's).
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
from vit_fast.files import file_aside
from vit_fast.quantization.ranges import Observation, Observer, Range, candidate_ranges

from .graphs import run_graph
from .products import Product

BINS = 256
"""Of the histogram whose entropy is looked at."""


# Counts on where ranges of the same images mean other numbers, as by how channels are smoothed.
FORMAT = "vit-fast-calibration/2"


class CalibrationError(VitFastError, ValueError):
    """A calibration cannot be used for this model, or not be made."""


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
        with file_aside(path) as aside:
            aside.write_text(json.dumps({"format": FORMAT, **asdict(self)}), encoding="utf-8")


def load_calibration(path: Path, fingerprint: str) -> Calibration:
    """A calibration that was saved.

    Raises:
        CalibrationError: the file is missing or damaged, of another version, or for other weights or another precision
            or target.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        written = content["format"]
        ranges = {name: Range(**fields) for name, fields in content["ranges"].items()}
        calibration = Calibration(content["fingerprint"], int(content["images"]), dict(content["peaks"]), ranges)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(f"{path}: cannot be read as a calibration: {error}") from None
    if written != FORMAT:
        raise CalibrationError(f"{path}: format is {written!r}: accepted is {FORMAT!r}, give images anew")
    if calibration.fingerprint != fingerprint:
        raise CalibrationError(f"{path}: is the calibration of other weights, precision or target: give images anew")
    return calibration


def fingerprint_of(products: Sequence[Product], scheme: str) -> str:
    """Tells models, sizes and schemes apart."""
    digest = hashlib.sha256(scheme.encode())
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
    generator = np.random.default_rng(0)
    observers = {name: Observer(generator) for name in values}
    for arrays in run_graph(model, batches, list(values.values())):
        for name, array in zip(values, arrays):
            for image in array.astype(np.float32):  # [N, C], or by head
                if not observers[name].add(image.reshape(-1, image.shape[-1])):
                    raise CalibrationError(f"calibration: {name} is infinite or undefined on these images")
    return {name: observer.seen() for name, observer in observers.items()}


def choose_range(seen: Observation, weights: Sequence[np.ndarray], symmetric: bool) -> Range:
    """The range whose integers change the products with these weights [C, F] least."""
    candidates = candidate_ranges(seen, lambda x, limits: in_integers(x, limits, symmetric))
    largest = candidates[0]
    candidates.append(_by_entropy(seen, largest.low, largest.high))

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

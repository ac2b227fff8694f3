"""Calibrates an ONNX graph: observes activations on images, smooths channels, and chooses a range per activation.

Smoothing moves the scale of large channels from an activation into the weights that read it, without changing x W:

    x W = (x / s) (s W),     s_j = sqrt(max |x_j| / max |W_j|)

The norm before the linear layer outputs x / s if its weight and bias are divided by s. In large ViTs, some channels are
100 to 1000 times larger than the others. Without smoothing, the others would get almost none of the 8-bit range.

Source: SmoothQuant, arxiv.org/abs/2211.10438.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import onnx_ir as ir

from vit_fast.errors import VitFastError
from vit_fast.files import file_aside
from vit_fast.quantization.schemes import (
    Observation,
    Observer,
    Range,
    Scheme,
    first_near_best,
    power_of_two,
    smoothing_scale,
)

from .eight_bit import Product, is_probability
from .graphs import Writer, constant_of, run_graph
from .options import ExportOptions

FORMAT = "vit-fast-calibration/2"
"""Version of the cache; increased whenever the same images would give other ranges."""
PARAMETERS = {
    "LayerNormalization": (1, 2), "SkipLayerNormalization": (2, 3), "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,), "SkipSimplifiedLayerNormalization": (2,),
}  # fmt: skip
"""Positions of weight and bias among a norm's inputs."""
DEVIATIONS = 3.0
"""Without images, the assumed peak of a normalized channel, in standard deviations."""


class CalibrationError(VitFastError, ValueError):
    """A calibration does not fit the model or cannot be computed."""


@dataclass(frozen=True)
class Calibration:
    """Content of a calibration cache.

    Attributes:
        fingerprint: Hash of weights, precision and target, which must match those of the model.
        images: Number of images.
        peaks: Largest magnitude of each channel by name of the activation, before smoothing.
        ranges: Range by name of the activation, after smoothing.
    """

    fingerprint: str
    images: int
    peaks: dict[str, list[float]]
    ranges: dict[str, Range]

    def __post_init__(self) -> None:
        limits = [(one.low, one.high) for one in self.ranges.values()]
        numbers = np.array([*chain(*self.peaks.values(), *limits)], np.float64)
        if not np.isfinite(numbers).all() or any(low > high for low, high in limits):
            raise ValueError("peaks and ranges must be finite, low <= high")

    def save(self, path: Path) -> None:
        with file_aside(path) as aside:
            aside.write_text(json.dumps({"format": FORMAT, **asdict(self)}), encoding="utf-8")


def load_calibration(path: Path, fingerprint: str) -> Calibration:
    """Reads a calibration cache.

    Raises:
        CalibrationError: the file is missing, damaged, or of another version, weights, precision or target.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        written = content["format"]
        ranges = {name: Range(**fields) for name, fields in content["ranges"].items()}
        calibration = Calibration(content["fingerprint"], int(content["images"]), dict(content["peaks"]), ranges)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CalibrationError(f"{path}: cannot be read as a calibration: {error}") from None
    if written != FORMAT:
        raise CalibrationError(f"{path}: format must be {FORMAT!r}, got {written!r}; calibrate again with images")
    if calibration.fingerprint != fingerprint:
        raise CalibrationError(f"{path}: belongs to other weights, precision or target; calibrate again with images")
    return calibration


def calibrate(
    model: ir.Model, products: Sequence[Product], options: ExportOptions, scheme: Scheme,
    batches: Sequence[np.ndarray], cache: Path | None,
) -> dict[str, Range]:  # fmt: skip
    """Smooths a graph in place and returns the ranges of its activations; {} for "int8-dynamic".

    With batches, observes the activations and writes the cache, if any. Without batches, reads the cache.

    Raises:
        CalibrationError: the cache cannot be used, or activations are not finite.
    """
    fingerprint = _fingerprint(products, f"{options.precision} {options.target}")
    if not batches:
        known = Calibration(fingerprint, 0, {}, {}) if cache is None else load_calibration(cache, fingerprint)
        names = {str(value.name): value for product in products for value in product.activations}
        if options.needs_calibration and names.keys() != known.ranges.keys():
            raise CalibrationError(f"{cache}: must contain the ranges of all activations; calibrate again with images")
        smooth(model, products, known.peaks, scheme)
        return known.ranges
    seen = observe(model, products, batches)
    known = Calibration(fingerprint, sum(map(len, batches)), {n: o.peak.tolist() for n, o in seen.items()}, {})
    scales = smooth(model, products, known.peaks, scheme)
    if options.needs_calibration:
        smoothed = {name: one.divided(scales[name]) if name in scales else one for name, one in seen.items()}
        known.ranges.update(choose_ranges(products, smoothed, scheme))
    if cache is not None:
        known.save(cache)
    return known.ranges


def _fingerprint(products: Sequence[Product], settings: str) -> str:
    digest = hashlib.sha256(settings.encode())
    for product in products:
        digest.update(product.name.encode())
        if product.weight is not None:
            digest.update(np.ascontiguousarray(product.weight).view(np.uint8).data)
    return digest.hexdigest()


def observe(model: ir.Model, products: Sequence[Product], batches: Sequence[np.ndarray]) -> dict[str, Observation]:
    """Runs the graph on images and observes the activations of the MatMuls, by name.

    Raises:
        CalibrationError: an activation is infinite or NaN.
    """
    values = {str(value.name): value for product in products for value in product.activations}
    generator = np.random.default_rng(0)
    observers = {name: Observer(generator) for name in values}
    for arrays in run_graph(model, batches, list(values.values())):
        for name, array in zip(values, arrays):
            for image in array.astype(np.float32):  # [N, C], or by head
                if not observers[name].add(image.reshape(-1, image.shape[-1])):
                    raise CalibrationError(f"{name} must be finite on all calibration images, got infinity or NaN")
    return {name: observer.seen() for name, observer in observers.items()}


def choose_ranges(products: Sequence[Product], seen: Mapping[str, Observation], scheme: Scheme) -> dict[str, Range]:
    """Returns the range of each activation. The output of a softmax has the range 0 to 1."""
    weights: dict[str, list[np.ndarray]] = {name: [] for name in seen}
    ranges = {}
    for product in products:
        for value in product.activations:
            if product.weight is not None:
                weights[str(value.name)].append(product.weight.astype(np.float32))
            if is_probability(value):
                ranges[str(value.name)] = Range(0.0, 1.0, "a softmax")
    return {name: ranges.get(name) or choose_range(one, weights[name], scheme) for name, one in seen.items()}


def choose_range(seen: Observation, weights: Sequence[np.ndarray], scheme: Scheme) -> Range:
    """Returns the range with the smallest error of the MatMuls with these weights [C, F]; the widest if none."""

    def error(limits: Range) -> float:
        difference = seen.tokens - scheme.rounded(seen.tokens, limits)
        return sum(float(np.square(difference @ weight).sum()) for weight in weights)

    return first_near_best([(error(limits), limits) for limits in scheme.ranges(seen)])[1]


def smooth(
    model: ir.Model, products: Sequence[Product], peaks: Mapping[str, Sequence[float]], scheme: Scheme
) -> dict[str, np.ndarray]:
    """Moves scales from the outputs of norms into the linear layers that follow, in place.

    Args:
        model: The graph; its outputs stay the same.
        products: The MatMuls. A norm whose output has other readers is skipped.
        peaks: Largest magnitude of each channel [C], by name of the activation; estimated from the norm's weight and
            bias for activations that are not in it.
        scheme: The number format; for e4m3, scales are powers of two.
    Returns:
        The scale [C] by which an activation was divided, by name.
    """
    readers: dict[str, list[Product]] = {}
    for product in products:
        if product.weight is not None:
            readers.setdefault(str(product.activations[0].name), []).append(product)
    scales = {}
    for name, users in readers.items():
        x = users[0].activations[0]
        norm = x.producer()
        if norm is None or norm.op_type not in PARAMETERS or len(x.uses()) != len(users) or x.is_graph_output():
            continue
        inputs = [norm.inputs[i] if i < len(norm.inputs) else None for i in PARAMETERS[norm.op_type]]
        parameters = [constant_of(value) for value in inputs]
        if parameters[0] is None or any(value is not None and p is None for value, p in zip(inputs, parameters)):
            continue
        weights = [weight for user in users if (weight := user.weight) is not None]
        peak = np.asarray(peaks[name]) if name in peaks else _expected_peak(parameters)
        if peak.shape != parameters[0].shape:
            raise CalibrationError(f"{name} must have {len(parameters[0])} peaks, got {len(peak)}")
        scale = smoothing_scale(peak, weights)
        scale = power_of_two(scale) if scheme.kind == "e4m3" else scale
        write = Writer(model.graph, f"{norm.name}.smoothed")
        for index, parameter in zip(PARAMETERS[norm.op_type], parameters):
            if parameter is not None:
                divided = (parameter.astype(np.float64) / scale).astype(parameter.dtype)
                norm.replace_input_with(index, write.constant(divided, "parameter"))
        for user, weight in zip(users, weights):
            scaled = (weight.astype(np.float64) * scale[:, None]).astype(weight.dtype)
            user.node.replace_input_with(1, write.constant(scaled, "weight"))
        scales[name] = scale
    return scales


def _expected_peak(parameters: list[np.ndarray | None]) -> np.ndarray:
    weight, bias = parameters[0], parameters[1] if len(parameters) > 1 else None
    assert weight is not None
    peak: np.ndarray = DEVIATIONS * np.abs(weight.astype(np.float64))
    return peak if bias is None else peak + np.abs(bias.astype(np.float64))

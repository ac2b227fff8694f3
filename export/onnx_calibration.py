"""Calibration of an ONNX graph: activations observed on images, channels smoothed, a range chosen per activation.

Smoothing moves large channels out of an activation into the weights that read it, exactly:

    x W = (x / s) (s W),     s_j = sqrt(max |x_j| / max |W_j|)

The norm before the linear gives x / s when its own weight and bias are divided by s. Large ViTs have single channels
100 to 1000 times the rest, which would take an activation's whole range in eight bits.

Source: SmoothQuant, arxiv.org/abs/2211.10438.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from vit_fast.errors import VitFastError
from vit_fast.files import file_aside
from vit_fast.quantization.ranges import Observation, Observer, Range, power_of_two, smoothing_scale
from vit_fast.quantization.schemes import Scheme, first_near_best

from .eight_bit import Product, is_probability
from .graphs import Writer, constant_of, run_graph

FORMAT = "vit-fast-calibration/2"
"""Counts on where ranges of the same images mean other numbers, as by how channels are smoothed."""
PARAMETERS = {
    "LayerNormalization": (1, 2), "SkipLayerNormalization": (2, 3), "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,), "SkipSimplifiedLayerNormalization": (2,),
}  # fmt: skip
"""The places of weight and bias among a norm's inputs."""
DEVIATIONS = 3.0
"""Assumed peak of a normalised channel, in standard deviations, where no image says more."""


class CalibrationError(VitFastError, ValueError):
    """A calibration cannot be used for this model, or not be made."""


@dataclass(frozen=True)
class Calibration:
    """Ranges and peaks of a model's activations, as a calibration cache holds them.

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
    """Reads a calibration cache.

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
        raise CalibrationError(f"{path}: format must be {FORMAT!r}, got {written!r}; calibrate again with images")
    if calibration.fingerprint != fingerprint:
        raise CalibrationError(
            f"{path}: is the calibration of other weights, precision or target; calibrate again with images"
        )
    return calibration


def fingerprint_of(products: Sequence[Product], asked: str) -> str:
    """Returns a hash of the weights, and of precision and target as `asked` says."""
    digest = hashlib.sha256(asked.encode())
    for product in products:
        digest.update(product.name.encode())
        if product.weight is not None:
            digest.update(np.ascontiguousarray(product.weight).view(np.uint8).data)
    return digest.hexdigest()


def observe(model: ir.Model, products: Sequence[Product], batches: Sequence[np.ndarray]) -> dict[str, Observation]:
    """Runs images through the graph and returns what was seen of the products' activations, by name.

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


def choose_ranges(products: Sequence[Product], seen: Mapping[str, Observation], scheme: Scheme) -> dict[str, Range]:
    """Returns a range per activation; a softmax has 0 to 1."""
    weights: dict[str, list[np.ndarray]] = {}
    ranges = {}
    for product in products:
        for value in product.activations:
            weights.setdefault(str(value.name), []).extend([] if product.weight is None else [product.weight])
            if is_probability(value):
                ranges[str(value.name)] = Range(0.0, 1.0, "a softmax")
    return {
        name: ranges.get(name) or choose_range(one, [w.astype(np.float32) for w in weights[name]], scheme)
        for name, one in seen.items()
    }


def choose_range(seen: Observation, weights: Sequence[np.ndarray], scheme: Scheme) -> Range:
    """Returns the range that changes the products with these weights [C, F] least; without any, the widest."""

    def damage(limits: Range) -> float:
        difference = seen.tokens - scheme.rounded(seen.tokens, limits)
        return sum(float(np.square(difference @ weight).sum()) for weight in weights)

    return first_near_best([(damage(limits), limits) for limits in scheme.ranges(seen)])[1]


def smooth(
    model: ir.Model, products: Sequence[Product], peaks: Mapping[str, Sequence[float]], scheme: Scheme
) -> dict[str, np.ndarray]:
    """Moves scale from every norm's output into the linears that follow; in place, the function stays the same.

    Args:
        model: The graph.
        products: The linears. A norm that something else reads as well is skipped.
        peaks: By name of an activation, the largest magnitude of each channel [C]; a norm's output that is not in it
            is estimated by the norm's own weight and bias.
        scheme: The number format; for e4m3, scales are powers of two.
    Returns:
        By name of the activation, the scale [C] that it was divided by; the linears' weights are new constants.
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
        scale = smoothing_scale(np.asarray(peaks[name]) if name in peaks else _expected_peak(parameters), weights)
        scale = power_of_two(scale) if scheme.kind == "e4m3" else scale
        write = Writer(model.graph, f"{norm.name}.smoothed", before=norm)
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

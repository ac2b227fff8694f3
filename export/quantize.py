"""Quantizes a graph to 8 bits: smooths, calibrates, and keeps layers in float until the loss is within the budget.

Quantizes the linear layers inside blocks and, for e4m3, the MatMuls of attention. Norms, patch embedding and head stay
in float; they need only a few percent of a ViT's operations.

Smoothing moves the scale of large channels from an activation into the weights that read it, without changing x W:

    x W = (x / s) (s W),     s_j = sqrt(max |x_j| / max |W_j|)

The norm before the linear layer outputs x / s if its weight and bias are divided by s. In large ViTs, some channels are
100 to 1000 times larger than the others. Without smoothing, the others would get almost none of the 8-bit range.

Source: SmoothQuant, arxiv.org/abs/2211.10438.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from vit_fast.apps.data import CALIBRATION_IMAGES, as_inputs, read_images
from vit_fast.errors import UnsupportedInputError, VitFastError
from vit_fast.quantization.schemes import (
    Observation,
    Observer,
    Range,
    Scheme,
    fewest_excluded,
    first_near_best,
    power_of_two,
    smoothing_scale,
)

from .eight_bit import MatMul, matmuls_of, quantize_dynamically, quantize_statically
from .graphs import constant_of, run_graph, save
from .options import ExportOptions, Target
from .report import EIGHT_BIT_BUDGET, Check, Quantized, loss_of
from .runtime.metadata import inspect_onnx, read_signature

ERROR_BATCHES = 4
"""Number of held-out batches used to sort the MatMuls by error."""
MARGIN = 0.9
"""Share of the error budget that quantization may use. The file, compared with eager later, may use all of it."""
PARAMETERS = {
    "LayerNormalization": (1, 2), "SkipLayerNormalization": (2, 3), "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,), "SkipSimplifiedLayerNormalization": (2,),
}  # fmt: skip
"""Positions of weight and bias among a norm's inputs."""
DEVIATIONS = 3.0
"""Without images, the assumed peak of a normalized channel, in standard deviations."""


class CalibrationError(VitFastError, ValueError):
    """A calibration cannot be computed."""


class QuantisationError(VitFastError, RuntimeError):
    """Quantization changes the model's outputs by more than the budget."""


def quantize(
    model: ir.Model, options: ExportOptions, calibration: Sequence[np.ndarray], held_out: Sequence[np.ndarray]
) -> tuple[ir.Model, Quantized]:
    """Quantizes a float graph, which is smoothed in place.

    Observes the batches of `calibration`, which may be empty for "int8-dynamic". Measures the loss on `held_out`; if
    it is empty, quantizes all layers. At most half of the linear layers stay in float.
    """
    scheme = Scheme("e4m3" if options.precision == "fp8" else "int8" if options.target == "tensorrt" else "uint8")
    matmuls = matmuls_of(model, scheme)
    expected = _outputs(model, held_out)
    seen = smooth(model, matmuls, observe(model, matmuls, calibration), scheme)
    ranges = choose_ranges(matmuls, seen, scheme) if options.needs_calibration else {}

    @functools.lru_cache(maxsize=1)
    def written(excluded: tuple[MatMul, ...]) -> ir.Model:
        chosen = [matmul for matmul in matmuls if matmul not in excluded]
        if not options.needs_calibration:
            return quantize_dynamically(model, chosen)
        return quantize_statically(model, chosen, scheme, ranges, fused=options.target == "ort-cpu")

    def loss(excluded: tuple[MatMul, ...]) -> Check:
        return loss_of(_outputs(written(excluded), held_out), expected, options.output)

    excluded: tuple[MatMul, ...] = ()
    if held_out and not loss(()).acceptable(MARGIN):
        attention = sum(matmul.weight is None for matmul in matmuls)
        most = attention + (len(matmuls) - attention) // 2
        order = _by_error(model, matmuls, scheme, ranges, held_out)
        found = fewest_excluded(order, lambda some: loss(tuple(some)).acceptable(MARGIN), most)
        if found is None:
            raise QuantisationError(
                f"{options.precision}: must be within {MARGIN:.0%} of the budget ({EIGHT_BIT_BUDGET}), "
                f"got {loss(tuple(order[:most])).line()} with {most} of {len(matmuls)} MatMuls in float"
            )
        excluded = found
    names, methods = tuple(matmul.name for matmul in excluded), Counter(one.method for one in ranges.values())
    return written(excluded), Quantized(len(matmuls) - len(excluded), names, dict(methods))


def quantize_file(source: Path, path: Path, target: Target, files: Sequence[Path]) -> Quantized:
    """Quantizes a float file of any exporter: its linear layers over tokens, calibrated on image files, to int8."""
    info = inspect_onnx(source)
    signature = read_signature(info)
    reasons = []
    if signature.dtype != np.float32 or signature.image_hw is None:
        got = f"{signature.dtype} {list(signature.shape)}"
        reasons.append(f"the file must take preprocessed images of one size in float32, got {got}")
    version = max(info.opsets.get(domain, 0) for domain in ("", "ai.onnx"))
    try:
        options = ExportOptions(opset=version, precision="int8", target=target)
    except ValueError as error:
        reasons.append(str(error))
    if reasons or signature.image_hw is None:
        raise UnsupportedInputError(f"int8 of {source.name}", reasons)
    size = signature.shape[0] or 1
    images = read_images(files, size * -(-CALIBRATION_IMAGES // size))  # whole batches
    inputs = as_inputs(images, info.data_config, signature.image_hw, signature.in_chans)
    graph = ir.external_data.load_to_model(ir.load(source))
    try:
        made, done = quantize(graph, options, [one.numpy() for one in inputs.split(size)], ())
    except ValueError as error:  # no linear layer to quantize
        raise UnsupportedInputError(f"int8 of {source.name}", [str(error)]) from None
    save(made, path)
    return done


def observe(model: ir.Model, matmuls: Sequence[MatMul], batches: Sequence[np.ndarray]) -> dict[str, Observation]:
    """Runs the graph on images and observes the activations of the MatMuls, by name; {} without images."""
    if not batches:
        return {}
    values = {str(value.name): value for value in _readers(matmuls)}
    generator = np.random.default_rng(0)
    observers = {name: Observer(generator) for name in values}
    for arrays in run_graph(model, batches, list(values.values())):
        for name, array in zip(values, arrays):
            for image in array.astype(np.float32):  # [N, C], or by head
                if not observers[name].add(image.reshape(-1, image.shape[-1])):
                    raise CalibrationError(f"{name} must be finite on all calibration images, got infinity or NaN")
    return {name: observer.seen() for name, observer in observers.items()}


def choose_ranges(matmuls: Sequence[MatMul], seen: Mapping[str, Observation], scheme: Scheme) -> dict[str, Range]:
    """Returns the range of each activation: 0 to 1 after a softmax, else the one with the smallest error.

    That is the error of the linear layers that read the activation. If there are none, returns the widest range.
    """
    ranges = {}
    for value, users in _readers(matmuls).items():
        name, producer = str(value.name), value.producer()
        if producer is not None and producer.op_type == "Softmax":
            ranges[name] = Range(0.0, 1.0, "a softmax")
            continue
        weights = [user.weight.astype(np.float32) for user in users if user.weight is not None]
        tried = []
        for limits in scheme.ranges(seen[name]):
            difference = seen[name].tokens - scheme.rounded(seen[name].tokens, limits)
            tried.append((sum(float(np.square(difference @ weight).sum()) for weight in weights), limits))
        ranges[name] = first_near_best(tried)[1]
    return ranges


def _readers(matmuls: Sequence[MatMul]) -> dict[ir.Value, list[MatMul]]:
    readers: dict[ir.Value, list[MatMul]] = {}
    for matmul in matmuls:
        for value in matmul.activations:
            readers.setdefault(value, []).append(matmul)
    return readers


def smooth(
    model: ir.Model, matmuls: Sequence[MatMul], seen: Mapping[str, Observation], scheme: Scheme
) -> dict[str, Observation]:
    """Moves scales from the outputs of norms into the linear layers that follow; returns the observations after it.

    Skips a norm whose output has other readers. Without an observation, estimates the largest magnitude of a channel
    from the norm's weight and bias.
    """
    smoothed = dict(seen)
    for x, users in _readers(matmuls).items():
        name, norm, weights = str(x.name), x.producer(), [user.weight for user in users]
        if norm is None or norm.op_type not in PARAMETERS or len(x.uses()) != len(users) or x.is_graph_output():
            continue
        places = [i for i in PARAMETERS[norm.op_type] if i < len(norm.inputs) and norm.inputs[i] is not None]
        parameters = [constant_of(norm.inputs[i]) for i in places]
        if PARAMETERS[norm.op_type][0] not in places or any(array is None for array in (*parameters, *weights)):
            continue
        largest = [np.abs(array.astype(np.float64)) for array in parameters if array is not None]
        peak = seen[name].peak if name in seen else DEVIATIONS * largest[0] + sum(largest[1:])
        scale = smoothing_scale(peak, [weight for weight in weights if weight is not None])
        scale = power_of_two(scale) if scheme.kind == "e4m3" else scale
        factors = [(norm, place, 1 / scale) for place in places] + [(user.node, 1, scale[:, None]) for user in users]
        for node, place, factor in factors:
            array: Any = constant_of(node.inputs[place])
            scaled = ir.tensor((array.astype(np.float64) * factor).astype(array.dtype))
            value = ir.val(f"{node.name}.smoothed_{place}", const_value=scaled)
            model.graph.register_initializer(value)
            node.replace_input_with(place, value)
        if name in seen:
            smoothed[name] = seen[name].divided(scale)
    return smoothed


def _outputs(model: ir.Model, batches: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([arrays[0] for arrays in run_graph(model, batches)]) if batches else np.empty(0)


def _by_error(
    model: ir.Model, matmuls: Sequence[MatMul], scheme: Scheme, ranges: Mapping[str, Range],
    held_out: Sequence[np.ndarray],
) -> list[MatMul]:  # fmt: skip
    """Sorts the MatMuls: attention first, then by the error if one alone is quantized, the largest first."""
    seen = observe(model, matmuls, held_out[:ERROR_BATCHES])

    def relative(moved: np.ndarray, exact: np.ndarray) -> float:
        return float(np.square(moved - exact).sum() / max(np.square(exact).sum(), 1e-30))

    def error(matmul: MatMul) -> float:
        names = [str(value.name) for value in matmul.activations]
        exact = [seen[name].tokens for name in names]
        known = [ranges.get(name) or Range(float(x.min()), float(x.max()), "its own") for name, x in zip(names, exact)]
        moved = [scheme.rounded(x, limits) for x, limits in zip(exact, known)]
        if matmul.weight is None:
            return max(map(relative, moved, exact))
        weight = matmul.weight.astype(np.float32)
        return relative(moved[0] @ scheme.rounded_weight(weight), exact[0] @ weight)

    return sorted(matmuls, key=lambda matmul: (matmul.weight is not None, -error(matmul)))

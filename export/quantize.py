"""Quantizes a graph to 8 bits: smooths, calibrates, and keeps just enough layers in float to meet the error budget.

Quantizes the linear layers inside blocks and, for e4m3, the MatMuls of attention. Norms, patch embedding and head stay
in float, because they need only a few percent of a ViT's operations. vit_fast/quantization/schemes.py defines the
scales. Each DequantizeLinear feeds its MatMul directly, so that TensorRT can fuse the pair.

Smoothing divides each output channel of a norm by a scale, and multiplies the weights that follow. In large ViTs, some
channels are 100 to 1000 times larger than most. Without smoothing, most channels would use little of the 8-bit range.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from vit_fast.apps.data import CALIBRATION_IMAGES, as_inputs, read_images
from vit_fast.errors import UnsupportedInputError, VitFastError
from vit_fast.quantization.schemes import Observation, Observer, Range, Scheme, fewest_excluded, first_near_best

from .call import Batch
from .graphs import add_constant, append, constant_of, move_weights, run_graph, save
from .options import ExportOptions, Target
from .report import FLIPS, RMS, Check, Quantized, joined, losses_of, worst
from .runtime.metadata import PREFIX, inspect_onnx, read_signature

ERROR_BATCHES = 4  # held-out batches used to sort the MatMuls by error
MARGIN = 0.9  # share of the error budget that quantization may use; the final verification allows all of it
PARTS = ("quantized", "scale", "zero_point")  # suffixes of constants
PARAMETERS = {  # positions of weight and bias among a norm's inputs
    "LayerNormalization": (1, 2), "SkipLayerNormalization": (2, 3), "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,), "SkipSimplifiedLayerNormalization": (2,),
}  # fmt: skip
DEVIATIONS = 3.0  # without images, the assumed peak of a normalized channel, in standard deviations


class CalibrationError(VitFastError, ValueError):
    """Activations are infinite or NaN on a calibration image."""


class QuantisationError(VitFastError, RuntimeError):
    """Quantization changes the model's outputs by more than the budget."""


@dataclass(frozen=True, eq=False)
class MatMul:
    """A MatMul of tokens [B, ..., C] with a constant weight [C, F], or of two activations inside attention."""

    node: ir.Node
    name: str

    @property
    def weight(self) -> np.ndarray | None:
        """The constant weight [C, F]; None inside attention."""
        return constant_of(self.node.inputs[1])

    @property
    def activations(self) -> list[ir.Value]:
        """The inputs that depend on the images."""
        inputs = [value for value in self.node.inputs if value is not None]
        return inputs if self.weight is None else inputs[:1]


Readers = dict[ir.Value, list[MatMul]]  # of each activation


def matmuls_of(model: ir.Model, scheme: Scheme) -> list[MatMul]:
    """Returns the linear layers over tokens and, for e4m3, the MatMuls of attention; not patch embedding and head."""
    linears: list[MatMul] = []
    attention: list[MatMul] = []
    for node in model.graph:
        if node.op_type == "MatMul" and not node.domain:
            x, weight = node.inputs[0], constant_of(node.inputs[1])
            if x is not None and weight is not None and weight.ndim == 2 and (x.shape is None or len(x.shape) > 2):
                linears.append(MatMul(node, str(node.name)))
        if node.op_type == "Softmax" and not node.domain and scheme.kind == "e4m3":
            scores = node.inputs[0].producer() if node.inputs[0] is not None else None
            mixed = [use.node for use in node.outputs[0].uses()]
            if scores is not None and scores.op_type == "MatMul" and [n.op_type for n in mixed] == ["MatMul"]:
                count = len(attention) // 2
                attention += [MatMul(scores, f"attention {count}: q k"), MatMul(mixed[0], f"attention {count}: p v")]
    if not linears:
        raise UnsupportedInputError("an 8-bit precision", ["the model must have a linear layer over tokens, got none"])
    return linears + attention


def quantize(
    model: ir.Model, options: ExportOptions, calibration: Sequence[Batch], held_out: Sequence[Batch]
) -> tuple[ir.Model, Quantized]:
    """Quantizes a float graph, which is smoothed in place.

    Observes the batches of `calibration`, which may be empty for "int8-dynamic". Measures the loss on `held_out`.
    Without held-out batches, quantizes all layers. At most half of the linear layers stay in float.
    """
    scheme = Scheme("e4m3" if options.precision == "fp8" else "uint8" if options.uint8_by_int8 else "int8")
    matmuls = matmuls_of(model, scheme)
    readers: Readers = defaultdict(list)
    for matmul in matmuls:
        for value in matmul.activations:
            readers[value].append(matmul)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights"  # of all graphs
        move_weights(model, weights)
        exact = list(_outputs(model, held_out, weights)) if held_out else []
        seen = smooth(model, readers, observe(model, readers, calibration, weights), scheme)
        add_quantized_weights(model, matmuls, scheme)
        move_weights(model, weights)
        ranges = choose_ranges(readers, seen, scheme) if options.needs_calibration else {}

        def written(excluded: Collection[MatMul]) -> ir.Model:
            return write_nodes(model, [matmul for matmul in matmuls if matmul not in excluded], scheme, ranges)

        def failures(excluded: Collection[MatMul], whole: bool = False) -> list[Check]:
            """Returns losses beyond the budget, on all batches if `whole`, otherwise on the first that exceed it."""
            found, failed = list(exact), list[Check]()
            for i, outputs in enumerate(_outputs(written(excluded), held_out, weights)):
                found[i] = outputs  # the others are exact, so that the losses can only grow
                if not i & (i + 1) or i == len(exact) - 1:  # after 1, 2, 4, 8, ... batches
                    checks = losses_of(joined(found), joined(exact))
                    failed = [check for check in checks if not check.acceptable(MARGIN)]
                    if failed and not whole:
                        break
            return failed

        excluded: tuple[MatMul, ...] = ()
        if held_out and failures(()):
            attention = sum(matmul.weight is None for matmul in matmuls)
            most = attention + (len(matmuls) - attention) // 2
            order = _by_error(matmuls, observe(model, readers, held_out[:ERROR_BATCHES], weights), ranges, scheme)
            found = fewest_excluded(order, lambda excluded: not failures(excluded), most)
            if found is None:
                got = worst(failures(order[:most], whole=True))
                raise QuantisationError(
                    f"{options.precision} changes outputs too much, even with {most} of {len(matmuls)} MatMuls in "
                    f"float: the rms error must be at most {MARGIN * RMS:g}, and confident predictions may change on "
                    f"at most {MARGIN * FLIPS:.1%} of the images, got {got}"
                )
            excluded = found
        made = ir.external_data.load_to_model(written(excluded))
    return made, Quantized(len(matmuls) - len(excluded), tuple(matmul.name for matmul in excluded))


def quantize_file(source: Path, path: Path, target: Target, files: Sequence[Path]) -> Quantized:
    """Quantizes the linear layers over tokens of any exporter's float file to int8; calibrates on image files.

    Keeps the metadata, except for what describes the float file.
    """
    info = inspect_onnx(source)
    signature = read_signature(info)
    if signature.dtype != np.float32 or signature.image_hw is None:
        got = f"{signature.dtype} {list(signature.shape)}"
        reason = f"the file must take preprocessed images of one size in float32, got {got}"
        raise UnsupportedInputError(f"int8 of {source.name}", [reason])
    version = max(info.opsets.get(domain, 0) for domain in ("", "ai.onnx"))
    try:
        options = ExportOptions(opset=version, precision="int8", target=target)
    except ValueError as error:
        raise UnsupportedInputError(f"int8 of {source.name}", [str(error)]) from None
    size = signature.shape[0] or 1
    images = read_images(files, size * -(-CALIBRATION_IMAGES // size))  # whole batches
    inputs = as_inputs(images, info.data_config, signature.image_hw, signature.in_chans)
    graph = ir.load(source)
    facts = dict(graph.metadata_props)
    made, done = quantize(graph, options, [one.numpy() for one in inputs.split(size)], ())
    if any(key.startswith(PREFIX) for key in facts):  # the checks were those of the float file
        changed: dict[str, Any] = {"precision": "int8", "target": target, "verification": "not verified"}
        changed |= {"eight_bit": asdict(done), "accuracy": None, "checked": {"verification": "not verified"}}
        facts |= {PREFIX + key: json.dumps(value) for key, value in changed.items()}
    made.metadata_props.update(facts)
    save(made, path)
    return done


def observe(model: ir.Model, readers: Readers, batches: Sequence[Batch], weights: Path) -> dict[str, Observation]:
    """Runs the graph on images and observes the activations of the MatMuls, by name; {} without images."""
    if not batches:
        return {}
    values = {str(value.name): value for value in readers}
    generator = np.random.default_rng(0)
    observers = {name: Observer(generator) for name in values}
    for arrays in run_graph(model, batches, list(values.values()), weights=weights):
        for name, array in zip(values, arrays):
            for image in array.astype(np.float32):  # [N, C], or by head
                if not observers[name].add(image.reshape(-1, image.shape[-1])):
                    raise CalibrationError(f"activation {name} must be finite for calibration, got infinity or NaN")
    return {name: observer.seen() for name, observer in observers.items()}


def choose_ranges(readers: Readers, seen: Mapping[str, Observation], scheme: Scheme) -> dict[str, Range]:
    """Returns a range per activation: 0 to 1 after a softmax, otherwise the range with the smallest error."""
    ranges = {}
    for value, users in readers.items():
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


def smooth(
    model: ir.Model, readers: Readers, seen: Mapping[str, Observation], scheme: Scheme
) -> dict[str, Observation]:
    """Moves scales from the outputs of norms into the linear layers that follow; returns the smoothed observations.

    Skips a norm whose output has other readers. Without an observation, estimates the largest magnitude of a channel
    from the norm's weight and bias.
    """
    smoothed = dict(seen)
    for x, users in readers.items():
        name, norm, weights = str(x.name), x.producer(), [user.weight for user in users]
        if norm is None or norm.op_type not in PARAMETERS or len(x.uses()) != len(users) or x.is_graph_output():
            continue
        places = [i for i in PARAMETERS[norm.op_type] if i < len(norm.inputs) and norm.inputs[i] is not None]
        parameters = [constant_of(norm.inputs[i]) for i in places]
        if PARAMETERS[norm.op_type][0] not in places or any(array is None for array in (*parameters, *weights)):
            continue
        largest = [np.abs(array.astype(np.float64)) for array in parameters if array is not None]
        peak = seen[name].peak if name in seen else DEVIATIONS * largest[0] + sum(largest[1:])
        scale = scheme.smoothing_scale(peak, [weight for weight in weights if weight is not None])
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


def _outputs(model: ir.Model, batches: Sequence[Batch], weights: Path) -> Iterator[dict[str, np.ndarray]]:
    names = [str(value.name) for value in model.graph.outputs]
    return (dict(zip(names, arrays)) for arrays in run_graph(model, batches, weights=weights))


def _by_error(
    matmuls: Sequence[MatMul], seen: Mapping[str, Observation], ranges: Mapping[str, Range], scheme: Scheme
) -> list[MatMul]:
    """Sorts the MatMuls: attention first, then by the error of the MatMul alone, largest first."""

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
        return relative(moved[0] @ np.multiply(*scheme.quantized_weight(weight)), exact[0] @ weight)

    return sorted(matmuls, key=lambda matmul: (matmul.weight is not None, -error(matmul)))


def add_quantized_weights(model: ir.Model, matmuls: Sequence[MatMul], scheme: Scheme) -> None:
    """Adds weights in int8 or e4m3, with scales and zero points, which `write_nodes` then uses in each copy."""
    kind: Any = ml_dtypes.float8_e4m3fn if scheme.kind == "e4m3" else np.int8
    for value in dict.fromkeys(matmul.node.inputs[1] for matmul in matmuls):
        if value is not None and (weight := constant_of(value)) is not None:
            numbers, scale = scheme.quantized_weight(weight)
            for name, array in zip(PARTS, (numbers.astype(kind), scale, np.zeros(scale.shape, kind))):
                add_constant(model.graph, array, f"{value.name}_{name}")


def write_nodes(model: ir.Model, matmuls: Sequence[MatMul], scheme: Scheme, ranges: Mapping[str, Range]) -> ir.Model:
    """Returns a copy with these MatMuls in QDQ format, with the weights of `add_quantized_weights`.

    Without `ranges`, the copy has MatMulIntegers of uint8 and int8, with ranges that are computed at run time.
    """
    made = model.clone()
    graph, twins = made.graph, dict(zip(model.graph, made.graph))
    quantized: dict[Any, Any] = {}
    for node in [twins[matmul.node] for matmul in matmuls]:
        for value in node.inputs:
            quantized[value] = quantized.get(value) or _quantized(graph, value, scheme, ranges)
        inputs = [quantized[value] for value in node.inputs]
        if not ranges:
            (x, x_scale, x_zero), (weight, scales, zeros) = inputs
            product = append(graph, "MatMulInteger", x, weight, x_zero, zeros)
            inputs = [append(graph, "Cast", product, to=ir.DataType.FLOAT), append(graph, "Mul", x_scale, scales)]
            node.op_type = "Mul"
        for i, value in enumerate(inputs):
            node.replace_input_with(i, value)
    common_passes.RemoveUnusedNodesPass()(made)
    graph.sort()
    return made


def _quantized(graph: ir.Graph, value: Any, scheme: Scheme, ranges: Mapping[str, Range]) -> Any:
    """Appends the quantization of a MatMul's input.

    Returns the dequantized value. Without `ranges`, returns integers, scale and zero point.
    """
    if value.const_value is not None:
        parts = [graph.initializers[f"{value.name}_{name}"] for name in PARTS]
    elif ranges:
        kind: Any = {"uint8": np.uint8, "int8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn}[scheme.kind]
        dtype = (value.dtype or ir.DataType.FLOAT).numpy()
        number, zero = scheme.grid(ranges[str(value.name)])
        pairs = zip(PARTS[1:], (np.asarray(number, dtype), np.asarray(zero, kind)))
        constants = [add_constant(graph, array, f"{value.name}_{name}") for name, array in pairs]
        parts = [append(graph, "QuantizeLinear", value, *constants), *constants]
    else:
        graph.append(dynamic := ir.node("DynamicQuantizeLinear", [value], num_outputs=3))
        return dynamic.outputs
    if not ranges:
        return parts
    return append(graph, "DequantizeLinear", *parts, **({"axis": 1} if len(parts[1].shape or ()) else {}))

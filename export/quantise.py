"""int8 weights and products: the linears inside the blocks, by channel; the rest of the model stays float.

    static:   x ~ s_x (x_q - z_x), s_x and z_x from the range on calibration images
    dynamic:  the same from each input's own range
    weight:   W[:, j] ~ s_j W_q[:, j], s_j = max |W[:, j]| / 127

Left float are attention's own products, norms, patch embedding and head: a few per cent of a ViT's arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from .graphs import Writer, constant_of, replace

FLOAT, INT8, UINT8, INT32 = ir.DataType.FLOAT, ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT32


def quantise_static(model: ir.Model, batches: list[np.ndarray], symmetric: bool) -> int:
    """Puts QuantizeLinear and DequantizeLinear around every linear inside the blocks; in place.

    Args:
        model: An fp32 graph with one input.
        batches: Calibration inputs.
        symmetric: Whether activations are int8 around zero (TensorRT) instead of uint8 with a zero point.
    Returns:
        How many linears were quantised.
    """
    linears = _linears(model)
    ranges = _measure_ranges(model, [linear.x for linear in linears], batches)
    cut: dict[int, ir.Value] = {}
    for i, linear in enumerate(linears):
        x, weight = linear.x, linear.weight
        write = Writer(model.graph, f"int8.{i}", before=linear.node)
        if id(x) not in cut:  # q, k and v may share one input
            cut[id(x)] = _through_int8(write, x, *ranges[str(x.name)], symmetric)
        quantised, scales = _quantise_weight(weight)
        zeros = np.zeros(scales.shape, np.int8)
        restored = write.op(
            "DequantizeLinear", write.constant(quantised, "weight"), write.constant(scales, "weight.scale"),
            write.constant(zeros, "weight.zero"), axis=1, dtype=FLOAT,
        )  # fmt: skip
        linear.node.replace_input_with(0, cut[id(x)])
        linear.node.replace_input_with(1, restored)
    _drop_unused(model)
    return len(linears)


def quantise_dynamic(model: ir.Model) -> int:
    """Replaces every linear inside the blocks by an integer product, its input's range found at run time; in place."""
    linears = _linears(model)
    shared: dict[int, list[ir.Value]] = {}
    for i, linear in enumerate(linears):
        x, weight = linear.x, linear.weight
        write = Writer(model.graph, f"int8.{i}", before=linear.node)
        if id(x) not in shared:
            parts: Any = write.op("DynamicQuantizeLinear", x, outputs=3, dtype=UINT8)
            shared[id(x)] = parts
        x_quantised, x_scale, x_zero = shared[id(x)]
        quantised, scales = _quantise_weight(weight)
        zeros = write.constant(np.zeros(scales.shape, np.int8), "weight.zero")
        product = write.op(
            "MatMulInteger", x_quantised, write.constant(quantised, "weight"), x_zero, zeros, dtype=INT32
        )
        scale = write.op("Mul", x_scale, write.constant(scales, "weight.scale"), dtype=FLOAT)
        product = write.op("Mul", write.op("Cast", product, to=FLOAT, dtype=FLOAT), scale, dtype=FLOAT)
        replace(linear.node.outputs[0], product)
    _drop_unused(model)
    return len(linears)


@dataclass(frozen=True)
class _Linear:
    """A product of tokens x [B, N, C] with a constant weight [C, F]."""

    node: ir.Node
    x: ir.Value
    weight: np.ndarray


def _linears(model: ir.Model) -> list[_Linear]:
    found = []
    for node in model.graph:
        if node.op_type != "MatMul" or node.domain:
            continue
        x, weight = node.inputs[0], constant_of(node.inputs[1])
        if x is not None and weight is not None and weight.ndim == 2 and (x.shape is None or len(x.shape) == 3):
            found.append(_Linear(node, x, weight))
    if not found:
        raise ValueError("precision='int8': there is no linear over tokens in this model")
    return found


def _quantise_weight(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 weight and fp32 scale by output channel (column)."""
    scales = np.maximum(np.abs(weight).max(axis=0), np.finfo(np.float32).tiny * 128) / 127
    return np.clip(np.rint(weight / scales), -127, 127).astype(np.int8), scales.astype(np.float32)


def _through_int8(write: Writer, x: ir.Value, low: float, high: float, symmetric: bool) -> ir.Value:
    low, high = min(low, 0.0), max(high, 0.0)  # zero must stay zero
    if symmetric:
        scale, zero = max(-low, high, 1e-30) / 127, np.asarray(0, np.int8)
    else:
        scale = max(high - low, 1e-30) / 255
        zero = np.asarray(np.clip(round(-low / scale), 0, 255), np.uint8)
    scale_value = write.constant(np.asarray(scale, np.float32), "scale")
    zero_value = write.constant(zero, "zero")
    integers = write.op("QuantizeLinear", x, scale_value, zero_value, dtype=INT8 if symmetric else UINT8)
    restored: ir.Value = write.op("DequantizeLinear", integers, scale_value, zero_value, dtype=FLOAT)
    return restored


def _measure_ranges(
    model: ir.Model, values: list[ir.Value], batches: list[np.ndarray]
) -> dict[str, tuple[float, float]]:
    """Smallest and largest element of each value over all calibration batches, computed by ONNX Runtime.

    The reductions are added to the graph, so that no activation leaves it, and removed again.
    """
    import onnxruntime

    graph = model.graph
    by_name = {str(v.name): v for v in values}
    names = list(by_name)
    write = Writer(graph, "range")
    outputs = list(graph.outputs)
    added = [
        write.op(kind, by_name[name], keepdims=0, dtype=FLOAT) for name in names for kind in ("ReduceMin", "ReduceMax")
    ]
    for value in added:
        value.shape = ir.Shape([])
    graph.outputs[:] = added
    try:
        proto = ir.serde.serialize_model(model).SerializeToString()
    finally:
        graph.outputs[:] = outputs
        for value in added:
            graph.remove(value.producer(), safe=True)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto, settings, providers=["CPUExecutionProvider"])
    del proto
    rows = np.array([session.run(None, {session.get_inputs()[0].name: batch}) for batch in batches], np.float64)
    lows, highs = rows[:, 0::2].min(axis=0), rows[:, 1::2].max(axis=0)
    if not (np.isfinite(lows).all() and np.isfinite(highs).all()):
        raise ValueError("calibration: the model gives infinite or undefined activations on these images")
    return {name: (float(low), float(high)) for name, low, high in zip(names, lows, highs)}


def _drop_unused(model: ir.Model) -> None:
    common_passes.RemoveUnusedNodesPass()(model)

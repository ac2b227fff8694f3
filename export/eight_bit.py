"""Quantizes MatMuls to 8 bits, with ONNX Runtime's quantizers and the scales of a scheme.

Each DequantizeLinear feeds its MatMul directly, also in attention, so that TensorRT fuses them. For ONNX Runtime on a
CPU, we fuse MatMul and bias into one MatMulIntegerToFloat, because ONNX Runtime leaves the bias a separate node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from vit_fast.quantization.schemes import Range, Scheme

from .graphs import MICROSOFT, Writer, constant_of, replace

ZEROS: dict[str, Any] = {"int8": np.int8, "uint8": np.uint8, "e4m3": ml_dtypes.float8_e4m3fn}


@dataclass(frozen=True, eq=False)
class Product:
    """A MatMul of tokens x [B, N, C] with a constant weight [C, F], or of two activations inside attention.

    Attributes:
        node: The MatMul.
        name: Name of the linear layer in the model if known; the same in every export.
    """

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


def linears(model: ir.Model) -> list[Product]:
    """Returns the linear layers over tokens, in the order of the graph; excludes patch embedding and head.

    Raises:
        ValueError: the graph has no such layer.
    """
    found = []
    for node in model.graph:
        if node.op_type != "MatMul" or node.domain:
            continue
        x, weight = node.inputs[0], constant_of(node.inputs[1])
        if x is not None and weight is not None and weight.ndim == 2 and (x.shape is None or len(x.shape) == 3):
            found.append(Product(node, _name_of(node)))
    if not found:
        raise ValueError("the model must have a linear layer over tokens for an 8-bit precision, got none")
    return found


def attention_products(model: ir.Model) -> list[Product]:
    """Returns the MatMuls of q with k and of the softmax with v, if they are separate nodes."""
    found = []
    for node in model.graph:
        if node.op_type == "Softmax" and not node.domain:
            scores = node.inputs[0].producer() if node.inputs[0] is not None else None
            mixed = [use.node for use in node.outputs[0].uses()]
            if scores is not None and scores.op_type == "MatMul" and [n.op_type for n in mixed] == ["MatMul"]:
                found += [Product(scores, str(scores.name)), Product(mixed[0], str(mixed[0].name))]
    return found


def _name_of(node: ir.Node) -> str:
    """Returns the layer's name, from its bias: the exporter renames transposed weights."""
    for use in node.outputs[0].uses():
        for value in use.node.inputs:
            if value is not None and value.const_value is not None and str(value.name).endswith(".bias"):
                return str(value.name).removeprefix("model.").removesuffix(".bias")
    return str(node.name)


def is_probability(value: ir.Value) -> bool:
    """True if a value is the output of a softmax, and therefore between 0 and 1."""
    producer = value.producer()
    return producer is not None and producer.op_type == "Softmax"


def quantise_products(
    model: ir.Model, products: Sequence[Product], scheme: Scheme, ranges: Mapping[str, Range], *, fused: bool
) -> ir.Model:
    """Returns a copy of a float graph with these MatMuls quantized in QDQ format.

    `ranges` are those of the activations by name. Activations have the format of the scheme, weights int8 or e4m3. If
    `fused`, MatMulIntegerToFloat replaces DequantizeLinear and MatMul.
    """
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    types = {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8, "e4m3": QuantType.QFLOAT8E4M3FN}
    of_weights = types["e4m3" if scheme.kind == "e4m3" else "int8"]
    overrides: dict[str, list[dict[str, Any]]] = {}
    limits = {}
    for product in products:
        for value in product.activations:
            name = str(value.name)
            one = ranges[name]
            limits[name] = TensorData(lowest=np.array([one.low], np.float32), highest=np.array([one.high], np.float32))
            overrides[name] = [_parameters(scheme, one, value.dtype) | {"quant_type": types[scheme.kind]}]
        if product.weight is not None and scheme.kind == "e4m3":  # ONNX Runtime would clip at 4.5 standard deviations
            weight, peak = product.node.inputs[1], float(np.abs(product.weight).max())
            assert weight is not None
            parameters = _parameters(scheme, Range(-peak, peak, "weight"), weight.dtype)
            overrides[str(weight.name)] = [parameters | {"quant_type": of_weights}]
    quantizer = QDQQuantizer(
        _with_types(model, products),
        per_channel=scheme.kind != "e4m3",
        reduce_range=False,
        weight_qType=of_weights,
        activation_qType=types[scheme.kind],
        tensors_range=TensorsData(CalibrationMethod.MinMax, limits),
        nodes_to_quantize=[product.node.name for product in products],
        nodes_to_exclude=[],
        op_types_to_quantize=["MatMul"],
        extra_options={"OpTypesToExcludeOutputQuantization": ["MatMul"], "TensorQuantOverrides": overrides},
    )
    quantizer.quantize_model()
    made = _read(quantizer)
    if fused:
        _fuse_products(made)
    return made


def quantise_dynamically(model: ir.Model, products: Sequence[Product]) -> ir.Model:
    """Returns a copy of a graph with these MatMuls in uint8 x int8. Ranges of activations are computed at run time."""
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
    from onnxruntime.quantization.quant_utils import QuantizationMode

    proto = ir.serde.serialize_model(model)
    del proto.graph.value_info[:]  # the quantizer infers all shapes again
    quantizer = ONNXQuantizer(
        proto,
        per_channel=True,
        reduce_range=False,
        mode=QuantizationMode.IntegerOps,
        static=False,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=None,
        nodes_to_quantize=[product.node.name for product in products],
        nodes_to_exclude=[],
        op_types_to_quantize=["MatMul"],
        extra_options={"MatMulConstBOnly": True, "DefaultTensorType": onnx.TensorProto.FLOAT},
    )
    quantizer.quantize_model()
    return _read(quantizer)


def _parameters(scheme: Scheme, limits: Range, dtype: ir.DataType | None) -> dict[str, np.ndarray]:
    scale, zero = scheme.grid(limits)
    kind = (dtype or ir.DataType.FLOAT).numpy()
    return {"scale": np.asarray(scale, kind), "zero_point": np.asarray(zero, ZEROS[scheme.kind])}


def _with_types(model: ir.Model, products: Sequence[Product]) -> onnx.ModelProto:
    """Returns the graph with dtypes of activations; ONNX Runtime's own inference fails for dynamic shapes."""
    from onnxruntime.quantization.quant_utils import add_infer_metadata

    for product in products:
        for value in (*product.activations, *product.node.outputs):
            value.dtype = value.dtype or ir.DataType.FLOAT
    proto: onnx.ModelProto = ir.serde.serialize_model(model)
    add_infer_metadata(proto)
    return proto


def _read(quantizer: Any) -> ir.Model:
    model = ir.serde.deserialize_model(quantizer.model.model)
    model.graph.sort()
    model.metadata_props.clear()
    return model


def _fuse_products(model: ir.Model) -> None:
    """Replaces each MatMul of two DequantizeLinear, and the bias added to it, by one node."""
    for count, node in enumerate([node for node in model.graph if node.op_type == "MatMul"]):
        producers = [value.producer() for value in node.inputs if value is not None]
        restored = [one.inputs for one in producers if one is not None and one.op_type == "DequantizeLinear"]
        if len(restored) < 2:
            continue
        (x, x_scale, x_zero), (weight, scales, _) = restored
        old, bias = _with_bias(node)
        write = Writer(model.graph, f"eight_bit.{count}", before=node)
        inputs = [x, weight, x_scale, scales, x_zero, None, *([] if bias is None else [bias])]
        replace(old, write.op("MatMulIntegerToFloat", *inputs, domain=MICROSOFT, dtype=ir.DataType.FLOAT))
    common_passes.RemoveUnusedNodesPass()(model)
    model.opset_imports[MICROSOFT] = 1


def _with_bias(node: ir.Node) -> tuple[ir.Value, ir.Value | None]:
    """Returns the output of the Add of a constant bias, and the bias; otherwise the MatMul's output and None."""
    output = node.outputs[0]
    users = [use.node for use in output.uses()]
    if [user.op_type for user in users] == ["Add"] and not output.is_graph_output():
        other = next((value for value in users[0].inputs if value is not output), None)
        array = constant_of(other)
        if array is not None and array.ndim == 1:
            return users[0].outputs[0], other
    return output, None

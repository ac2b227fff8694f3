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
from onnxscript.rewriter import pattern, rewrite

from vit_fast.quantization.schemes import Range, Scheme

from .graphs import constant_of
from .options import MICROSOFT

ZEROS: dict[str, Any] = {"int8": np.int8, "uint8": np.uint8, "e4m3": ml_dtypes.float8_e4m3fn}


@dataclass(frozen=True, eq=False)
class MatMul:
    """A MatMul of tokens [B, N, C] with a constant weight [C, F], or of two activations inside attention."""

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


def matmuls_of(model: ir.Model, scheme: Scheme) -> list[MatMul]:
    """Returns the linear layers over tokens and, for e4m3, the MatMuls of attention; not patch embedding and head."""
    linears: list[MatMul] = []
    attention: list[MatMul] = []
    for node in model.graph:
        if node.op_type == "MatMul" and not node.domain:
            x, weight = node.inputs[0], constant_of(node.inputs[1])
            if x is not None and weight is not None and weight.ndim == 2 and (x.shape is None or len(x.shape) == 3):
                # Named after its bias, because the exporter renames transposed weights. If several constants follow,
                # the last one is the bias: in SkipLayerNormalization, it follows that of the norm.
                read = [value for use in node.outputs[0].uses() for value in use.node.inputs if value is not None]
                biases = [str(v.name) for v in read if v.const_value is not None and str(v.name).endswith(".bias")]
                name = biases[-1].removeprefix("model.").removesuffix(".bias") if biases else str(node.name)
                linears.append(MatMul(node, name))
        if node.op_type == "Softmax" and not node.domain and scheme.kind == "e4m3":
            scores = node.inputs[0].producer() if node.inputs[0] is not None else None
            mixed = [use.node for use in node.outputs[0].uses()]
            if scores is not None and scores.op_type == "MatMul" and [n.op_type for n in mixed] == ["MatMul"]:
                count = len(attention) // 2
                attention += [MatMul(scores, f"attention {count}: q k"), MatMul(mixed[0], f"attention {count}: p v")]
    if not linears:
        raise ValueError("the model must have a linear layer over tokens for an 8-bit precision, got none")
    return linears + attention


def quantize_statically(
    model: ir.Model, matmuls: Sequence[MatMul], scheme: Scheme, ranges: Mapping[str, Range], *, fused: bool
) -> ir.Model:
    """Returns a copy with these MatMuls in QDQ format, or fused: MatMulIntegerToFloat. Weights are int8 or e4m3."""
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.calibrate import TensorData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
    from onnxruntime.quantization.quant_utils import add_infer_metadata

    is_e4m3 = scheme.kind == "e4m3"
    kind = {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8, "e4m3": QuantType.QFLOAT8E4M3FN}[scheme.kind]
    limits = {value: ranges[str(value.name)] for matmul in matmuls for value in matmul.activations}
    activations = [str(value.name) for value in limits]
    for matmul in matmuls:
        if matmul.weight is not None and is_e4m3:  # ONNX Runtime would clip at 4.5 standard deviations
            weight, peak = matmul.node.inputs[1], float(np.abs(matmul.weight).max())
            assert weight is not None
            limits[weight] = Range(-peak, peak, "weight")
    overrides: dict[str, list[dict[str, Any]]] = {}
    for value, one in limits.items():
        scale, zero = scheme.grid(one)
        dtype = (value.dtype or ir.DataType.FLOAT).numpy()
        numbers = {"scale": np.asarray(scale, dtype), "zero_point": np.asarray(zero, ZEROS[scheme.kind])}
        overrides[str(value.name)] = [numbers | {"quant_type": kind}]
    for matmul in matmuls:  # ONNX Runtime's own inference of dtypes fails for dynamic shapes
        for value in (*matmul.activations, *matmul.node.outputs):
            value.dtype = value.dtype or ir.DataType.FLOAT
    proto: onnx.ModelProto = ir.serde.serialize_model(model)
    add_infer_metadata(proto)
    unused = TensorData(lowest=np.zeros(1, np.float32), highest=np.ones(1, np.float32))  # `overrides` replaces it
    quantizer = QDQQuantizer(
        proto, per_channel=not is_e4m3, weight_qType=kind if is_e4m3 else QuantType.QInt8, activation_qType=kind,
        tensors_range=dict.fromkeys(activations, unused),
        extra_options={"OpTypesToExcludeOutputQuantization": ["MatMul"], "TensorQuantOverrides": overrides},
        **_only(matmuls),
    )  # fmt: skip
    made = _quantized(quantizer)
    if fused:
        for rule in _FUSIONS:  # first with a bias
            rewrite(made, pattern.RewriteRuleSet([rule], commute=True))
        made.opset_imports[MICROSOFT] = 1
    return made


def quantize_dynamically(model: ir.Model, matmuls: Sequence[MatMul]) -> ir.Model:
    """Returns a copy of a graph with these MatMuls in uint8 x int8. Ranges of activations are computed at run time."""
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
    from onnxruntime.quantization.quant_utils import QuantizationMode

    proto = ir.serde.serialize_model(model)
    del proto.graph.value_info[:]  # the quantizer infers all shapes again
    quantizer = ONNXQuantizer(
        proto, mode=QuantizationMode.IntegerOps, static=False, per_channel=True, tensors_range=None,
        weight_qType=QuantType.QInt8, activation_qType=QuantType.QUInt8,
        extra_options={"MatMulConstBOnly": True, "DefaultTensorType": onnx.TensorProto.FLOAT}, **_only(matmuls),
    )  # fmt: skip
    return _quantized(quantizer)


def _only(matmuls: Sequence[MatMul]) -> dict[str, Any]:
    nodes = [matmul.node.name for matmul in matmuls]
    return {
        "nodes_to_quantize": nodes, "nodes_to_exclude": [], "op_types_to_quantize": ["MatMul"], "reduce_range": False,
    }  # fmt: skip


def _quantized(quantizer: Any) -> ir.Model:
    quantizer.quantize_model()
    model = ir.serde.deserialize_model(quantizer.model.model)
    model.graph.sort()
    model.metadata_props.clear()
    return model


def _product(op: Any, x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, w_zero: Any) -> Any:
    return op.MatMul(op.DequantizeLinear(x, x_scale, x_zero), op.DequantizeLinear(w, w_scale, w_zero))


def _product_and_bias(op: Any, x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, w_zero: Any, bias: Any) -> Any:
    return op.Add(_product(op, x, x_scale, x_zero, w, w_scale, w_zero), bias)


def _one_node(op: Any, x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, bias: Any = None, **_: Any) -> Any:
    rest = [] if bias is None else [bias]
    return op.MatMulIntegerToFloat(x, w, x_scale, w_scale, x_zero, None, *rest, _domain=MICROSOFT)


def _is_bias(context: Any, bias: ir.Value, **_: Any) -> bool:
    array = constant_of(bias)
    return array is not None and array.ndim == 1


# the DequantizeLinear of an activation may have other readers, so unused nodes are removed afterwards
_FUSIONS = (
    pattern.RewriteRule(_product_and_bias, _one_node, _is_bias, remove_nodes=False),
    pattern.RewriteRule(_product, _one_node, remove_nodes=False),
)

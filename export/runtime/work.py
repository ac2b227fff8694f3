"""Lower bound on the work of an ONNX file: operations, and elements read and written, from inferred shapes.

Counts matmuls, convolutions and attention: 2 operations per multiply-add, and each operand and output once. Does not
count biases, attention scores and other operators. The operations equal those of torch's FLOP counter for the original
model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import TensorProto

from vit_fast.work import Work, total

from .metadata import read_proto

# Matmuls and convolutions. The second operand is input 1, or 3 if scale and zero point of the first come before it.
_PRODUCTS = (
    "MatMul", "FusedMatMul", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul", "Gemm",
    "FusedGemm", "QGemm", "Conv", "FusedConv", "ConvInteger", "QLinearConv",
)  # fmt: skip
_ATTENTION = ("MultiHeadAttention", "Attention")
_CASTS = ("Cast", "QuantizeLinear", "DequantizeLinear")
# Operators of other domains that compute no matmul.
_WITHOUT = (
    "SkipLayerNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "BiasGelu",
    "FastGelu", "Gelu", "QuickGelu", "BiasAdd", "BiasSoftmax", "QuantizeLinear", "DequantizeLinear", "QLinearAdd",
    "QLinearMul", "QLinearSoftmax", "QLinearSigmoid", "QLinearConcat", "RotaryEmbedding",
)  # fmt: skip
# ONNX operators that compute other matmuls or convolutions, or run subgraphs.
_OTHERS = ("Einsum", "ConvTranspose", "DeformConv", "RNN", "GRU", "LSTM", "If", "Loop", "Scan", "SequenceMap")
_NARROW = {
    TensorProto.INT8: "int8", TensorProto.UINT8: "int8", TensorProto.FLOAT8E4M3FN: "fp8", TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
}  # fmt: skip


class UncountedError(ValueError):
    """A file contains an operator whose operations cannot be counted."""


def count_work(path: str | Path, shape: Sequence[int]) -> Work:
    """Counts the operations of one call with images of a shape, and the elements of operands and outputs."""
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    proto = read_proto(path)
    dims = proto.graph.input[0].type.tensor_type.shape.dim
    if len(dims) != len(shape):
        raise UncountedError(f"its input must have {len(shape)} axes, got {len(dims)}")
    calls = math.ceil(shape[0] / (dims[0].dim_value or shape[0]))
    for dim, size in zip(dims, shape, strict=True):
        dim.dim_value = dim.dim_value or size
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    foreign = [node for node in proto.graph.node if node.domain not in ("", "ai.onnx")]
    unknown = [node for node in foreign if node.op_type not in (*_PRODUCTS, *_ATTENTION, *_WITHOUT)]
    for node in [*unknown, *(node for node in proto.graph.node if node.op_type in _OTHERS)]:
        raise UncountedError(f"{node.domain or 'ai.onnx'}.{node.op_type}: no formula for its operations")
    del proto.graph.value_info[:]
    try:
        proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
        if foreign:  # operators that ONNX does not know
            proto = SymbolicShapeInference.infer_shapes(proto, auto_merge=True)
    except Exception as error:  # both raise many types
        raise UncountedError(f"its shapes cannot be inferred: {' '.join(str(error).split())[:200]}") from None
    return total(map(_count, ir.from_proto(proto).graph)) * calls


def narrow_precision(path: str | Path) -> str | None:
    """Returns the number format of most weights: "int8", "fp8", "fp16", "bf16"; None for fp32 or wider."""
    sizes: Counter[str | None] = Counter()
    for tensor in read_proto(path).graph.initializer:
        sizes[_NARROW.get(tensor.data_type)] += math.prod(tensor.dims)
    return sizes.most_common(1)[0][0] if sizes else None


def _count(node: ir.Node) -> Work:
    if node.op_type in _ATTENTION:
        if (node.domain and node.op_type == "Attention") or sum(value is not None for value in node.inputs[:3]) < 3:
            raise UncountedError(f"{node.op_type} of packed qkv: no formula for its operations")
        (query, key, value), out = map(_shape, node.inputs[:3]), _shape(node.outputs[0])
        flop = 2 * key[-2] * (math.prod(query) + math.prod(out))
        return Work(flop, sum(map(math.prod, (query, key, value, out))))
    if node.op_type not in _PRODUCTS:
        return Work()
    first, second = node.inputs[0], node.inputs[3 if node.op_type.startswith("Q") else 1]
    a, b, out = _shape(first), _shape(second), _shape(node.outputs[0])
    inner = math.prod(b[1:]) if "Conv" in node.op_type else a[-2 if node.attributes.get_int("transA", 0) else -1]
    # attention scores count as not moved
    source = first.producer() if first is not None else None
    while source is not None and source.op_type in _CASTS:
        source = source.inputs[0].producer() if source.inputs[0] is not None else None
    users = [use.node for use in node.outputs[0].uses()]
    while len(users) == 1 and users[0].op_type in ("Add", "Sub", "Mul", "Div", "Where", *_CASTS):
        users = [use.node for use in users[0].outputs[0].uses()]
    moved = 0 if source is not None and source.op_type == "Softmax" else math.prod(a)
    moved += 0 if any(user.op_type == "Softmax" for user in users) else math.prod(out)
    return Work(2 * inner * math.prod(out), moved + math.prod(b))


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    if value is None or value.shape is None or not value.shape.is_static():
        raise UncountedError(f"the shape of {'an input' if value is None else value.name!r} is unknown")
    return value.shape.numpy()

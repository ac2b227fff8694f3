"""Lower bound on the work of an ONNX file: operations, and elements read and written, from inferred shapes.

Counts matmuls, convolutions and attention: 2 operations per multiply-add, and each operand and output once. A bias
counts as an operand of its matmul or convolution. The elements of attention scores are not counted, nor are other
operators. The operations equal those of torch's FLOP counter for the original model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import NodeProto, TensorProto

from vit_fast.work import Work, total

from .model_files import read_proto

# Matmuls and convolutions: positions of their two operands.
_PRODUCTS = {
    "MatMul": (0, 1), "FusedMatMul": (0, 1), "MatMulInteger": (0, 1), "MatMulIntegerToFloat": (0, 1),
    "DynamicQuantizeMatMul": (0, 1), "QLinearMatMul": (0, 3), "Gemm": (0, 1), "FusedGemm": (0, 1), "QGemm": (0, 3),
    "Conv": (0, 1), "FusedConv": (0, 1), "ConvInteger": (0, 1), "QLinearConv": (0, 3),
}  # fmt: skip
_ATTENTION = ("MultiHeadAttention", "Attention")
# Position of the bias, in the node itself or in the next one.
_BIAS = {"Conv": 2, "FusedConv": 2, "QLinearConv": 8, "Gemm": 2, "FusedGemm": 2, "QGemm": 6}
_BIAS_BEHIND = {"Add": (0, 1), "BiasGelu": (1,), "FastGelu": (1,), "SkipLayerNormalization": (4,)}
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Where", "Cast", "QuantizeLinear", "DequantizeLinear")
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
    """Counts the operations of one call, and the elements of operands and outputs.

    Args:
        path: The .onnx file, with one input.
        shape: Shape of the images; they are split if the file has a fixed batch size.
    Raises:
        ModelFileError: see model_files.read_proto.
        UncountedError: an operator cannot be counted; the message names it.
    """
    proto = read_proto(path)
    dims = proto.graph.input[0].type.tensor_type.shape.dim
    if len(dims) != len(shape):
        raise UncountedError(f"its input must have {len(shape)} axes, got {len(dims)}")
    calls = math.ceil(shape[0] / (dims[0].dim_value or shape[0]))
    for dim, size in zip(dims, shape, strict=True):
        dim.dim_value = dim.dim_value or size
    graph = _Graph(proto)
    return total(map(graph.count, graph.nodes)) * calls


def narrow_precision(path: str | Path) -> str | None:
    """Returns the number format of most weights: "int8", "fp8", "fp16", "bf16"; None for fp32 or wider.

    Raises:
        ModelFileError: see model_files.read_proto.
    """
    sizes: dict[str | None, int] = {}
    for tensor in read_proto(path).graph.initializer:
        kind = _NARROW.get(tensor.data_type)
        sizes[kind] = sizes.get(kind, 0) + math.prod(tensor.dims)
    return max(sizes, key=lambda kind: sizes[kind], default=None)


class _Graph:
    """Nodes of a file, with the shapes of their inputs and outputs."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

        if proto.functions:
            proto = onnx.inliner.inline_local_functions(proto)
        foreign = [node.domain not in ("", "ai.onnx") for node in proto.graph.node]
        for node, strange in zip(proto.graph.node, foreign, strict=True):
            if node.op_type not in (*_PRODUCTS, *_ATTENTION, *_WITHOUT) if strange else node.op_type in _OTHERS:
                raise UncountedError(f"{node.domain or 'ai.onnx'}.{node.op_type}: no formula for its operations")
        del proto.graph.value_info[:]
        try:
            proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
            if any(foreign):  # operators that ONNX does not know
                proto = SymbolicShapeInference.infer_shapes(proto, auto_merge=True)
        except Exception as error:  # both raise many types
            raise UncountedError(f"its shapes cannot be inferred: {' '.join(str(error).split())[:200]}") from None
        inferred = proto.graph
        self.nodes: list[NodeProto] = list(inferred.node)
        self._constants = {tensor.name: list(tensor.dims) for tensor in inferred.initializer}
        self._shapes: dict[str, list[Any]] = {
            value.name: [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]
            for value in (*inferred.input, *inferred.output, *inferred.value_info)
        } | self._constants
        self._made = {name: node for node in self.nodes for name in node.output}
        self._users: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            for name in node.input:
                self._users.setdefault(name, []).append(node)

    def count(self, node: NodeProto) -> Work:
        if node.op_type in _ATTENTION:
            return self._attention(node)
        return self._product(node) if node.op_type in _PRODUCTS else Work()

    def _product(self, node: NodeProto) -> Work:
        first, second = (node.input[place] for place in _PRODUCTS[node.op_type])
        a, b, out = self._shape(first), self._shape(second), self._shape(node.output[0])
        if "Conv" in node.op_type:
            inner = math.prod(b[1:])
        else:
            inner = a[-2 if any(x.name == "transA" and x.i for x in node.attribute) else -1]
        moved = 0 if self._is_from_softmax(first) else math.prod(a)
        moved += 0 if self._leads_to_softmax(node.output[0]) else math.prod(out)
        return Work(2 * inner * math.prod(out), moved + math.prod(b) + self._bias(node))

    def _bias(self, node: NodeProto) -> int:
        place = _BIAS.get(node.op_type)
        if place is not None and len(node.input) > place and node.input[place]:
            return math.prod(self._shape(node.input[place]))
        for user in self._users.get(node.output[0], []):
            for name in (user.input[i] for i in _BIAS_BEHIND.get(user.op_type, ()) if i < len(user.input)):
                if len(self._constants.get(name, ())) == 1:
                    return self._constants[name][0]
        return 0

    def _attention(self, node: NodeProto) -> Work:
        query, key, *_ = (self._shape(name) for name in node.input if name)
        out = self._shape(node.output[0])
        if node.domain == "com.microsoft" and node.op_type == "Attention":  # includes projections; key: weights
            width, bias = key[1] // 3, math.prod(self._shape(node.input[2])) if node.input[2] else 0
            rows = math.prod(query[:-1])
            flop = 2 * rows * math.prod(key) + 4 * rows * query[1] * width
            return Work(flop, math.prod(query) + math.prod(key) + bias + 3 * rows * width + 4 * rows * width)
        if len(query) == 5 or len([name for name in node.input[:3] if name]) < 3:
            raise UncountedError(f"{node.op_type} of packed qkv: no formula for its operations")
        operands = sum(math.prod(self._shape(name)) for name in node.input[:3])
        return Work(2 * key[-2] * (math.prod(query) + math.prod(out)), operands + math.prod(out))

    def _shape(self, name: str) -> list[int]:
        shape = self._shapes.get(name)
        if shape is None or not all(isinstance(size, int) for size in shape):
            raise UncountedError(f"the shape of {name!r} is unknown")
        return shape

    def _is_from_softmax(self, name: str) -> bool:
        node = self._made.get(name)
        while node is not None and node.op_type in _ELEMENTWISE[5:]:
            node = self._made.get(node.input[0])
        return node is not None and node.op_type == "Softmax"

    def _leads_to_softmax(self, name: str) -> bool:
        users = self._users.get(name, [])
        while len(users) == 1 and users[0].op_type in _ELEMENTWISE:
            users = self._users.get(users[0].output[0], [])
        return any(user.op_type == "Softmax" for user in users)

"""Writes MatMuls in 8 bits.

Each DequantizeLinear feeds its MatMul directly, also in attention, so that TensorRT fuses them. For ONNX Runtime on a
CPU, we fuse MatMul and bias into one MatMulIntegerToFloat, because ONNX Runtime leaves the bias a separate node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.rewriter import pattern, rewrite

from vit_fast.quantization.schemes import Range, Scheme

from .graphs import constant_of
from .options import MICROSOFT

DTYPES: dict[str, Any] = {"int8": np.int8, "uint8": np.uint8, "e4m3": ml_dtypes.float8_e4m3fn}


@dataclass(frozen=True, eq=False)
class Product:
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


def products_of(model: ir.Model, scheme: Scheme) -> list[Product]:
    """Returns the linear layers over tokens and, for e4m3, the MatMuls of attention; not patch embedding and head."""
    linears: list[Product] = []
    attention: list[Product] = []
    for node in model.graph:
        if node.op_type == "MatMul" and not node.domain:
            x, weight = node.inputs[0], constant_of(node.inputs[1])
            if x is not None and weight is not None and weight.ndim == 2 and (x.shape is None or len(x.shape) == 3):
                linears.append(Product(node, _name_of(node)))
        if node.op_type == "Softmax" and not node.domain and scheme.kind == "e4m3":
            scores = node.inputs[0].producer() if node.inputs[0] is not None else None
            mixed = [use.node for use in node.outputs[0].uses()]
            if scores is not None and scores.op_type == "MatMul" and [n.op_type for n in mixed] == ["MatMul"]:
                count = len(attention) // 2
                attention += [Product(scores, f"attention {count}: q k"), Product(mixed[0], f"attention {count}: p v")]
    if not linears:
        raise ValueError("the model must have a linear layer over tokens for an 8-bit precision, got none")
    return linears + attention


def _name_of(node: ir.Node) -> str:
    """Returns the layer's name, from its bias: the exporter renames transposed weights."""
    for use in node.outputs[0].uses():
        for value in use.node.inputs:
            if value is not None and value.const_value is not None and str(value.name).endswith(".bias"):
                return str(value.name).removeprefix("model.").removesuffix(".bias")
    return str(node.name)


def quantise_products(
    model: ir.Model, products: Sequence[Product], scheme: Scheme, ranges: Mapping[str, Range], *, fused: bool = False
) -> ir.Model:
    """Returns a copy with these MatMuls in 8 bits: in QDQ format, or as MatMulIntegerToFloat if `fused`.

    Without ranges, activations are quantized to uint8 at run time, and multiplied by MatMulInteger.
    """
    made = model.clone()
    names = {product.node.name for product in products}
    writer = _Operands(scheme, ranges)
    tape = writer.tape
    for node in [node for node in made.graph if node.name in names]:
        operands = [writer.quantised(value) for value in node.inputs if value is not None]
        if ranges:
            for place, operand in enumerate(operands):
                per_channel = constant_of(operand[1]).ndim > 0
                restored = tape.op("DequantizeLinear", operand, {"axis": 1} if per_channel else {})
                node.replace_input_with(place, restored)
        else:
            (x, x_scale, x_zero), (weight, weight_scale, weight_zero) = operands
            sums = tape.op("MatMulInteger", [x, weight, x_zero, weight_zero])
            scale = tape.op("Mul", [x_scale, weight_scale])
            y = tape.op("Mul", [tape.op("Cast", [sums], {"to": ir.DataType.FLOAT}), scale])
            ir.convenience.replace_all_uses_with(node.outputs[0], y, replace_graph_outputs=True)
    for value in tape.initializers:
        made.graph.register_initializer(value)
    made.graph.extend(tape.nodes)
    made.graph.sort()
    if fused:
        for rule in _FUSIONS:  # first with a bias
            rewrite(made, pattern.RewriteRuleSet([rule], commute=True))
        made.opset_imports[MICROSOFT] = 1
    RemoveUnusedNodesPass()(made)
    return made


class _Operands:
    """Records the nodes and constants that quantize the operands of MatMuls, each operand once."""

    def __init__(self, scheme: Scheme, ranges: Mapping[str, Range]) -> None:
        self.tape = ir.tape.Tape()
        self._scheme, self._ranges = scheme, ranges
        self._known: dict[str, Sequence[ir.Value]] = {}

    def quantised(self, value: ir.Value) -> Sequence[ir.Value]:
        """Returns an operand in 8 bits, its scale and its zero point."""
        name = str(value.name)
        if name not in self._known:
            if (weight := constant_of(value)) is not None:
                self._known[name] = self._weight(name, weight)
            elif self._ranges:
                scale, zero = self._scheme.grid(self._ranges[name])
                dtype = (value.dtype or ir.DataType.FLOAT).numpy()
                grid = self._grid(name, np.asarray(scale, dtype), np.asarray(zero, DTYPES[self._scheme.kind]))
                self._known[name] = self.tape.op("QuantizeLinear", [value, *grid]), *grid
            else:
                self._known[name] = self.tape.op_multi_out("DynamicQuantizeLinear", [value], num_outputs=3)
        return self._known[name]

    def _weight(self, name: str, weight: np.ndarray) -> Sequence[ir.Value]:
        codes, scale = self._scheme.quantised_weight(weight)
        codes = codes.astype(DTYPES["e4m3" if self._scheme.kind == "e4m3" else "int8"])
        stored = self.tape.initializer(ir.tensor(codes, name=f"{name}_quantized"))
        return stored, *self._grid(name, scale, np.zeros(scale.shape, codes.dtype))

    def _grid(self, name: str, scale: np.ndarray, zero: np.ndarray) -> list[ir.Value]:
        arrays = {f"{name}_scale": scale, f"{name}_zero_point": zero}
        return [self.tape.initializer(ir.tensor(array, name=key)) for key, array in arrays.items()]


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


_FUSIONS = (
    pattern.RewriteRule(_product_and_bias, _one_node, _is_bias),
    pattern.RewriteRule(_product, _one_node),
)

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
    values = [value for use in node.outputs[0].uses() for value in use.node.inputs if value is not None]
    names = [str(v.name) for v in values if v.const_value is not None and str(v.name).endswith(".bias")]
    # the last one: in SkipLayerNormalization, the bias follows the norm's own
    return names[-1].removeprefix("model.").removesuffix(".bias") if names else str(node.name)


def _bias_of(node: ir.Node) -> tuple[ir.Node, ir.Value | None]:
    """Returns the Add that follows a MatMul, and the bias that it adds; else the MatMul itself."""
    for user in {use.node for use in node.outputs[0].uses()}:
        for value in user.inputs:
            array = constant_of(value)
            if user.op_type == "Add" and array is not None and array.ndim == 1:
                return user, value
    return node, None


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
        if ranges and not fused:
            for place, (values, scale, zero) in enumerate(operands):
                axis = {"axis": 1} if scale.shape else {}
                node.replace_input_with(place, tape.op("DequantizeLinear", [values, scale, zero], axis))
            continue
        (x, x_scale, x_zero), (weight, weight_scale, weight_zero) = operands
        last, bias = _bias_of(node)
        if ranges:
            inputs = [x, weight, x_scale, weight_scale, x_zero, None, *([] if bias is None else [bias])]
            _replace(last.outputs[0], tape.op("MatMulIntegerToFloat", inputs, domain=MICROSOFT))
        else:
            sums = tape.op("MatMulInteger", [x, weight, x_zero, weight_zero])
            in_float = tape.op("Cast", [sums], {"to": ir.DataType.FLOAT})
            _replace(node.outputs[0], tape.op("Mul", [in_float, tape.op("Mul", [x_scale, weight_scale])]))
    for value in tape.initializers:
        made.graph.register_initializer(value)
    made.graph.extend(tape.nodes)
    made.graph.sort()
    RemoveUnusedNodesPass()(made)
    if fused:
        made.opset_imports[MICROSOFT] = 1
    return made


def _replace(old: ir.Value, new: ir.Value) -> None:
    if old.is_graph_output():
        new.name, new.shape, new.type, old.name = old.name, old.shape, old.type, None
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


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

"""Products in eight bits, as nodes: QuantizeLinear and DequantizeLinear around them, or ONNX Runtime's integer product.

    int8 weight        W[:, j] ~ s_j W_q[:, j],   s_j = max |W[:, j]| / 127
    int8 activation    x ~ s (x_q - z), the range from calibration, or from each input itself (dynamic)
    e4m3               x ~ s x_q, W ~ s W_q, each s = max |.| / 448, one for the whole tensor

Source of the e4m3 layout: NVIDIA's Model-Optimizer, which TensorRT fuses: every DequantizeLinear feeds its product
directly, also both products of attention; the softmax, between 0 and 1, has the scale 1/448.
"""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

from .calibration import Range, grid
from .graphs import Writer, constant_of, replace
from .products import Product

Scheme = Literal["uint8", "int8", "e4m3", "uint8-fused", "dynamic", "dynamic-fused"]
"""uint8, int8 (around zero), e4m3: Q and DQ. fused: com.microsoft.MatMulIntegerToFloat with the bias inside."""

MICROSOFT = "com.microsoft"
LARGEST_E4M3 = 448.0
FLOAT, INT8, UINT8, INT32 = ir.DataType.FLOAT, ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT32
FP8 = ir.DataType.FLOAT8E4M3FN


class EightBit:
    """Writes products of one graph in one scheme.

    Args:
        model: The graph.
        scheme: How.
        ranges: Of each activation by name; the dynamic schemes need none.
    """

    def __init__(self, model: ir.Model, scheme: Scheme, ranges: dict[str, Range]) -> None:
        self._graph, self._scheme, self._ranges = model.graph, scheme, ranges
        self._activations: dict[str, Any] = {}  # q, k and v may share one input
        self._count = 0

    def replace(self, product: Product) -> tuple[ir.Value, ir.Value]:
        """Lets the graph use the product in eight bits.

        Returns:
            What was used before, and what is now: `graphs.replace` of the second by the first undoes it.
        """
        self._count += 1
        write = Writer(self._graph, f"eight_bit.{self._count}", before=product.node)
        if self._scheme in ("uint8", "int8", "e4m3"):
            inputs = [self._restored(write, value) for value in product.activations]
            if product.weight is not None:
                inputs.append(self._restored_weight(write, product.weight))
            old, new = product.node.outputs[0], write.op("MatMul", *inputs, dtype=product.activations[0].dtype)
        elif self._scheme == "dynamic":
            old, new = product.node.outputs[0], self._integer_product(write, product)
        else:
            old, bias = _with_bias(product.node)
            new = self._fused(write, product, bias)
        replace(old, new)
        return old, new

    def _restored(self, write: Writer, x: ir.Value) -> ir.Value:
        """Through eight bits and back."""
        if str(x.name) not in self._activations:
            scale, zero, kind = self._grid(x)
            constants = write.constant(scale, "scale"), write.constant(zero, "zero")
            integers = write.op("QuantizeLinear", x, *constants, dtype=kind)
            self._activations[str(x.name)] = write.op("DequantizeLinear", integers, *constants, dtype=x.dtype)
        restored: ir.Value = self._activations[str(x.name)]
        return restored

    def _grid(self, x: ir.Value) -> tuple[np.ndarray, np.ndarray, ir.DataType]:
        """Scale, in x's dtype, zero point and type of an activation."""
        limits = self._ranges[str(x.name)]
        float_type = (x.dtype or FLOAT).numpy()
        if self._scheme == "e4m3":
            largest = max(-limits.low, limits.high, 1e-3)
            return np.asarray(largest / LARGEST_E4M3, float_type), np.zeros((), ml_dtypes.float8_e4m3fn), FP8
        symmetric = self._scheme == "int8"
        scale, zero = grid(limits.low, limits.high, symmetric)
        kind = INT8 if symmetric else UINT8
        return np.asarray(scale, float_type), np.asarray(zero, kind.numpy()), kind

    def _restored_weight(self, write: Writer, weight: np.ndarray) -> ir.Value:
        if self._scheme == "e4m3":
            scale = np.asarray(max(float(np.abs(weight).max()), 1e-3) / LARGEST_E4M3, weight.dtype)
            quantised = _e4m3(weight.astype(np.float32) / np.float32(scale))
            axis: dict[str, Any] = {}
        else:
            quantised, scale = quantise_weight(weight)
            scale, axis = scale.astype(weight.dtype), {"axis": 1}
        zeros = np.zeros(scale.shape, quantised.dtype)
        restored: ir.Value = write.op(
            "DequantizeLinear", write.constant(quantised, "weight"), write.constant(scale, "weight.scale"),
            write.constant(zeros, "weight.zero"), dtype=ir.DataType.from_numpy(weight.dtype), **axis,
        )  # fmt: skip
        return restored

    def _integers(self, write: Writer, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """uint8 elements, scale and zero point."""
        if str(x.name) not in self._activations:
            if self._scheme.startswith("dynamic"):
                parts = write.op("DynamicQuantizeLinear", x, outputs=3, dtype=UINT8)
                parts[1].dtype = FLOAT
                self._activations[str(x.name)] = tuple(parts)
            else:
                scale, zero, kind = self._grid(x)
                constants = write.constant(scale, "scale"), write.constant(zero, "zero")
                integers = write.op("QuantizeLinear", x, *constants, dtype=kind)
                self._activations[str(x.name)] = (integers, *constants)
        found: tuple[ir.Value, ir.Value, ir.Value] = self._activations[str(x.name)]
        return found

    def _weight(self, write: Writer, product: Product) -> tuple[ir.Value, ir.Value]:
        """int8 elements around zero, and scales by column."""
        assert product.weight is not None
        quantised, scales = quantise_weight(product.weight)
        return write.constant(quantised, "weight"), write.constant(scales, "weight.scale")

    def _integer_product(self, write: Writer, product: Product) -> ir.Value:
        x, x_scale, x_zero = self._integers(write, product.activations[0])
        weight, scales = self._weight(write, product)
        sums = write.op("MatMulInteger", x, weight, x_zero, dtype=INT32)
        scale = write.op("Mul", x_scale, scales, dtype=FLOAT)
        restored: ir.Value = write.op("Mul", write.op("Cast", sums, to=FLOAT, dtype=FLOAT), scale, dtype=FLOAT)
        return restored

    def _fused(self, write: Writer, product: Product, bias: ir.Value | None) -> ir.Value:
        x, x_scale, x_zero = self._integers(write, product.activations[0])
        weight, scales = self._weight(write, product)
        inputs = [x, weight, x_scale, scales, x_zero, None, *([] if bias is None else [bias])]
        restored: ir.Value = write.op("MatMulIntegerToFloat", *inputs, domain=MICROSOFT, dtype=FLOAT)
        return restored


def in_e4m3(x: np.ndarray) -> np.ndarray:
    """x after a way through e4m3 and back, fp32."""
    return _e4m3(x).astype(np.float32)


def _e4m3(x: np.ndarray) -> np.ndarray:
    return x.clip(-LARGEST_E4M3, LARGEST_E4M3).astype(ml_dtypes.float8_e4m3fn)


def quantise_weight(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 weight and fp32 scale by output channel (column)."""
    weight = weight.astype(np.float32)
    scales = np.maximum(np.abs(weight).max(axis=0), np.finfo(np.float32).tiny * 128) / 127
    return np.clip(np.rint(weight / scales), -127, 127).astype(np.int8), scales.astype(np.float32)


def _with_bias(node: ir.Node) -> tuple[ir.Value, ir.Value | None]:
    """The product with its constant bias, if that is all that is made of it; else the product alone."""
    output = node.outputs[0]
    uses = list(output.uses())
    if len(uses) == 1 and uses[0].node.op_type == "Add" and not output.is_graph_output():
        other = next((v for v in uses[0].node.inputs if v is not output), None)
        array = constant_of(other)
        if array is not None and array.ndim == 1:
            return uses[0].node.outputs[0], other
    return output, None

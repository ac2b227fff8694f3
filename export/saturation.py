"""Evaluates int8 files as x86 CPUs without VNNI do: their sums of two products saturate in int16.

AVX2 and AVX-512 multiply uint8 activations a by int8 weights w with vpmaddubsw. ONNX Runtime applies it to the input
channels 2 i and 2 i + 1, before it subtracts zero points:

    y = sum_i clip(a_{2i} w_{2i} + a_{2i+1} w_{2i+1}, -2^15, 2^15 - 1)

VNNI (vpdpbusd) and ARM (udot) add products in int32. The weights of most pairs are so small that no activation
saturates. For the others, the evaluation adds the difference to the exact y.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, PMADDUBSW; onnxruntime/core/mlas/lib/qgemm.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from vit_fast.quantization.schemes import pair_sums

from .graphs import add_constant, append, constant_of

LEAST, MOST, UINT8_MAX = -(2**15), 2**15 - 1, 255  # LEAST and MOST of int16


def saturate(model: ir.Model) -> bool:
    """Makes the MatMuls of uint8 by int8 saturate, in place; returns False if no activation can saturate them."""
    graph, can_saturate = model.graph, False
    for node in list(graph):
        if (operands := _operands(node)) is None:
            continue
        x, weight, scales = operands
        positive, negative = UINT8_MAX * pair_sums(weight.astype(np.int32))
        pairs, channels = np.nonzero((positive > MOST) | (negative > -LEAST))
        if not len(pairs):
            continue
        can_saturate, y = True, node.outputs[0]
        readers = list(y.uses())
        x = append(graph, "Cast", x, to=ir.DataType.FLOAT)
        products = []
        for rows in (2 * pairs, 2 * pairs + 1):
            chosen = append(graph, "Gather", x, rows, axis=-1)
            products.append(append(graph, "Mul", chosen, weight[rows, channels].astype(np.float32)))
        exact = append(graph, "Add", *products)
        clipped = append(graph, "Clip", exact, np.float32(LEAST), np.float32(MOST))
        change = append(graph, "Mul", append(graph, "Sub", clipped, exact), scales[channels])
        targets = append(graph, "Expand", channels, append(graph, "Shape", change))
        change = append(graph, "CastLike", change, y)
        saturated = append(graph, "ScatterElements", y, targets, change, axis=-1, reduction="add")
        for reader in readers:
            reader.node.replace_input_with(reader.idx, saturated)
    graph.sort()
    return can_saturate


def _operands(node: ir.Node) -> tuple[Any, np.ndarray, np.ndarray] | None:
    """Returns integer activations, int8 weight [C, F] and scales of the output [F] of a MatMul in int8.

    Makes a MatMulInteger exact on every CPU, because none saturates uint8 by uint8.
    """
    graph, inputs = node.graph, list(node.inputs)
    constant: Callable[[ir.Value | None], Any] = constant_of
    if graph is not None and node.op_type == "MatMulInteger" and (weight := constant(inputs[1])) is not None:
        for i in (1, 3):  # weight and zero point
            shifted = (constant(inputs[i]).astype(np.int16) + 128).astype(np.uint8)
            node.replace_input_with(i, add_constant(graph, shifted))
        return inputs[0], weight, np.ones(weight.shape[1], np.float32)
    if node.op_type == "MatMul":
        restored: list[Any] = [None if value is None else value.producer() for value in inputs]
        if all(each is not None and each.op_type == "DequantizeLinear" for each in restored):
            (x, x_scale, _), (stored, scales, _) = (each.inputs for each in restored)
            if (weight := constant(stored)) is not None:
                return x, weight, constant(x_scale) * constant(scales)
    return None

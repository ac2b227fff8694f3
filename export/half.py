"""Keeps layers of fp16 graphs in fp32 if their values can exceed the range of fp16, which makes GPUs return NaN.

ONNX Runtime's CPU provider computes fp16 in fp32, so that its outputs do not show an overflow. This file computes the
graph in fp32 before operators are fused, and measures the largest magnitudes:

    values    inputs and outputs of all operators, at most LIMIT
    scores    inputs of a softmax, and q k^T times the scale inside of attention, at most SCORES
    sums      partial sums of matmuls, before the scale in attention; max |x| max |w_j| bounds them, at most SUMS

A LayerNormalization computes its statistics in fp32 (stash_type = 1).

These layers are not in bf16, although TensorRT supports fp16 and bf16 in one file. bf16 rounds values by up to 0.4 %,
and an fp16 file may have errors of 0.5 %. ONNX Runtime has no bf16 on a CPU, so that such a file could not be verified
there. Only few layers overflow, so that their dtype hardly changes the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from vit_fast.errors import UnsupportedInputError

from .call import Batch
from .graphs import add_constant, append, constant_of, linear_weight, run_graph, scope_of
from .programs import FP16_MAX

SUMS = FP16_MAX / 2  # other images than the measured ones may have larger values
LIMIT = SUMS / 2  # GELU reaches 2 x inside, in x (1 + erf(x / sqrt(2)))
SCORES = 1024.0  # fp16 rounds larger scores by more than 0.25, and changes their probabilities by more than 28 %
HALF, FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT


def keep_in_range(model: ir.Model, batches: Sequence[Batch]) -> tuple[str, ...]:
    """Makes nodes that can overflow compute in fp32, in place; returns the layers and their largest values."""
    peaks = _beside_constants(model.graph) | (overflowing(model, batches) if batches else {})
    widen(model.graph, peaks)
    layers: dict[str, list[ir.Node]] = defaultdict(list)
    for node in peaks:
        layers[scope_of(node)].append(node)
    lines = []
    for scope, nodes in layers.items():
        names = [str(node.name) if linear_weight(node) is not None else node.op_type for node in nodes]
        parts = ", ".join(dict.fromkeys(name.removeprefix(f"{scope}.") for name in names))
        lines.append(f"{scope or model.graph.name}: {parts} (up to {max(peaks[node] for node in nodes):.3g})")
    return tuple(lines)


def _beside_constants(graph: ir.Graph) -> dict[ir.Node, float]:
    """Returns nodes that write or read the output of an operator with a large constant, see programs.py."""
    peaks: dict[ir.Node, float] = {}
    for node in [node for node in graph if node.op_type == "Cast" and node.attributes.get_int("to") == HALF]:
        source: Any = node.inputs[0] and node.inputs[0].producer()
        values = () if source is None else source.inputs
        constants = [constant_of(value) for value in values if value is not None and value.dtype == FLOAT]
        finite = [np.abs(x[np.isfinite(x)]).max(initial=0) for x in constants if x is not None]
        if (peak := float(max(finite, default=0))) > FP16_MAX:
            peaks |= dict.fromkeys([node, *(use.node for use in node.outputs[0].uses())], peak)
    return peaks


def overflowing(model: ir.Model, batches: Sequence[Batch]) -> dict[ir.Node, float]:
    """Returns the nodes that can overflow in fp16, with the largest magnitudes of their values or sums."""
    copy = model.clone()
    twins = list(zip(model.graph, copy.graph))
    widen(copy.graph, [twin for _, twin in twins], fold=False)
    probes: list[tuple[Collection[ir.Node], float, ir.Value]] = []  # a node is too large if the value exceeds the limit
    for node, twin in twins:
        for value, wide in zip(node.outputs, twin.outputs):
            readers = [use.node for use in value.uses()]
            if value.dtype == HALF:
                is_score = any(reader.op_type == "Softmax" for reader in readers)
                probes.append(([node, *readers], SCORES if is_score else LIMIT, wide))
        probes += [([node], limit, bound) for limit, bound in _inside(copy.graph, twin)]
    probes.reverse()  # ONNX Runtime computes the last output first: this order needs the least memory
    outputs = [_largest(copy.graph, value) for _, _, value in probes]
    copy.graph.sort()
    runs = [np.stack(arrays) for arrays in run_graph(copy, batches, outputs, optimize=False)]
    peaks: dict[ir.Node, float] = {}
    for (nodes, limit, _), peak in zip(probes, np.max(runs, axis=0)):
        for node in nodes if not peak <= limit else ():
            peaks[node] = max(peaks.get(node, 0.0), float(peak))
    return {node: peaks[node] for node in model.graph if node in peaks}


def _largest(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Appends the largest finite magnitude; masks contain infinities."""
    value = append(graph, "Cast", value, to=FLOAT) if value.dtype == HALF else value  # of torch.cond
    magnitude = append(graph, "Abs", value)
    finite = append(graph, "Where", append(graph, "IsInf", magnitude), np.float32(0), magnitude)
    peak = append(graph, "ReduceMax", finite, keepdims=0)
    peak.dtype, peak.shape = FLOAT, ir.Shape([])
    return peak


def _inside(graph: ir.Graph, node: ir.Node) -> Iterator[tuple[float, ir.Value]]:
    """Appends what an operator computes inside, in fp32; yields limits and values."""
    inputs: Any = node.inputs
    if node.op_type == "Conv":
        magnitudes = [append(graph, "Abs", value) for value in inputs]
        yield SUMS, append(graph, "Conv", *magnitudes, **{name: a.value for name, a in node.attributes.items()})
    if node.op_type not in ("MatMul", "Gemm", "MultiHeadAttention", "Attention"):
        return
    (x, y), axis = inputs[:2], -1 if node.attributes.get_int("transB", 0) else -2
    if node.op_type.endswith("Attention"):
        heads = node.attributes.get_int("num_heads", 0) or node.attributes.get_int("q_num_heads", 0)
        if heads:  # [B, N, H * D]
            by_head = [append(graph, "Reshape", value, np.array([0, 0, heads, -1])) for value in (x, y)]
            x, y = (append(graph, "Transpose", value, perm=(0, 2, 1, 3)) for value in by_head)
        y = append(graph, "Transpose", y, perm=(0, 1, 3, 2))
        yield SCORES / node.attributes.get_float("scale", 1.0), append(graph, "MatMul", x, y)
    norms = [append(graph, "ReduceL2", value, np.array([a]), keepdims=0) for value, a in ((x, -1), (y, axis))]
    yield SUMS, append(graph, "Mul", *(append(graph, "ReduceMax", norm, keepdims=0) for norm in norms))


def _wide(array: ir.TensorProtocol) -> ir.LazyTensor:
    """Converts a constant when it is written, because fp32 copies of all weights need much memory."""
    return ir.LazyTensor(lambda: ir.tensor(array.numpy().astype(np.float32)), FLOAT, ir.Shape(array.numpy().shape))


def widen(graph: ir.Graph, nodes: Collection[ir.Node], fold: bool = True) -> None:
    """Makes nodes read, compute and write fp32 instead of fp16, in place. `fold` stores their weights in fp32."""
    in_fp32: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if node in nodes]:
        if any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()):
            if fold:
                reason = f"values of {node.op_type} (torch.cond) must not exceed {LIMIT:g}: export with fp32 or bf16"
                raise UnsupportedInputError("fp16", [reason])
            continue
        for i, value in enumerate(node.inputs):
            if value is None or value.dtype != HALF:
                continue
            if value not in in_fp32 and fold and value.const_value is not None:
                in_fp32[value] = add_constant(graph, _wide(value.const_value))
            elif value not in in_fp32:
                in_fp32[value] = append(graph, "Cast", value, to=FLOAT)
            node.replace_input_with(i, in_fp32[value])
        if node.op_type == "Cast" and node.attributes.get_int("to") == HALF:
            node.attributes.add(ir.AttrInt64("to", FLOAT))
        for value in node.outputs:
            if value.dtype == HALF:
                value.type = ir.TensorType(FLOAT)  # a clone shares the type
                readers = [use for use in value.uses() if use.node not in nodes]
                if readers:
                    narrow = append(graph, "Cast", value, to=HALF)
                    narrow.dtype = HALF
                    for reader in readers:
                        reader.node.replace_input_with(reader.idx, narrow)
    graph.sort()

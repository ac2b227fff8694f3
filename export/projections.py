"""How q, k and v were cut out of a linear: found by sending an array that names its own elements through the nodes.

Libraries cut the qkv linear's output by reshape/permute/unbind, by chunk, by three linears, images or tokens first.
Instead of patterns of nodes, this knows what a few layout operators do to an array, and reads off the result which
column of the linear became which (head, channel).
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from .graphs import constant_of

LAYOUT_OPS = {"Reshape", "Transpose", "Slice", "Split", "Squeeze", "Unsqueeze", "Gather", "Identity"}
PROBE_BATCH = 2  # more than one, so that a layout which mixes images shows
PROBE_PIXELS = 56  # at least one patch of every usual size
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "floor": math.floor, "ceiling": math.ceil, "Max": max, "Min": min, "max": max, "min": min,
    "FloorDiv": operator.floordiv, "Mod": operator.mod,
}  # fmt: skip


@dataclass(frozen=True)
class Projection:
    """Where one of q, k, v comes from: rows of x times weight[:, columns] + bias[columns].

    Attributes:
        x: [B, N, C_in], or [N, B, C_in] when rows_transposed.
        linear: The whole linear's output.
        weight: [C_in, C_out], a constant.
        bias: [C_out], a constant, or None.
        columns: Columns [H * D] of the linear in the order of heads and their channels.
        rows_transposed: Whether tokens come before images in x.
    """

    x: ir.Value
    linear: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    columns: np.ndarray
    rows_transposed: bool


def projection_of(value: ir.Value | None, sizes: Sizes) -> Projection | None:
    """Follows layout nodes back from q, k or v [B, H, N, D] to a linear, and probes what they do."""
    chain: list[ir.Value] = []
    while value is not None:
        producer = value.producer()
        if producer is None or producer.domain != "" or producer.op_type not in LAYOUT_OPS:
            break
        chain.append(value)
        value = producer.inputs[0]
    linear = _linear_of(value)
    if linear is None or value is None:
        return None
    x, weight, bias = linear
    shape = sizes.of(value)
    if shape is None or len(shape) != 3:
        return None
    probe = _named_elements(shape)
    for step in reversed(chain):
        moved = _apply_layout(step, probe, sizes)
        if moved is None:
            return None
        probe = moved
    rows, columns = np.divmod(probe, shape[-1])  # both [B, H, N, D]
    B, _, N, _ = probe.shape
    expected = np.arange(B)[:, None] * N + np.arange(N)
    transposed = np.arange(B)[:, None] + np.arange(N) * B
    if (columns != columns[:1, :, :1]).any():
        return None
    for row_index, rows_transposed in ((expected, False), (transposed, True)):
        # the shape too: with one image both orders number the rows alike
        as_shaped = shape[:2] == ((N, B) if rows_transposed else (B, N))
        if as_shaped and (rows == row_index[:, None, :, None]).all():
            return Projection(x, value, weight, bias, columns[0, :, 0].reshape(-1), rows_transposed)
    return None


def _named_elements(shape: tuple[int, ...]) -> np.ndarray:
    count = math.prod(shape)
    return np.arange(count, dtype=np.int32 if count < 2**31 else np.int64).reshape(shape)


def _linear_of(value: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value | None] | None:
    """(x, weight [C_in, C_out], bias or None) when the value is x @ weight [+ bias] with constant weight and bias."""
    producer = None if value is None else value.producer()
    bias = None
    if producer is not None and producer.op_type == "Add":
        for i, other in ((0, 1), (1, 0)):
            candidate = producer.inputs[other]
            if candidate is not None and candidate.const_value is not None and len(candidate.const_value.shape) == 1:
                bias = candidate
                producer = producer.inputs[i].producer()  # type: ignore[union-attr]  # both inputs of an Add
                break
    if producer is None or producer.op_type != "MatMul":
        return None
    x, weight = producer.inputs
    if x is None or weight is None or weight.const_value is None or len(weight.const_value.shape) != 2:
        return None
    return x, weight, bias


def merged_output(node: ir.Node, sizes: Sizes) -> ir.Value | None:
    """Follows layout nodes forward from the output [B, H, N, D] until it lies as [B, N, H * D]."""
    value = node.outputs[0]
    shape = sizes.of(value)
    if shape is None:
        return None
    B, H, N, D = shape
    probe = _named_elements(shape)
    wanted = probe.transpose(0, 2, 1, 3).reshape(B, N, H * D)
    while True:
        uses = value.uses()
        if len(uses) != 1 or value.is_graph_output():
            return None
        consumer = next(iter(uses)).node
        if consumer.op_type not in LAYOUT_OPS or consumer.domain != "":
            return None
        value = consumer.outputs[0]
        moved = _apply_layout(value, probe, sizes)
        if moved is None:
            return None
        probe = moved
        if probe.shape == wanted.shape and (probe == wanted).all():
            return value


class Sizes:
    """Concrete sizes for symbolic shapes: every symbol gets a number, every expression of symbols its value."""

    def __init__(self, graph: ir.Graph) -> None:
        batch = graph.inputs[0].shape[0] if graph.inputs[0].shape else None
        self.batch = batch.value if isinstance(batch, ir.SymbolicDim) else None

    def of(self, value: ir.Value) -> tuple[int, ...] | None:
        if value.shape is None:
            return None
        sizes = [dim if isinstance(dim, int) else self._evaluate(dim.value) for dim in value.shape]
        known = tuple(size for size in sizes if size is not None and size >= 1)
        return known if len(known) == len(sizes) else None

    def _evaluate(self, expression: str | None) -> int | None:
        try:
            number = self._number(ast.parse(expression or "", mode="eval").body)
        except (SyntaxError, KeyError, TypeError, ZeroDivisionError):
            return None
        return int(number) if number == int(number) else None

    def _number(self, part: ast.expr) -> Any:
        if isinstance(part, ast.Constant):
            return part.value
        if isinstance(part, ast.Name):
            return PROBE_BATCH if part.id == self.batch else PROBE_PIXELS
        if isinstance(part, ast.BinOp):
            return _ARITHMETIC[type(part.op)](self._number(part.left), self._number(part.right))
        if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.USub):
            return -self._number(part.operand)
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name):
            return _FUNCTIONS[part.func.id](*map(self._number, part.args))
        raise KeyError(type(part).__name__)


def _apply_layout(output: ir.Value, array: np.ndarray, sizes: Sizes) -> np.ndarray | None:
    """What a layout node makes of an array; None when that cannot be said without running the model."""
    node = output.producer()
    if node is None:
        return None
    if node.op_type == "Identity":
        return array
    if node.op_type == "Transpose":
        perm = node.attributes.get_ints("perm")
        return array.transpose(perm)
    if node.op_type in ("Reshape", "Squeeze", "Unsqueeze"):
        shape = sizes.of(output)
        return array.reshape(shape) if shape is not None and np.prod(shape) == array.size else None
    constants = [constant_of(v) for v in node.inputs[1:]]
    if node.op_type == "Gather":
        return None if constants[0] is None else np.take(array, constants[0], axis=node.attributes.get_int("axis", 0))
    if node.op_type == "Slice":
        return _apply_slice(array, constants)
    return _apply_split(node, output, array, sizes)


def _apply_slice(array: np.ndarray, constants: Sequence[np.ndarray | None]) -> np.ndarray | None:
    if any(c is None for c in constants) or len(constants) < 3:
        return None
    starts, ends, axes = (c.reshape(-1) for c in constants[:3])  # type: ignore[union-attr]  # as was just asked
    steps = constants[3].reshape(-1) if len(constants) > 3 else np.ones_like(starts)  # type: ignore[union-attr]  # likewise
    index = [slice(None)] * array.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        index[axis] = slice(int(start), int(end), int(step))
    return array[tuple(index)]


def _apply_split(node: ir.Node, output: ir.Value, array: np.ndarray, sizes: Sizes) -> np.ndarray | None:
    axis, offset = node.attributes.get_int("axis", 0), 0
    for part in node.outputs:
        shape = sizes.of(part)
        if shape is None:
            return None
        if part is output:
            return np.take(array, range(offset, offset + shape[axis]), axis=axis)
        offset += shape[axis]
    return None

"""Attention in the graph: recognised as one node, its q/k/v layout undone, written in the form a target runs best.

    softmax(scale * q k^T) v

torch's exporter is told (custom_translation_table) to write every scaled_dot_product_attention as one placeholder node.
How q, k and v were cut out of the qkv linear differs by library (reshape/permute/unbind, chunk, three linears ...), so
nothing here matches patterns of nodes: an array that names its own elements is sent through the layout nodes between the
linear and the placeholder, and what comes out says which column of the linear became which (head, channel).
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir

from .graphs import Writer, constant_of, replace

DOMAIN = "vit_fast.placeholder"
SDPA = "Sdpa"
MICROSOFT = "com.microsoft"

Form = Literal["plain", "attention", "attention_4d", "multi_head_attention"]
"""plain: MatMul, Softmax, MatMul. attention: ONNX's own node (opset 23) on [B, N, C]; attention_4d: on [B, H, N, D].
multi_head_attention: com.microsoft's node."""

_LAYOUT_OPS = {"Reshape", "Transpose", "Slice", "Split", "Squeeze", "Unsqueeze", "Gather", "Identity"}
_PROBE_BATCH = 2  # more than one, so that a layout which mixes images shows
_PROBE_PIXELS = 56  # at least one patch of every usual size
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "floor": math.floor, "ceiling": math.ceil, "Max": max, "Min": min, "max": max, "min": min,
    "FloorDiv": operator.floordiv, "Mod": operator.mod,
}  # fmt: skip


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What torch.onnx.export needs in order to write attention as a placeholder node."""
    import torch
    from onnxscript import values

    if not onnx.defs.has(SDPA, DOMAIN):
        schema = onnx.defs.OpSchema
        any_float = "T"
        onnx.defs.register_schema(
            schema(
                SDPA,
                DOMAIN,
                1,
                inputs=[schema.FormalParameter(name, any_float) for name in ("q", "k", "v")],
                outputs=[schema.FormalParameter("mixed", any_float)],
                type_constraints=[(any_float, ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
                attributes=[schema.Attribute("scale", schema.AttrType.FLOAT, "", required=True)],
            )
        )
    placeholder = values.Op(values.Opset(DOMAIN, 1), SDPA)

    def sdpa(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        given = {"attn_mask": attn_mask is not None, "dropout_p": dropout_p, "is_causal": is_causal, "enable_gqa": enable_gqa}
        if unsupported := [name for name, value in given.items() if value]:
            raise NotImplementedError(f"scaled_dot_product_attention with {', '.join(unsupported)}")
        return placeholder(query, key, value, scale=query.shape[-1] ** -0.5 if scale is None else scale)

    return {torch.ops.aten.scaled_dot_product_attention.default: sdpa}


@dataclass
class _Projection:
    """Where one of q, k, v comes from: rows x [B, N, C_in] times weight[:, columns] + bias[columns]."""

    x: ir.Value
    linear: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    columns: np.ndarray  # [H * D], head-major
    rows_transposed: bool  # x is [N, B, C_in]


@dataclass
class Site:
    """One attention placeholder and what was found out around it."""

    node: ir.Node
    heads: int
    head_dim: int
    scale: float
    packed: tuple[_Projection, _Projection, _Projection] | None
    merged: ir.Value | None  # where the output lies as [B, N, H * D], after the model's own layout nodes


@dataclass
class LoweringReport:
    """How many attentions there were, and how many had q, k and v written as one packed matrix product."""

    sites: int = 0
    packed: int = 0


def lower_attention(model: ir.Model, form: Form) -> LoweringReport:
    """Replaces every placeholder of a model by the nodes of `form`; in place."""
    report = LoweringReport()
    for site in find_sites(model):
        _lower(model.graph, site, form, index=report.sites)
        report.sites += 1
        report.packed += site.packed is not None
    return report


def find_sites(model: ir.Model) -> list[Site]:
    """The placeholders of a model, each with its canonical projections where they could be found."""
    sizes = _Sizes(model.graph)
    return [_examine(node, sizes) for node in model.graph if node.domain == DOMAIN and node.op_type == SDPA]


# --- finding the layout ------------------------------------------------------------------------------------------------


def _examine(node: ir.Node, sizes: _Sizes) -> Site:
    q = node.inputs[0]
    assert q is not None and q.shape is not None  # noqa: S101
    heads, head_dim = q.shape[1], q.shape[3]
    if not isinstance(heads, int) or not isinstance(head_dim, int):
        raise ValueError(f"attention {node.name}: the number of heads and their width must be fixed, found {q.shape}")
    scale = node.attributes.get_float("scale")
    projections = [_projection_of(value, sizes) for value in node.inputs]
    packed = None
    if all(p is not None for p in projections):
        first = projections[0]
        same = all(p.x is first.x and p.rows_transposed == first.rows_transposed for p in projections)  # type: ignore[union-attr]
        biases = {p.bias is None for p in projections}  # type: ignore[union-attr]
        if same and len(biases) == 1:
            packed = tuple(projections)
    return Site(node, heads, head_dim, scale, packed, _merged_output(node, sizes))  # type: ignore[arg-type]


def _projection_of(value: ir.Value | None, sizes: _Sizes) -> _Projection | None:
    """Follows layout nodes back from q, k or v [B, H, N, D] to a linear, and probes what they do."""
    chain: list[ir.Value] = []
    while value is not None:
        producer = value.producer()
        if producer is None or producer.domain != "" or producer.op_type not in _LAYOUT_OPS:
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
    probe: np.ndarray | None = _named_elements(shape)
    for step in reversed(chain):
        probe = _apply_layout(step, probe, sizes)
        if probe is None:
            return None
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
            return _Projection(x, value, weight, bias, columns[0, :, 0].reshape(-1), rows_transposed)
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
                producer = producer.inputs[i].producer()  # type: ignore[union-attr]
                break
    if producer is None or producer.op_type != "MatMul":
        return None
    x, weight = producer.inputs
    if x is None or weight is None or weight.const_value is None or len(weight.const_value.shape) != 2:
        return None
    return x, weight, bias


def _merged_output(node: ir.Node, sizes: _Sizes) -> ir.Value | None:
    """Follows layout nodes forward from the output [B, H, N, D] until it lies as [B, N, H * D]."""
    value = node.outputs[0]
    shape = sizes.of(value)
    if shape is None:
        return None
    B, H, N, D = shape
    probe: np.ndarray | None = _named_elements(shape)
    wanted = probe.transpose(0, 2, 1, 3).reshape(B, N, H * D)
    while True:
        uses = value.uses()
        if len(uses) != 1 or value.is_graph_output():
            return None
        consumer = next(iter(uses)).node
        if consumer.op_type not in _LAYOUT_OPS or consumer.domain != "":
            return None
        value = consumer.outputs[0]
        probe = _apply_layout(value, probe, sizes)
        if probe is None:
            return None
        if probe.shape == wanted.shape and (probe == wanted).all():
            return value


class _Sizes:
    """Concrete sizes for symbolic shapes: every symbol gets a number, every expression of symbols its value."""

    def __init__(self, graph: ir.Graph) -> None:
        batch = graph.inputs[0].shape[0] if graph.inputs[0].shape else None
        self.batch = batch.value if isinstance(batch, ir.SymbolicDim) else None

    def of(self, value: ir.Value) -> tuple[int, ...] | None:
        if value.shape is None:
            return None
        sizes = [dim if isinstance(dim, int) else self._evaluate(dim.value) for dim in value.shape]
        return None if any(size is None or size < 1 for size in sizes) else tuple(sizes)  # type: ignore[arg-type, operator]

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
            return _PROBE_BATCH if part.id == self.batch else _PROBE_PIXELS
        if isinstance(part, ast.BinOp):
            return _ARITHMETIC[type(part.op)](self._number(part.left), self._number(part.right))
        if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.USub):
            return -self._number(part.operand)
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name):
            return _FUNCTIONS[part.func.id](*map(self._number, part.args))
        raise KeyError(type(part).__name__)


def _apply_layout(output: ir.Value, array: np.ndarray | None, sizes: _Sizes) -> np.ndarray | None:
    """What a layout node makes of an array; None when that cannot be said without running the model."""
    node = output.producer()
    if node is None or array is None:
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
    starts, ends, axes = (c.reshape(-1) for c in constants[:3])  # type: ignore[union-attr]
    steps = constants[3].reshape(-1) if len(constants) > 3 else np.ones_like(starts)  # type: ignore[union-attr]
    index = [slice(None)] * array.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        index[axis] = slice(int(start), int(end), int(step))
    return array[tuple(index)]


def _apply_split(node: ir.Node, output: ir.Value, array: np.ndarray, sizes: _Sizes) -> np.ndarray | None:
    axis, offset = node.attributes.get_int("axis", 0), 0
    for part in node.outputs:
        shape = sizes.of(part)
        if shape is None:
            return None
        if part is output:
            return np.take(array, range(offset, offset + shape[axis]), axis=axis)
        offset += shape[axis]
    return None


# --- writing it again ---------------------------------------------------------------------------------------------------


def _lower(graph: ir.Graph, site: Site, form: Form, index: int) -> None:
    write = Writer(graph, f"attention.{index}", before=site.node)
    H, C = site.heads, site.heads * site.head_dim
    scale = site.scale
    if form == "multi_head_attention" or form == "attention":
        q, k, v = _split_packed(write, site) if site.packed else [_as_rows(write, x, C) for x in site.node.inputs]
        if form == "attention":
            rows = write.op("Attention", q, k, v, q_num_heads=H, kv_num_heads=H, scale=scale)
        else:
            rows = write.op("MultiHeadAttention", q, k, v, domain=MICROSOFT, num_heads=H, scale=scale)
        if site.merged is not None:
            replace(site.merged, rows)
        else:
            split = write.op("Reshape", rows, write.constant([0, 0, H, site.head_dim], "heads"))
            replace(site.node.outputs[0], write.op("Transpose", split, perm=[0, 2, 1, 3]))
        return
    q, k, v = _heads_from_packed(write, site) if site.packed else site.node.inputs
    if form == "attention_4d":
        mixed = write.op("Attention", q, k, v, scale=scale)
    else:
        dtype = site.node.inputs[0].dtype or ir.DataType.FLOAT  # type: ignore[union-attr]
        # q is scaled before the product: in fp16 the unscaled scores can pass 65504
        scaled = write.op("Mul", q, write.constant(np.asarray(scale, dtype.numpy()), "scale"))
        scores = write.op("MatMul", scaled, write.op("Transpose", k, perm=[0, 1, 3, 2]))
        mixed = write.op("MatMul", write.op("Softmax", scores, axis=-1), v)
    if site.merged is not None:
        merged = write.op("Transpose", mixed, perm=[0, 2, 1, 3])
        replace(site.merged, write.op("Reshape", merged, write.constant([0, 0, C], "merged")))
    else:
        replace(site.node.outputs[0], mixed)


def _packed_linear(write: Writer, site: Site) -> ir.Value:
    """One matrix product giving [B, N, q | k | v], each head-major."""
    first, *others = site.packed  # type: ignore[misc]
    x = write.op("Transpose", first.x, perm=[1, 0, 2]) if first.rows_transposed else first.x
    weight, bias = first.weight, first.bias
    columns = np.concatenate([p.columns for p in site.packed])  # type: ignore[union-attr]
    one_linear = all(p.weight is weight for p in others)
    if one_linear and (columns == np.arange(weight.const_value.shape[1])).all():  # type: ignore[union-attr]
        if not first.rows_transposed:
            return first.linear
    else:
        parts = site.packed or ()
        weight = write.constant(
            np.concatenate([p.weight.const_value.numpy()[:, p.columns] for p in parts], axis=1), "qkv.weight"
        )
        if bias is not None:
            bias = write.constant(np.concatenate([p.bias.const_value.numpy()[p.columns] for p in parts]), "qkv.bias")
    product = write.op("MatMul", x, weight)
    return product if bias is None else write.op("Add", product, bias)


def _split_packed(write: Writer, site: Site) -> list[ir.Value]:
    C = site.heads * site.head_dim
    sizes = write.constant([C, C, C], "qkv.sizes")
    parts: list[ir.Value] = write.op("Split", _packed_linear(write, site), sizes, outputs=3, axis=2)
    return parts


def _heads_from_packed(write: Writer, site: Site) -> list[ir.Value]:
    """q, k, v as [B, H, N, D], from the packed product by one transpose."""
    heads = write.constant([0, 0, 3, site.heads, site.head_dim], "qkv.heads")
    by_head = write.op("Transpose", write.op("Reshape", _packed_linear(write, site), heads), perm=[2, 0, 3, 1, 4])
    parts = []
    for i, name in enumerate("qkv"):
        parts.append(write.op("Gather", by_head, write.constant(np.asarray(i, np.int64), f"{name}.index"), axis=0))
    return parts


def _as_rows(write: Writer, value: ir.Value | None, C: int) -> ir.Value:
    """[B, H, N, D] -> [B, N, H * D]."""
    rows: ir.Value = write.op(
        "Reshape", write.op("Transpose", value, perm=[0, 2, 1, 3]), write.constant([0, 0, C], "rows")
    )
    return rows

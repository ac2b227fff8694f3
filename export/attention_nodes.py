"""Attention in the graph: recognised as one node, its q/k/v layout undone, written in the form a target runs best.

    softmax(scale * q k^T) v

torch's exporter is told (custom_translation_table) to write every scaled_dot_product_attention as one placeholder node;
projections.py finds out how q, k and v were cut out of the linear before it; here it is written again for a target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir

from .graphs import Writer, constant_of, replace
from .projections import Projection, Sizes, merged_output, projection_of

DOMAIN = "vit_fast.placeholder"
SDPA = "Sdpa"
MICROSOFT = "com.microsoft"

Form = Literal["plain", "attention", "attention_4d", "multi_head_attention"]
"""plain: MatMul, Softmax, MatMul. attention: ONNX's own node (opset 23) on [B, N, C]; attention_4d: on [B, H, N, D].
multi_head_attention: com.microsoft's node."""


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What torch.onnx.export needs in order to write attention as a placeholder node."""
    import torch
    from onnxscript import opset18, values

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
        given = {
            "attn_mask that is no boolean one": attn_mask is not None and attn_mask.dtype != ir.DataType.BOOL,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "enable_gqa": enable_gqa,
        }
        if unsupported := [name for name, value in given.items() if value]:
            raise NotImplementedError(f"scaled_dot_product_attention with {', '.join(unsupported)}")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if attn_mask is None:
            return placeholder(query, key, value, scale=scale)
        # no runtime has a form of its own for it; q is scaled first, as in `_lower`
        scores = opset18.MatMul(
            opset18.Mul(query, opset18.CastLike(scale, query)), opset18.Transpose(key, perm=[0, 1, 3, 2])
        )
        nothing = opset18.CastLike(float("-inf"), query)
        return opset18.MatMul(opset18.Softmax(opset18.Where(attn_mask, scores, nothing), axis=-1), value)

    return {torch.ops.aten.scaled_dot_product_attention.default: sdpa}


@dataclass
class Site:
    """One attention placeholder and what was found out around it."""

    node: ir.Node
    heads: int
    head_dim: int
    scale: float
    packed: list[Projection] | None
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
    sizes = Sizes(model.graph)
    return [_examine(node, sizes) for node in model.graph if node.domain == DOMAIN and node.op_type == SDPA]


def _examine(node: ir.Node, sizes: Sizes) -> Site:
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    heads, head_dim = (None, None) if shape is None else (shape[1], shape[3])
    if not isinstance(heads, int) or not isinstance(head_dim, int):
        raise ValueError(f"attention {node.name}: the number of heads and their width must be fixed, found {shape}")
    scale = node.attributes.get_float("scale")
    return Site(node, heads, head_dim, scale, _packed(node, sizes), merged_output(node, sizes))


def _packed(node: ir.Node, sizes: Sizes) -> list[Projection] | None:
    """The projections of q, k and v when one matrix product can give all three."""
    projections = [p for value in node.inputs if (p := projection_of(value, sizes)) is not None]
    if len(projections) != 3:
        return None
    first = projections[0]
    one_source = all(p.x is first.x and p.rows_transposed == first.rows_transposed for p in projections)
    all_or_none = len({p.bias is None for p in projections}) == 1
    return projections if one_source and all_or_none else None


# --- writing it again ---------------------------------------------------------------------------------------


def _lower(graph: ir.Graph, site: Site, form: Form, index: int) -> None:
    write = Writer(graph, f"attention.{index}", before=site.node)
    H, C = site.heads, site.heads * site.head_dim
    scale = site.scale
    if form == "multi_head_attention" or form == "attention":
        q, k, v = _split_packed(write, site.packed, C) if site.packed else _rows(write, site.node, C)
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
    q, k, v = _heads_from_packed(write, site.packed, H) if site.packed else _inputs(site.node)
    if form == "attention_4d":
        mixed = write.op("Attention", q, k, v, scale=scale)
    else:
        dtype = q.dtype or ir.DataType.FLOAT
        # q is scaled before the product: in fp16 the unscaled scores can pass 65504
        scaled = write.op("Mul", q, write.constant(np.asarray(scale, dtype.numpy()), "scale"))
        scores = write.op("MatMul", scaled, write.op("Transpose", k, perm=[0, 1, 3, 2]))
        mixed = write.op("MatMul", write.op("Softmax", scores, axis=-1), v)
    if site.merged is not None:
        merged = write.op("Transpose", mixed, perm=[0, 2, 1, 3])
        replace(site.merged, write.op("Reshape", merged, write.constant([0, 0, C], "merged")))
    else:
        replace(site.node.outputs[0], mixed)


def _packed_linear(write: Writer, packed: list[Projection]) -> ir.Value:
    """One matrix product giving [B, N, q | k | v], each head-major."""
    first = packed[0]
    columns = np.concatenate([p.columns for p in packed])
    as_it_lies = all(p.linear is first.linear for p in packed) and (columns == np.arange(len(columns))).all()
    if as_it_lies and not first.rows_transposed:
        return first.linear
    weights = [_constant(p.weight) for p in packed]
    weight = write.constant(np.concatenate([w[:, p.columns] for w, p in zip(weights, packed)], axis=1), "qkv.weight")
    x = write.op("Transpose", first.x, perm=[1, 0, 2]) if first.rows_transposed else first.x
    product: ir.Value = write.op("MatMul", x, weight)
    biases = [_constant(p.bias)[p.columns] for p in packed if p.bias is not None]
    if biases:
        product = write.op("Add", product, write.constant(np.concatenate(biases), "qkv.bias"))
    return product


def _constant(value: ir.Value) -> np.ndarray:
    array = constant_of(value)
    if array is None:
        raise ValueError(f"{value.name} is not constant")
    return array


def _split_packed(write: Writer, packed: list[Projection], C: int) -> list[ir.Value]:
    sizes = write.constant([C, C, C], "qkv.sizes")
    parts: list[ir.Value] = write.op("Split", _packed_linear(write, packed), sizes, outputs=3, axis=2)
    return parts


def _heads_from_packed(write: Writer, packed: list[Projection], H: int) -> list[ir.Value]:
    """q, k, v as [B, H, N, D], from the packed product by one transpose."""
    heads = write.constant([0, 0, 3, H, -1], "qkv.heads")
    by_head = write.op("Transpose", write.op("Reshape", _packed_linear(write, packed), heads), perm=[2, 0, 3, 1, 4])
    parts = []
    for i, name in enumerate("qkv"):
        parts.append(write.op("Gather", by_head, write.constant(np.asarray(i, np.int64), f"{name}.index"), axis=0))
    return parts


def _inputs(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


def _rows(write: Writer, node: ir.Node, C: int) -> list[ir.Value]:
    """q, k and v [B, H, N, D] -> [B, N, H * D] each."""
    merged = [write.op("Transpose", value, perm=[0, 2, 1, 3]) for value in _inputs(node)]
    return [write.op("Reshape", value, write.constant([0, 0, C], "rows")) for value in merged]

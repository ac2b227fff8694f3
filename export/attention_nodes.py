"""Attention as one placeholder node, which is replaced by the form that is fastest on a target.

    softmax(scale * q k^T) v

With our custom_translation_table, torch's exporter writes attention of packed projections [B, N, q | k | v], and each
other scaled_dot_product_attention, as one node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir

from .exported_blocks import exported_attention
from .graphs import MICROSOFT, Writer, replace

DOMAIN = "vit_fast.placeholder"
PACKED, SDPA = "Packed", "Sdpa"

Form = Literal["plain", "attention", "attention_4d", "multi_head_attention"]
"""plain: MatMul, Softmax, MatMul. attention: ONNX's own node (opset 23) on [B, N, C]; attention_4d: on [B, H, N, D].
multi_head_attention: com.microsoft's node."""


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns the custom_translation_table with which torch.onnx.export writes attention as placeholder nodes."""
    import torch
    from onnxscript import opset18, values

    _register(SDPA, ("q", "k", "v"), scale=onnx.defs.OpSchema.AttrType.FLOAT)
    attributes = {"heads": onnx.defs.OpSchema.AttrType.INT, "scale": onnx.defs.OpSchema.AttrType.FLOAT}
    _register(PACKED, ("qkv",), **attributes)
    placeholders = values.Opset(DOMAIN, 1)
    packed, placeholder = values.Op(placeholders, PACKED), values.Op(placeholders, SDPA)

    def sdpa(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        given = {
            "attn_mask that is not boolean": attn_mask is not None and attn_mask.dtype != ir.DataType.BOOL,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "enable_gqa": enable_gqa,
        }
        if unsupported := [name for name, value in given.items() if value]:
            raise NotImplementedError(f"scaled_dot_product_attention with {', '.join(unsupported)}")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if attn_mask is None:
            return placeholder(query, key, value, scale=scale)
        # no runtime has a fused form; q is scaled first, as in `_on_heads`
        scores = opset18.MatMul(
            opset18.Mul(query, opset18.CastLike(scale, query)), opset18.Transpose(key, perm=[0, 1, 3, 2])
        )
        nothing = opset18.CastLike(float("-inf"), query)
        return opset18.MatMul(opset18.Softmax(opset18.Where(attn_mask, scores, nothing), axis=-1), value)

    def packed_attention(qkv: Any, heads: int, scale: float) -> Any:
        return packed(qkv, heads=heads, scale=scale)

    return {
        torch.ops.aten.scaled_dot_product_attention.default: sdpa,
        exported_attention._opoverload: packed_attention,
    }


def _register(name: str, inputs: tuple[str, ...], **attributes: Any) -> None:
    if onnx.defs.has(name, DOMAIN):
        return
    schema = onnx.defs.OpSchema
    kinds = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    onnx.defs.register_schema(
        schema(
            name,
            DOMAIN,
            1,
            inputs=[schema.FormalParameter(each, "T") for each in inputs],
            outputs=[schema.FormalParameter("mixed", "T")],
            type_constraints=[("T", kinds, "")],
            attributes=[schema.Attribute(each, kind, "", required=True) for each, kind in attributes.items()],
        )
    )


def lower_attention(model: ir.Model, form: Form) -> tuple[int, int]:
    """Replaces all placeholders by the nodes of `form`, in place; returns the number of all and of packed ones."""
    nodes = [node for node in model.graph if node.domain == DOMAIN]
    for count, node in enumerate(nodes):
        write = Writer(model.graph, f"attention.{count}", before=node)
        lower = _from_packed if node.op_type == PACKED else _from_heads
        replace(node.outputs[0], lower(write, node, form))
    return len(nodes), sum(node.op_type == PACKED for node in nodes)


def _from_packed(write: Writer, node: ir.Node, form: Form) -> ir.Value:
    """[B, N, q | k | v] -> [B, N, C]."""
    (qkv,) = node.inputs
    shape = None if qkv is None else qkv.shape
    heads, scale = node.attributes.get_int("heads"), node.attributes.get_float("scale")
    if shape is None or not isinstance(shape[2], int):
        raise ValueError(f"attention {node.name}: the number of channels must be static, got {shape}")
    C = shape[2] // 3
    if form in ("attention", "multi_head_attention"):
        q, k, v = write.op("Split", qkv, write.constant([C, C, C], "qkv.sizes"), outputs=3, axis=2)
        return _on_rows(write, q, k, v, form, heads, scale)
    by_head = write.op("Reshape", qkv, write.constant([0, 0, 3, heads, C // heads], "qkv.heads"))
    by_head = write.op("Transpose", by_head, perm=[2, 0, 3, 1, 4])
    q, k, v = (
        write.op("Gather", by_head, write.constant(np.asarray(i, np.int64), f"{name}.index"), axis=0)
        for i, name in enumerate("qkv")
    )
    mixed = write.op("Transpose", _on_heads(write, q, k, v, form, scale), perm=[0, 2, 1, 3])
    merged: ir.Value = write.op("Reshape", mixed, write.constant([0, 0, C], "merged"))
    return merged


def _from_heads(write: Writer, node: ir.Node, form: Form) -> ir.Value:
    """q, k and v, [B, H, N, D] each -> [B, H, N, D]."""
    q, k, v = (value for value in node.inputs if value is not None)
    scale, shape = node.attributes.get_float("scale"), q.shape
    if form != "multi_head_attention":
        return _on_heads(write, q, k, v, form, scale)
    heads, head_dim = (None, None) if shape is None else (shape[1], shape[3])
    if not isinstance(heads, int) or not isinstance(head_dim, int):
        raise ValueError(f"attention {node.name}: the number of heads and head_dim must be static, got {shape}")
    merged = [write.op("Transpose", value, perm=[0, 2, 1, 3]) for value in (q, k, v)]
    q, k, v = (write.op("Reshape", value, write.constant([0, 0, heads * head_dim], "rows")) for value in merged)
    mixed = _on_rows(write, q, k, v, form, heads, scale)
    split = write.op("Reshape", mixed, write.constant([0, 0, heads, head_dim], "heads"))
    by_head: ir.Value = write.op("Transpose", split, perm=[0, 2, 1, 3])
    return by_head


def _on_rows(write: Writer, q: ir.Value, k: ir.Value, v: ir.Value, form: Form, heads: int, scale: float) -> ir.Value:
    mixed: ir.Value
    if form == "attention":
        mixed = write.op("Attention", q, k, v, q_num_heads=heads, kv_num_heads=heads, scale=scale)
    else:
        mixed = write.op("MultiHeadAttention", q, k, v, domain=MICROSOFT, num_heads=heads, scale=scale)
    return mixed


def _on_heads(write: Writer, q: ir.Value, k: ir.Value, v: ir.Value, form: Form, scale: float) -> ir.Value:
    mixed: ir.Value
    if form != "plain":
        mixed = write.op("Attention", q, k, v, scale=scale)
        return mixed
    # scale q before the product: in fp16, unscaled scores can exceed 65504
    dtype = q.dtype or ir.DataType.FLOAT
    scaled = write.op("Mul", q, write.constant(np.asarray(scale, dtype.numpy()), "scale"))
    scores = write.op("MatMul", scaled, write.op("Transpose", k, perm=[0, 1, 3, 2]))
    mixed = write.op("MatMul", write.op("Softmax", scores, axis=-1), v)
    return mixed

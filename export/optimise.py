"""Optimizes a graph for its target: replaces attention placeholders, and uses ONNX Runtime's fused operators.

A placeholder is one node for attention, softmax(scale * q k^T) v. It is replaced by the nodes that are fastest on the
target. torch's exporter writes two kinds of placeholders, because of our custom_translation_table: Packed for attention
of packed qkv [B, N, q | k | v], and Sdpa for every other scaled_dot_product_attention.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from onnxscript.rewriter import pattern, rewrite
from onnxscript.rewriter.ort_fusions.bias_gelu import fuse_bias_gelu
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_layer_normalization
from onnxscript.rewriter.rules.common import no_op_transpose_rule, transpose_transpose_rule

from vit_fast.libraries.interface.image_model import ImageModel

from .exported_blocks import exported_attention
from .graphs import MICROSOFT, Writer, replace
from .options import ATTENTION_OPSET, ExportOptions
from .report import Fusion

DOMAIN = "vit_fast.placeholder"
PACKED, SDPA = "Packed", "Sdpa"
SKIP_NORM, BIAS_GELU, LAYER_NORM = "SkipLayerNormalization", "BiasGelu", "LayerNormalization"

Form = Literal["plain", "attention", "attention_4d", "multi_head_attention"]
"""Nodes that replace a placeholder.

plain: MatMul, Softmax, MatMul. attention: ONNX's Attention (opset 23) on [B, N, C]; attention_4d: on [B, H, N, D].
multi_head_attention: com.microsoft's MultiHeadAttention on [B, N, C].
"""


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns the custom_translation_table for torch.onnx.export, which writes attention as placeholder nodes."""
    import torch
    from onnxscript import opset18, values

    kinds = onnx.defs.OpSchema.AttrType
    _register(SDPA, ("q", "k", "v"), scale=kinds.FLOAT)
    _register(PACKED, ("qkv",), heads=kinds.INT, scale=kinds.FLOAT)
    packed, placeholder = (values.Op(values.Opset(DOMAIN, 1), name) for name in (PACKED, SDPA))

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
        # no runtime fuses attention with a mask; scale q first, see `_on_heads`
        scaled = opset18.Mul(query, opset18.CastLike(scale, query))
        scores = opset18.MatMul(scaled, opset18.Transpose(key, perm=[0, 1, 3, 2]))
        masked = opset18.Where(attn_mask, scores, opset18.CastLike(float("-inf"), query))
        return opset18.MatMul(opset18.Softmax(masked, axis=-1), value)

    def packed_attention(qkv: Any, heads: int, scale: float) -> Any:
        return packed(qkv, heads=heads, scale=scale)

    return {torch.ops.aten.scaled_dot_product_attention.default: sdpa, exported_attention._opoverload: packed_attention}


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
    """Replaces the placeholders by nodes of a form, in place.

    Returns:
        The number of placeholders, and how many of them were packed.
    """
    nodes = [node for node in model.graph if node.domain == DOMAIN]
    for count, node in enumerate(nodes):
        write = Writer(model.graph, f"attention.{count}", before=node)
        lower = _from_packed if node.op_type == PACKED else _from_heads
        replace(node.outputs[0], lower(write, node, form))
    return len(nodes), sum(node.op_type == PACKED for node in nodes)


def _from_packed(write: Writer, node: ir.Node, form: Form) -> ir.Value:
    """[B, N, q | k | v] -> [B, N, C]."""
    (qkv,) = (value for value in node.inputs if value is not None)
    heads, scale = node.attributes.get_int("heads"), node.attributes.get_float("scale")
    C = _static(node, qkv, 2)[0] // 3
    if form in ("attention", "multi_head_attention"):
        q, k, v = write.node("Split", qkv, write.constant([C, C, C], "qkv.sizes"), outputs=3, axis=2).outputs
        return _on_tokens(write, q, k, v, form, heads, scale)
    by_head = write.op("Reshape", qkv, write.constant([0, 0, 3, heads, C // heads], "qkv.heads"))
    by_head = write.op("Transpose", by_head, perm=[2, 0, 3, 1, 4])
    q, k, v = (
        write.op("Gather", by_head, write.constant(np.asarray(i, np.int64), f"{name}.index"), axis=0)
        for i, name in enumerate("qkv")
    )
    mixed = write.op("Transpose", _on_heads(write, q, k, v, form, scale), perm=[0, 2, 1, 3])
    return write.op("Reshape", mixed, write.constant([0, 0, C], "merged"))


def _from_heads(write: Writer, node: ir.Node, form: Form) -> ir.Value:
    """q, k and v, [B, H, N, D] each -> [B, H, N, D]."""
    q, k, v = (value for value in node.inputs if value is not None)
    scale = node.attributes.get_float("scale")
    if form != "multi_head_attention":
        return _on_heads(write, q, k, v, form, scale)
    heads, head_dim = _static(node, q, 1, 3)
    merged = [write.op("Transpose", value, perm=[0, 2, 1, 3]) for value in (q, k, v)]
    q, k, v = (write.op("Reshape", value, write.constant([0, 0, heads * head_dim], "rows")) for value in merged)
    mixed = _on_tokens(write, q, k, v, form, heads, scale)
    split = write.op("Reshape", mixed, write.constant([0, 0, heads, head_dim], "heads"))
    return write.op("Transpose", split, perm=[0, 2, 1, 3])


def _static(node: ir.Node, value: ir.Value, *axes: int) -> list[int]:
    """Returns sizes of a value, which must not depend on the input."""
    sizes = [] if value.shape is None else [size for axis in axes if isinstance(size := value.shape[axis], int)]
    if len(sizes) < len(axes):
        raise ValueError(f"attention {node.name}: heads and channels must be static, got shape {value.shape}")
    return sizes


def _on_tokens(write: Writer, q: ir.Value, k: ir.Value, v: ir.Value, form: Form, heads: int, scale: float) -> ir.Value:
    if form == "attention":
        return write.op("Attention", q, k, v, q_num_heads=heads, kv_num_heads=heads, scale=scale)
    return write.op("MultiHeadAttention", q, k, v, domain=MICROSOFT, num_heads=heads, scale=scale)


def _on_heads(write: Writer, q: ir.Value, k: ir.Value, v: ir.Value, form: Form, scale: float) -> ir.Value:
    if form != "plain":
        return write.op("Attention", q, k, v, scale=scale)
    # scale q before the product: in fp16, unscaled scores can exceed 65504
    dtype = q.dtype or ir.DataType.FLOAT
    scaled = write.op("Mul", q, write.constant(np.asarray(scale, dtype.numpy()), "scale"))
    scores = write.op("MatMul", scaled, write.op("Transpose", k, perm=[0, 1, 3, 2]))
    return write.op("MatMul", write.op("Softmax", scores, axis=-1), v)


def optimise(model: ir.Model, vit: ImageModel, options: ExportOptions) -> list[Fusion]:
    """Replaces attention placeholders and, for ONNX Runtime, fuses LayerNorm and GELU, in place.

    Returns:
        The fusions of the target: how many were made, and how many were possible.
    """
    form: Form = "attention_4d" if options.target == "tensorrt" else "attention"
    if options.targets_ort:
        form = "multi_head_attention"
    elif options.opset < ATTENTION_OPSET:
        form = "plain"
    sites, packed = lower_attention(model, form)
    common_passes.RemoveUnusedNodesPass()(model)
    # remove pairs of inverse transposes, which libraries use around attention
    rewrite(model, [transpose_transpose_rule, no_op_transpose_rule])
    missing = vit.attentions - sites
    fusions = []
    if form != "plain":
        note = f"{missing} have a mask or do not call scaled_dot_product_attention" if missing > 0 else ""
        name = "MultiHeadAttention" if options.targets_ort else "Attention"
        fusions.append(Fusion(name, sites, vit.attentions, note))
    note = "" if packed >= vit.depth else "the others rotate or normalize q and k, or could not be read"
    fusions.append(Fusion("packed qkv", packed, vit.depth, note))
    if options.targets_ort:
        fusions += _fuse_for_ort(model, vit, options)
        model.opset_imports[MICROSOFT] = 1
    model.opset_imports.pop(DOMAIN, None)
    common_passes.RemoveUnusedNodesPass()(model)
    counts = count_nodes(model)
    norms = counts[LAYER_NORM] + counts[SKIP_NORM]
    fusions.append(Fusion("LayerNorm as one node in blocks", min(norms, 2 * vit.depth), 2 * vit.depth))
    return fusions


def forget_inner_shapes(model: ir.Model) -> None:
    """Removes shapes and types of inner values: the runtime infers them, and outdated ones break quantizers."""
    outputs = set(map(id, model.graph.outputs))
    for node in model.graph:
        for value in node.outputs:
            if id(value) not in outputs:
                value.shape, value.type = None, None


def count_nodes(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def _fuse_for_ort(model: ir.Model, vit: ImageModel, options: ExportOptions) -> list[Fusion]:
    rewrite(model, pattern.RewriteRuleSet(_ERF_GELUS, commute=True))
    exact = [n for n in model.graph if n.op_type == "Gelu" and n.attributes.get_string("approximate", "none") == "none"]
    skip_norm = _fuse_skip_norm(model, vit, options)
    fuse_bias_gelu(model)
    note = "" if len(exact) >= vit.depth else "the model's activation is not exact GELU"
    return [skip_norm, Fusion(BIAS_GELU, count_nodes(model)[BIAS_GELU], vit.depth, note)]


def _halved(op: Any, x: Any) -> Any:
    """Matches GELU before opset 20, x * (0.5 * (1 + erf(x / sqrt(2)))), also with rounded constants in fp16."""
    return op.Mul(x, op.Mul(_near(0.5), op.Add(op.Erf(op.Div(x, _near(math.sqrt(2)))), _near(1.0))))


def _halved_last(op: Any, x: Any) -> Any:
    return op.Mul(_near(0.5), op.Mul(x, op.Add(op.Erf(op.Div(x, _near(math.sqrt(2)))), _near(1.0))))


_near = partial(pattern.Constant, rel_tol=2e-3)  # the default does not match constants in fp16
_ERF_GELUS = [
    pattern.RewriteRule(each, lambda op, x: op.Gelu(x, _domain=MICROSOFT)) for each in (_halved, _halved_last)
]


def _fuse_skip_norm(model: ir.Model, vit: ImageModel, options: ExportOptions) -> Fusion:
    if options.target == "ort-cpu":
        # In profiles of ONNX Runtime 1.31, its CPU kernel is not vectorized, unlike the two others.
        return Fusion(SKIP_NORM, 0, 0, "not fused for the CPU, whose kernel is slower than Add and LayerNormalization")
    fuse_skip_layer_normalization(model)
    fused, wanted = count_nodes(model)[SKIP_NORM], 2 * vit.depth
    note = "" if fused >= wanted else "the last LayerNorm follows pooling, or a block has another residual structure"
    return Fusion(SKIP_NORM, fused, wanted, note)

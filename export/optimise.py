"""Optimizes a graph for its target: replaces attention placeholders, and uses ONNX Runtime's fused operators."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from onnxscript.rewriter import pattern, rewrite
from onnxscript.rewriter.ort_fusions.bias_gelu import fuse_bias_gelu
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_layer_normalization
from onnxscript.rewriter.rules.common import no_op_transpose_rule, transpose_transpose_rule

from vit_fast.libraries.interface.image_model import ImageModel

from . import attention_nodes
from .graphs import MICROSOFT
from .options import ATTENTION_OPSET, ExportOptions
from .report import Fusion

SKIP_NORM, BIAS_GELU, LAYER_NORM = "SkipLayerNormalization", "BiasGelu", "LayerNormalization"


def optimise(model: ir.Model, vit: ImageModel, options: ExportOptions) -> list[Fusion]:
    """Replaces attention placeholders and, for ONNX Runtime, fuses LayerNorm and GELU, in place.

    Returns:
        The fusions of the target: how many were made, and how many were possible.
    """
    form: attention_nodes.Form = "attention_4d" if options.target == "tensorrt" else "attention"
    if options.targets_ort:
        form = "multi_head_attention"
    elif options.opset < ATTENTION_OPSET:
        form = "plain"
    sites, packed = attention_nodes.lower_attention(model, form)
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
    model.opset_imports.pop(attention_nodes.DOMAIN, None)
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

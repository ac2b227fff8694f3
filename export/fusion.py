"""What a target runs best: attention in its form, ONNX Runtime's operators, and a count of what was fused."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from . import attention
from .options import ATTENTION_OPSET, ExportOptions
from .subjects import Subject

SKIP_NORM, BIAS_GELU, LAYER_NORM = "SkipLayerNormalization", "BiasGelu", "LayerNormalization"


@dataclass(frozen=True)
class Fusion:
    """How often a fusion happened, against how often the model's blocks call for it.

    Attributes:
        name: What was fused.
        fused: Nodes of it in the graph.
        wanted: How many there would be if it had happened everywhere.
        note: Why it did not happen everywhere, where that is known.
    """

    name: str
    fused: int
    wanted: int
    note: str = ""

    @property
    def complete(self) -> bool:
        return self.fused >= self.wanted

    def line(self) -> str:
        return f"{self.name}: {self.fused} of {self.wanted}" + (f" ({self.note})" if self.note else "")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def attention_form(options: ExportOptions) -> attention.Form:
    """The form in which a target takes attention."""
    if options.targets_ort:
        return "multi_head_attention"
    if options.opset < ATTENTION_OPSET:
        return "plain"
    return "attention_4d" if options.target == "tensorrt" else "attention"


def optimise(model: ir.Model, subject: Subject, options: ExportOptions) -> list[Fusion]:
    """Lowers the attention placeholders and, for ONNX Runtime, fuses what stands around them; in place.

    Returns:
        One entry a fusion that the target calls for.
    """
    form = attention_form(options)
    lowered = attention.lower_attention(model, form)
    common_passes.RemoveUnusedNodesPass()(model)
    _cancel_transposes(model)
    missing = subject.attentions - lowered.sites
    fusions = []
    if form != "plain":
        note = f"{missing} written by the model without scaled_dot_product_attention" if missing > 0 else ""
        name = "MultiHeadAttention" if options.targets_ort else "Attention"
        fusions.append(Fusion(name, lowered.sites, subject.attentions, note))
    note = "a pooling head's query is no token" if lowered.packed < lowered.sites else ""
    fusions.append(Fusion("packed qkv", lowered.packed, subject.depth, "" if lowered.packed >= subject.depth else note))
    if options.targets_ort:
        fusions += _fuse_for_ort(model, subject)
        model.opset_imports[attention.MICROSOFT] = 1
    model.opset_imports.pop(attention.DOMAIN, None)
    common_passes.RemoveUnusedNodesPass()(model)
    counts = count_nodes(model)
    norms = counts[LAYER_NORM] + counts[SKIP_NORM]
    fusions.append(Fusion("LayerNorm as one node in blocks", min(norms, 2 * subject.depth), 2 * subject.depth))
    return fusions


def forget_inner_shapes(model: ir.Model) -> None:
    """Drops what is known of values inside the graph: the runtime infers it, and stale entries break quantisers."""
    outputs = set(map(id, model.graph.outputs))
    for node in model.graph:
        for value in node.outputs:
            if id(value) not in outputs:
                value.shape, value.type = None, None


def count_nodes(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def _fuse_for_ort(model: ir.Model, subject: Subject) -> list[Fusion]:
    from onnxscript.rewriter.ort_fusions.bias_gelu import fuse_bias_gelu
    from onnxscript.rewriter.ort_fusions.erfgelu import fuse_erfgelu
    from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_layer_normalization

    fuse_erfgelu(model)
    exact = [n for n in model.graph if n.op_type == "Gelu" and n.attributes.get_string("approximate", "none") == "none"]
    fuse_skip_layer_normalization(model)
    fuse_bias_gelu(model)
    counts = count_nodes(model)
    norms = 2 * subject.depth
    skip_note = (
        "" if counts[SKIP_NORM] >= norms else "the last LayerNorm comes after pooling, or the block adds otherwise"
    )
    gelu_note = "" if len(exact) >= subject.depth else "the model's activation is not exact GELU"
    return [
        Fusion(SKIP_NORM, counts[SKIP_NORM], norms, skip_note),
        Fusion(BIAS_GELU, counts[BIAS_GELU], subject.depth, gelu_note),
    ]


def _cancel_transposes(model: ir.Model) -> None:
    """Transposes that undo one another: what is left where a library kept its own layout around attention."""
    from onnxscript.rewriter import rewrite
    from onnxscript.rewriter.rules.common import no_op_transpose_rule, transpose_transpose_rule

    rewrite(model, [transpose_transpose_rule, no_op_transpose_rule])

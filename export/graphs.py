"""Optimizes ONNX graphs for their target, runs them, and saves them."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from onnxscript.rewriter import pattern, rewrite
from onnxscript.rewriter.ort_fusions.bias_gelu import fuse_bias_gelu
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_layer_normalization
from onnxscript.rewriter.rules.common import no_op_transpose_rule, transpose_transpose_rule

from vit_fast.libraries.interface.image_model import ImageModel

from .options import ExportOptions
from .report import Fusion
from .runtime.runner import open_session

MICROSOFT = "com.microsoft"
PROTOBUF_LIMIT = 2 * 2**30 - 32 * 2**20
"""Bytes of weights that fit into one file: protobuf's limit of 2 GiB, minus room for the graph."""
SKIP_NORM, BIAS_GELU, LAYER_NORM = "SkipLayerNormalization", "BiasGelu", "LayerNormalization"
NEAR = partial(pattern.Constant, rel_tol=2e-3)  # the default does not match constants in fp16


def optimise(model: ir.Model, vit: ImageModel, options: ExportOptions, packed: int) -> list[Fusion]:
    """Removes transposes and, for ONNX Runtime, fuses LayerNorm and GELU, in place; returns the target's fusions."""
    # remove pairs of inverse transposes, which libraries use around attention
    rewrite(model, [transpose_transpose_rule, no_op_transpose_rule])
    fusions = []
    if options.attention:
        fused = count_nodes(model)[options.attention]
        note = f"{vit.attentions - fused} have a mask or do not call scaled_dot_product_attention"
        fusions.append(_fusion(options.attention, fused, vit.attentions, note))
    note = "the others rotate or normalize q and k, or could not be read"
    fusions.append(_fusion("packed qkv", packed, vit.depth, note))
    if options.targets_ort:
        fusions += _fuse_for_ort(model, vit, options)
        model.opset_imports[MICROSOFT] = 1
    common_passes.RemoveUnusedNodesPass()(model)
    counts = count_nodes(model)
    norms = counts[LAYER_NORM] + counts[SKIP_NORM]
    return [*fusions, _fusion("LayerNorm as one node in blocks", min(norms, 2 * vit.depth), 2 * vit.depth)]


def _fusion(name: str, fused: int, wanted: int, note: str = "") -> Fusion:
    return Fusion(name, fused, wanted, note if fused < wanted else "")


def _fuse_for_ort(model: ir.Model, vit: ImageModel, options: ExportOptions) -> list[Fusion]:
    rewrite(model, pattern.RewriteRuleSet(_ERF_GELUS, commute=True))
    exact = [n for n in model.graph if n.op_type == "Gelu" and n.attributes.get_string("approximate", "none") == "none"]
    if options.target == "ort-cpu":
        # In profiles of ONNX Runtime 1.31, its CPU kernel is not vectorized, unlike the two others.
        note = "not fused for the CPU, whose kernel is slower than Add and LayerNormalization"
        skip_norm = Fusion(SKIP_NORM, 0, 0, note)
    else:
        fuse_skip_layer_normalization(model)
        note = "the last LayerNorm follows pooling, or a block has another residual structure"
        skip_norm = _fusion(SKIP_NORM, count_nodes(model)[SKIP_NORM], 2 * vit.depth, note)
    fuse_bias_gelu(model)
    note = "" if len(exact) >= vit.depth else "the model's activation is not exact GELU"
    return [skip_norm, Fusion(BIAS_GELU, count_nodes(model)[BIAS_GELU], vit.depth, note)]


def _halved(op: Any, x: Any) -> Any:
    """Matches GELU before opset 20, x * (0.5 * (1 + erf(x / sqrt(2)))), also with rounded constants in fp16."""
    return op.Mul(x, op.Mul(NEAR(0.5), op.Add(op.Erf(op.Div(x, NEAR(math.sqrt(2)))), NEAR(1.0))))


def _halved_last(op: Any, x: Any) -> Any:
    return op.Mul(NEAR(0.5), op.Mul(x, op.Add(op.Erf(op.Div(x, NEAR(math.sqrt(2)))), NEAR(1.0))))


_ERF_GELUS = [
    pattern.RewriteRule(each, lambda op, x: op.Gelu(x, _domain=MICROSOFT)) for each in (_halved, _halved_last)
]


def count_nodes(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def forget_inner_shapes(model: ir.Model) -> None:
    """Removes shapes and types of inner values: the runtime infers them, and outdated ones break quantizers."""
    outputs = set(map(id, model.graph.outputs))
    for node in model.graph:
        for value in node.outputs:
            if id(value) not in outputs:
                value.shape, value.type = None, None


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """Returns the array of an initializer or constant; None if the value depends on the input."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def save(model: ir.Model, path: Path, external: bool | None = None) -> str | None:
    """Writes a model; returns the name of the file for the weights, if they are external or exceed protobuf's limit."""
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    if size > PROTOBUF_LIMIT and external is False:
        exceed = "exceed protobuf's limit of 2 GB per file: use external_data=True"
        raise ValueError(f"{size / 1e9:.1f} GB of weights {exceed}")
    beside = f"{path.name}.data" if external or size > PROTOBUF_LIMIT else None
    try:
        ir.save(model, path, external_data=beside)
    except Exception as error:
        cause: BaseException | None = error
        while not isinstance(cause, OSError):
            if cause is None:
                raise
            cause = cause.__cause__
        raise OSError(cause.errno, f"{cause.strerror or cause} ({size / 2**20:.0f} MiB of weights)") from error
    return beside


def run_graph(
    model: ir.Model, batches: Iterable[np.ndarray], values: Sequence[ir.Value] | None = None
) -> Iterator[list[np.ndarray]]:
    """Runs a graph with one input in ONNX Runtime on the CPU, and yields its outputs, or these inner values."""
    outputs = list(model.graph.outputs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        if values is not None:
            model.graph.outputs[:] = values
        try:
            save(model, path)
        finally:
            model.graph.outputs[:] = outputs
        session = open_session(path, fp8=True)
    name = session.get_inputs()[0].name
    for batch in batches:
        yield session.run(None, {name: batch})

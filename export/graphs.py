"""ONNX graphs: captures models with torch.export, optimizes the graphs for their target, runs and saves them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import math
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch
from onnxscript.rewriter import pattern, rewrite
from onnxscript.rewriter.ort_fusions.bias_gelu import fuse_bias_gelu
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_layer_normalization
from onnxscript.rewriter.rules.common import no_op_transpose_rule, transpose_transpose_rule
from torch import Tensor, nn

from vit_fast.errors import UnsupportedInputError
from vit_fast.libraries.interface.image_model import ImageModel, Output

from .exported_blocks import exportable_copy, exported_attention, translation_table
from .options import MICROSOFT, ExportOptions
from .report import Fusion
from .runtime.runner import open_session

INPUT, BATCH = "images", "batch"
PROTOBUF_LIMIT = 2 * 2**30 - 32 * 2**20
"""Bytes of weights that fit into one file: protobuf's limit of 2 GiB, minus room for the graph."""
SKIP_NORM, BIAS_GELU, LAYER_NORM = "SkipLayerNormalization", "BiasGelu", "LayerNormalization"
NEAR = partial(pattern.Constant, rel_tol=2e-3)  # the default does not match constants in fp16


class _Exported(nn.Module):
    """Runs the model in its dtype, with inputs and outputs in fp32."""

    def __init__(self, vit: ImageModel, options: ExportOptions, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = vit.model
        self._vit, self._options, self._dtype = vit, options, dtype

    def forward(self, images: Tensor) -> Tensor:
        output: Output = "features" if self._options.output == "features" else "logits"
        result = self._vit.forward(images.to(self._dtype), output, self._options.dynamic_size).float()
        return result.softmax(-1) if self._options.output == "probabilities" else result


def capture(vit: ImageModel, options: ExportOptions) -> tuple[ir.Model, int]:
    """Captures a model as an ONNX graph; also returns the number of blocks with attention of packed qkv.

    The input is "images" [batch, in_chans, height, width] fp32; the output is named options.output.
    """
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(options.dtype, torch.float32)
    if dtype != torch.float32:
        vit = vit.copy_in(dtype)
    vit = dataclasses.replace(vit, model=exportable_copy(vit.model))
    with vit.exporting("sdpa", options.dynamic_size), _quiet(), torch.no_grad():
        exported = _torch_export(_Exported(vit, options, dtype).eval(), vit, options)
        model = _to_onnx(exported, options)
    _name_dimensions(model, vit)
    common_passes.ClearMetadataAndDocStringPass()(model)
    packed = sum(node.target is exported_attention._opoverload for node in exported.graph.nodes)
    return model, packed


def _torch_export(module: nn.Module, vit: ImageModel, options: ExportOptions) -> Any:
    (height, width), (patch_h, patch_w) = vit.image_hw, vit.patch_hw
    dimensions: dict[int, Any] = {0: torch.export.Dim(BATCH)} if options.dynamic_batch else {}
    if options.dynamic_size:  # trace with a size that is neither the model's nor square, or torch specializes it
        height, width = height + patch_h, width + 2 * patch_w
        dimensions |= {2: patch_h * torch.export.Dim("rows"), 3: patch_w * torch.export.Dim("columns")}
    example = torch.randn(2 if options.dynamic_batch else 1, vit.in_chans, height, width)
    entered: list[nn.Module] = []  # modules whose forward has not returned

    def leave(*_: Any) -> None:
        if entered:  # another thread may have entered before the hooks were registered
            entered.pop()

    hooks = nn.modules.module
    enter = hooks.register_module_forward_pre_hook(lambda entering, _: entered.append(entering))
    handles = [enter, hooks.register_module_forward_hook(leave)]
    try:
        return torch.export.export(module, (example,), dynamic_shapes=(dimensions,), strict=False)
    except Exception as error:
        names = {each: name.removeprefix("model.") or "the model itself" for name, each in module.named_modules()}
        where = "the model, with these dynamic dimensions,"
        if entered:
            where = f"module {names.get(entered[-1], type(entered[-1]).__name__)!r}"
        reason = f"{where} cannot be exported by torch.export: {_first_line(error)}"
        raise UnsupportedInputError(f"export of {vit.name}", [reason]) from error
    finally:
        for handle in handles:
            handle.remove()


def _to_onnx(exported: Any, options: ExportOptions) -> ir.Model:
    try:
        program = torch.onnx.export(
            exported, dynamo=True, opset_version=options.opset, input_names=[INPUT], output_names=[options.output],
            custom_translation_table=translation_table(options), verbose=False,
        )  # fmt: skip
    except Exception as error:
        raise UnsupportedInputError("export to ONNX", _untranslatable(exported, error)) from error
    model: ir.Model = program.model  # type: ignore[union-attr]  # None only without dynamo=True
    if (written := model.opset_imports.get("")) != options.opset:  # its converter cannot lower the newest opsets
        raise UnsupportedInputError(f"opset {options.opset}", [f"torch wrote opset {written} instead"])
    for node in model.graph.all_nodes():
        if node.op_type == "Resize":  # before onnxscript 0.7.2, these attributes do not match torch
            if node.attributes.get_int("antialias", 0):
                node.attributes.add(ir.AttrFloat32("cubic_coeff_a", -0.5))
                node.attributes.add(ir.AttrInt64("exclude_outside", 1))
            if node.attributes.get_string("coordinate_transformation_mode") == "pytorch_half_pixel":
                node.attributes.add(ir.AttrString("coordinate_transformation_mode", "half_pixel"))
    return model


def _untranslatable(exported: Any, error: BaseException) -> list[str]:
    """Finds module and operator in the chain of exceptions that torch's exporter raises."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    match = re.search(r"target=(?:torch\.ops\.)?([\w.:]+)", "\n".join(map(str, causes)))
    reason = _first_line(causes[-1])
    for node in exported.graph.nodes:
        if match and node.op == "call_function" and str(node.target) == match[1]:
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            path = stack[-1][0].split("model.", 1)[-1] if stack else "the model itself"
            return [f"module {path!r}: the operator {node.target} cannot be translated to ONNX ({reason})"]
    return [reason]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _name_dimensions(model: ir.Model, vit: ImageModel) -> None:
    """Names dynamic dimensions "batch", and "rows" and "columns" of patches, instead of torch's s34."""
    names = (BATCH, "channels", *(f"{patch}*{name}" for patch, name in zip(vit.patch_hw, ("rows", "columns"))))
    for value in (model.graph.inputs[0], model.graph.outputs[0]):
        dims = enumerate(value.shape or ())
        value.shape = ir.Shape([dim if isinstance(dim, int) else names[i] for i, dim in dims])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides progress messages and deprecation warnings of torch's exporter."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("torch.onnx", "onnxscript", "onnx_ir"))}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def optimize(model: ir.Model, vit: ImageModel, options: ExportOptions, packed: int) -> list[Fusion]:
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
    fuse_bias_gelu(model)
    note = "" if len(exact) >= vit.depth else "the model's activation is not exact GELU"
    fusions = [Fusion(BIAS_GELU, count_nodes(model)[BIAS_GELU], vit.depth, note)]
    # In profiles of ONNX Runtime 1.31 on a CPU, SkipLayerNormalization is not vectorized, unlike the two others.
    if options.target != "ort-cpu":
        fuse_skip_layer_normalization(model)
        note = "the last LayerNorm follows pooling, or a block has another residual structure"
        fusions.append(_fusion(SKIP_NORM, count_nodes(model)[SKIP_NORM], 2 * vit.depth, note))
    return fusions


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

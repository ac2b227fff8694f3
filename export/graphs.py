"""ONNX graphs: captures models with torch.export, optimizes the graphs for their target, runs and saves them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.ort_fusions.bias_gelu import fuse_bias_gelu
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_layer_normalization
from onnxscript.rewriter.rules.common import no_op_transpose_rule, transpose_transpose_rule
from torch import Tensor, nn

from vit_fast.errors import UnsupportedInputError
from vit_fast.libraries.interface.image_model import ImageModel, Output

from .exported_blocks import decompositions, exportable_copy
from .options import MICROSOFT, ExportOptions
from .report import Fusion
from .runtime.runner import open_session

BATCH = "batch"
PROTOBUF_LIMIT = 2 * 2**30 - 32 * 2**20  # bytes of weights in one file: protobuf's 2 GiB, minus room for the graph
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class _Exported(nn.Module):
    """Runs the model in its dtype, with inputs and outputs in fp32."""

    def __init__(self, vit: ImageModel, options: ExportOptions) -> None:
        super().__init__()
        self.model = vit.model
        self._vit, self._options = vit, options

    def forward(self, images: Tensor) -> Tensor:
        options = self._options
        output: Output = "features" if options.output == "features" else "logits"
        result = self._vit.forward(images.to(DTYPES[options.dtype]), output, options.dynamic_size).float()
        return result.softmax(-1) if options.output == "probabilities" else result


def capture(vit: ImageModel, options: ExportOptions) -> tuple[ir.Model, int]:
    """Captures a model as an ONNX graph; also returns the number of blocks with attention of packed qkv.

    The input is "images" [batch, in_chans, height, width] fp32; the output is named options.output.
    """
    if options.dtype != "fp32":
        vit = vit.copy_in(DTYPES[options.dtype])
    copied, packed = exportable_copy(vit.model, options)
    vit = dataclasses.replace(vit, model=copied)
    with vit.exporting("sdpa", options.dynamic_size), _quiet(), torch.no_grad():
        model = _to_onnx(_Exported(vit, options).eval(), vit, options)
    if (written := model.opset_imports.get("")) != options.opset:  # its converter cannot lower the newest opsets
        raise UnsupportedInputError(f"opset {options.opset}", [f"torch wrote opset {written} instead"])
    for node in model.graph.all_nodes():
        if node.op_type == "Resize":  # before onnxscript 0.7.2, these attributes do not match torch
            if node.attributes.get_int("antialias", 0):
                node.attributes.add(ir.AttrFloat32("cubic_coeff_a", -0.5))
                node.attributes.add(ir.AttrInt64("exclude_outside", 1))
            if node.attributes.get_string("coordinate_transformation_mode") == "pytorch_half_pixel":
                node.attributes.add(ir.AttrString("coordinate_transformation_mode", "half_pixel"))
    names = (BATCH, "channels", *(f"{patch}*{name}" for patch, name in zip(vit.patch_hw, ("rows", "columns"))))
    for value in (model.graph.inputs[0], model.graph.outputs[0]):  # torch calls the dynamic dimensions s34
        value.shape = ir.Shape([dim if isinstance(dim, int) else name for dim, name in zip(value.shape or (), names)])
    common_passes.ClearMetadataAndDocStringPass()(model)
    return model, len(packed)


def _to_onnx(module: nn.Module, vit: ImageModel, options: ExportOptions) -> ir.Model:
    (height, width), (patch_h, patch_w) = vit.image_hw, vit.patch_hw
    dimensions: dict[int, Any] = {0: torch.export.Dim(BATCH)} if options.dynamic_batch else {}
    if options.dynamic_size:  # trace with a size that is neither the model's nor square, or torch specializes it
        height, width = height + patch_h, width + 2 * patch_w
        dimensions |= {2: patch_h * torch.export.Dim("rows"), 3: patch_w * torch.export.Dim("columns")}
    example = torch.randn(2 if options.dynamic_batch else 1, vit.in_chans, height, width)
    exported: Any = None
    try:
        exported = torch.export.export(module, (example,), dynamic_shapes=(dimensions,), strict=False)
        exported = exported.run_decompositions(decompositions(options))
        program: Any = torch.onnx.export(
            exported, dynamo=True, opset_version=options.opset, input_names=["images"], output_names=[options.output],
            verbose=False,
        )  # fmt: skip
    except Exception as error:
        reason = _failure(error, module, exported)
        raise UnsupportedInputError(f"export of {vit.name}", [reason]) from error
    model: ir.Model = program.model
    return model


def _failure(error: BaseException, model: nn.Module, exported: Any) -> str:
    """Describes an exception of torch's exporter with the module and the operator that cause it, if they are found."""
    names = {id(module): name.removeprefix("model.") for name, module in model.named_modules() if "." in name}
    frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    inside = [names[id(module)] for module in frames if id(module) in names]
    where = f"module {inside[-1]!r}" if inside else "the model, with these dynamic dimensions,"
    fault = "cannot be exported by torch.export"
    while error.__cause__ is not None:
        error = error.__cause__
    if exported is not None:
        where, fault = "the graph", "cannot be translated to ONNX"
        for node in exported.graph.nodes:
            if node.op == "call_function" and repr(node.target) in str(error):
                (*_, (path, _)) = (node.meta.get("nn_module_stack") or {"": ("", None)}).values()
                where = f"module {path.split('model.', 1)[-1]!r}: the operator {node.target}"
    return f"{where} {fault}: {type(error).__name__}: {str(error).strip()[:300]}".splitlines()[0]


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
    note = "the others rotate or normalize q and k, or could not be read"
    fusions = [("packed qkv", packed, vit.depth, note)]
    if options.attention:
        fused = count_nodes(model)[options.attention]
        note = f"{vit.attentions - fused} have a mask or do not call scaled_dot_product_attention"
        fusions.insert(0, (options.attention, fused, vit.attentions, note))
    if options.targets_ort:
        gelus = [node.attributes.get_string("approximate", "none") for node in model.graph if node.op_type == "Gelu"]
        fuse_bias_gelu(model)
        note = "" if gelus.count("none") >= vit.depth else "the model's activation is not exact GELU"
        fusions.append(("BiasGelu", count_nodes(model)["BiasGelu"], vit.depth, note))
    # In profiles of ONNX Runtime 1.31 on a CPU, SkipLayerNormalization is not vectorized, unlike the two others.
    if options.target == "ort-cuda":
        fuse_skip_layer_normalization(model)
        note = "the last LayerNorm follows pooling, or a block has another residual structure"
        count = count_nodes(model)["SkipLayerNormalization"]
        fusions.append(("SkipLayerNormalization", count, 2 * vit.depth, note))
    common_passes.RemoveUnusedNodesPass()(model)
    if options.targets_ort:
        model.opset_imports[MICROSOFT] = 1
    counts = count_nodes(model)
    norms = min(counts["LayerNormalization"] + counts["SkipLayerNormalization"], 2 * vit.depth)
    fusions.append(("LayerNorm as one node in blocks", norms, 2 * vit.depth, ""))
    return [Fusion(name, done, wanted, note if done < wanted else "") for name, done, wanted, note in fusions]


def count_nodes(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def forget_inner_shapes(model: ir.Model) -> None:
    """Removes shapes and types of inner values: the runtime infers them, and outdated ones break quantizers."""
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output():
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
    ir.save(model, path, external_data=beside)
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

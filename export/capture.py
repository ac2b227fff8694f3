"""Captures a model as an ONNX graph by torch.export and torch's ONNX exporter; attention stays one node."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch
from torch import Tensor, nn

from vit_fast.errors import UnsupportedInputError
from vit_fast.libraries.interface.image_model import ImageModel, Output

from . import attention_nodes
from .exported_blocks import exportable_copy
from .options import ExportOptions

INPUT, BATCH = "images", "batch"


class _Exported(nn.Module):
    """Runs the model in its dtype, with inputs and outputs in fp32."""

    def __init__(self, vit: ImageModel, output: Output, dtype: torch.dtype, dynamic_size: bool) -> None:
        super().__init__()
        self.model = vit.model
        self._vit, self._output, self._dtype, self._dynamic_size = vit, output, dtype, dynamic_size

    def forward(self, images: Tensor) -> Tensor:
        output: Output = "logits" if self._output == "probabilities" else self._output
        result = self._vit.forward(images.to(self._dtype), output, self._dynamic_size).float()
        return result.softmax(-1) if self._output == "probabilities" else result


def capture(vit: ImageModel, options: ExportOptions) -> ir.Model:
    """Returns the model as an ONNX graph in which every attention is one placeholder node (see attention_nodes.py).

    Args:
        vit: The model. For fp16 and bf16, a copy in that dtype is captured.
        options: Opset, precision, dynamic dimensions, output.
    Returns:
        A graph with one input, "images" [batch, in_chans, height, width] fp32, and one output named by options.output.
    Raises:
        UnsupportedInputError: an operator cannot be exported; names the module.
    """
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(options.dtype, torch.float32)
    if dtype != torch.float32:
        vit = vit.copy_in(dtype)
    vit = dataclasses.replace(vit, model=exportable_copy(vit.model))
    example = torch.randn(2, vit.in_chans, *_example_size(vit, options))
    module = _Exported(vit, options.output, dtype, options.dynamic_size).eval()
    with vit.exporting("sdpa", options.dynamic_size), _quiet(), torch.no_grad():
        exported = _torch_export(module, example, vit, options)
        model = _to_onnx(exported, options)
    _rename_symbols(model)
    common_passes.ClearMetadataAndDocStringPass()(model)
    return model


def _example_size(vit: ImageModel, options: ExportOptions) -> tuple[int, int]:
    """Returns the size to trace with. For dynamic_size, unlike the model's and not square, or torch specializes it."""
    (height, width), (patch_h, patch_w) = vit.image_hw, vit.patch_hw
    return (height + patch_h, width + 2 * patch_w) if options.dynamic_size else (height, width)


def _torch_export(module: nn.Module, example: Tensor, vit: ImageModel, options: ExportOptions) -> Any:
    dimensions: dict[int, Any] = {}
    if options.dynamic_batch:
        dimensions[0] = torch.export.Dim(BATCH)
    else:
        example = example[:1]
    if options.dynamic_size:
        for axis, name in ((2, "rows"), (3, "columns")):
            dimensions[axis] = vit.patch_hw[axis - 2] * torch.export.Dim(name)
    try:
        return torch.export.export(module, (example,), dynamic_shapes=(dimensions,), strict=False)
    except Exception as error:
        where = _failing_module(module, example)
        raise UnsupportedInputError(
            f"export of {vit.name}",
            [f"{where} cannot be exported by torch.export: {_first_line(error)}"],
        ) from error


def _to_onnx(exported: Any, options: ExportOptions) -> ir.Model:
    # Write the graph for the requested opset, because the converter cannot lower the newest opsets.
    try:
        program = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=options.opset,
            input_names=[INPUT],
            output_names=[options.output],
            custom_translation_table=attention_nodes.translation_table(),
            verbose=False,
        )
    except Exception as error:
        raise UnsupportedInputError("export to ONNX", _untranslatable(exported, error)) from error
    model: ir.Model = program.model  # type: ignore[union-attr]  # None only without dynamo=True
    written = model.opset_imports.get("")
    if written != options.opset:
        raise UnsupportedInputError(f"opset {options.opset}", [f"torch wrote opset {written} instead"])
    for node in model.graph.all_nodes():
        if node.op_type == "Resize":  # onnxscript before 0.7.2 does not match torch's Resize
            if node.attributes.get_int("antialias", 0):
                node.attributes.add(ir.AttrFloat32("cubic_coeff_a", -0.5))
                node.attributes.add(ir.AttrInt64("exclude_outside", 1))
            if node.attributes.get_string("coordinate_transformation_mode") == "pytorch_half_pixel":
                node.attributes.add(ir.AttrString("coordinate_transformation_mode", "half_pixel"))
    return model


def _untranslatable(exported: Any, error: BaseException) -> list[str]:
    """Returns module and operator from the chain of exceptions that torch's exporter raises."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__
    text = "\n".join(map(str, causes))
    match = re.search(r"target=([\w.:]+)", text)
    operator = match.group(1) if match else None
    reasons = []
    for node in exported.graph.nodes:
        if node.op == "call_function" and operator and operator.removeprefix("torch.ops.") == str(node.target):
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            path = stack[-1][0].split("model.", 1)[-1] if stack else "the model itself"
            reason = f"the operator {node.target} cannot be translated to ONNX ({_first_line(causes[-1])})"
            reasons.append(f"module {path!r}: {reason}")
            break
    return reasons or [_first_line(causes[-1])]


def _failing_module(module: nn.Module, example: Tensor) -> str:
    """Runs torch.export again, and returns the module whose forward was entered last."""
    names = {id(m): name.removeprefix("model.") or "the model itself" for name, m in module.named_modules()}
    entered: list[str] = []

    def enter(m: nn.Module, args: Any) -> None:
        entered.append(names.get(id(m), type(m).__name__))

    def leave(m: nn.Module, args: Any, result: Any) -> None:
        entered.pop()

    handles = [nn.modules.module.register_module_forward_pre_hook(enter)]
    handles.append(nn.modules.module.register_module_forward_hook(leave))
    try:
        torch.export.export(module, (example,), strict=False)
    except Exception:  # the same error again
        return f"module {entered[-1]!r}" if entered else "the model"
    finally:
        for handle in handles:
            handle.remove()
    return "the model, with these dynamic dimensions,"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _rename_symbols(model: ir.Model) -> None:
    """Renames torch's s34 to "batch", and the symbols of height and width to "rows" and "columns" (of patches)."""
    names: dict[str, str] = {}
    shape = model.graph.inputs[0].shape
    for axis, name in ((0, BATCH), (2, "rows"), (3, "columns")):
        dim = shape[axis] if shape is not None else None
        if isinstance(dim, ir.SymbolicDim) and dim.value:
            for symbol in re.findall(r"[A-Za-z_]\w*", dim.value):
                names[symbol] = name
    if not names:
        return
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
    values = [*model.graph.inputs, *(v for node in model.graph for v in node.outputs)]
    for value in values:
        if value.shape is None:
            continue
        value.shape = ir.Shape(
            [
                pattern.sub(lambda m: names[m.group()], d.value) if isinstance(d, ir.SymbolicDim) and d.value else d
                for d in value.shape
            ]
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides progress messages and deprecation warnings of torch's exporter."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)

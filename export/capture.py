"""Captures a model as an ONNX graph with torch.export and torch's ONNX exporter."""

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

from .exported_blocks import exportable_copy, exported_attention, translation_table
from .options import ExportOptions

INPUT, BATCH = "images", "batch"


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
    try:
        return torch.export.export(module, (example,), dynamic_shapes=(dimensions,), strict=False)
    except Exception as error:
        reason = f"{_failing_module(module, example)} cannot be exported by torch.export: {_first_line(error)}"
        raise UnsupportedInputError(f"export of {vit.name}", [reason]) from error


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


def _failing_module(module: nn.Module, example: Tensor) -> str:
    """Runs torch.export again, and returns the module whose forward was entered last."""
    entered: list[nn.Module] = []

    def enter(entering: nn.Module, _: Any) -> None:
        entered.append(entering)

    def leave(*_: Any) -> None:
        entered.pop()

    hooks = nn.modules.module
    handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)]
    try:
        torch.export.export(module, (example,), strict=False)
    except Exception:  # the same error again
        names = {each: name.removeprefix("model.") or "the model itself" for name, each in module.named_modules()}
        return f"module {names.get(entered[-1], type(entered[-1]).__name__)!r}" if entered else "the model"
    finally:
        for handle in handles:
            handle.remove()
    return "the model, with these dynamic dimensions,"


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
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)

"""Options of an export, and checks of their combinations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import onnx

from vit_fast.errors import UnsupportedInputError, check_choice, check_integer, check_type
from vit_fast.libraries.interface.image_model import Output, Outputs

from .report import EIGHT_BIT_BUDGET

Target = Literal["generic", "ort-cpu", "ort-cuda", "tensorrt"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "int8-dynamic", "fp8"]

MIN_OPSET, DEFAULT_OPSET = 18, 20
# First opsets with QuantizeLinear in fp16 and e4m3, with Gelu, with Conv in bf16, and with Attention.
HALF_SCALES_OPSET, GELU_OPSET, BF16_OPSET, ATTENTION_OPSET = 19, 20, 22, 23
MICROSOFT = "com.microsoft"  # domain of ONNX Runtime's own operators

# Largest |file - eager| / max(1, largest |eager|) that passes. For 8-bit precisions, see `report.Check`.
BUDGETS: dict[str, float] = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 5e-2}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Arguments of export_onnx that describe the file. Raises UnsupportedInputError with all conflicts."""

    opset: int = DEFAULT_OPSET
    ir_version: int | None = None
    dynamic_batch: bool = True
    dynamic_size: bool = False
    precision: Precision = "fp32"
    preprocess: bool = False
    target: Target = "generic"
    outputs: Outputs = field(default_factory=Outputs)
    external_data: bool | None = None

    def __post_init__(self) -> None:
        for name, choices in (("target", Target), ("precision", Precision)):
            check_choice(name, getattr(self, name), get_args(choices))
        for output in self.outputs.names:
            check_choice("output", output, get_args(Output))
        if bool(self.outputs.layers) != ("intermediate" in self.outputs.names):
            raise ValueError("layers (--layers) must be given for output 'intermediate', and only for it")
        for name in ("dynamic_batch", "dynamic_size", "preprocess"):
            check_type(name, getattr(self, name), bool)
        for name in ("normed", "spatial"):
            check_type(name, getattr(self.outputs, name), bool)
        for layer in self.outputs.layers:
            check_type("layers", layer, int)
        check_type("external_data", self.external_data, bool, type(None))
        check_integer("opset", self.opset, MIN_OPSET, newest_opset())
        least_ir = 0
        if self.ir_version is not None:
            check_integer("ir_version", self.ir_version, 1, onnx.IR_VERSION)
            least_ir = least_ir_version(self.opset)
        old_ir = f"ir_version must be at least {least_ir} for opset {self.opset}, got {self.ir_version}"
        tensorrt, bf16, fp8 = self.target == "tensorrt", self.precision == "bf16", self.precision == "fp8"
        no_half_scales = self.is_eight_bit and self.dtype == "fp16" and self.opset < HALF_SCALES_OPSET
        no_resize = "preprocess must be False for TensorRT (no antialiased Resize): use target='ort-cuda'"
        one_size = "dynamic_size must be False for preprocess=True, which resizes all images to one size"
        conflicts = [
            (tensorrt and self.precision == "int8-dynamic", "precision must not be int8-dynamic for TensorRT"),
            (tensorrt and self.preprocess, no_resize),
            (bf16 and self.target == "ort-cpu", "ONNX Runtime's CPU provider has no Conv, MatMul or norms in bf16"),
            (bf16 and self.opset < BF16_OPSET, f"opset must be at least {BF16_OPSET} for bf16 Conv"),
            (fp8 and self.targets_ort, f"target must be one of generic, tensorrt for fp8, got {self.target}"),
            (no_half_scales, f"opset must be at least {HALF_SCALES_OPSET} for quantization scales in fp16"),
            (self.dynamic_size and self.preprocess, one_size),
            ((self.ir_version or 0) < least_ir, old_ir),
        ]
        if reasons := [reason for applies, reason in conflicts if applies]:
            what = f"export with opset {self.opset}, precision {self.precision!r}, target {self.target!r}"
            raise UnsupportedInputError(what, reasons)

    @property
    def is_eight_bit(self) -> bool:
        return self.precision not in BUDGETS

    @property
    def needs_calibration(self) -> bool:
        return self.precision in ("int8", "fp8")

    @property
    def uint8_by_int8(self) -> bool:
        """True for int8 files that CPUs may run: uint8 activations, int8 weights."""
        return self.precision.startswith("int8") and self.target != "tensorrt"

    @property
    def dtype(self) -> str:
        """Dtype of layers that are not quantized. In 8-bit files: fp16 for fp8 and for TensorRT, otherwise fp32.

        TensorRT adds no casts, so it computes these layers in the dtype of the file.
        """
        if not self.is_eight_bit:
            return self.precision
        return "fp16" if self.precision == "fp8" or self.target == "tensorrt" else "fp32"

    @property
    def targets_ort(self) -> bool:
        return self.target in ("ort-cpu", "ort-cuda")

    @property
    def attention(self) -> str | None:
        """The operator that computes attention; None means MatMul, Softmax, MatMul."""
        if self.targets_ort:
            return "MultiHeadAttention"
        return "Attention" if self.opset >= ATTENTION_OPSET else None

    @property
    def budget(self) -> str:
        """The largest allowed error, in words."""
        return EIGHT_BIT_BUDGET if self.is_eight_bit else f"max error <= {BUDGETS[self.precision]:g}"


def default_opset(precision: str, ir_version: int | None) -> int:
    """Returns 20, or 22 for bf16; for files with an older IR version, an older opset."""
    newest, oldest = (BF16_OPSET, BF16_OPSET) if precision == "bf16" else (DEFAULT_OPSET, MIN_OPSET)
    limit = ir_version if isinstance(ir_version, int) else onnx.IR_VERSION  # ExportOptions rejects other types
    return next((opset for opset in range(newest, oldest, -1) if least_ir_version(opset) <= limit), oldest)


def least_ir_version(opset: int) -> int:
    """Returns the IR version of the first ONNX release with this opset."""
    return onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])


def newest_opset() -> int:
    """Returns the newest opset that the installed torch and onnxscript write."""
    from onnxscript.version_converter import _version_converter

    return int(getattr(_version_converter, "SUPPORTED_MAX_ONNX_OPSET", ATTENTION_OPSET))

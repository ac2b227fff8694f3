"""ONNX: export, verification, optimization, quantization, and a runner for ONNX Runtime.

    report = vit_fast.export.export_onnx(model, "model.onnx", target="ort-cpu")
    logits = vit_fast.export.OnnxRunner("model.onnx")(images)

Names are imported on first use, so that the package can be imported without onnx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vit_fast.errors import require_packages

if TYPE_CHECKING:
    from .deployment import trtexec_line, write_card, write_triton_repository
    from .exporter import export_onnx
    from .quantize import CalibrationError, QuantisationError
    from .report import ExportReport
    from .runtime.metadata import ModelFileError, inspect_onnx
    from .runtime.runner import OnnxRunner, ProviderError
    from .verification import VerificationError

__all__ = [
    "CalibrationError", "ExportReport", "ModelFileError", "OnnxRunner", "ProviderError", "QuantisationError",
    "VerificationError", "export_onnx", "inspect_onnx", "trtexec_line", "write_card", "write_triton_repository",
]  # fmt: skip

_MODULES = {
    ".deployment": "trtexec_line write_card write_triton_repository", ".exporter": "export_onnx",
    ".quantize": "CalibrationError QuantisationError", ".report": "ExportReport",
    ".runtime.metadata": "ModelFileError inspect_onnx", ".runtime.runner": "OnnxRunner ProviderError",
    ".verification": "VerificationError",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_packages("export", "onnx", "onnxscript", "onnxruntime")
    (module,) = (module for module, names in _MODULES.items() if name in names.split())
    return getattr(importlib.import_module(module, __name__), name)

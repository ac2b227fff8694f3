"""vit-fast: Vision Transformers with fused Triton kernels.

    model = vit_fast.create_model("vit_base_patch16_224")
    logits = model(images)

`__all__` lists the public names. Heavy modules, including torch, are imported on first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from . import export, figures, ops
    from .blocks.fusion_report import FusionReport
    from .config import DataConfig, ViTConfig
    from .errors import UnsupportedInputError, VitFastError
    from .fusion.calibration import Calibration, calibrate
    from .fusion.fuse import freeze, fuse, set_backend, unfreeze, unfuse
    from .libraries.fixed_grid import FixedGrid
    from .measure.optimization import Optimization, load_optimized, optimize
    from .model import VisionTransformer
    from .run.graph_runner import GraphRunner, budgets_for
    from .run.runtime import WarmUp, compile, warm_up
    from .variants import list_models
    from .weights import create_model, load, load_weights, save

_MODULES = {
    ".blocks.fusion_report": "FusionReport", ".config": "DataConfig ViTConfig",
    ".errors": "UnsupportedInputError VitFastError", ".fusion.calibration": "Calibration calibrate",
    ".fusion.fuse": "freeze fuse set_backend unfreeze unfuse", ".libraries.fixed_grid": "FixedGrid",
    ".measure.optimization": "Optimization load_optimized optimize", ".model": "VisionTransformer",
    ".run.graph_runner": "GraphRunner budgets_for", ".run.runtime": "WarmUp compile warm_up",
    ".variants": "list_models", ".weights": "create_model load load_weights save",
}  # fmt: skip
_LAZY = {name: module for module, names in _MODULES.items() for name in names.split()}
_LAZY_PACKAGES = ("config", "errors", "export", "figures", "model", "ops", "variants")

__all__ = [
    "Calibration", "DataConfig", "FixedGrid", "FusionReport", "GraphRunner", "Optimization", "UnsupportedInputError",
    "ViTConfig", "VisionTransformer", "VitFastError", "WarmUp", "budgets_for", "calibrate", "compile", "create_model",
    "export", "figures", "freeze", "fuse", "list_models", "load", "load_optimized", "load_weights", "ops", "optimize",
    "save", "set_backend", "unfreeze", "unfuse", "warm_up",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    if name in _LAZY_PACKAGES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


# If torch is already imported, register the operators now, because torch.export.load needs them. Otherwise do not
# import torch, so that `vit-fast --help` is fast.
if "torch" in sys.modules:
    importlib.import_module(".weights", __name__)

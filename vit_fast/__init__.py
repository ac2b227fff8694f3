"""vit-fast: a Vision Transformer with fused Triton kernels, swappable for eager PyTorch.

    model = vit_fast.create_model("vit_base_patch16_224")
    logits = model(images)

Everything public is listed in __all__; heavy parts are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import ops
from .config import DataConfig, ViTConfig
from .errors import UnsupportedInputError, VitFastError
from .factory import create_model
from .model import VisionTransformer, set_backend
from .variants import list_models
from .version import __version__ as __version__

if TYPE_CHECKING:
    from . import export
    from .fusion import fuse, unfuse
    from .fusion_report import FusionReport
    from .runtime import GraphRunner, compile
    from .weights import load, load_weights, save

_LAZY = {
    "FusionReport": ".fusion_report",
    "GraphRunner": ".runtime",
    "compile": ".runtime",
    "fuse": ".fusion",
    "load": ".weights",
    "load_weights": ".weights",
    "save": ".weights",
    "unfuse": ".fusion",
}

_LAZY_PACKAGES = ("export",)

__all__ = [
    "DataConfig",
    "FusionReport",
    "GraphRunner",
    "UnsupportedInputError",
    "ViTConfig",
    "VisionTransformer",
    "VitFastError",
    "compile",
    "create_model",
    "export",
    "fuse",
    "list_models",
    "load",
    "load_weights",
    "ops",
    "save",
    "set_backend",
    "unfuse",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    if name in _LAZY_PACKAGES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

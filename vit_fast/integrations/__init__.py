"""One module a library whose models can be fused; each is imported only when a model of that library is seen."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from .common import FusedModule

LIBRARIES = {"timm": ".timm", "transformers": ".transformers", "torchvision": ".torchvision", "torch": ".torch_nn"}


def integration_of(cls: type[nn.Module]) -> ModuleType | None:
    """The integration that knows the library a class comes from; None when there is none."""
    name = LIBRARIES.get(cls.__module__.partition(".")[0])
    return None if name is None else importlib.import_module(name, __name__)


def fused_form(cls: type[nn.Module]) -> type[FusedModule] | None:
    """The fused class that instances of exactly this class can be given, or None."""
    integration = integration_of(cls)
    return None if integration is None else integration.fused_form(cls)


def left_reason(cls: type[nn.Module]) -> str | None:
    """Why a class is never fused, where that is known."""
    integration = integration_of(cls)
    return None if integration is None else integration.left_reason(cls)

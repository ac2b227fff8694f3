"""Finds the library that supports given weights, configuration files, models or classes."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.fused import FusedContainer, FusedModule, cached, form_of
from ..config import ViTConfig
from ..errors import UnsupportedInputError
from . import fixed_grid, research_files, torchvision, vit_fast_model
from .interface.image_model import ImageModel, cast_module, deep_copy
from .interface.packed_tower import PackedTower
from .interface.weight_names import Converted
from .timm import timm_blocks, timm_model, timm_towers
from .transformers import families, graph_towers, hf_model

NAMED_WEIGHTS = (research_files.GOOGLE, torchvision, hf_model, research_files.CLIP, timm_model)
CONFIGURATIONS = (timm_model, hf_model)
PEERS = (timm_model, hf_model, torchvision)
IMAGE_MODELS = (vit_fast_model, fixed_grid, timm_model, hf_model, torchvision)
TOWERS = (graph_towers, timm_towers)
FUSABLE = (vit_fast_model, timm_blocks, timm_towers, families, torchvision)

ATTENTION = re.compile("att(n|ention)", re.IGNORECASE)
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def convert(state: Mapping[str, Tensor], config: ViTConfig) -> Converted | None:
    """Converts a state dict of any library to timm's names for a model of this config; None for unknown names."""
    for library in NAMED_WEIGHTS:
        if any(re.search(library.SIGNATURE, name) for name in state):
            return library.convert(state, config)
    return None


def starts(name: str) -> list[int]:
    """Returns the positions in the name of a tensor at which a name of a library may begin, after a prefix."""
    places = [0, *(dot.end() for dot in re.finditer(r"\.", name))]
    return [i for i in places if any(re.search(library.SIGNATURE, name[i:]) for library in NAMED_WEIGHTS)]


def recognize(model: nn.Module) -> ImageModel:
    """Describes a model for export, see `exportable`."""
    found = next((found for library in IMAGE_MODELS if (found := library.recognize(model)) is not None), None)
    if found is None:
        what = f"{type(model).__module__}.{type(model).__qualname__}"
        raise UnsupportedInputError(what, ["the model must be a ViT of vit_fast, timm, transformers or torchvision"])
    found.model = exportable(model)
    found.set_data_config(found.data_config)
    return found


def exportable(model: nn.Module) -> nn.Module:
    """Returns the model, or a copy unless it is in evaluation mode, in fp32 and on the CPU."""
    if any(x.device.type == "meta" for x in (*model.parameters(), *model.buffers())):
        raise UnsupportedInputError(type(model).__name__, ["weights must be loaded, got tensors on the meta device"])
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for p in model.parameters()) or model.training:
        model = cast_module(deep_copy(model).cpu(), torch.float32)
        model.eval()
    return model


def find(model: nn.Module) -> ImageModel | None:
    """Describes a ViT for export in place; returns None for other models and for a ViT that cannot be exported."""
    with contextlib.suppress(UnsupportedInputError):
        return next((found for library in IMAGE_MODELS if (found := library.recognize(model)) is not None), None)
    return None


def prepare_attention(model: Any, undo: contextlib.ExitStack) -> None:
    """Prepares modules of torch and transformers inside of any ImageModel for export; `undo` restores them."""
    torchvision.TorchvisionModel.make_exportable(model, undo, False)
    if "transformers" in sys.modules:
        hf_model.TransformersModel.make_exportable(model, undo, False)


def packed_tower(tower: nn.Module) -> PackedTower | None:
    """Returns the PackedTower of a vision tower; None for other models."""
    return next((found for library in TOWERS if (found := library.packed_tower(tower)) is not None), None)


_MIXINS = {path: mixin for file in FUSABLE for path, mixin in file.MIXINS.items()}


@cached
def fused_form(cls: type[nn.Module]) -> type[FusedModule] | None:
    """Returns the fused class for instances of exactly this class, or None; for a fused class, the class itself."""
    if issubclass(cls, FusedModule):
        return cls
    mixin = _MIXINS.get(f"{cls.__module__}.{cls.__qualname__}")
    return form_of(mixin, cls) if mixin is not None and mixin.replaces(cls) else None


@cached
def reason_against(cls: type[nn.Module]) -> str | None:
    """Returns why a class without a fused class has none, if it is derived from a class that has one."""
    for base in cls.__mro__[1:]:
        if not issubclass(base, nn.Module) or (form := fused_form(base)) is None or issubclass(form, FusedContainer):
            continue
        if cls.__name__.startswith("FSDP") and any(parent.__name__ == "FSDPModule" for parent in cls.__mro__):
            return "fully_shard has wrapped it: call fuse before fully_shard"
        own = ", which has another forward" if cls.forward is not form.original_forward else ""
        return f"fuse supports {base.__qualname__}, but not its subclass {cls.__qualname__}{own}"
    return None


def is_near_attention(model: nn.Module, name: str) -> bool:
    """Returns True if a module is near attention, as in an encoder block; MLPs of heads and projectors are not."""
    for _ in range(2):  # searches the two enclosing modules, but not the layers of lists in them
        if not name:
            return False
        name = name.rpartition(".")[0]
        near = list(model.get_submodule(name).named_children())
        near += [each for _, child in near if not isinstance(child, LISTS) for each in child.named_children()]
        if any(ATTENTION.search(f"{own} {type(child).__name__}") for own, child in near):
            return True
    return False

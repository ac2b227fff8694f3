"""An image model of any library: input size, preprocessing, class names, and a common way to call it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...config import DataConfig, Size, ViTConfig

Output = Literal["logits", "probabilities", "features"]
Head = Literal["logits", "features"]


@dataclass(kw_only=True)
class ImageModel:
    """A model with the facts that export needs. Each library whose models lack timm's methods has a subclass."""

    model: nn.Module
    library: str  # "vit-fast", "timm", "transformers" or "torchvision"
    name: str  # of the model if it stores one, otherwise of its class
    image_hw: Size
    in_chans: int
    patch_hw: Size  # of the image region that one token covers
    depth: int  # encoder blocks
    attentions: int  # attention layers, including pooling heads
    num_classes: int  # 0 if there is no head
    data_config: DataConfig | None = None  # None if unknown
    no_data_config: str = "the model has no data_config"  # the reason if it is unknown
    class_names: tuple[str, ...] | None = None  # None if unknown
    config: dict[str, Any] = field(default_factory=dict)  # of the library, as plain data

    def make_exportable(self, undo: contextlib.ExitStack, dynamic_size: bool) -> None:
        """Prepares the model for export, with any image size if requested; `undo` restores it."""

    def run(self, images: Tensor, head: Head, dynamic_size: bool) -> Tensor:
        """Maps images [B, in_chans, height, width] to logits or pooled features [B, ...]."""
        model: Any = self.model
        result: Tensor
        if head == "features":
            result = model.forward_head(model.forward_features(images), pre_logits=True)
        else:
            result = model(images)
        return result

    def set_data_config(self, data_config: DataConfig | None) -> None:
        """Sets the preprocessing, without the normalization if `fuse` folded it into the model."""
        if data_config is not None and any(hasattr(module, "vit_fast_mean") for module in self.model.modules()):
            zeros, scale = (0.0,) * self.in_chans, (1 / 255,) * self.in_chans
            data_config = dataclasses.replace(data_config, mean=zeros, std=scale)
        self.data_config = data_config

    def forward(self, images: Tensor, output: Output, dynamic_size: bool = False) -> Tensor:
        """Maps images [B, in_chans, height, width] to logits, probabilities or pooled features [B, ...]."""
        head: Head = "features" if output == "features" or not self.num_classes else "logits"
        result = self.run(images, head, dynamic_size)
        return result.softmax(-1) if output == "probabilities" else result

    def copy_in(self, dtype: torch.dtype) -> ImageModel:
        """Returns this description with a copy of the model in another dtype."""
        return dataclasses.replace(self, model=copy.deepcopy(self.model).to(dtype))

    @contextlib.contextmanager
    def exporting(self, backend: str, dynamic_size: bool) -> Iterator[None]:
        """Sets the backend and, if requested, allows any image size. Restores the model at the end."""
        with contextlib.ExitStack() as undo:
            for module in self.model.modules():
                if hasattr(module, "vit_fast_backend"):
                    switch(undo, module, "vit_fast_backend", backend)
            self.make_exportable(undo, dynamic_size)
            yield


@dataclass(kw_only=True)
class Facts:
    """Contents of the configuration files beside weights; None if unknown."""

    config: ViTConfig | None = None
    data_config: DataConfig | None = None
    class_names: tuple[str, ...] | None = None  # of the head's outputs
    notes: list[str] = field(default_factory=list)  # for the report


def required_input_reasons(model: nn.Module) -> list[str]:
    """Returns a reason if the forward of a model requires more arguments than images."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [each for each in inspect.signature(model.forward).parameters.values() if each.kind in kinds]
    names = [each.name for each in parameters[1:] if each.default is inspect.Parameter.empty]
    if not names:
        return []
    packed = {"grid_thw", "spatial_shapes"} & set(names)
    advice = ": to export, use vit_fast.FixedGrid; for CUDA graphs, pass budgets to GraphRunner" if packed else ""
    return [f"the model's forward must require only images, but also requires {' and '.join(names)}{advice}"]


def comes_from(package: str, model: nn.Module, *class_names: str) -> bool:
    """Returns True if a model's class or one of its bases is from a package and has one of the names, if given."""
    bases = [cls for cls in type(model).__mro__ if cls.__module__.partition(".")[0] == package]
    return any(not class_names or cls.__name__ in class_names for cls in bases)


def switch(undo: contextlib.ExitStack, owner: Any, attribute: str, value: Any) -> None:
    """Sets an attribute until `undo` closes."""
    undo.callback(setattr, owner, attribute, getattr(owner, attribute))
    setattr(owner, attribute, value)

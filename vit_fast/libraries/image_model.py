"""A model of images, whatever library it is from: input size, preprocessing, names, and how to call it."""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..config import DataConfig, Size

Output = Literal["logits", "probabilities", "features"]
Head = Literal["logits", "features"]


@dataclass(kw_only=True)
class ImageModel(abc.ABC):
    """A model, and what its library knows of it.

    Attributes:
        model: The module itself.
        library: "vit-fast", "timm", "transformers" or "torchvision".
        name: The model's class, or its name where it knows one.
        image_hw: Height and width it was made for.
        in_chans: Channels of the input.
        patch_hw: Height and width of the image region behind one token.
        depth: Encoder blocks.
        attentions: Attention layers, pooling heads included.
        num_classes: Outputs of the head; 0 when there is none.
        data_config: How its images are prepared; None when the model does not say.
        class_names: Names of the outputs; None when the model does not say.
        config: The model's configuration as plain data.
        takes_bytes: Whether `fuse` folded the normalisation into the model, which then takes pixels from 0 to 255.
    """

    model: nn.Module
    library: str
    name: str
    image_hw: Size
    in_chans: int
    patch_hw: Size
    depth: int
    attentions: int
    num_classes: int
    data_config: DataConfig | None = None
    class_names: tuple[str, ...] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    takes_bytes: bool = False

    @abc.abstractmethod
    def make_exportable(self, undo: contextlib.ExitStack, dynamic_size: bool) -> None:
        """Switches the model to what exports, and any image size if asked; `undo` switches it back.

        Raises:
            UnsupportedInputError: the model cannot take other sizes than its own.
        """

    @abc.abstractmethod
    def run(self, images: Tensor, head: Head, dynamic_size: bool) -> Tensor:
        """Images [B, in_chans, height, width] -> logits or pooled features [B, ...]."""

    def set_data_config(self, data_config: DataConfig | None) -> None:
        """Sets the preprocessing; without normalising where the model does that itself."""
        if data_config is not None and self.takes_bytes:
            zeros, scale = (0.0,) * self.in_chans, (1 / 255,) * self.in_chans
            data_config = dataclasses.replace(data_config, mean=zeros, std=scale)
        self.data_config = data_config

    def forward(self, images: Tensor, output: Output, dynamic_size: bool = False) -> Tensor:
        """Images [B, in_chans, height, width] -> logits, probabilities or pooled features [B, ...]."""
        head: Head = "features" if output == "features" or not self.num_classes else "logits"
        result = self.run(images, head, dynamic_size)
        return result.softmax(-1) if output == "probabilities" else result

    def copy_in(self, dtype: torch.dtype) -> ImageModel:
        """The same with a copy of the model in another dtype."""
        return dataclasses.replace(self, model=copy.deepcopy(self.model).to(dtype))

    @contextlib.contextmanager
    def exporting(self, backend: str, dynamic_size: bool) -> Iterator[None]:
        """For the time of export or of a reference run: this backend everywhere, any image size if asked.

        Nothing is copied; whatever is switched is switched back.
        """
        with contextlib.ExitStack() as undo:
            for module in self.model.modules():
                ours = type(module).__module__.startswith("vit_fast.")
                for attribute in ("backend", "vit_fast_backend"):
                    if isinstance(getattr(module, attribute, None), str) and (ours or attribute != "backend"):
                        switch(undo, module, attribute, backend)
            self.make_exportable(undo, dynamic_size)
            yield


class TimmInterface(ImageModel):
    """A model with timm's methods, which ours has too."""

    def run(self, images: Tensor, head: Head, dynamic_size: bool) -> Tensor:
        model: Any = self.model
        result: Tensor
        if head == "features":
            result = model.forward_head(model.forward_features(images), pre_logits=True)
        else:
            result = model(images)
        return result


def needs_more(model: nn.Module) -> list[str]:
    """Returns the reason why a model cannot be called with images alone: required arguments of its forward."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = [each for each in inspect.signature(model.forward).parameters.values() if each.kind in kinds]
    names = [each.name for each in takes[1:] if each.default is inspect.Parameter.empty]
    if not names:
        return []
    packed = {"grid_thw", "spatial_shapes"} & set(names)
    advice = ": give GraphRunner budgets; to export, use vit_fast.FixedGrid" if packed else ""
    return [f"its forward must take images alone, but also needs {' and '.join(names)}{advice}"]


def comes_from(package: str, model: nn.Module, class_name: str | None = None) -> bool:
    """True if a model's class, or one it derives from, is of a package (and of this name)."""
    return any(
        cls.__module__.partition(".")[0] == package and class_name in (None, cls.__name__)
        for cls in type(model).__mro__
    )


def switch(undo: contextlib.ExitStack, owner: Any, attribute: str, value: Any) -> None:
    """Sets an attribute until `undo` closes."""
    undo.callback(setattr, owner, attribute, getattr(owner, attribute))
    setattr(owner, attribute, value)


def pair(value: Any) -> Size:
    """Height and width of what may be one number for both."""
    if isinstance(value, int):
        return value, value
    height, width = value
    return int(height), int(width)

"""Our own VisionTransformer, for export: one library among the others. Its names are timm's."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from ..config import DataConfig, ViTConfig
from ..model import VisionTransformer
from ..variants import get_variant, list_models
from .image_model import ImageModel, TimmInterface, switch

NAME = "vit-fast"


def recognise(model: nn.Module) -> ImageModel | None:
    """What a VisionTransformer of ours takes and gives; None for another model."""
    if not isinstance(model, VisionTransformer):
        return None
    config = model.config
    return OurModel(
        model=model,
        library=NAME,
        name=_variant_of(config, model.data_config) or type(model).__name__,
        image_hw=config.image_hw,
        in_chans=config.in_chans,
        patch_hw=config.patch_pixels,
        depth=config.depth,
        attentions=config.depth + (config.global_pool == "map"),
        num_classes=config.num_classes,
        data_config=model.data_config,
        class_names=model.class_names,
        config=config.to_dict(),
    )


def _variant_of(config: ViTConfig, data_config: DataConfig) -> str | None:
    """The named variant of this shape, whatever its head; of several, the one whose images are prepared alike."""
    fields = {"num_classes": config.num_classes, "dynamic_img_size": config.dynamic_img_size}
    same = [name for name in list_models() if get_variant(name).config.replace(**fields) == config]
    alike = [name for name in same if get_variant(name).data == data_config]
    return next(iter(alike or same), None)


class OurModel(TimmInterface):
    """Our VisionTransformer."""

    def make_exportable(self, undo: contextlib.ExitStack, dynamic_size: bool) -> None:
        model: Any = self.model
        if model.config.dynamic_img_size != dynamic_size:
            config = model.config.replace(dynamic_img_size=dynamic_size)
            switch(undo, model, "config", config)
            switch(undo, model.patch_embed, "config", config)

"""Our own VisionTransformer: one library among the others. Its names are timm's.

Its modules have a backend already, so fusing it is choosing one, and undoing it the one before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from ..config import DataConfig, ViTConfig
from ..fusion.fused import dtype_of, triton_reasons
from ..fusion.plain import forward_is_replaced
from ..fusion.reading import describe, dropout_notes
from ..layers import AttentionPool, Mlp
from ..model import Attention, Block, VisionTransformer, set_backend
from ..variants import get_variant, list_models
from .image_model import ImageModel, TimmInterface, switch

NAME = "vit-fast"
BEFORE = "vit_fast_backend_before"


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


# --- fusing -------------------------------------------------------------------------------------------------


def parts(model: VisionTransformer) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, module and kind of everything that has a backend, or stands where something should have one."""
    for name, module in model.named_modules():
        if isinstance(module, Attention | AttentionPool):
            yield name, module, "attention"
        if isinstance(module, Block):
            yield name, module, "norm + MLP"
            if not any(isinstance(inner, Attention) for inner in module.attn.modules()):
                yield f"{name}.attn", module.attn, "attention"


def part_reasons(part: nn.Module, backend: str) -> list[str]:
    """Why a part is not computed by our operator, whatever the rest of the model does."""
    if type(part) not in (Attention, AttentionPool, Block):
        ours = isinstance(part, Attention | AttentionPool | Block)
        return [f"{type(part).__qualname__} is {'a subclass of' if ours else 'not'} one of ours"]
    reasons = ["its forward was replaced on the instance"] if forward_is_replaced(part) else []
    if isinstance(part, Block):
        reasons += part.read().mlp_reasons
        if backend == "triton" and type(part.attn) is not Attention:  # the kernels would run past its forward
            reasons.append(f"attn is {describe(part.attn)}: the triton kernels take a whole block of ours")
    return reasons


def model_reasons(model: VisionTransformer, request: str, resolved: str) -> list[str]:
    """Why the model as a whole cannot be given this backend, naming the first part that cannot."""
    if resolved != "triton":
        return []
    found: dict[str, str] = {}
    for name, part, _ in parts(model):
        what, p = _dropout(part)
        if part.training and p:
            found.setdefault(f"{what} drops with probability {p} in training", name)
    reasons = [f"{name}: {reason}" for reason, name in found.items()]
    unable = dict.fromkeys(reason for _, part, _ in parts(model) for reason in _unable(model, part))
    return reasons if request == "auto" else [*reasons, *unable]


def notes(model: VisionTransformer, part: nn.Module, request: str, resolved: str) -> list[str]:
    """What to know of a part that is fused."""
    what, p = _dropout(part)
    found = dropout_notes("mlp.drop", p) if resolved != "triton" and isinstance(part, Block) else []
    if resolved == "triton" and p:
        found = [f"in training it raises, because {what} drops with probability {p}: fuse with 'sdpa' to train"]
    if request == "auto" and resolved == "triton" and (unable := _unable(model, part)):
        found.append("it runs with backend sdpa: " + "; ".join(unable))
    return found


def choose_backend(model: VisionTransformer, backend: str, left: Collection[nn.Module]) -> None:
    """Sets the backend of all parts but `left`.

    A later .to() resolves the backend of every part again; those left run as modules under any backend.
    """
    earlier = [(part, part.__dict__["backend"]) for part in left if "backend" in part.__dict__]
    model.__dict__.setdefault(BEFORE, model.requested_backend)
    set_backend(model, backend)
    for part, before in earlier:
        part.__dict__["backend"] = before


def give_backend_back(model: VisionTransformer) -> None:
    """The backend before the first fuse; nothing when there was none."""
    before = model.__dict__.pop(BEFORE, None)
    if before is not None:
        set_backend(model, before)


def _unable(model: VisionTransformer, part: nn.Module) -> list[str]:
    """Why the kernels cannot compute a part."""
    return triton_reasons(model.config.embed_dim // model.config.num_heads, dtype_of(model))


def _dropout(part: nn.Module) -> tuple[str, float]:
    """What drops in a part, and with which probability."""
    if isinstance(part, Attention):
        return "attention", part.attn_drop_rate
    return "the MLP", part.mlp.drop.p if isinstance(part, Block) and isinstance(part.mlp, Mlp) else 0.0

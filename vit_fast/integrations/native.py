"""Our own model: its modules have a backend already, so fusing it is choosing one, and undoing it the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from ..layers import AttentionPool
from ..model import Attention, Block, VisionTransformer, set_backend
from .common import dtype_of, triton_reasons

BEFORE = "vit_fast_backend_before"


def native_models(model: nn.Module) -> list[VisionTransformer]:
    """Every VisionTransformer of ours in the model, itself included."""
    return [module for module in model.modules() if isinstance(module, VisionTransformer)]


class NativeChange:
    """Sets the backend of one of our models, and can set it back."""

    def __init__(self, model: VisionTransformer) -> None:
        self.model = model

    def parts(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Name, module and kind of everything that has a backend."""
        for name, module in self.model.named_modules():
            if isinstance(module, Attention | AttentionPool):
                yield name, module, "attention"
            if isinstance(module, Block):
                yield name, module, "norm + MLP"

    def reasons(self, part: nn.Module, backend: str) -> list[str]:
        """Why a part cannot run this backend."""
        reasons = []
        if type(part) not in (Attention, AttentionPool, Block):
            reasons.append(f"{type(part).__qualname__} is a subclass of one of ours")
        if "forward" in part.__dict__:
            reasons.append("its forward was replaced on the instance")
        if backend != "triton":
            return reasons
        config = self.model.config
        if isinstance(part, Attention) and part.training and part.attn_drop_rate:
            reasons.append(f"attention drops with probability {part.attn_drop_rate} in training")
        if isinstance(part, Block) and part.training and part.mlp.drop.p:
            reasons.append(f"the MLP drops with probability {part.mlp.drop.p} in training")
        head_width = None if isinstance(part, Block) else config.embed_dim // config.num_heads
        return reasons + triton_reasons(head_width, dtype_of(part))

    def apply(self, backend: str) -> Callable[[], None]:
        """Sets the backend; gives back what undoes it."""
        before = self.model.requested_backend
        first = BEFORE not in self.model.__dict__
        self.model.__dict__.setdefault(BEFORE, before)
        set_backend(self.model, backend)

        def undo() -> None:
            set_backend(self.model, before)
            if first:
                self.model.__dict__.pop(BEFORE, None)

        return undo

    def undo(self) -> None:
        """The backend before the first fuse; nothing when there was none."""
        before = self.model.__dict__.pop(BEFORE, None)
        if before is not None:
            set_backend(self.model, before)

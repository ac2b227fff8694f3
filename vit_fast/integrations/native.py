"""Our own model: its modules have a backend already, so fusing it is choosing one, and undoing it the one before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from torch import nn

from ..layers import AttentionPool, DropPath, LayerScale, Mlp, forward_is_replaced
from ..model import Attention, Block, VisionTransformer, set_backend
from .common import class_path, describe, dropout_notes, dtype_of, touch_reasons, triton_reasons

BEFORE = "vit_fast_backend_before"


def native_models(model: nn.Module) -> list[VisionTransformer]:
    """Every VisionTransformer of ours in the model, itself included."""
    return [module for module in model.modules() if isinstance(module, VisionTransformer)]


class NativeChange:
    """Sets the backend of one of our models, part by part, and can set it back."""

    def __init__(self, model: VisionTransformer) -> None:
        self.model = model

    def parts(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Name, module and kind of everything that has a backend, or stands where something should have one."""
        for name, module in self.model.named_modules():
            if isinstance(module, Attention | AttentionPool):
                yield name, module, "attention"
            if isinstance(module, Block):
                yield name, module, "norm + MLP"
                if not any(isinstance(inner, Attention) for inner in module.attn.modules()):
                    yield f"{name}.attn", module.attn, "attention"

    def part_reasons(self, part: nn.Module, backend: str) -> list[str]:
        """Why a part is not computed by our operator, whatever the rest of the model does."""
        if type(part) not in (Attention, AttentionPool, Block):
            ours = isinstance(part, Attention | AttentionPool | Block)
            return [f"{type(part).__qualname__} is {'a subclass of' if ours else 'not'} one of ours"]
        reasons = ["its forward was replaced on the instance"] if forward_is_replaced(part) else []
        if isinstance(part, Block):
            reasons += _norm_mlp_reasons(part)
            if backend == "triton" and type(part.attn) is not Attention:  # the kernels would run past its forward
                reasons.append(f"attn is {describe(part.attn)}: the triton kernels take a whole block of ours")
        return reasons

    def model_reasons(self, request: str, resolved: str) -> list[str]:
        """Why the model as a whole cannot be given this backend, naming the first part that cannot."""
        if resolved != "triton":
            return []
        found: dict[str, str] = {}
        for name, part, _ in self.parts():
            if isinstance(part, Attention) and part.training and part.attn_drop_rate:
                found.setdefault(f"attention drops with probability {part.attn_drop_rate} in training", name)
            if isinstance(part, Block) and part.training and isinstance(part.mlp, Mlp) and part.mlp.drop.p:
                found.setdefault(f"the MLP drops with probability {part.mlp.drop.p} in training", name)
        reasons = [f"{name}: {reason}" for reason, name in found.items()]
        return reasons if request == "auto" else reasons + self._triton_reasons()

    def notes(self, part: nn.Module, request: str, resolved: str) -> list[str]:
        """What to know of a part that is fused."""
        name, p = ("mlp.drop", part.mlp.drop.p) if isinstance(part, Block) else ("attention", _attention_dropout(part))
        notes = dropout_notes(name, p) if resolved != "triton" and isinstance(part, Block) else []
        if resolved == "triton" and p:
            notes = [f"in training it raises, because {name} drops with probability {p}: fuse with 'sdpa' to train"]
        if request == "auto" and resolved == "triton" and (unable := self._triton_reasons()):
            notes.append("it runs with backend sdpa: " + "; ".join(unable))
        return notes

    def _triton_reasons(self) -> list[str]:
        config = self.model.config
        return triton_reasons(config.embed_dim // config.num_heads, dtype_of(self.model))

    def request_before(self) -> str | None:
        """The backend asked for before the first fuse; None when there was none."""
        return self.model.__dict__.get(BEFORE)

    def apply(self, backend: str, left: Collection[nn.Module] = ()) -> Callable[[], None]:
        """Sets the backend of all parts but `left`; gives back what undoes it.

        A later .to() resolves the backend of every part again; those left run as modules under any backend.
        """
        before, first = self.model.requested_backend, BEFORE not in self.model.__dict__
        backends = [(part, part.backend) for _, part, _ in self.parts() if hasattr(part, "backend")]

        def undo() -> None:
            set_backend(self.model, before)
            for part, earlier in backends:
                part.__dict__["backend"] = earlier
            if first:
                self.model.__dict__.pop(BEFORE, None)

        self.model.__dict__.setdefault(BEFORE, before)
        set_backend(self.model, backend)
        for part, earlier in backends:
            if part in left:
                part.__dict__["backend"] = earlier
        return undo

    def undo(self) -> None:
        """The backend before the first fuse; nothing when there was none."""
        before = self.model.__dict__.pop(BEFORE, None)
        if before is not None:
            set_backend(self.model, before)


def _attention_dropout(part: nn.Module) -> float:
    return part.attn_drop_rate if isinstance(part, Attention) else 0.0


def _norm_mlp_reasons(block: Block) -> list[str]:
    """Why the second half of a block runs as modules: replaced, wrapped or hooked parts."""
    norm, mlp = block.norm2, block.mlp
    reasons = [] if type(norm) is nn.LayerNorm else [f"norm2 is {describe(norm)}: accepted is torch.nn.LayerNorm"]
    if type(mlp) is Mlp:
        for name, linear in (("mlp.fc1", mlp.fc1), ("mlp.fc2", mlp.fc2)):
            if type(linear) is not nn.Linear:
                reasons.append(f"{name} is a {class_path(linear)}: accepted is torch.nn.Linear itself")
    else:
        reasons.append(f"mlp is {describe(mlp)}: accepted is the Mlp of ours")
    if type(block.ls2) not in (LayerScale, nn.Identity):
        reasons.append(f"ls2 is {describe(block.ls2)}: accepted is the LayerScale of ours")
    if type(block.drop_path2) is not DropPath:
        reasons.append(f"drop_path2 is {describe(block.drop_path2)}: accepted is the DropPath of ours")
    for root in ("norm2", "mlp", "ls2", "drop_path2"):
        for name, module in block.get_submodule(root).named_modules(prefix=root):
            reasons += touch_reasons(name, module)
    return reasons

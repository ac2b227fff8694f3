"""fuse(model) and unfuse(model): our operators inside the models of other libraries, in place and reversibly."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .errors import UnsupportedInputError
from .fusion_report import FusionReport, ModuleReport
from .integrations import fused_form, left_reason
from .integrations.common import FusedModule, device_of, dtype_of, triton_reasons
from .integrations.native import NativeChange, native_models
from .integrations.patch_embed import FusedPatchConv, FusedPatchEmbed, check_normalize, find_patch_conv
from .layers import PatchEmbed, forward_is_replaced
from .ops.backends import auto_reasons, resolve_backend, triton_unavailable_reasons

LOOKS_FUSABLE = re.compile(r"(Attention|Attn|Mlp|MLP|FFN|FeedForward)(?![a-z])|Attention$")


def fuse(
    model: nn.Module,
    backend: str = "auto",
    *,
    normalize: tuple[Sequence[float], Sequence[float]] | None = None,
) -> FusionReport:
    """Makes attention and LayerNorm + MLP of a timm, transformers, torchvision or torch.nn model run our operators.

    In place and per instance. The modules stay the very objects they are, with the same Parameters, state_dict keys,
    hooks and names; only their class changes, to a subclass with another forward. Training, autocast, checkpointing,
    deepcopy, pickle, torch.export, DDP and FSDP work as before (fuse before fully_shard). A module that cannot be fused
    is left as it is, with every reason in the report. Fusing again changes the backend, and normalize where given;
    a module that can no longer be fused is given back its class.

    A fused module runs its original forward for what the operators do not do: masks, attention weights asked for,
    dropout in training, and children that were hooked, wrapped or replaced after fuse.

    Args:
        model: Any module; everything inside it is looked at.
        backend: "triton", "sdpa", "eager", or "auto": triton on a CUDA device where it runs, for fp16, bf16, and fp32
            with TF32 or under autocast; else sdpa. "auto" is resolved now, and again when the model is moved or
            converted.
        normalize: (mean, std) of pictures in 0..1, a number a channel. The patch embedding then takes pictures in
            0..255, uint8 or floating, and normalises within its convolution.
    Returns:
        What was done, module by module; print it, or call require_all() on it.
    Raises:
        ValueError: the backend is unknown or normalize does not fit the model.
        UnsupportedInputError: a backend asked for by name cannot run here; lists all reasons. Nothing is changed. A
            model on meta is fused for any, and its forward raises where it has been moved to and cannot run.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: accepted is a torch.nn.Module")
    resolved = _checked_backend(model, backend)
    plan = _Plan(backend, resolved)
    plan.add_native(model)
    plan.add_modules(model)
    if normalize is not None:
        plan.add_normalize(model, *check_normalize(normalize))
    plan.apply()
    why = auto_reasons(device_of(model), dtype_of(model)) if backend == "auto" and resolved != "triton" else ()
    return FusionReport(resolved, tuple(plan.rows), why)


def unfuse(model: nn.Module) -> None:
    """Undoes fuse: every module is again of the class it was, and is the very object it was all along.

    A model that was not fused is left alone.

    Raises:
        UnsupportedInputError: fully_shard was applied after fuse; lists the modules. Nothing is changed.
    """
    fused = [(name, module) for name, module in model.named_modules() if isinstance(module, FusedModule)]
    wrapped = [name for name, module in fused if "original" not in vars(type(module))]
    if wrapped:
        raise UnsupportedInputError(
            "unfuse", [f"{name} has been given another class since ({_class_name(model, name)})" for name in wrapped]
        )
    for _, module in fused:
        _give_class_back(module)
    for native in native_models(model):
        NativeChange(native).undo()


Undo = Callable[[], None]


@dataclass
class _Plan:
    """Everything that fuse will do, decided before anything is done."""

    requested: str
    resolved: str
    rows: list[ModuleReport] = field(default_factory=list)
    changes: list[Callable[[], Undo]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)  # modules that a row speaks for

    def add_native(self, model: nn.Module) -> None:
        for native in native_models(model):
            change = NativeChange(native)
            prefix = _name_in(model, native)
            everywhere = change.model_reasons(self.requested, self.resolved)
            parts, left = list(change.parts()), []
            for name, part, kind in parts:
                full_name = f"{prefix}.{name}" if prefix else name
                reasons = change.part_reasons(part, self.resolved) + everywhere
                notes = [] if reasons else change.notes(part, self.requested, self.resolved)
                self.rows.append(_row(full_name, part, kind, reasons, notes))
                if reasons:
                    left.append(part)
            self.seen.update(id(module) for module in native.modules())
            if everywhere:
                left, request = [], change.request_before()
            else:
                request = self.requested if len(left) < len(parts) else None
            if request is not None:
                self.changes.append(functools.partial(change.apply, request, left))

    def add_modules(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if id(module) in self.seen:
                continue
            if isinstance(module, FusedModule):
                self._add_fused_before(name, module)
                continue
            form = fused_form(type(module))
            if form is not None:
                self._add(name, module, form)
            elif reason := _reason_to_leave(module):
                self.seen.add(id(module))
                self.seen.update(id(child) for child in module.modules() if not _has_its_own_row(child))
                part = "norm + MLP" if "Block" in type(module).__name__ else "attention"
                self.rows.append(_row(name, module, part, [reason]))
        self._add_unknown(model)

    def add_normalize(self, model: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        found = find_patch_conv(model)
        reasons = ["the model has no convolution that could be its patch embedding"]
        if found is not None:
            name, conv = found
            if isinstance(conv, FusedPatchConv):
                self.rows.append(_row(name, conv, FusedPatchConv.kind))
                self.changes.append(lambda: _set_attributes(conv, vit_fast_mean=mean, vit_fast_std=std))
                return
            reasons = FusedPatchConv.reasons(conv)
            if conv.in_channels != len(mean):
                reasons.append(f"{name} takes {conv.in_channels} channels: normalize has {len(mean)}")
        if found is None or reasons:
            raise ValueError("normalize cannot be folded into this model: " + "; ".join(reasons))
        self.rows.append(_row(name, conv, FusedPatchConv.kind, notes=FusedPatchConv.notes(conv)))
        self.changes.append(lambda: _give_class(conv, FusedPatchConv, "auto", vit_fast_mean=mean, vit_fast_std=std))
        for owner in model.modules():
            if type(owner) is PatchEmbed and any(part is conv for part in owner.modules()):
                self.changes.append(lambda owner=owner: _give_class(owner, FusedPatchEmbed, "auto"))  # type: ignore[misc]

    def apply(self) -> None:
        """All of it, or none: what was done is undone when something fails."""
        undos: list[Undo] = []
        try:
            for change in self.changes:
                undos.append(change())
        except BaseException:
            for undo in reversed(undos):
                undo()
            raise

    def _add(self, name: str, module: nn.Module, form: type[FusedModule]) -> None:
        reasons = _instance_reasons(module, form) or form.reasons(module)
        notes: list[str] = []
        if not reasons:
            reasons, notes = self._about_triton(module, form)
        self.rows.append(_row(name, module, form.kind, reasons, form.notes(module) + notes if not reasons else ()))
        self.seen.add(id(module))
        if not reasons:
            for child in form.bypassed(module):
                self.seen.add(id(child))
            self.changes.append(lambda: _give_class(module, form, self.requested))
        else:
            self.seen.update(id(child) for child in module.modules() if fused_form(type(child)) is None)

    def _add_fused_before(self, name: str, module: FusedModule) -> None:
        form = type(module)
        self.seen.add(id(module))
        if form.kind == FusedPatchConv.kind:
            return
        reasons = _reasons_now(module)
        notes: list[str] = []
        if not reasons:
            reasons, notes = self._about_triton(module, form)
        self.rows.append(_row(name, module, form.kind, reasons, () if reasons else ("already fused", *notes)))
        if not reasons:
            self.seen.update(id(child) for child in form.bypassed(module))
            self.changes.append(lambda: _fuse_again(module, self.requested))
            return
        inside = [child for child in module.modules() if not isinstance(child, FusedModule)]
        self.seen.update(id(child) for child in inside if fused_form(type(child)) is None)
        if "original" in vars(form) and not forward_is_replaced(module):
            self.changes.append(lambda: _give_class_back(module))
        else:  # fully_shard gave it another class, or the forward set on it may call the one it had: that must work
            self.changes.append(lambda: _set_backend(module, "sdpa"))

    def _about_triton(self, module: nn.Module, form: type[FusedModule]) -> tuple[list[str], list[str]]:
        """Why the kernels cannot do this module: reasons to leave it, or a note where "auto" takes sdpa instead."""
        unable = triton_reasons(form.head_width(module), dtype_of(module)) if self.resolved == "triton" else []
        if self.requested != "auto":
            return unable, []
        place, dtype = device_of(module), dtype_of(module)
        backend = "sdpa" if unable else resolve_backend("auto", place, dtype)
        if backend == self.resolved:
            return [], []
        why = [] if backend == "triton" else unable or auto_reasons(place, dtype)
        return [], [f"it runs with backend {backend}" + ("" if not why else ": " + "; ".join(why))]

    def _add_unknown(self, model: nn.Module) -> None:
        """What looks like attention or an MLP, has weights, and no row speaks for it or for something inside it."""
        for name, module in model.named_modules():
            if id(module) in self.seen or not LOOKS_FUSABLE.search(type(module).__name__):
                continue
            if any(id(child) in self.seen for child in module.modules()) or next(module.parameters(), None) is None:
                continue
            self.seen.update(id(child) for child in module.modules())
            part = "attention" if "Att" in type(module).__name__ else "norm + MLP"
            self.rows.append(_row(name, module, part, [f"{type(module).__qualname__} is not a class vit_fast knows"]))


def _checked_backend(model: nn.Module, backend: str) -> str:
    device = device_of(model)
    resolved = resolve_backend(backend, device, dtype_of(model))
    if backend == "triton" and device.type != "meta":  # from there a model moves to where it will run
        reasons = triton_unavailable_reasons(device)
        if reasons:
            raise UnsupportedInputError("fuse with backend='triton'", reasons)
    return resolved


def _instance_reasons(module: nn.Module, form: type[FusedModule]) -> list[str]:
    """Why this instance is not what its class says."""
    reasons = []
    if type(module).forward is not form.original_forward:
        reasons.append(f"{type(module).__qualname__}.forward has been replaced since vit_fast first saw it")
    if forward_is_replaced(module):
        reasons.append("its forward was replaced on the instance")
    return reasons


def _reasons_now(module: FusedModule) -> list[str]:
    """Why a module that was fused earlier can no longer be.

    Sharded weights are none: fully_shard came after fuse, and gathers them before forward runs.
    """
    reasons = ["its forward was replaced on the instance"] if forward_is_replaced(module) else []
    return reasons + [reason for reason in type(module).reasons(module) if " is a DTensor: " not in reason]


def _reason_to_leave(module: nn.Module) -> str | None:
    """Why a module without a fused form is left, where there is a particular reason."""
    cls = type(module)
    reason = left_reason(cls)
    if reason is not None:
        return f"{cls.__qualname__}: {reason}"
    for base in cls.__mro__[1:]:
        form = fused_form(base) if issubclass(base, nn.Module) and base is not nn.Module else None
        if form is None:
            continue
        if cls.__name__.startswith("FSDP") and any(parent.__name__ == "FSDPModule" for parent in cls.__mro__):
            return "fully_shard has wrapped it: call fuse before fully_shard"
        own = cls.forward is not form.original_forward
        return f"{cls.__qualname__} is a subclass of {base.__qualname__}" + (
            " with a forward of its own" if own else ""
        )
    return None


def _has_its_own_row(module: nn.Module) -> bool:
    return fused_form(type(module)) is not None or _reason_to_leave(module) is not None


def _give_class(module: nn.Module, form: type[FusedModule], backend: str, **attributes: Any) -> Undo:
    """Makes the module an instance of its fused class; gives back what undoes it."""

    def undo() -> None:
        module.__class__ = before
        for name in set(module.__dict__) - set(kept):
            del module.__dict__[name]
        module.__dict__.update(kept)

    before, kept = type(module), dict(module.__dict__)
    try:
        module.__dict__.pop("forward", None)  # transformers 4 leaves the class's own behind, which would win over ours
        module.__class__ = form
        module.__dict__.update(attributes)
        fused: Any = module
        fused.prepare()
        fused.set_fused_backend(backend)
    except BaseException:
        undo()
        raise
    return undo


def _give_class_back(module: FusedModule) -> Undo:
    def undo() -> None:
        module.__class__ = form
        module.__dict__.clear()
        module.__dict__.update(kept)

    form, kept = type(module), dict(module.__dict__)
    module.__dict__.pop("forward", None)  # as above
    for name in [name for name in module.__dict__ if name.startswith("vit_fast_")]:
        del module.__dict__[name]
    module.__class__ = type(module).original  # type: ignore[assignment]  # a class of another library
    return undo


def _fuse_again(module: FusedModule, backend: str) -> Undo:
    """Records anew what the children are now, which may have been replaced since, and sets the backend."""

    def undo() -> None:
        module.__dict__.clear()
        module.__dict__.update(kept)

    kept = dict(module.__dict__)
    try:
        module.prepare()
        module.set_fused_backend(backend)
    except BaseException:
        undo()
        raise
    return undo


def _set_backend(module: FusedModule, backend: str) -> Undo:
    before = module.vit_fast_request
    module.set_fused_backend(backend)
    return lambda: module.set_fused_backend(before)


def _set_attributes(module: nn.Module, **attributes: Any) -> Undo:
    before = {name: module.__dict__[name] for name in attributes}
    module.__dict__.update(attributes)
    return lambda: module.__dict__.update(before)


def _row(
    name: str, module: nn.Module, part: str, reasons: Sequence[str] = (), notes: Sequence[str] = ()
) -> ModuleReport:
    form = type(module)
    class_name = form.original.__qualname__ if issubclass(form, FusedModule) else form.__qualname__
    return ModuleReport(name, class_name, part, not reasons, tuple(reasons), tuple(notes))


def _name_in(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _class_name(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name)).__name__

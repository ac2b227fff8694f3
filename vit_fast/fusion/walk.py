"""Walks over a model, selects the fused class of each module, and collects the report."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..blocks.fused import Finding, FusedContainer, FusedModule, FusedNormMlp, device_of, dtype_of, form_of
from ..blocks.fusion_report import UNKNOWN, ModuleReport
from ..blocks.plain import forward_is_replaced, forward_reasons
from ..errors import type_name
from ..libraries.known import fused_form, is_near_attention, reason_against
from ..ops.backends import auto_reasons, resolve_backend
from ..reading import forms
from ..reading.recorder import Found
from .patch_embed import FusedPatchConv

CANNOT_NORMALIZE = "normalize cannot be folded into the patch embedding"
LOOKS_FUSABLE = re.compile(r"(Attention|Attn|Mlp|MLP|FFN|FeedForward)(?![a-z])|Attention$")


class Walk:
    """Walks over a model and collects the rows of the report and the changes to make."""

    def __init__(self, model: nn.Module, requested: str, resolved: str, found: Found | None = None) -> None:
        self.model, self.requested, self.resolved, self.found = model, requested, resolved, found or Found()
        self.rows: list[ModuleReport] = []
        self.elsewhere: list[str] = []
        self.has_unnamed = False  # True if a module looks fusable, but has no row
        self.changes: list[Callable[[], object]] = []
        self._has_row: dict[nn.Module, bool] = {}
        self._blocks: set[nn.Module] = set()  # fused blocks that a FusedContainer may run
        self.visit("", model)

    def visit(self, name: str, module: nn.Module, inside_unknown: bool = False) -> bool:
        """Adds the rows of a module and all modules inside it; returns True if there are any.

        `inside_unknown`: an enclosing module is skipped or looks fusable. Then, a class that looks fusable has no row.
        """
        if module in self._has_row:
            return self._has_row[module]
        self._has_row[module] = True
        form = fused_form(type(module))
        if isinstance(module, FusedPatchConv):
            return True
        if (recipe := self.found.recipes.get(module)) is not None:
            for part in module.modules():  # fused by an earlier call
                if part is not module and isinstance(part, FusedModule) and "original" in vars(type(part)):
                    self.changes.append(functools.partial(restore_class, part))
            self._visit_created(name, module, forms.ReadModule, forms.attributes(module, recipe))
            found = True
        elif form is None:
            found = self._visit_other(name, module, inside_unknown)
        elif issubclass(form, FusedContainer):
            found = self._visit_children(name, module, inside_unknown)
            fits = not isinstance(module, form) and form.fits(module, self._blocks)
            if fits and not _reasons(module, form, Finding()):
                self.changes.append(lambda: set_fused_class(module, form, self.requested))
        else:
            at = len(self.rows)
            skipped = self._visit_fusable(name, module, form)
            self._visit_children(name, module, inside_unknown=skipped)
            is_read = any("MLP" in row.part and row.fused for row in self.rows[at + 1 :])
            if skipped and is_read and form.kind_of(module) == FusedNormMlp.kind:  # e.g. an MLP with a norm of its own
                del self.rows[at]
            found = True
        self._has_row[module] = found
        return found

    def has_unknown(self) -> bool:
        """Returns True if an example may show more, because a module is conditional or skipped."""
        return self.has_unnamed or not self.rows or any(row.condition or row.reasons for row in self.rows)

    def _visit_children(self, name: str, module: nn.Module, inside_unknown: bool) -> bool:
        prefix = f"{name}." if name else ""
        found = [self.visit(prefix + own, child, inside_unknown) for own, child in module.named_children()]
        return any(found)

    def _visit_other(self, name: str, module: nn.Module, inside_unknown: bool) -> bool:
        """Adds a row for a module without a fused form if it was not read, or without an example, looks fusable."""
        class_name = type(module).__name__
        if not self.found.is_read and (reason := reason_against(type(module))) is not None:
            part = "norm + MLP" if "Block" in class_name else "attention"
            self.rows.append(row_of(name, module, part, [reason]))
            self._visit_children(name, module, inside_unknown=True)
            return True
        decodes = "Decoder" in class_name and "Encoder" not in class_name
        reads_text = getattr(module, "input_modalities", None) in ("text", ("text",))  # of transformers
        is_elsewhere = bool(name) and (decodes or reads_text)
        if is_elsewhere and not inside_unknown and (reads_text or _attends(module)):
            kind = "language model" if reads_text else "decoder"
            self.elsewhere.append(f"{name} ({type(module).__qualname__}) is a {kind}")
        inside_unknown = inside_unknown or is_elsewhere
        looks_fusable = LOOKS_FUSABLE.search(class_name) is not None
        found = self._visit_children(name, module, inside_unknown or looks_fusable)
        if self.found.is_read:
            return self._visit_unread(name, module, found)
        if not found and not inside_unknown and not looks_fusable and _looks_like_attention(module):
            self.rows.append(row_of(name, module, "attention", [f"{type(module).__qualname__} {UNKNOWN}"]))
            return True
        if found or inside_unknown or not looks_fusable or next(module.parameters(), None) is None:
            return found
        part = "attention" if "Att" in class_name else "norm + MLP"
        if part != "attention" and not is_near_attention(self.model, name):  # perhaps of a head
            self.has_unnamed = True
            return False
        self.rows.append(row_of(name, module, part, [f"{type(module).__qualname__} {UNKNOWN}"]))
        return True

    def _visit_unread(self, name: str, module: nn.Module, found: bool) -> bool:
        """Adds a row for attention that a module computes itself, and for an MLP, if they were not read."""
        why, attends = self.found.reasons.get(module), self.found.own[module] > 0
        around = (row for row in self.rows if row.reasons and "MLP" in row.part and name.startswith(f"{row.name}."))
        has_mlp = self.found.mlps[module] > 0  # e.g. beside an attention layer
        if not attends and (why is None or any(around) or (found and not has_mlp)):
            return found
        kinds = {"attention": self.found.cores[module] > 0 and (attends or not found), "norm + MLP": has_mlp}
        part = ", ".join(kind for kind, exists in kinds.items() if exists) or "norm + MLP"
        several = "its forward computes more than one attention layer"
        why = why or (several if self.found.own[module] > 1 else "q, k and v are not linear layers of the tokens")
        if (width := self.found.width_of_cores(module)) is not None:
            part = "norm + MLP" if has_mlp else ""
            notes = [f"the rest runs as modules: {why}"]
            if module in self.found.spelled:
                notes.append("with the backend sdpa, the products and the softmax of its forward run")
            self._visit_created(name, module, forms.CoreModule, {"vit_fast_width": width})
            self.rows[-1] = dataclasses.replace(self.rows[-1], notes=(*self.rows[-1].notes, *notes))
        if part:
            self.rows.append(row_of(name, module, part, [why]))
        return True

    def _visit_created(
        self, name: str, module: nn.Module, mixin: type[FusedModule], attributes: dict[str, Any]
    ) -> None:
        """Handles a module of an unknown class."""
        module.__dict__.update(attributes)  # examined as if it were fused
        try:
            original = type(module).original if isinstance(module, FusedModule) else type(module)
            self._visit_fusable(name, module, form_of(mixin, original), attributes)
        finally:
            for own in attributes:
                del module.__dict__[own]

    def _visit_fusable(
        self, name: str, module: nn.Module, form: type[FusedModule], attributes: dict[str, Any] | None = None
    ) -> bool:
        """Handles a module that is fused or has a fused class; returns True if the module is skipped."""
        owner = self.model.get_submodule(name.rpartition(".")[0])
        finding, calls = form.examine(module), form.examine_call(owner, self.found.problems.get(module))
        notes = [*(["already fused"] if isinstance(module, FusedModule) else []), *finding.notes, *calls.notes]
        reasons = [*_reasons(module, form, finding), *calls.reasons]
        if not reasons:
            reasons, backend_notes = self._backend_reasons(module, form)
            notes += backend_notes
        row = row_of(name, module, form.kind_of(module), reasons, () if reasons else notes)
        self.rows.append(dataclasses.replace(row, condition="" if reasons else calls.condition))
        if not reasons:
            self._has_row.update(dict.fromkeys(finding.bypassed, True))
            set_class = functools.partial(set_fused_class, module, form, self.requested, **(attributes or {}))
            self.changes.append(set_class)
            if issubclass(form, FusedNormMlp) and form.in_sequence:
                self._blocks.add(module)
        elif isinstance(module, FusedModule):
            if "original" in vars(form) and not forward_is_replaced(module):
                self.changes.append(functools.partial(restore_class, module))
            else:  # keep the class: fully_shard changed it, or a forward set on the instance may call its forward
                self.changes.append(functools.partial(module.set_fused_backend, "sdpa"))
        return bool(reasons)

    def add_normalize(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """Adds the changes that fold the normalization into the first convolution, which reads the image."""
        convs = ((name, module) for name, module in self.model.named_modules() if isinstance(module, nn.Conv2d))
        name, conv = next(convs, ("", None))
        if conv is None:
            raise ValueError(f"{CANNOT_NORMALIZE}: the model must have a torch.nn.Conv2d as patch embedding, got none")
        finding = Finding() if isinstance(conv, FusedPatchConv) else FusedPatchConv.examine(conv)
        reasons = list(finding.reasons)
        if conv.in_channels != len(mean):
            reasons.append(f"mean and std must have {conv.in_channels} numbers, one per input channel, got {len(mean)}")
        if reasons:
            raise ValueError(f"{CANNOT_NORMALIZE}: {'; '.join(reasons)}")
        self.rows.append(row_of(name, conv, FusedPatchConv.kind, notes=finding.notes))
        folded = {"vit_fast_mean": mean, "vit_fast_std": std}
        self.changes.append(lambda: set_fused_class(conv, form_of(FusedPatchConv, nn.Conv2d), "auto", **folded))

    def apply(self) -> None:
        """Applies all changes; if one fails, undoes the others."""
        before = [(module, type(module), dict(module.__dict__)) for module in self.model.modules()]
        try:
            for change in self.changes:
                change()
        except BaseException:
            for module, cls, attributes in before:
                module.__class__ = cls
                module.__dict__.clear()
                module.__dict__.update(attributes)
            raise

    def _backend_reasons(self, module: nn.Module, form: type[FusedModule]) -> tuple[list[str], list[str]]:
        """Returns reasons to skip the module, and notes; with "auto", a module that triton cannot run uses sdpa."""
        unable = form.triton_reasons(module) if self.resolved == "triton" else []
        if self.requested != "auto":
            return unable, []
        device, dtype = device_of(module), dtype_of(module)
        backend = "sdpa" if unable else resolve_backend("auto", device, dtype)
        if backend == self.resolved:
            return [], []
        why = [] if backend == "triton" else unable or auto_reasons(device, dtype)
        return [], [f"it runs with backend {backend}" + ("" if not why else ": " + "; ".join(why))]


def is_supported(module: nn.Module) -> bool:
    """Returns True if fuse supports a module by its class."""
    if isinstance(module, nn.Sequential):  # its children decide
        return False
    form = fused_form(type(module))
    return form is not None and not issubclass(form, FusedContainer) and not form.examine(module).reasons


def _looks_like_attention(module: nn.Module) -> bool:
    """Returns True if the shapes of parameters look like those of q, k, v and an output projection."""
    if getattr(type(module), "forward", None) in (None, nn.Module.forward):  # e.g. a ModuleList, or a scripted module
        return False
    shapes = [tuple(each.shape) for each in module.parameters() if each.dim() == 2]
    widths = {rows for rows, columns in shapes if rows == columns}
    return any(sum(rows for rows, own in shapes if own == width and rows <= 3 * width) >= 4 * width for width in widths)


def _attends(module: nn.Module) -> bool:
    """Returns True if a class inside a module has the name of an attention layer; convolutional decoders have none."""
    layers = (part for part in module.modules() if "Att" in type(part).__name__)
    return any(next(layer.parameters(), None) is not None for layer in layers)


def _reasons(module: nn.Module, form: type[FusedModule], finding: Finding) -> list[str]:
    """Returns the reasons why a module cannot be fused, or can no longer be fused."""
    if isinstance(module, FusedModule):
        reasons = ["its forward was replaced on the instance"] if forward_is_replaced(module) else []
        # sharded weights are no reason: fully_shard was called after fuse, and gathers them before forward
        sharded = tuple(f", got {type_name(each)}" for each in module.parameters() if type(each).__name__ == "DTensor")
        return reasons + [reason for reason in finding.reasons if not reason.endswith(sharded)]
    reasons = forward_reasons(module)
    if not reasons and type(module).forward is not form.original_forward:
        reasons.append(f"{type(module).__qualname__}.forward was replaced on the class")
    return reasons or list(finding.reasons)


def set_fused_class(module: nn.Module, form: type[FusedModule], backend: str, **attributes: Any) -> None:
    # transformers 4 leaves the class's forward on the instance, which would override the fused one
    module.__dict__.pop("forward", None)
    module.__class__ = form
    module.__dict__.update(attributes)
    fused: Any = module
    fused.prepare(backend)


def restore_class(module: FusedModule) -> None:
    if not forward_is_replaced(module):
        module.__dict__.pop("forward", None)  # left by transformers 4; a forward set by the user stays
    for name in [name for name in module.__dict__ if name.startswith("vit_fast_")]:
        del module.__dict__[name]
    module.__class__ = type(module).original  # type: ignore[assignment]  # a class of another library


def row_of(
    name: str, module: nn.Module, part: str, reasons: Sequence[str] = (), notes: Sequence[str] = ()
) -> ModuleReport:
    form = type(module)
    class_name = form.original.__qualname__ if issubclass(form, FusedModule) else form.__qualname__
    return ModuleReport(name, class_name, part, not reasons, tuple(reasons), tuple(notes))

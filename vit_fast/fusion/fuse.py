"""fuse and freeze: run the encoder blocks of a model with fused operators, in place and reversibly."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from ..blocks.block import freeze_block
from ..blocks.fp8_scales import PLACE, remove_scales
from ..blocks.frozen import Frozen
from ..blocks.fused import Finding, FusedContainer, FusedModule, FusedNormMlp, device_of, dtype_of
from ..blocks.fusion_report import FreezeReport, FusionReport, ModuleReport
from ..blocks.plain import forward_is_replaced, forward_reasons
from ..errors import check_type, raise_unsupported, type_name
from ..libraries.known import form_or_reason, fused_form, is_near_attention
from ..ops.backends import auto_reasons, resolve_backend, triton_unavailable_reasons
from ..quantization import fp8
from ..reading import forms
from ..reading.forms import Recipe
from ..reading.reader import Found, read_model
from .patch_embed import FusedPatchConv, check_normalize

UNKNOWN = "is not a supported class"
HINT = ": pass example= to fuse what it computes"
CANNOT_NORMALIZE = "normalize cannot be folded into the patch embedding"
LOOKS_FUSABLE = re.compile(r"(Attention|Attn|Mlp|MLP|FFN|FeedForward)(?![a-z])|Attention$")


def fuse(
    model: nn.Module, backend: str = "auto", *, normalize: tuple[Sequence[float], Sequence[float]] | None = None,
    precision: str | None = None, keep: Iterable[str] | None = None, min_agreement: float | None = None,
    example: Any = None,
) -> FusionReport:  # fmt: skip
    """Replaces attention and norm + MLP of a model by fused operators.

    fuse supports modules of vit-fast, timm, transformers, torchvision and torch.nn by their class. With an example, it
    also supports modules of any other class: it reads what they compute. fuse changes the model in place: it sets the
    class of each fused module to a subclass with another forward. Modules keep their identity, Parameters,
    state_dict keys, hooks and names. Training, autocast, checkpointing, deepcopy, pickle, torch.export, DDP and FSDP
    work as before (call fuse before fully_shard). Call fuse again to change the backend or normalize.

    - A module that fuse or the backend does not support keeps its original forward. The report lists all reasons;
      `report.require_all()` raises an error if a module was skipped.
    - A fused module runs its original forward for calls with active dropout, with masks other than padding masks, or
      that request attention weights. Submodules that are hooked or replaced after fuse run their own forward. Attention
      functions that a user of transformers registers and selects run unchanged.
    - Any other call that the backend cannot run, e.g. because of dtype or device, raises UnsupportedInputError.

    Args:
        model: Any module; all its submodules are inspected.
        backend: "triton" (Triton kernels), "sdpa" (torch's fused attention), "eager" (reference formulas), or "auto".
            "auto" selects triton for each module whose device, head_dim and dtype the kernels support, otherwise sdpa;
            fp32 requires TF32 or autocast for triton. Moving or converting the model repeats the selection.
        normalize: (mean, std) of images in 0..1, one number per channel. The patch embedding then takes images in
            0..255, uint8 or floating, and normalizes them inside its convolution.
        precision: "fp8" runs the linear layers of blocks in e4m3, and attention in half precision, for inference on
            GPUs of compute capability 8.9 or higher. The model must be in fp16 or bf16, and calibrated by
            `vit_fast.calibrate`. Training and gradients raise an error. Original forwards and calls with padding masks
            or packed sequences run in half precision. None means the dtype of the model, also after "fp8".
        keep: With "fp8", names or patterns of linear layers that stay in half precision, e.g. `("*.mlp.fc2",)`. By
            default, the layers of the previous choice stay in half precision. The choice is saved with the scales.
        min_agreement: With "fp8", the required top-1 agreement with the unrounded model on the calibration images, in
            (0, 1]. The most sensitive linear layers stay in half precision until emulated FP8 reaches this agreement.
        example: Input of one forward: a tensor, a tuple of arguments, or a dictionary of keyword arguments. Modules
            whose class is unknown are captured on it. A module is fused only if its parts compute the same outputs and
            gradients on random weights. Calls with other arguments than in this forward run the original forward.
    Returns:
        A report with one row per fused or skipped module.
    Raises:
        ValueError: an argument is unknown or does not fit the model.
        TypeError: model or keep has another type.
        UnsupportedInputError: the device does not support the requested backend, or device or model do not support FP8.
    """
    check_type("model", model, nn.Module)
    choice = None
    if precision is not None or keep is not None or min_agreement is not None:
        fp8.check_request(model, backend, precision)
        choice, backend = fp8.choose(model, sharing_copy(model), keep, min_agreement), "triton"
    device = device_of(model)
    resolved = resolve_backend(backend, device, dtype_of(model))
    if backend == "triton" and device.type != "meta":  # a model moves from meta to its device later
        raise_unsupported("fuse with backend='triton'", list(triton_unavailable_reasons(device)))
    walk = _Walk(model, backend, resolved, None if example is None else read_model(model, example, _is_supported))
    if normalize is not None:
        walk.add_normalize(*check_normalize(normalize))
    if any(PLACE in module._modules for module in model.modules()):  # calibrated
        walk.changes.append(functools.partial(fp8.switch, model, choice))
    walk.apply()
    rows = walk.rows if choice is None else fp8.annotated(walk.rows, choice, dtype_of(model))
    why = auto_reasons(device, dtype_of(model)) if backend == "auto" and resolved != "triton" else ()
    measured = () if choice is None else choice.notes
    return FusionReport(resolved, tuple(rows), why, precision, measured, tuple(walk.elsewhere))


def unfuse(model: nn.Module) -> None:
    """Undoes fuse: restores the original class of each module, and removes the scales of `calibrate`.

    Hooks, modules and forwards that were set after fuse stay.

    Raises:
        UnsupportedInputError: fully_shard was applied after fuse; lists the modules. The model stays unchanged.
    """
    check_type("model", model, nn.Module)
    fused = {name: module for name, module in model.named_modules() if isinstance(module, FusedModule)}
    wrapped = {name: type(module).__name__ for name, module in fused.items() if "original" not in vars(type(module))}
    raise_unsupported(
        "unfuse",
        [f"{name or 'model'} is wrapped as {cls}: call unfuse before fully_shard" for name, cls in wrapped.items()],
    )
    for module in fused.values():
        _restore_class(module)
    remove_scales(model)


def set_backend(model: nn.Module, backend: str) -> FusionReport:
    """Calls fuse with a backend, but raises an error instead of skipping a module that the Triton kernels cannot run.

    Args:
        model: A VisionTransformer or any other module.
        backend: "triton", "sdpa", "eager" or "auto"; see fuse.
    Returns:
        The report of fuse.
    Raises:
        ValueError: the backend is unknown.
        UnsupportedInputError: "triton" cannot run the model; lists all reasons. The model stays unchanged.
    """
    check_type("model", model, nn.Module)
    if backend == "triton":
        forms = {
            part: type(part) if isinstance(part, FusedModule) else fused_form(type(part)) for part in model.modules()
        }
        unable = [reason for part, form in forms.items() if form is not None for reason in form.triton_reasons(part)]
        raise_unsupported("set_backend with backend='triton'", list(dict.fromkeys(unable)))
    return fuse(model, backend)


def freeze(model: nn.Module) -> FreezeReport:
    """Prepares the weights of a model's blocks for inference once, instead of in every forward.

    On a GPU (backend triton), folds each norm into the next linear layer, which saves at least one launch per block.
    The folded weights of qkv and fc1 need additional memory. Call freeze under autocast if later forwards use autocast;
    then proj and fc2 also need additional memory.

    On a CPU (backend sdpa), copies the weights of all linear layers in the blocks into the layout of the fastest
    implementation: oneDNN, MKL or ATen. The first freeze of a layer shape on a machine measures the implementations and
    caches the result for later processes; `vit-fast cache --clear` removes it. The first forward of each input shape
    may compile attention by oneDNN Graph, which takes 5 to 100 ms. Autocast, torch.compile, torch.export, tracing and
    torch.func use the original weights.

    A forward in another dtype, in training mode, or with gradients uses the original weights.

    unfreeze(model), train(), load_state_dict() and moves to another device or dtype drop the prepared weights. Changes
    that torch tracks update the prepared weights: optimizer steps, in-place writes that increment the version counter,
    and replaced parameters. Call freeze again after other changes: writes through `.data`, collectives of
    torch.distributed, replays of a captured training step, and other libraries (e.g. merging LoRA weights by peft).
    Copies and pickles of the model are not frozen. Blocks in FP8 always cache their quantized weights, by these rules.

    Args:
        model: A model in evaluation mode, after vit_fast.fuse or from create_model. Blocks that freeze does not support
            are skipped, e.g. blocks with a wrapped or hooked part.
    Returns:
        The names of the frozen blocks, as a tuple. Print it to show the skipped blocks with all reasons.
    Raises:
        TypeError: model is not a module.
        ValueError: a block is in training mode. Nothing is frozen.
    """
    check_type("model", model, nn.Module)
    blocks = [(name, module) for name, module in model.named_modules() if isinstance(module, FusedNormMlp)]
    for name, block in blocks:
        if block.training:
            raise ValueError(f"{name or 'model'} must be in evaluation mode: call eval() first")
    rows = [_row(name, block, "block", freeze_block(block)) for name, block in blocks]
    inside = {part for _, block in blocks for part in block.modules()}
    alone = (each for each in model.named_modules() if isinstance(each[1], FusedModule) and each[1] not in inside)
    rows += [
        _row(name, part, part.kind, ["fuse did not fuse the norm and MLP of its block"])
        for name, part in alone
        if part.kind == "attention"
    ]
    return FreezeReport(rows)


def unfreeze(model: nn.Module) -> None:
    """Undoes freeze: drops the prepared weights. Does nothing if the model is not frozen."""
    check_type("model", model, nn.Module)
    for module in model.modules():
        if isinstance(module, FusedNormMlp):
            module.drop_frozen()


def frozen_of(model: nn.Module) -> list[Frozen]:
    """Returns the cached weights of a model's blocks."""
    parts = [module.__dict__.get("vit_fast_parts") for module in model.modules() if isinstance(module, FusedNormMlp)]
    return [each.frozen for each in parts if each is not None and each.frozen is not None]


def sharing_copy(model: nn.Module) -> nn.Module:
    """Returns a copy of a model that shares its tensors and is fused with "sdpa", which runs on any device."""
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    _Walk(copied, "sdpa", "sdpa").apply()
    return copied


class _Walk:
    """Walks over a model and collects the rows of the report and the changes to make."""

    def __init__(self, model: nn.Module, requested: str, resolved: str, found: Found | None = None) -> None:
        self.model, self.requested, self.resolved, self.found = model, requested, resolved, found or Found()
        self.rows: list[ModuleReport] = []
        self.elsewhere: list[str] = []
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
        form, reason = (type(module), None) if isinstance(module, FusedModule) else form_or_reason(type(module))
        if isinstance(module, FusedPatchConv):
            return True
        if (recipe := self.found.recipes.get(module)) is not None:
            self._visit_read(name, module, recipe)
            found = True
        elif form is None:
            found = self._visit_other(name, module, reason, inside_unknown)
        elif issubclass(form, FusedContainer):
            found = self._visit_children(name, module, inside_unknown)
            fits = not isinstance(module, form) and form.fits(module, self._blocks)
            if fits and not _reasons(module, form, Finding()):
                self.changes.append(lambda: _set_fused_class(module, form, self.requested))
        else:
            self._visit_children(name, module, inside_unknown=self._visit_fusable(name, module, form))
            found = True
        self._has_row[module] = found
        return found

    def _visit_children(self, name: str, module: nn.Module, inside_unknown: bool) -> bool:
        prefix = f"{name}." if name else ""
        found = [self.visit(prefix + own, child, inside_unknown) for own, child in module.named_children()]
        return any(found)

    def _visit_other(self, name: str, module: nn.Module, reason: str | None, inside_unknown: bool) -> bool:
        """Adds a row for a module without a fused form if a reason is known or it looks fusable."""
        class_name = type(module).__name__
        if reason:
            part = "norm + MLP" if "Block" in class_name else "attention"
            self.rows.append(_row(name, module, part, [reason]))
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
            self.rows.append(_row(name, module, "attention", [f"{type(module).__qualname__} {UNKNOWN}{HINT}"]))
            return True
        if found or inside_unknown or not looks_fusable or next(module.parameters(), None) is None:
            return found
        part = "attention" if "Att" in class_name else "norm + MLP"
        if part != "attention" and not is_near_attention(self.model, name):
            return False
        self.rows.append(_row(name, module, part, [f"{type(module).__qualname__} {UNKNOWN}{HINT}"]))
        return True

    def _visit_unread(self, name: str, module: nn.Module, found: bool) -> bool:
        """Adds a row for attention that a module computes itself, and for an MLP, if they were not read."""
        why, attends = self.found.reasons.get(module), self.found.own[module] > 0
        if not attends and (found or why is None):
            return found
        part = "attention" if self.found.cores[module] else "norm + MLP"
        self.rows.append(_row(name, module, part, [why or "its forward computes more than one attention layer"]))
        return True

    def _visit_read(self, name: str, module: nn.Module, recipe: Recipe) -> None:
        """Handles a module that was read by its computation."""
        attributes = forms.attributes(module, recipe)
        module.__dict__.update(attributes)  # examined as if it were fused
        try:
            self._visit_fusable(name, module, forms.form_of(type(module), recipe.kind), attributes)
        finally:
            for own in attributes:
                del module.__dict__[own]

    def _visit_fusable(
        self, name: str, module: nn.Module, form: type[FusedModule], attributes: dict[str, Any] | None = None
    ) -> bool:
        """Handles a module that is fused or has a fused class; returns True if the module is skipped."""
        finding, calls = form.examine(module), form.examine_calls(self.model, name)
        notes = [*(["already fused"] if isinstance(module, FusedModule) else []), *finding.notes, *calls.notes]
        reasons = [*_reasons(module, form, finding), *calls.reasons]
        if not reasons:
            reasons, backend_notes = self._backend_reasons(module, form)
            notes += backend_notes
        row = _row(name, module, form.kind, reasons, () if reasons else notes)
        self.rows.append(dataclasses.replace(row, condition="" if reasons else calls.condition))
        if not reasons:
            self._has_row.update(dict.fromkeys(finding.bypassed, True))
            set_class = functools.partial(_set_fused_class, module, form, self.requested, **(attributes or {}))
            self.changes.append(set_class)
            if issubclass(form, FusedNormMlp) and form.in_sequence:
                self._blocks.add(module)
        elif isinstance(module, FusedModule):
            if "original" in vars(form) and not forward_is_replaced(module):
                self.changes.append(functools.partial(_restore_class, module))
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
        self.rows.append(_row(name, conv, FusedPatchConv.kind, notes=finding.notes))
        folded = {"vit_fast_mean": mean, "vit_fast_std": std}
        self.changes.append(lambda: _set_fused_class(conv, FusedPatchConv, "auto", **folded))

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


def _is_supported(module: nn.Module) -> bool:
    """Returns True if fuse supports a module by its class."""
    if isinstance(module, nn.Sequential):  # its children decide
        return False
    form = type(module) if isinstance(module, FusedModule) else fused_form(type(module))
    return form is not None and not issubclass(form, FusedContainer) and not form.examine(module).reasons


def _looks_like_attention(module: nn.Module) -> bool:
    """Returns True if the shapes of parameters look like those of q, k, v and an output projection."""
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


def _set_fused_class(module: nn.Module, form: type[FusedModule], backend: str, **attributes: Any) -> None:
    # transformers 4 leaves the class's forward on the instance, which would override the fused one
    module.__dict__.pop("forward", None)
    module.__class__ = form
    module.__dict__.update(attributes)
    fused: Any = module
    fused.prepare(backend)


def _restore_class(module: FusedModule) -> None:
    if not forward_is_replaced(module):
        module.__dict__.pop("forward", None)  # left by transformers 4; a forward set by the user stays
    for name in [name for name in module.__dict__ if name.startswith("vit_fast_")]:
        del module.__dict__[name]
    module.__class__ = type(module).original  # type: ignore[assignment]  # a class of another library


def _row(
    name: str, module: nn.Module, part: str, reasons: Sequence[str] = (), notes: Sequence[str] = ()
) -> ModuleReport:
    form = type(module)
    class_name = form.original.__qualname__ if issubclass(form, FusedModule) else form.__qualname__
    return ModuleReport(name, class_name, part, not reasons, tuple(reasons), tuple(notes))

"""fuse and freeze: run the encoder blocks of a model with fused operators, in place and reversibly."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ..blocks.block import freeze_block
from ..blocks.fp8_scales import PLACE, remove_scales
from ..blocks.frozen import Frozen
from ..blocks.fused import FusedModule, FusedNormMlp, device_of, dtype_of
from ..blocks.fusion_report import FreezeReport, FusionReport
from ..errors import check_type, raise_unsupported
from ..libraries.interface.image_model import deep_copy
from ..libraries.known import fused_form
from ..ops.backends import auto_reasons, resolve_backend, triton_unavailable_reasons
from ..quantization import fp8
from ..reading.reader import read_model
from ..reading.recorder import Found, examples_of
from .patch_embed import check_normalize
from .walk import Walk, is_supported, restore_class, row_of


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
            gradients on random weights. Calls with other arguments than in this forward run the original forward. By
            default, fuse uses the images of `calibrate`, or if the model contains unknown classes, a random input of
            the model or of the towers inside it that state their size.
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
        if example is None:
            example = fp8.calibration_images(model)
        choice, backend = fp8.choose(model, sharing_copy(model, example), keep, min_agreement), "triton"
    device = device_of(model)
    resolved = resolve_backend(backend, device, dtype_of(model))
    if backend == "triton" and device.type != "meta":  # a model moves from meta to its device later
        raise_unsupported("fuse with backend='triton'", list(triton_unavailable_reasons(device)))
    if example is None:
        walk = _walk(model, backend, resolved)
    else:
        walk = Walk(model, backend, resolved, read_model(model, example, is_supported))
    if normalize is not None:
        walk.add_normalize(*check_normalize(normalize))
    if any(PLACE in module._modules for module in model.modules()):  # calibrated
        walk.changes.append(functools.partial(fp8.switch, model, choice))
    walk.apply()
    rows = walk.rows if choice is None else fp8.annotated(walk.rows, choice, dtype_of(model))
    why = auto_reasons(device, dtype_of(model)) if backend == "auto" and resolved != "triton" else ()
    measured = () if choice is None else choice.notes
    return FusionReport(resolved, tuple(rows), why, precision, measured, tuple(walk.elsewhere), walk.found.is_read)


def fuse_plain(model: nn.Module, example: Any) -> None:
    """Calls fuse with an example, unless a part of the model is fused or compiled."""
    if not any(isinstance(part, FusedModule) or hasattr(part, "_orig_mod") for part in model.modules()):
        fuse(model, example=example)


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
        restore_class(module)
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
        forms = ((part, fused_form(type(part))) for part in model.modules())
        unable = [reason for part, form in forms if form is not None for reason in form.triton_reasons(part)]
        raise_unsupported("set_backend with backend='triton'", list(dict.fromkeys(unable)))
    return fuse(model, backend)


def freeze(model: nn.Module) -> FreezeReport:
    """Prepares the weights of a model's blocks for inference once, instead of in every forward.

    On a GPU (backend triton), folds each norm into the next linear layer, which saves at least one launch per block.
    The folded weights of qkv and fc1 need additional memory. Call freeze under autocast if later forwards use autocast;
    then proj and fc2 also need additional memory.

    On a CPU (backend sdpa), copies the weights of all linear layers in the blocks into the layout of the fastest
    implementation: oneDNN or MKL; ATen needs no copy. The first freeze of a layer shape on a machine measures the
    implementations and caches the result for later processes; `vit-fast cache --clear` removes it. Modules that were
    read by their computation are skipped if they are not measurably faster. The first forward of each input shape may
    compile attention by oneDNN Graph, which takes 5 to 100 ms. Autocast, torch.compile, torch.export, tracing and
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
    rows = [row_of(name, block, "block", freeze_block(block)) for name, block in blocks]
    inside = {part for _, block in blocks for part in block.modules()}
    alone = (each for each in model.named_modules() if isinstance(each[1], FusedModule) and each[1] not in inside)
    rows += [
        row_of(name, part, part.kind, ["fuse did not fuse the norm and MLP of its block"])
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


def sharing_copy(model: nn.Module, example: Any = None) -> nn.Module:
    """Returns a copy of a model that shares its tensors and is fused with "sdpa", which runs on any device.

    Modules of unknown classes are read on the example, if the model can run on it.
    """
    copied = deep_copy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    _walk(copied, "sdpa", "sdpa", example).apply()
    return copied


def _walk(model: nn.Module, backend: str, resolved: str, example: Any = None) -> Walk:
    """Walks over a model. If its forward fails on the example, modules of unknown classes are skipped.

    Without an example, towers inside the model that state the size of their images are read instead.
    """
    by_class = functools.partial(Walk, model, backend, resolved)
    walk = by_class()
    if walk.has_unknown():
        for each in examples_of(model) if example is None else [example]:
            with contextlib.suppress(Exception):  # e.g. the model needs more than an image
                return by_class(read_model(model, each, is_supported))
        if example is None:
            return by_class(_read_towers(model))
    return walk


def _read_towers(model: nn.Module) -> Found:
    """Reads the largest modules inside a model that run on an example which fits their stated size."""
    found, parts = Found(), list(model.children())
    for part in parts:
        for each in examples_of(part):
            with contextlib.suppress(Exception):
                found.recipes |= read_model(part, each, is_supported).recipes
                break
        else:
            parts += part.children()
    return found

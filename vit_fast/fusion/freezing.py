"""freeze(model) and unfreeze(model): prepare weights for inference once instead of in every forward."""

from __future__ import annotations

from torch import nn

from ..blocks.block import freeze_parts
from ..blocks.frozen import Frozen
from ..blocks.fused import FusedNormMlp
from ..blocks.packed import pack_parts
from ..errors import check_type


def freeze(model: nn.Module) -> tuple[str, ...]:
    """Prepares the weights of a model's blocks for inference once, instead of in every forward.

    On a GPU, folds each LayerNorm into the next linear layer, which saves one launch per block. A frozen block makes
    five launches: qkv, attention, proj, fc1, fc2. This needs memory for a second copy of the qkv and fc1 weights, in
    the dtype of the matmuls (autocast's dtype if called under autocast).

    On a CPU (backend sdpa), packs the linear layers with oneDNN, or with MKL for fp32 on CPUs from Intel, folds
    LayerScale in, and applies activation and residual in place. This needs memory for a second copy of the weights of
    all linear layers in the blocks. On CPUs of other vendors than Intel, oneDNN Graph computes attention. It compiles
    attention in the first forward of each input shape, which takes 5 to 100 ms. Under autocast, torch.compile,
    torch.export, tracing and torch.func, a forward runs the original modules.

    A forward in another dtype, in training mode, or with gradients uses the original weights.

    The prepared weights are used until unfreeze(model), train(), load_state_dict(), or a move to another device or
    dtype. They are updated after changes that torch tracks: steps of its optimizers, in-place writes that increment the
    version counter, and replaced parameters. Call freeze again after other changes: writes through `.data`, collectives
    of torch.distributed, replays of a captured training step, and other libraries (e.g. merging LoRA weights by peft).
    Copies and pickles of the model are not frozen. Blocks in FP8 always cache their quantized weights, by the same
    rules.

    Args:
        model: A model of vit_fast.fuse or create_model, in evaluation mode. Blocks with a wrapped or hooked part are
            skipped, and blocks whose backend or dtype needs no preparation.
    Returns:
        The names of the frozen blocks.
    Raises:
        TypeError: model is not a module.
        ValueError: a block is in training mode. Nothing is frozen.
    """
    check_type("model", model, nn.Module)
    blocks = [(name, module) for name, module in model.named_modules() if isinstance(module, FusedNormMlp)]
    for name, block in blocks:
        if block.training:
            raise ValueError(f"{name or 'model'} must be in evaluation mode: call eval() first")
    frozen = []
    for name, block in blocks:
        if (parts := block.whole()) is not None:
            freeze_parts(parts)
        elif (parts := block.packable()) is not None:
            pack_parts(parts)
        else:
            continue
        frozen.append(name)
    return tuple(frozen)


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

"""freeze(model) and unfreeze(model): weights prepared for inference once, instead of in every forward."""

from __future__ import annotations

from torch import nn

from ..blocks.block import freeze_parts
from ..blocks.fused import FusedNormMlp
from ..blocks.packing import pack_parts
from ..errors import check_type
from ..ops.frozen import Frozen


def freeze(model: nn.Module) -> tuple[str, ...]:
    """Prepares the weights of a model's blocks for inference once, instead of in every forward.

    On a GPU, every LayerNorm is folded into the linear layer behind it, which saves one launch per block. A frozen
    block makes five launches: qkv, attention, proj, fc1, fc2. The extra memory is a second copy of the qkv and fc1
    weights, in the dtype of the matmuls: autocast's where this is called under autocast, else the weights' own.

    On a CPU (backend sdpa), the linear layers are packed for the processor, by MKL in fp32 and by oneDNN in bf16 and
    fp16, with LayerScale folded in and activation and residual in place. The extra memory is a second copy of the
    weights of all linear layers in the blocks. A forward under autocast, and one that torch.compile, torch.export,
    tracing or torch.func sees, uses the modules.

    A forward in another dtype, one in training mode, and one that needs gradients use the weights themselves.

    The copies last until unfreeze(model), train(), load_state_dict(), or a move to another device or dtype. They follow
    what torch can see of changed weights: steps of its optimizers, writes that its version counters count, parameters
    that were replaced; freezing again follows everything. What it cannot see is what you promise by calling this: that
    nobody writes to the weights through `.data`, by torch.distributed's collectives, by replaying a captured training
    step, or through other libraries (a merge of LoRA weights by peft, for one) without calling freeze again. A copy or
    a pickle of the model is not frozen. Blocks in FP8 keep their quantised weights in any case, under the same promise.

    Args:
        model: A model fused by vit_fast.fuse or made by create_model, in evaluation mode. Blocks of which a part is
            wrapped or hooked, or whose backend or dtype offers nothing to prepare, are left as they are.
    Returns:
        The names of the blocks that are frozen now.
    Raises:
        TypeError: model is no module.
        ValueError: a block is in training mode; nothing is frozen then.
    """
    check_type("model", model, nn.Module)
    blocks = [(name, module) for name, module in model.named_modules() if isinstance(module, FusedNormMlp)]
    for name, block in blocks:
        if block.training:
            raise ValueError(f"{name or 'model'} is in training mode: accepted is evaluation mode, call eval() first")
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
    """Undoes freeze: the weights are folded in every forward again. A model that is not frozen is left alone."""
    check_type("model", model, nn.Module)
    for module in model.modules():
        if isinstance(module, FusedNormMlp):
            module.drop_frozen()


def frozen_of(model: nn.Module) -> list[Frozen]:
    """Returns the cached weights of a model's blocks."""
    parts = [module.__dict__.get("vit_fast_parts") for module in model.modules() if isinstance(module, FusedNormMlp)]
    return [each.frozen for each in parts if each is not None and each.frozen is not None]


def frozen_bytes(model: nn.Module) -> int:
    """Memory of the copies of weights that freeze keeps, in bytes."""
    return sum(each.bytes for each in frozen_of(model))

"""Whole encoder blocks by the Triton kernels: four matmuls and attention, and no pointwise pass between them.

qkv = LN(x) Wqkv^T + b              LayerNorm folded into the matmul
a   = attention(qkv)
x   = x + ls (a Wproj^T + b)        residual and LayerScale in the epilogue, which leaves the row statistics
h   = act(LN(x) W1^T + b1)          that this LayerNorm takes over
x   = x + ls (h W2^T + b2)          likewise, for the LayerNorm of the next block
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

from .layers import is_touched, norm_and_mlp_are_plain, scaling_is_plain
from .ops.attention import attention_qkvpacked, is_exporting
from .ops.layer_norm_mlp import fused_layer_norm_mlp
from .ops.linear import layer_norm_linear, linear_residual

if TYPE_CHECKING:
    from .model import Block


def can_fuse(block: Block) -> bool:
    """Whether a block computes exactly what `fused_block` does.

    Not where its parts were replaced or wrapped (LoRA, quantised or parametrised layers), carry hooks that would not
    run, drop elements at random, or are being exported to a runtime that does not know our operators.
    """
    if is_exporting():
        return False
    from .model import Attention

    attn, mlp = block.attn, block.mlp
    if not norm_and_mlp_are_plain(block.norm2, mlp) or type(attn) is not Attention:
        return False
    if type(attn.proj_drop) is not nn.Dropout:
        return False
    if block.training and (attn.attn_drop_rate or attn.proj_drop.p or mlp.drop.p):
        return False
    if not (type(block.norm1) is nn.LayerNorm and type(attn.qkv) is type(attn.proj) is nn.Linear):
        return False
    if any(is_touched(part) for part in block.modules() if part is not block):
        return False
    scalings = ((block.ls1, block.drop_path1), (block.ls2, block.drop_path2))
    return all(scaling_is_plain(*pair) for pair in scalings)


def run_blocks(blocks: nn.Sequential, x: Tensor) -> Tensor:
    """blocks(x), [B, N, C] -> [B, N, C]; where all are fused, each takes its first row statistics from the one before.

    A block that is wrapped, replaced or carries hooks is called as a module, and so are all the others then.
    """
    fused = [block for block in blocks if _is_fused(block)]
    if len(fused) < len(blocks) or any(is_touched(part) for part in (blocks, *blocks)):
        return blocks(x)
    statistics: Tensor | None = None
    for block, following in zip_longest(fused, fused[1:]):
        next_eps = None if following is None else following.norm1.eps
        x, statistics = fused_block(block, x, statistics, next_eps)
    return x


def _is_fused(block: nn.Module) -> TypeGuard[Block]:
    from .model import Block

    return type(block) is Block and block.backend == "triton" and can_fuse(block)


def fused_block(
    block: Block, x: Tensor, statistics: Tensor | None = None, next_eps: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """What `Block.forward` does, with row statistics handed in and out.

    Args:
        block: can_fuse(block) holds.
        x: [B, N, C].
        statistics: (mean, rstd) of the rows of x for norm1, fp32 [2, B N]; None computes them.
        next_eps: Epsilon of the LayerNorm that follows; None means that its statistics are not wanted.
    Returns:
        [B, N, C], and the statistics of its rows where they were wanted, they are of half precision, and nothing came
        after the last matmul.
    """
    attn, mlp, norm1, norm2 = block.attn, block.mlp, block.norm1, block.norm2
    qkv = layer_norm_linear(
        x, norm1.weight, norm1.bias, attn.qkv.weight, attn.qkv.bias, eps=norm1.eps, statistics=statistics
    )
    mixed = attention_qkvpacked(qkv.unflatten(-1, (3, attn.num_heads, -1)), backend="triton").flatten(2)
    dropping = block.training and block.drop_path1.drop_prob > 0
    x, statistics = _add_branch(block, x, mixed, dropping)
    dropping = block.training and block.drop_path2.drop_prob > 0
    y, emitted = fused_layer_norm_mlp(
        x, statistics, norm2.weight, norm2.bias, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias,
        eps=norm2.eps, activation=mlp.activation, layer_scale=getattr(block.ls2, "gamma", None), residual=not dropping,
        next_eps=None if dropping else next_eps,
    )  # fmt: skip
    if dropping:
        return x + block.drop_path2(y), None
    return y, emitted


def _add_branch(block: Block, x: Tensor, mixed: Tensor, dropping: bool) -> tuple[Tensor, Tensor | None]:
    """x + drop_path(ls (mixed Wproj^T + b)), and its row statistics where nothing comes after the matmul."""
    proj, scale = block.attn.proj, getattr(block.ls1, "gamma", None)
    if dropping:
        branch, _ = linear_residual(mixed, proj.weight, proj.bias, layer_scale=scale, residual=None)
        return x + block.drop_path1(branch), None
    return linear_residual(mixed, proj.weight, proj.bias, layer_scale=scale, residual=x, next_eps=block.norm2.eps)

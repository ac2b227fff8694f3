"""A whole encoder block by the Triton kernels: five matmuls' worth of launches and no pointwise pass between them.

qkv = LN(x) Wqkv^T + b              LayerNorm folded into the matmul
a   = attention(qkv)
x   = x + ls (a Wproj^T + b)        residual and LayerScale in the epilogue, which leaves the row statistics
h   = act(LN(x) W1^T + b1)          that this LayerNorm takes over
x   = x + ls (h W2^T + b2)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .ops.attention import attention_qkvpacked
from .ops.layer_norm_mlp import fused_layer_norm_mlp
from .ops.linear import layer_norm_linear, linear_residual

if TYPE_CHECKING:
    from .model import Block


def can_fuse(block: Block) -> bool:
    """Whether a block computes exactly what `fused_block` does.

    Not where its parts were replaced or wrapped (LoRA, quantised or parametrised layers), carry hooks that would not
    run, drop elements at random, or are being exported to a runtime that does not know our operators.
    """
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        return False
    attn, mlp = block.attn, block.mlp
    if block.training and (attn.attn_drop_rate or attn.proj_drop.p or mlp.drop.p):
        return False
    return all(map(_is_plain, (block.norm1, attn.qkv, attn.proj, block.norm2, mlp.fc1, mlp.fc2)))


def _is_plain(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, nn.LayerNorm) and not (module._forward_hooks or module._forward_pre_hooks)


def fused_block(block: Block, x: Tensor) -> Tensor:
    """What `Block.forward` does, [B, N, C] -> [B, N, C]."""
    attn, mlp, norm1, norm2 = block.attn, block.mlp, block.norm1, block.norm2
    qkv = layer_norm_linear(x, norm1.weight, norm1.bias, attn.qkv.weight, attn.qkv.bias, eps=norm1.eps)
    mixed = attention_qkvpacked(qkv.unflatten(-1, (3, attn.num_heads, -1)), backend="triton").flatten(2)
    dropping = block.training and block.drop_path1.drop_prob > 0
    x, statistics = _add_branch(block, x, mixed, dropping)
    dropping = block.training and block.drop_path2.drop_prob > 0
    y, _ = fused_layer_norm_mlp(
        x, statistics, norm2.weight, norm2.bias, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias,
        eps=norm2.eps, activation=mlp.activation, layer_scale=getattr(block.ls2, "gamma", None), residual=not dropping,
    )  # fmt: skip
    return x + block.drop_path2(y) if dropping else y


def _add_branch(block: Block, x: Tensor, mixed: Tensor, dropping: bool) -> tuple[Tensor, Tensor | None]:
    """x + drop_path(ls (mixed Wproj^T + b)), and its row statistics where nothing comes after the matmul."""
    proj, scale = block.attn.proj, getattr(block.ls1, "gamma", None)
    if dropping:
        branch, _ = linear_residual(mixed, proj.weight, proj.bias, layer_scale=scale, residual=None)
        return x + block.drop_path1(branch), None
    return linear_residual(mixed, proj.weight, proj.bias, layer_scale=scale, residual=x, next_eps=block.norm2.eps)

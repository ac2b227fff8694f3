"""timm's VisionTransformer: its last block computes only the token that the head reads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...blocks.block import run_blocks, run_packed_blocks
from ...blocks.fused import Forms, FusedContainer
from ...blocks.plain import is_touched
from ...ops.registration import is_exporting
from .timm_blocks import BlockMixin

_METHODS = ("forward_features", "forward_head", "pool")  # which a user may have replaced


class VisionTransformerMixin(FusedContainer):
    """timm's VisionTransformer. If its head reads only the first token, its last block computes only that token.

    This applies to calls without gradients, of a model that is frozen for the CPU or compiled with backend sdpa.
    `forward_features` and hooked or wrapped parts still get all tokens.
    """

    @classmethod
    def fits(cls, module: Any, blocks: Collection[nn.Module]) -> bool:
        return len(module.blocks) > 0 and all(block in blocks for block in module.blocks)

    def forward(self, x: Tensor, *masks: Any, **options: Any) -> Tensor:
        tower: Any = self  # also a VisionTransformer
        if masks or options or not self._reads_one_token():
            timms: Any = super()
            output: Tensor = timms.forward(x, *masks, **options)
        else:
            tokens = tower.norm_pre(tower.patch_drop(tower._pos_embed(tower.patch_embed(x))))
            output = tower.forward_head(tower.norm(_run_for_one_token(tower.blocks, tokens)))
        return output

    def _reads_one_token(self) -> bool:
        tower: Any = self
        if torch.is_grad_enabled() or tower.training or tower.global_pool != "token" or tower.attn_pool is not None:
            return False
        blocks, cls = tower.blocks, type(tower)
        if not isinstance(blocks, nn.Sequential) or not len(blocks) or is_exporting():
            return False
        for name in _METHODS:
            if name in self.__dict__ or getattr(cls, name).__module__ != cls.original.__module__:
                return False
        return not any(part._forward_hooks or is_touched(part) for part in (blocks, tower.norm))


def _run_for_one_token(blocks: Any, x: Tensor) -> Tensor:
    """Runs blocks on [B, N, C]; returns the first token [B, 1, C], or all if the last block needs its own forward."""
    *others, last = blocks
    if not torch.compiler.is_compiling():
        output = run_packed_blocks(blocks, x, outputs=1)
        return blocks(x) if output is None else output
    supported = isinstance(last, BlockMixin) and last.vit_fast_backend == "sdpa" and not last.training
    if not supported or last._forward_hooks or is_touched(last):
        return blocks(x)
    parts = last.ready()
    if parts is None or parts.attention is None or parts.fp8 is not None:
        return blocks(x)
    return _first_token(last, run_blocks(others, x))


def _first_token(block: Any, x: Tensor) -> Tensor:
    """Runs a block [B, N, C] -> [B, 1, C] for the first token, which attends to all tokens."""
    attn = block.attn
    normed = block.norm1(x)
    weight, bias, width = attn.qkv.weight, attn.qkv.bias, attn.qkv.weight.shape[0] // 3
    biases = (None, None) if bias is None else (bias[:width], bias[width:])
    q = F.linear(normed[:, :1], weight[:width], biases[0]).unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)
    kv = F.linear(normed, weight[width:], biases[1]).unflatten(-1, (2, attn.num_heads, -1))
    k, v = kv.transpose(1, 3).unbind(2)
    q, k = attn.q_norm(q), attn.k_norm(k)
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    x = x[:, :1] + block.drop_path1(block.ls1(attn.project_out(mixed, normed[:, :1])))
    out: Tensor = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
    return out


FORMS = Forms(globals(), {"timm.models.vision_transformer.VisionTransformer": VisionTransformerMixin})
__getattr__ = FORMS.named

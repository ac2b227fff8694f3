"""timm's VisionTransformer: its last block computes only the token that the head reads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blocks.block import run_blocks
from ..blocks.containers import FusedContainer
from ..blocks.fused import Forms
from ..blocks.plain import is_touched
from ..ops.operators import is_exporting
from .timm_blocks import BlockForm

# The methods of timm through which the tokens go.
_METHODS = ("forward_features", "forward_head", "pool")


class ClassifierForm(FusedContainer):
    """timm's VisionTransformer. If its head reads the first token alone, its last block computes no other.

    This holds for calls of the model without gradients, with backend sdpa. `forward_features` and hooked or wrapped
    parts get all tokens.
    """

    @classmethod
    def fits(cls, module: Any, blocks: Collection[nn.Module]) -> bool:
        return len(module.blocks) > 0 and all(block in blocks for block in module.blocks)

    def forward(self, x: Tensor, *masks: Any, **options: Any) -> Tensor:
        """Maps images to logits."""
        tower: Any = self  # also a VisionTransformer
        if masks or options or not self._reads_one_token():
            timms: Any = super()
            output: Tensor = timms.forward(x, *masks, **options)
        else:
            tokens = tower.norm_pre(tower.patch_drop(tower._pos_embed(tower.patch_embed(x))))
            *others, last = tower.blocks
            output = tower.forward_head(tower.norm(_first_token(last, run_blocks(others, tokens))))
        return output

    def _reads_one_token(self) -> bool:
        tower: Any = self
        if torch.is_grad_enabled() or tower.training or tower.global_pool != "token" or tower.attn_pool is not None:
            return False
        blocks, cls = tower.blocks, type(tower)
        if not isinstance(blocks, nn.Sequential) or is_exporting():
            return False
        for name in _METHODS:  # not those of a user
            if name in self.__dict__ or getattr(cls, name).__module__ != cls.original.__module__:
                return False
        last = blocks[-1]
        if not isinstance(last, BlockForm) or last.vit_fast_backend != "sdpa" or last.training:
            return False
        if any(part._forward_hooks or is_touched(part) for part in (blocks, last, tower.norm)):
            return False
        parts = last.ready()
        return parts is not None and parts.attention is not None and parts.fp8 is None


def _first_token(block: Any, x: Tensor) -> Tensor:
    """Runs a block [B, N, C] -> [B, 1, C] for the first token, which attends to all of them."""
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


FORMS = Forms(globals(), {"timm.models.vision_transformer.VisionTransformer": ClassifierForm})


def __getattr__(name: str) -> Any:
    return FORMS.named(name)

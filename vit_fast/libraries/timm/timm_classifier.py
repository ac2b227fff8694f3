"""timm's VisionTransformer: its last block computes only the token that the head reads.

On a CPU, blocks that are not frozen compute all tokens, without calls of their modules.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ...blocks.block import run_blocks, run_packed_blocks
from ...blocks.fused import Forms, FusedContainer
from ...blocks.packed import is_plain_call
from ...blocks.parts import BlockParts, block_tensors, drops, drops_path
from ...blocks.plain import is_touched
from ...layers import ACTIVATIONS
from ...ops.descriptions import BlockTensors
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
        return _run_all_tokens(blocks, x) if output is None else output
    supported = isinstance(last, BlockMixin) and last.vit_fast_backend == "sdpa" and not last.training
    if not supported or last._forward_hooks or is_touched(last):
        return blocks(x)
    parts = last.ready()
    if parts is None or parts.attention is None or parts.fp8 is not None:
        return blocks(x)
    return _first_token(last, run_blocks(others, x))


def _run_all_tokens(blocks: nn.Sequential, x: Tensor) -> Tensor:
    """Runs blocks in a call without gradients, [B, N, C] -> [B, N, C], bitwise as timm does.

    On a CPU, skips the calls of their modules if nothing observes these, which take 6 % of a small model's time.
    """
    plain = is_plain_call(x) and not (_has_any_global_hook() or blocks._forward_hooks or is_touched(blocks))
    ready = [_as_timm_computes(block) for block in blocks] if plain else [None]
    if None in ready:
        output: Tensor = blocks(x)
        return output
    for parts in ready:
        x = _run_block(parts, x)
    return x


def _as_timm_computes(block: Any) -> BlockParts | None:
    """Returns the parts of a block that `_run_block` computes bitwise as timm does; None for other blocks."""
    if not isinstance(block, BlockMixin) or block.vit_fast_backend != "sdpa" or block._forward_hooks:
        return None
    parts = None if is_touched(block) else block.ready()
    if parts is None or parts.attention is None or parts.mlp is None or parts.fp8 is not None:
        return None
    attention, mlp = parts.attention, parts.mlp
    norms = {type(norm.module).__name__ for norm in (attention.norm, mlp.norm)}
    others = attention.qk_norm, mlp.gate, mlp.inner_norm
    if norms != {"LayerNorm"} or others != (None, None, None) or not attention.module.__dict__.get("fused_attn"):
        return None
    dropping = drops(attention.dropouts) or drops_path(attention.drop_path) or drops_path(mlp.drop_path)
    return None if dropping else parts


def _run_block(parts: Any, x: Tensor) -> Tensor:
    t = block_tensors(parts.attention, parts.mlp)
    x = _added(_attend(t, parts.attention, x), t.scale1, x)
    return _added(_run_mlp(t, parts.mlp, x), t.scale2, x)


# Separate functions release large tensors early. Otherwise, a batch of eight in fp32 takes 14 % longer.
def _attend(t: BlockTensors, parts: Any, x: Tensor) -> Tensor:
    normed = torch.layer_norm(x, x.shape[-1:], t.norm1_weight, t.norm1_bias, parts.norm.eps, False)
    qkv = F.linear(normed, t.qkv_weight, t.qkv_bias)
    q, k, v = qkv.view(*qkv.shape[:-1], 3, parts.num_heads, -1).transpose(1, 3).unbind(2)
    return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), t.proj_weight, t.proj_bias)


def _run_mlp(t: BlockTensors, parts: Any, x: Tensor) -> Tensor:
    normed = torch.layer_norm(x, x.shape[-1:], t.norm2_weight, t.norm2_bias, parts.norm.eps, False)
    return F.linear(ACTIVATIONS[parts.activation](F.linear(normed, t.fc1_weight, t.fc1_bias)), t.fc2_weight, t.fc2_bias)


def _added(branch: Tensor, scale: Tensor | None, x: Tensor) -> Tensor:
    branch = branch if scale is None else branch * scale
    return branch.add_(x) if branch.dtype is x.dtype else x + branch


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

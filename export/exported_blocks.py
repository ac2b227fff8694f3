"""Encoder blocks for export: they run from BlockParts, with q, k and v as one linear layer, whatever the library.

Attention is one operator on packed qkv, which `optimise.py` lowers for the target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, library, nn

from vit_fast.blocks.block import run_mlp, runs_whole
from vit_fast.blocks.fused import FusedNormMlp
from vit_fast.blocks.parts import BlockParts, scale_of, tensors_of
from vit_fast.fusion.fuse import sharing_copy
from vit_fast.ops import attention_qkvpacked, qk_norm_rope, reference
from vit_fast.ops.attention import softmax_scale
from vit_fast.ops.descriptions import Keys, Rope


@library.custom_op("vit_fast::exported_attention", mutates_args=())
def exported_attention(qkv: Tensor, heads: int, scale: float) -> Tensor:
    """Attention of packed qkv, [B, N, 3 * H * D] -> [B, N, H * D]; the exporter writes it as one node."""
    packed = qkv.unflatten(-1, (3, heads, -1))
    return attention_qkvpacked(packed, scale=scale, backend="sdpa").flatten(2)


@exported_attention.register_fake
def _(qkv: Tensor, heads: int, scale: float) -> Tensor:
    return qkv.new_empty((*qkv.shape[:2], qkv.shape[2] // 3))


class ExportedBlock(nn.Module):
    """Runs a block from its parts.

    Args:
        parts: Parts of a block, both attention and MLP.
    """

    def __init__(self, parts: BlockParts) -> None:
        super().__init__()
        attention: Any = parts.attention
        mlp: Any = parts.mlp
        self._attention, self._mlp = attention, mlp
        self.qkv = None
        if not len(attention.qkv.weights) == len(attention.qkv.biases) == 1:  # concatenate them once, as constants
            self.qkv = nn.Module()
            for name, tensor in zip(("weight", "bias"), attention.qkv.tensors(), strict=True):
                self.qkv.register_buffer(name, None if tensor is None else tensor.detach().contiguous())

    def forward(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """Maps [B, N, C] to [B, N, C], with rotary embeddings if the model has them."""
        attention, mlp = self._attention, self._mlp
        weight, bias = attention.qkv.tensors() if self.qkv is None else tensors_of(self.qkv)
        qkv = F.linear(reference.normalise(x, attention.norm.now()), weight, bias)
        packed = qkv.unflatten(-1, (3, attention.num_heads, -1))
        if rope is None and attention.qk_norm is None:
            mixed = exported_attention(qkv, attention.num_heads, softmax_scale(packed, attention.scale))
        else:
            packed = qk_norm_rope(
                packed, qk_norm=attention.qk_norm and attention.qk_norm.now(), rope=rope, backend="sdpa"
            )
            mixed = attention_qkvpacked(packed, scale=attention.scale, backend="sdpa").flatten(2)
        branch, scale = F.linear(mixed, *tensors_of(attention.proj)), scale_of(attention)
        x = x + (branch if scale is None else branch * scale)
        if mlp.fc1.chunk is None:
            return run_mlp(mlp, x, "sdpa")
        # fc1 packs the gate: keep it one MatMul
        packed = F.linear(reference.normalise(x, mlp.norm.now()), *replace(mlp.fc1, chunk=None).tensors())
        halves = packed.chunk(2, -1)
        hidden = reference.ACTIVATIONS[mlp.activation](halves[mlp.gate.chunk]) * halves[mlp.fc1.chunk]
        if mlp.inner_norm is not None:
            hidden = reference.normalise(hidden, mlp.inner_norm.now())
        branch, scale = F.linear(hidden, *tensors_of(mlp.fc2)), scale_of(mlp)
        return x + (branch if scale is None else branch * scale)


def exportable_copy(model: nn.Module) -> nn.Module:
    """Returns a copy that shares the model's tensors. Its blocks run as ExportedBlock if their parts can be read."""
    copied = sharing_copy(model)
    blocks: list[Any] = [module for module in copied.modules() if isinstance(module, FusedNormMlp)]
    for block in blocks:
        parts = block.read()
        if runs_whole(parts):
            block.vit_fast_exported = ExportedBlock(parts)
            # the block's own forward still runs, because it computes positions and masks
            block.ready, block.is_idle = partial(_constant, parts), partial(_constant, False)
            block.run_as_block = partial(_run_as_block, block.vit_fast_exported)
    return copied


def _run_as_block(
    block: ExportedBlock, parts: Any, x: Tensor, attend: Callable[[Tensor], Tensor], ordinary: bool = True,
    rope: Rope | None = None, keys: Keys | None = None,
) -> Tensor:  # fmt: skip
    """Replaces FusedNormMlp.run_as_block."""
    if ordinary and keys is None:
        y: Tensor = block(x, rope)
        return y
    return run_mlp(parts.mlp, attend(x), "sdpa")


def _constant(value: Any) -> Any:
    return value

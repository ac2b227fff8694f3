"""Blocks as the exporter sees them: run from BlockParts, with q, k and v as one linear layer, whatever their library.

The attention of such a block is one operator on the packed projections; `attention_nodes.py` writes it for a target.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_fast.blocks.block import run_mlp, runs_whole
from vit_fast.blocks.fused import FusedNormMlp
from vit_fast.blocks.parts import BlockParts, LinearParts, scale_of, tensors_of
from vit_fast.fusion.fuse import shadow_of
from vit_fast.ops import attention_qkvpacked, qk_norm_rope, reference
from vit_fast.ops.attention import scale_of as scale_of_heads
from vit_fast.ops.descriptions import Keys, Rope


@torch.library.custom_op("vit_fast::exported_attention", mutates_args=())
def exported_attention(qkv: Tensor, heads: int, scale: float) -> Tensor:
    """Attention of packed projections, [B, N, 3 * H * D] -> [B, N, H * D]; the exporter writes it as one node."""
    packed = qkv.unflatten(-1, (3, heads, -1))
    return attention_qkvpacked(packed, scale=scale, backend="sdpa").flatten(2)


@exported_attention.register_fake
def _(qkv: Tensor, heads: int, scale: float) -> Tensor:
    return qkv.new_empty((*qkv.shape[:2], qkv.shape[2] // 3))


class ExportedBlock(nn.Module):
    """Runs a block from its parts.

    Args:
        parts: Of a block both of whose halves could be read.
    """

    def __init__(self, parts: BlockParts) -> None:
        super().__init__()
        attention: Any = parts.attention
        mlp: Any = parts.mlp
        self._attention, self._mlp = attention, mlp
        linears: dict[str, LinearParts | None] = {"qkv": attention.qkv, "fc1": mlp.fc1, "gate": mlp.gate}
        self.joined = nn.ModuleDict(
            {name: _Joined(linear) for name, linear in linears.items() if linear is not None and not _is_one(linear)}
        )

    def forward(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """[B, N, C], and rotary positions where the model has some -> [B, N, C]."""
        attention, mlp = self._attention, self._mlp
        qkv = F.linear(reference.normalise(x, attention.norm.now()), *self._tensors("qkv", attention.qkv))
        packed = qkv.unflatten(-1, (3, attention.num_heads, -1))
        if rope is None and attention.qk_norm is None:
            mixed = exported_attention(qkv, attention.num_heads, scale_of_heads(packed, attention.scale))
        else:
            packed = qk_norm_rope(
                packed, qk_norm=attention.qk_norm and attention.qk_norm.now(), rope=rope, backend="sdpa"
            )
            mixed = attention_qkvpacked(packed, scale=attention.scale, backend="sdpa").flatten(2)
        branch, scale = F.linear(mixed, *tensors_of(attention.proj)), scale_of(attention)
        x = x + (branch if scale is None else branch * scale)
        gate = (None, None) if mlp.gate is None else self._tensors("gate", mlp.gate)
        (norm_weight, norm_bias), (fc1_weight, fc1_bias) = mlp.norm.tensors(), self._tensors("fc1", mlp.fc1)
        return reference.layer_norm_mlp(
            x, norm_weight, norm_bias, fc1_weight, fc1_bias, mlp.fc2.weight, mlp.fc2.bias, eps=mlp.norm.eps,
            activation=mlp.activation, layer_scale=scale_of(mlp), norm=mlp.norm.kind, gate_weight=gate[0],
            gate_bias=gate[1], inner_norm=mlp.inner_norm and mlp.inner_norm.now(),
        )  # fmt: skip

    def _tensors(self, name: str, linear: LinearParts) -> tuple[Any, Any]:
        return tensors_of(self.joined[name]) if name in self.joined else linear.tensors()


class _Joined(nn.Module):
    """Weight and bias of several linear layers, or of one half of one, as constants of the graph."""

    def __init__(self, linear: LinearParts) -> None:
        super().__init__()
        for name, tensor in zip(("weight", "bias"), linear.tensors(), strict=True):
            self.register_buffer(name, None if tensor is None else tensor.detach().contiguous())


def _is_one(linear: LinearParts) -> bool:
    return linear.chunk is None and len(linear.weights) == len(linear.biases) == 1


def exportable_copy(model: nn.Module) -> nn.Module:
    """Returns a copy that shares the model's tensors, whose blocks run from their parts where they can be read."""
    shadow = shadow_of(model)
    blocks: list[Any] = [module for module in shadow.modules() if isinstance(module, FusedNormMlp)]
    for block in blocks:
        parts = block.read()
        if runs_whole(parts, "triton"):
            block.vit_fast_exported = exported = ExportedBlock(parts)
            # its own forward stays, which finds positions and masks
            block.ready = partial(_same, parts)
            block.is_idle = partial(_same, False)
            block.run_as_block = partial(_run_as_block, exported)
    return shadow


def _run_as_block(
    block: ExportedBlock,
    parts: Any,
    x: Tensor,
    attend: Callable[[Tensor], Tensor],
    ordinary: bool = True,
    rope: Rope | None = None,
    keys: Keys | None = None,
) -> Tensor:
    """Stands for FusedNormMlp.run_as_block."""
    if ordinary and keys is None:
        y: Tensor = block(x, rope)
        return y
    return run_mlp(parts.mlp, attend(x), "sdpa")


def _same(value: Any) -> Any:
    return value

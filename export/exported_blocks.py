"""Encoder blocks for export: they run from BlockParts, with q, k and v as one linear layer, whatever the library.

Attention becomes the ONNX operators that are fastest on the target:

    ONNX Runtime     com.microsoft's MultiHeadAttention on tokens [B, N, C]
    opset 23         ONNX's Attention, on tokens, or for TensorRT on heads [B, H, N, D]
    older opsets     MatMul, Softmax, MatMul
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.onnx.ops import symbolic

from vit_fast.blocks.block import run_mlp, runs_whole
from vit_fast.blocks.fused import FusedNormMlp
from vit_fast.blocks.parts import BlockParts, tensors_of
from vit_fast.fusion.fuse import sharing_copy
from vit_fast.ops import qk_norm_rope, reference
from vit_fast.ops.attention import softmax_scale
from vit_fast.ops.descriptions import Keys, Rope

from .options import ATTENTION_OPSET, GELU_OPSET, MICROSOFT, ExportOptions


class ExportedBlock(nn.Module):
    """Runs a block from its parts, which must include attention and MLP.

    Adds itself to `packed` if its attention reads the output of the qkv layer unchanged.
    """

    def __init__(self, parts: BlockParts, options: ExportOptions, packed: set[nn.Module]) -> None:
        super().__init__()
        self._attention, self._mlp = parts.halves
        self._options, self._packed = options, packed
        self.qkv = None
        qkv = self._attention.qkv
        if not len(qkv.weights) == len(qkv.biases) == 1:  # concatenate them once, as constants
            self.qkv = nn.Module()
            for name, tensor in zip(("weight", "bias"), qkv.tensors(), strict=True):
                self.qkv.register_buffer(name, None if tensor is None else tensor.detach().contiguous())

    def forward(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """Maps [B, N, C] to [B, N, C], with rotary embeddings if the model has them."""
        attention, mlp, options = self._attention, self._mlp, self._options
        weight, bias = attention.qkv.tensors() if self.qkv is None else tensors_of(self.qkv)
        qkv = F.linear(reference.normalize(x, attention.norm.now()), weight, bias)
        heads = qkv.unflatten(-1, (3, attention.num_heads, -1))
        is_packed = rope is None and attention.qk_norm is None
        if is_packed:
            self._packed.add(self)
        else:
            norm = attention.qk_norm and attention.qk_norm.now()
            heads = qk_norm_rope(heads, qk_norm=norm, rope=rope, backend="sdpa")
        scale = softmax_scale(heads, attention.scale)
        if options.attention and options.target != "tensorrt":
            q, k, v = qkv.chunk(3, -1) if is_packed else (heads[:, :, i].flatten(2) for i in range(3))
            mixed = _on_tokens(q, k, v, attention.num_heads, scale, options)
        else:
            by_head = heads.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(by_head[0], by_head[1], by_head[2], scale=scale)
            mixed = mixed.transpose(1, 2).flatten(2)
        x = _add_linear(x, mixed, *attention.with_scale(attention.proj))
        if mlp.fc1.chunk is None:
            return run_mlp(mlp, x, "sdpa")
        # fc1 packs the gate: keep it one MatMul
        halves = F.linear(reference.normalize(x, mlp.norm.now()), *replace(mlp.fc1, chunk=None).tensors()).chunk(2, -1)
        gate: Any = mlp.gate
        hidden = reference.ACTIVATIONS[mlp.activation](halves[gate.chunk]) * halves[mlp.fc1.chunk]
        if mlp.inner_norm is not None:
            hidden = reference.normalize(hidden, mlp.inner_norm.now())
        return _add_linear(x, hidden, *mlp.with_scale(mlp.fc2))

    def run_as_block(
        self, parts: Any, x: Tensor, attend: Callable[[Tensor], Tensor], ordinary: bool = True,
        rope: Rope | None = None, keys: Keys | None = None,
    ) -> Tensor:  # fmt: skip
        """Replaces FusedNormMlp.run_as_block."""
        y: Tensor = self(x, rope) if ordinary and keys is None else run_mlp(parts.mlp, attend(x), "sdpa")
        return y


def _add_linear(x: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    branch = F.linear(hidden, weight, bias)
    return x + (branch if scale is None else branch * scale)


def exportable_copy(model: nn.Module, options: ExportOptions) -> tuple[nn.Module, set[nn.Module]]:
    """Returns a copy that shares the model's tensors. Its blocks run as ExportedBlock if their parts can be read.

    Also returns the set to which the blocks with attention of packed qkv add themselves.
    """
    copied, packed = sharing_copy(model), set[nn.Module]()
    blocks: list[Any] = [module for module in copied.modules() if isinstance(module, FusedNormMlp)]
    for block in blocks:
        parts = block.read()
        if runs_whole(parts):  # the block's own forward computes positions and masks
            block.vit_fast_exported = ExportedBlock(parts, options, packed)
            block.ready, block.is_idle = lambda parts=parts: parts, lambda: False
            block.run_as_block = block.vit_fast_exported.run_as_block
    return copied, packed


def _on_tokens(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float, options: ExportOptions) -> Tensor:
    """Attention of tokens [B, N, H * D], as one operator of the target."""
    name, version, attributes = "Attention", ATTENTION_OPSET, {"q_num_heads": heads, "kv_num_heads": heads}
    if options.targets_ort:
        name, version, attributes = f"{MICROSOFT}::MultiHeadAttention", 1, {"num_heads": heads}
    return symbolic(name, (q, k, v), {"scale": scale, **attributes}, dtype=q.dtype, shape=q.shape, version=version)


def decompositions(options: ExportOptions) -> dict[Any, Callable[..., Any]]:
    """Returns decompositions of attention outside of ExportedBlock, and of GELU, into operators of the target."""

    def sdpa(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if dropout_p or is_causal or enable_gqa:
            raise NotImplementedError("scaled_dot_product_attention with dropout_p, is_causal or enable_gqa")
        scale = softmax_scale(q, scale)
        if attn_mask is None and options.targets_ort:
            heads = q.shape[1]
            q, k, v = (each.transpose(1, 2).flatten(2) for each in (q, k, v))
            return _on_tokens(q, k, v, heads, scale, options).unflatten(2, (heads, -1)).transpose(1, 2)
        if attn_mask is None and options.attention:  # one output: TensorRT does not support the other ones
            return symbolic(
                "Attention", (q, k, v), {"scale": scale}, dtype=q.dtype, shape=q.shape, version=ATTENTION_OPSET
            )
        # scale q before the matmul: in fp16, unscaled scores can exceed 65504
        scores = (q * scale) @ k.transpose(-1, -2)
        if attn_mask is not None:  # no runtime fuses attention with a mask
            masked = attn_mask.dtype == torch.bool
            scores = torch.where(attn_mask, scores, float("-inf")) if masked else scores + attn_mask
        return scores.softmax(-1) @ v

    def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
        if approximate != "none":
            return NotImplemented
        return symbolic(f"{MICROSOFT}::Gelu", (x,), dtype=x.dtype, shape=x.shape, version=1)

    table: dict[Any, Callable[..., Any]] = {torch.ops.aten.scaled_dot_product_attention.default: sdpa}
    if options.targets_ort and options.opset < GELU_OPSET:  # torch would write GELU as five nodes
        table[torch.ops.aten.gelu.default] = gelu
    return table

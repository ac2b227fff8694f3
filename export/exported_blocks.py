"""Encoder blocks for export: they run from BlockParts, with q, k and v as one linear layer, whatever the library.

Also contains the translation of attention into the ONNX operators that are fastest on the target:

    ONNX Runtime     com.microsoft's MultiHeadAttention on tokens [B, N, C]
    opset 23         ONNX's Attention, on tokens, or for TensorRT on heads [B, H, N, D]
    older opsets     MatMul, Softmax, MatMul
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
import torch.nn.functional as F
from onnxscript import opset18 as op
from onnxscript import values
from torch import Tensor, library, nn

from vit_fast.blocks.block import run_mlp, runs_whole
from vit_fast.blocks.fused import FusedNormMlp
from vit_fast.blocks.parts import BlockParts, scale_of, tensors_of
from vit_fast.fusion.fuse import sharing_copy
from vit_fast.ops import attention_qkvpacked, qk_norm_rope, reference
from vit_fast.ops.attention import softmax_scale
from vit_fast.ops.descriptions import Keys, Rope

from .options import MICROSOFT, ExportOptions


@library.custom_op("vit_fast::exported_attention", mutates_args=())
def exported_attention(qkv: Tensor, heads: int, scale: float) -> Tensor:
    """Attention of packed qkv, [B, N, 3 * H * D] -> [B, N, H * D]."""
    packed = qkv.unflatten(-1, (3, heads, -1))
    return attention_qkvpacked(packed, scale=scale, backend="sdpa").flatten(2)


@exported_attention.register_fake
def _(qkv: Tensor, heads: int, scale: float) -> Tensor:
    return qkv.new_empty((*qkv.shape[:2], qkv.shape[2] // 3))


class ExportedBlock(nn.Module):
    """Runs a block from its parts, which must include attention and MLP."""

    def __init__(self, parts: BlockParts) -> None:
        super().__init__()
        attention: Any = parts.attention
        mlp: Any = parts.mlp
        self._attention, self._mlp, qkv = attention, mlp, attention.qkv
        self.qkv = None
        if not len(qkv.weights) == len(qkv.biases) == 1:  # concatenate them once, as constants
            self.qkv = nn.Module()
            for name, tensor in zip(("weight", "bias"), qkv.tensors(), strict=True):
                self.qkv.register_buffer(name, None if tensor is None else tensor.detach().contiguous())

    def forward(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """Maps [B, N, C] to [B, N, C], with rotary embeddings if the model has them."""
        attention, mlp = self._attention, self._mlp
        weight, bias = attention.qkv.tensors() if self.qkv is None else tensors_of(self.qkv)
        qkv = F.linear(reference.normalize(x, attention.norm.now()), weight, bias)
        packed = qkv.unflatten(-1, (3, attention.num_heads, -1))
        if rope is None and attention.qk_norm is None:
            mixed = exported_attention(qkv, attention.num_heads, softmax_scale(packed, attention.scale))
        else:
            norm = attention.qk_norm and attention.qk_norm.now()
            packed = qk_norm_rope(packed, qk_norm=norm, rope=rope, backend="sdpa")
            mixed = attention_qkvpacked(packed, scale=attention.scale, backend="sdpa").flatten(2)
        x = _add(x, F.linear(mixed, *tensors_of(attention.proj)), scale_of(attention))
        if mlp.fc1.chunk is None:
            return run_mlp(mlp, x, "sdpa")
        # fc1 packs the gate: keep it one MatMul
        halves = F.linear(reference.normalize(x, mlp.norm.now()), *replace(mlp.fc1, chunk=None).tensors()).chunk(2, -1)
        hidden = reference.ACTIVATIONS[mlp.activation](halves[mlp.gate.chunk]) * halves[mlp.fc1.chunk]
        if mlp.inner_norm is not None:
            hidden = reference.normalize(hidden, mlp.inner_norm.now())
        return _add(x, F.linear(hidden, *tensors_of(mlp.fc2)), scale_of(mlp))


def _add(x: Tensor, branch: Tensor, scale: Tensor | None) -> Tensor:
    return x + (branch if scale is None else branch * scale)


def exportable_copy(model: nn.Module) -> nn.Module:
    """Returns a copy that shares the model's tensors. Its blocks run as ExportedBlock if their parts can be read."""
    copied = sharing_copy(model)
    blocks: list[Any] = [module for module in copied.modules() if isinstance(module, FusedNormMlp)]
    for block in blocks:
        parts = block.read()
        if runs_whole(parts):
            _run_exported(block, parts)
    return copied


def _run_exported(block: Any, parts: BlockParts) -> None:
    """Makes the block's own forward, which computes positions and masks, run an ExportedBlock."""
    block.vit_fast_exported = ExportedBlock(parts)
    block.ready, block.is_idle = lambda: parts, lambda: False
    block.run_as_block = partial(_run_as_block, block.vit_fast_exported)


def _run_as_block(
    block: ExportedBlock, parts: Any, x: Tensor, attend: Callable[[Tensor], Tensor], ordinary: bool = True,
    rope: Rope | None = None, keys: Keys | None = None,
) -> Tensor:  # fmt: skip
    """Replaces FusedNormMlp.run_as_block."""
    if ordinary and keys is None:
        y: Tensor = block(x, rope)
        return y
    return run_mlp(parts.mlp, attend(x), "sdpa")


def translation_table(options: ExportOptions) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns the custom_translation_table for torch.onnx.export: attention in operators of the target."""
    kinds = onnx.defs.OpSchema.AttrType
    # one output each: TensorRT does not support the other outputs of ONNX's Attention
    fused = _attention_operator("Attention", "", q_num_heads=kinds.INT, kv_num_heads=kinds.INT, scale=kinds.FLOAT)
    of_ort = _attention_operator("MultiHeadAttention", MICROSOFT, num_heads=kinds.INT, scale=kinds.FLOAT)

    def on_tokens(q: Any, k: Any, v: Any, heads: int, scale: float) -> Any:
        if options.targets_ort:
            return of_ort(q, k, v, num_heads=heads, scale=scale)
        return fused(q, k, v, q_num_heads=heads, kv_num_heads=heads, scale=scale)

    def on_heads(q: Any, k: Any, v: Any, scale: float, dtype: ir.DataType, mask: Any = None) -> Any:
        if options.attention == "Attention" and mask is None:
            return fused(q, k, v, scale=scale)
        # scale q before the matmul: in fp16, unscaled scores can exceed 65504
        factor = ir.tensor(np.asarray(scale, dtype.numpy()))
        scores = op.MatMul(op.Mul(q, op.Constant(value=factor)), op.Transpose(k, perm=[0, 1, 3, 2]))
        if mask is not None:  # no runtime fuses attention with a mask
            scores = op.Where(mask, scores, op.CastLike(float("-inf"), q))
        return op.MatMul(op.Softmax(scores, axis=-1), v)

    def packed(qkv: Any, heads: int, scale: float) -> Any:
        channels = qkv.shape[-1] // 3
        if options.attention and options.target != "tensorrt":
            q, k, v = op.Split(qkv, axis=2, num_outputs=3)
            return on_tokens(q, k, v, heads, scale)
        by_head = op.Transpose(op.Reshape(qkv, [0, 0, 3, heads, channels // heads]), perm=[2, 0, 3, 1, 4])
        q, k, v = (op.Gather(by_head, i, axis=0) for i in range(3))
        mixed = on_heads(q, k, v, scale, qkv.dtype)
        return op.Reshape(op.Transpose(mixed, perm=[0, 2, 1, 3]), [0, 0, channels])

    def sdpa(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        given = {
            "attn_mask that is not boolean": attn_mask is not None and attn_mask.dtype != ir.DataType.BOOL,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "enable_gqa": enable_gqa,
        }
        if unsupported := [name for name, value in given.items() if value]:
            raise NotImplementedError(f"scaled_dot_product_attention with {', '.join(unsupported)}")
        heads, head_dim = query.shape[1], query.shape[3]
        scale = head_dim**-0.5 if scale is None else scale
        if attn_mask is not None or not options.targets_ort:
            return on_heads(query, key, value, scale, query.dtype, attn_mask)
        tokens = (op.Transpose(each, perm=[0, 2, 1, 3]) for each in (query, key, value))
        q, k, v = (op.Reshape(each, [0, 0, heads * head_dim]) for each in tokens)
        mixed = on_tokens(q, k, v, heads, scale)
        return op.Transpose(op.Reshape(mixed, [0, 0, heads, head_dim]), perm=[0, 2, 1, 3])

    return {torch.ops.aten.scaled_dot_product_attention.default: sdpa, exported_attention._opoverload: packed}


def _attention_operator(name: str, domain: str, **attributes: Any) -> values.Op:
    schema = onnx.defs.OpSchema
    return values.Op(
        values.Opset(domain, 1),
        name,
        schema(
            name,
            domain,
            1,
            inputs=[schema.FormalParameter(each, "T") for each in "qkv"],
            outputs=[schema.FormalParameter("mixed", "T")],
            type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
            attributes=[schema.Attribute(each, kind, "", required=False) for each, kind in attributes.items()],
        ),
    )

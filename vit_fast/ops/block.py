"""A pre-norm encoder block, or one of its halves, as one operator that runs the Triton kernels.

    x = x + scale1 * proj(attention(qkv(norm1(x))))
    x = x + scale2 * fc2(activation(fc1(norm2(x))))

Dropout is not supported. Drop path can be applied only to the output of a single half.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from .attention import check_key_mask, check_lengths
from .block_op import block_kernel, named
from .checks import require_supported
from .descriptions import LAYOUTS, BlockTensors, Keys, QkNorm, Rope, check_qk_norm, checked_rope, is_rms
from .operators import matmul_dtype, needs_gradient, text_of
from .rotary import QkSettings, QkTensors, flat_settings

_NO_QK, _NO_SETTINGS = QkTensors(), QkSettings()


def fold(
    tensors: BlockTensors,
    dtype: torch.dtype,
    norm: str = "layer_norm",
    rope_head: int = 0,
    inner_norm: str = "none",
) -> BlockTensors:
    """Folds the norms of a block into qkv, fc1 and, with a norm inside the MLP, fc2.

    The folded weights are not updated when the parameters change, and have no gradients.

    Args:
        dtype: The dtype of the matmuls.
        rope_head: Pass head_dim D to make channels j and j + D/2 of q and k adjacent, which does not change q k^T. The
            block then needs positions from `interleave`. 0 keeps the order.
    """
    from ..kernels.linear.folding import NormedLinear, fold_linears

    with torch.no_grad():
        t = BlockTensors._make(tensor if tensor is None else tensor.detach() for tensor in tensors)
        linears = [
            NormedLinear(t.qkv_weight, t.qkv_bias, t.norm1_weight, t.norm1_bias, is_rms(norm), rope_head=rope_head),
            NormedLinear(
                t.fc1_weight, t.fc1_bias, t.norm2_weight, t.norm2_bias, is_rms(norm), t.gate_weight, t.gate_bias
            ),
        ]
        if inner_norm != "none":
            linears.append(NormedLinear(t.fc2_weight, t.fc2_bias, t.inner_weight, t.inner_bias, is_rms(inner_norm)))
        qkv, fc1, *fc2 = fold_linears(linears, dtype)
        folded = (qkv, fc1, *fc2)
        sums = [f.shift.new_empty(0) if f.weight_sum is None else f.weight_sum for f in folded]
        if fc2:
            t = t._replace(
                fc2_weight=fc2[0].weight, fc2_bias=fc2[0].shift, fc2_sum=sums[2], inner_weight=None, inner_bias=None
            )
        return t._replace(
            norm1_weight=None, norm1_bias=None, qkv_weight=qkv.weight, qkv_bias=qkv.shift, qkv_sum=sums[0],
            norm2_weight=None, norm2_bias=None, fc1_weight=fc1.weight, fc1_bias=fc1.shift, fc1_sum=sums[1],
            gate_weight=None, gate_bias=None, proj_weight=t.proj_weight.to(dtype), fc2_weight=t.fc2_weight.to(dtype),
        )  # fmt: skip


def fused_block(
    x: Tensor,
    statistics: Tensor | None,
    tensors: BlockTensors,
    *,
    heads: int = 0,
    attention_scale: float | None = None,
    eps: tuple[float, float],
    norm: str = "layer_norm",
    activation: str = "gelu",
    qk_norm: QkNorm | None = None,
    rope: Rope | None = None,
    keys: Keys | None = None,
    inner_norm: tuple[str, float] | None = None,
    residual: bool = True,
    next_statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Runs a block or one of its halves; passes LayerNorm statistics in and out.

    Args:
        x: [B, N, C], or [..., C] for the second half alone; fp32, fp16 or bf16.
        statistics: LayerNorm statistics of x from the previous block; None computes them.
        tensors: The parameters, in x's dtype, autocast's, or fp32; or the result of `fold`. A half without weights is
            skipped.
        attention_scale: Multiplier of q k^T; None means D**-0.5.
        eps: Epsilons of the two norms, in units of x squared.
        activation: One of `reference.ACTIVATIONS`; with a gate, the gate's.
        qk_norm: Norms of q and k, before rotation.
        keys: The keys that queries attend to; B is 1 for packed sequences. None means all of an image.
        inner_norm: Kind and epsilon of a norm before fc2.
        residual: Adds x to the branch of a half; True for a whole block.
        next_statistics: True if the following norm reuses LayerNorm statistics of the output.
    Returns:
        The output in x's shape and dtype. Under autocast, its dtype replaces fp16 and bf16, and fp32 too if `residual`
        is False. Also returns the output's LayerNorm statistics; None if not requested, for fp32 x, and without
        residual.
    Raises:
        UnsupportedInputError: the kernels cannot run this input; lists all reasons.
    """
    dtype = matmul_dtype(x)
    if x.dtype not in (torch.float32, dtype):  # fp32 stays fp32, as under autocast for sums and LayerNorm
        x = x.to(dtype)
    emit_statistics = next_statistics and residual and x.dtype != torch.float32
    of_qk, qk, prefix, longest = _NO_QK, _NO_SETTINGS, 0, 0
    if tensors.qkv_weight is not None:
        width = tensors.qkv_weight.shape[0]
        if attention_scale is None:
            attention_scale = (width // (3 * heads)) ** -0.5
        if qk_norm is not None or rope is not None:
            of_qk, qk, prefix = checked_qk(x, width, heads, qk_norm, rope, tensors.qkv_sum is not None)
        if keys is not None:
            of_qk, longest = of_qk._replace(cu_seqlens=keys.cu_seqlens, key_mask=keys.mask), _checked_longest(x, keys)
    device = x.device
    flat: list[Tensor] = []
    present: list[int] = []
    for number, tensor in enumerate((*tensors, *of_qk)):  # faster than a comprehension
        if tensor is None:
            continue
        if tensor.device != device:  # torch's dispatcher chooses one device before the operator sees its inputs
            require_supported(*named(tensors), x, dtype)
        flat.append(tensor)
        present.append(number)
    keep = needs_gradient(x, *flat)
    if keep and tensors.qkv_sum is not None:
        reason = "folded weights have no gradients: pass the parameters, or use torch.no_grad()"
        raise UnsupportedInputError("a block of folded weights with gradients enabled", [reason])
    inner, inner_eps = inner_norm or ("none", 0.0)
    words = text_of(
        norm, activation, qk.norm, qk.over, qk.layout, inner, residual, emit_statistics, keep, dtype, tuple(present)
    )  # fmt: skip
    scale = 1.0 if attention_scale is None else attention_scale
    outputs = block_kernel(
        x, statistics, flat, heads, scale, prefix, longest, *eps, qk.eps, inner_eps, words
    )  # fmt: skip
    return outputs[0], outputs[1] if emit_statistics else None


def checked_qk(
    x: Tensor, packed_width: int, heads: int, qk_norm: QkNorm | None, rope: Rope | None, together: bool
) -> tuple[QkTensors, QkSettings, int]:
    """Checks qk-norm and rotation against x [B, N, C] and a qkv layer of 3 H D outputs; returns operator arguments.

    Args:
        together: True if the layer was folded, so that positions from `interleave` are possible.
    """
    head_dim = packed_width // (3 * heads)
    if qk_norm is not None:
        check_qk_norm(qk_norm, heads, head_dim)
    if rope is not None:
        layouts = (*LAYOUTS, "interleaved_half") if together else LAYOUTS
        rope = checked_rope(rope, (x.shape[0], x.shape[1], 3, heads, head_dim), layouts)
    return flat_settings(x, qk_norm, rope)


def _checked_longest(x: Tensor, keys: Keys) -> int:
    """Checks keys against x [B, N, C]; returns the longest packed sequence, or 0."""
    if keys.mask is not None:
        check_key_mask(keys.mask, x.shape[0], x.shape[1], x.device)
        return 0
    if x.shape[0] != 1:
        raise ValueError(f"x must have shape [1, total, C] with packed sequences, got {tuple(x.shape)}")
    cu_seqlens: Any = keys.cu_seqlens
    check_lengths(cu_seqlens, keys.max_seqlen, x)
    return keys.max_seqlen

"""A whole pre-norm encoder block by the Triton kernels, as one operator.

    x = x + scale1 * proj(attention(qkv(norm1(x))))
    x = x + scale2 * fc2(activation(fc1(norm2(x))))

For a block in which nothing but these comes between the kernels: no dropout, no drop path, no module of somebody's own.
The operators in `linear.py`, `attention.py` and `layer_norm_mlp.py`, of which it is made, are for the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from .attention import check_key_mask
from .attention_varlen import check_lengths
from .block_op import block_op, block_training
from .checks import matmul_dtype, no_tensor, require_one_device, residual_stream
from .descriptions import LAYOUTS, BlockTensors, Keys, QkNorm, Rope, check_qk_norm, checked_rope, is_rms
from .rotary_op import flat_settings
from .transforms import needs_gradient


def fold(
    tensors: BlockTensors, dtype: torch.dtype, norm: str = "layer_norm", paired_head: int = 0, inner_norm: str = "none"
) -> BlockTensors:
    """The same block with its norms folded into qkv, fc1 and, where there is one inside the MLP, fc2, for matmuls of a
    dtype: of a model that is frozen.

    The folded weights follow no change of the parameters, and give no gradients.

    Args:
        paired_head: Channels D of a head of q and k where channels j and j + D/2 are made neighbours, which q k^T does
            not notice: the block then takes its positions as `neighbours` gives them. 0 leaves channels where they are.
    """
    from ..kernels.linear.folding import NormedLinear, fold_linears

    with torch.no_grad():
        t = BlockTensors._make(tensor if tensor is None else tensor.detach() for tensor in tensors)
        linears = [
            NormedLinear(t.qkv_weight, t.qkv_bias, t.norm1_weight, t.norm1_bias, is_rms(norm), paired_head=paired_head),
            NormedLinear(
                t.fc1_weight, t.fc1_bias, t.norm2_weight, t.norm2_bias, is_rms(norm), t.gate_weight, t.gate_bias
            ),
        ]
        if inner_norm != "none":
            linears.append(NormedLinear(t.fc2_weight, t.fc2_bias, t.inner_weight, t.inner_bias, is_rms(inner_norm)))
        qkv, fc1, *fc2 = fold_linears(linears, dtype)
        kept = (qkv, fc1, *fc2)
        sums = [no_tensor(folded.shift) if folded.weight_sum is None else folded.weight_sum for folded in kept]
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
    heads: int,
    attention_scale: float | None,
    eps: tuple[float, float],
    norm: str = "layer_norm",
    activation: str,
    qk_norm: QkNorm | None = None,
    rope: Rope | None = None,
    keys: Keys | None = None,
    inner_norm: tuple[str, float] = ("none", 0.0),
    next_statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A block, with row statistics handed in and out.

    Args:
        x: [B, N, C]; fp32, fp16 or bf16.
        statistics: Of the rows of x, as the block before gave them; None computes them. Those of fp32 x are not used.
        tensors: The parameters, in x's dtype, autocast's, or fp32; or what `fold` made of them.
        heads: H.
        attention_scale: Multiplier of q k^T; None means D**-0.5.
        eps: Of the two norms, in units of x squared.
        norm: "layer_norm" or "rms_norm".
        activation: One of `reference.ACTIVATIONS`; with a gate, the gate's.
        qk_norm: Of q and k, before they are rotated.
        rope: Rotary positions of q and k.
        keys: Which keys queries meet; of packed sequences B is 1. None means all of an image.
        inner_norm: Kind and epsilon of a norm of the hidden layer before fc2, of a kind of norm or "none".
        next_statistics: Whether a LayerNorm follows that takes the statistics of the rows over.
    Returns:
        [B, N, C] in x.dtype, in place of fp16 and bf16 in autocast's where that is on; and the statistics of its rows,
        None where they were not wanted and of fp32 rows.
    Raises:
        UnsupportedInputError: the kernels cannot run this input; lists all reasons.
    """
    dtype, x = matmul_dtype(x), residual_stream(x)
    wanted = next_statistics and x.dtype != torch.float32  # rows that the next LayerNorm normalises itself
    require_one_device("a block", x, tensors._asdict(), dtype)
    if attention_scale is None:
        attention_scale = (tensors.qkv_weight.shape[0] // (3 * heads)) ** -0.5
    *of_qk, qk_kind, qk_eps, over, prefix, layout = checked_qk(
        x, tensors.qkv_weight.shape[0], heads, qk_norm, rope, tensors.qkv_sum is not None
    )  # fmt: skip
    among, longest = _checked_keys(x, keys)
    qk_settings = (qk_kind, qk_eps, over, prefix, layout)
    settings = (heads, attention_scale, *eps, norm, activation, *qk_settings, longest, wanted, dtype)
    plain, sums, inner = tensors[:16], tensors[16:18], tensors[18:]
    if not needs_gradient(x, *tensors, *of_qk):
        y, emitted = block_op(x, statistics, *plain, *of_qk, *among, *sums, *settings, *inner, *inner_norm)
    elif tensors.qkv_sum is None:
        y, emitted, *_ = block_training(x, statistics, *plain, *of_qk, *among, *settings, *inner[:2], *inner_norm)
    else:
        reason = "they give no gradient: use the parameters themselves, or torch.no_grad"
        raise UnsupportedInputError("a block of folded weights where gradients are recorded", [reason])
    return y, emitted if wanted else None


def checked_qk(
    x: Tensor, packed_width: int, heads: int, qk_norm: QkNorm | None, rope: Rope | None, together: bool
) -> tuple[Any, ...]:
    """qk-norm and rotation as operators take them, where they fit x [B, N, C] and qkv layers of 3 H D rows.

    Args:
        together: Whether the layer's pairs may have been made neighbours beforehand.
    """
    head_dim = packed_width // (3 * heads)
    if qk_norm is not None:
        check_qk_norm(qk_norm, heads, head_dim)
    if rope is not None:
        layouts = (*LAYOUTS, "neighbours") if together else LAYOUTS
        rope = checked_rope(rope, (x.shape[0], x.shape[1], 3, heads, head_dim), layouts)
    return flat_settings(x, qk_norm, rope)


def _checked_keys(x: Tensor, keys: Keys | None) -> tuple[tuple[Tensor | None, Tensor | None], int]:
    """cu_seqlens and the mask of keys, and the longest sequence, where they fit x [B, N, C]."""
    if keys is None:
        return (None, None), 0
    if keys.mask is not None:
        check_key_mask(keys.mask, x.shape[0], x.shape[1], x.device)
        return (None, keys.mask), 0
    if x.shape[0] != 1:
        raise ValueError(f"x has shape {tuple(x.shape)}: accepted is [1, total, C] of packed sequences")
    cu_seqlens: Any = keys.cu_seqlens
    check_lengths(cu_seqlens, keys.max_seqlen, x)
    return (cu_seqlens, None), keys.max_seqlen

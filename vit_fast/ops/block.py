"""A whole pre-norm encoder block by the Triton kernels, as one operator.

    x = x + scale1 * proj(attention(qkv(norm1(x))))
    x = x + scale2 * fc2(activation(fc1(norm2(x))))

For a block in which nothing but these comes between the kernels: no dropout, no drop path, no module of somebody's own.
The operators in `linear.py`, `attention.py` and `layer_norm_mlp.py`, of which it is made, are for the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from .block_op import block_op, block_training
from .checks import matmul_dtype, require_one_device
from .layer_norm_mlp import needs_gradient, residual_stream


class BlockTensors(NamedTuple):
    """The parameters of a block; None for the absent ones.

    Attributes:
        norm1_weight, norm1_bias: The first LayerNorm's [C].
        qkv_weight, qkv_bias: One linear layer of q, k and v, [3 H D, C] and [3 H D].
        proj_weight, proj_bias: [C, H D] and [C].
        scale1: LayerScale of the attention branch [C].
        norm2_weight, norm2_bias: The second LayerNorm's [C].
        fc1_weight, fc1_bias: [F, C] and [F].
        fc2_weight, fc2_bias: [C, F] and [C].
        scale2: LayerScale of the MLP branch [C].
        qkv_sum, fc1_sum: Where `fold` has folded the LayerNorms into the weights, what the rounding left in their rows,
            fp32 [3 H D] and [F]. The norms' own parameters are None then.
    """

    norm1_weight: Tensor | None
    norm1_bias: Tensor | None
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    proj_weight: Tensor
    proj_bias: Tensor | None
    scale1: Tensor | None
    norm2_weight: Tensor | None
    norm2_bias: Tensor | None
    fc1_weight: Tensor
    fc1_bias: Tensor | None
    fc2_weight: Tensor
    fc2_bias: Tensor | None
    scale2: Tensor | None
    qkv_sum: Tensor | None = None
    fc1_sum: Tensor | None = None


def fold(tensors: BlockTensors, dtype: torch.dtype) -> BlockTensors:
    """The same block with its LayerNorms folded into qkv and fc1, for matmuls of a dtype: of a model that is frozen.

    The folded weights follow no change of the parameters, and give no gradients.
    """
    from ..kernels.folding import NormedLinear, fold_linears

    with torch.no_grad():
        t = BlockTensors._make(tensor if tensor is None else tensor.detach() for tensor in tensors)
        qkv, fc1 = fold_linears(
            [
                NormedLinear(t.qkv_weight, t.qkv_bias, t.norm1_weight, t.norm1_bias),
                NormedLinear(t.fc1_weight, t.fc1_bias, t.norm2_weight, t.norm2_bias),
            ],
            dtype,
        )
        return t._replace(
            norm1_weight=None, norm1_bias=None, qkv_weight=qkv.weight, qkv_bias=qkv.shift, qkv_sum=qkv.weight_sum,
            norm2_weight=None, norm2_bias=None, fc1_weight=fc1.weight, fc1_bias=fc1.shift, fc1_sum=fc1.weight_sum,
            proj_weight=t.proj_weight.to(dtype), fc2_weight=t.fc2_weight.to(dtype),
        )  # fmt: skip


def fused_block(
    x: Tensor,
    statistics: Tensor | None,
    tensors: BlockTensors,
    *,
    heads: int,
    attention_scale: float | None,
    eps: tuple[float, float],
    activation: str,
    next_statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A block, with row statistics handed in and out.

    Args:
        x: [B, N, C]; fp32, fp16 or bf16.
        statistics: Of the rows of x, as the block before gave them; None computes them. Those of fp32 x are not used.
        tensors: The parameters, in x's dtype, autocast's, or fp32; or what `fold` made of them.
        heads: H.
        attention_scale: Multiplier of q k^T; None means D**-0.5.
        eps: Of the two LayerNorms, in units of x squared.
        activation: One of `reference.ACTIVATIONS`.
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
    settings = (heads, attention_scale, *eps, activation, wanted, dtype)
    if not needs_gradient(x, *tensors):
        y, emitted = block_op(x, statistics, *tensors, *settings)
    elif tensors.qkv_sum is None:
        y, emitted, *_ = block_training(x, statistics, *tensors[:-2], *settings)
    else:
        reason = "they give no gradient: use the parameters themselves, or torch.no_grad"
        raise UnsupportedInputError("a block of folded weights where gradients are recorded", [reason])
    return y, emitted if wanted else None

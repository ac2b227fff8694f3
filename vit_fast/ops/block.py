"""A pre-norm encoder block, or one of its halves, as one operator that runs the Triton kernels.

    x = x + scale1 * proj(attention(qkv(norm1(x))))
    x = x + scale2 * fc2(activation(fc1(norm2(x))))

Supports no dropout; a drop path is supported only behind a single half.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from .attention import check_key_mask, check_lengths
from .block_op import block_kernel, named
from .checks import matmul_dtype, needs_gradient, require_supported
from .descriptions import LAYOUTS, BlockTensors, Keys, QkNorm, Rope, check_qk_norm, checked_rope, is_rms
from .operators import text_of
from .rotary import QkSettings, QkTensors, flat_settings

_NO_QK, _NO_SETTINGS = QkTensors(), QkSettings()


def fold(
    tensors: BlockTensors, dtype: torch.dtype, norm: str = "layer_norm", paired_head: int = 0, inner_norm: str = "none"
) -> BlockTensors:
    """Folds the norms of a block into qkv, fc1 and, with a norm inside the MLP, fc2, for matmuls of a dtype.

    The folded weights do not follow changes of the parameters and have no gradients.

    Args:
        paired_head: Width D of a head if the rows of q and k are permuted so that channels j and j + D/2 become
            adjacent, which does not change q k^T. The block then needs rotary positions from `neighbours`. 0 keeps the
            order of the channels.
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
        sums = [f.shift.new_empty(0) if f.weight_sum is None else f.weight_sum for f in kept]
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
    inner_norm: tuple[str, float] = ("none", 0.0),
    residual: bool = True,
    next_statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Runs a block or one of its halves, with LayerNorm statistics passed in and out.

    Args:
        x: [B, N, C]; for the second half alone [..., C]; fp32, fp16 or bf16.
        statistics: LayerNorm statistics of x, as the previous block returned them; None computes them. They are not
            used for fp32 x.
        tensors: The parameters, in the dtype of x, autocast's dtype, or fp32; or the result of `fold`. A half whose
            weights are None is skipped.
        heads: Number of heads H.
        attention_scale: Multiplier of q k^T; None means D**-0.5.
        eps: Epsilons of the two norms, in units of x squared.
        norm: "layer_norm" or "rms_norm".
        activation: One of `reference.ACTIVATIONS`; with a gate, the activation of the gate.
        qk_norm: Norms of q and k, applied before the rotation.
        rope: Rotary positions of q and k.
        keys: Keys that each query attends to; None means all keys of an image. B must be 1 for packed sequences.
        inner_norm: Kind and epsilon of a norm of the hidden layer before fc2; "none" if there is none.
        residual: True if x is added to the branch of a half; a whole block always adds it.
        next_statistics: True to return the LayerNorm statistics of the output, for the norm that follows.
    Returns:
        A tensor with the shape and dtype of x; autocast's dtype replaces fp16 and bf16, and fp32 if x is not added. And
            its
        LayerNorm statistics; None without `next_statistics`, and for fp32, which the next norm normalizes itself.
    Raises:
        UnsupportedInputError: the kernels cannot run this input; lists all reasons.
    """
    dtype = matmul_dtype(x)
    if x.dtype not in (torch.float32, dtype):  # fp32 stays fp32, as autocast does for sums and LayerNorm
        x = x.to(dtype)
    wanted = next_statistics and residual and x.dtype != torch.float32
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
    given: list[Tensor] = []
    present: list[int] = []
    for number, tensor in enumerate((*tensors, *of_qk)):  # faster than a comprehension
        if tensor is None:
            continue
        if tensor.device != device:  # torch's dispatcher chooses one device before the operator sees its inputs
            require_supported(*named(tensors), x, dtype)
        given.append(tensor)
        present.append(number)
    keep = needs_gradient(x, *given)
    if keep and tensors.qkv_sum is not None:
        reason = "they have no gradients: pass the parameters, or use torch.no_grad()"
        raise UnsupportedInputError("a block of folded weights where gradients are recorded", [reason])
    words = text_of(
        norm, activation, qk.norm, qk.over, qk.layout, inner_norm[0], residual, wanted, keep, dtype, tuple(present)
    )  # fmt: skip
    scale = 1.0 if attention_scale is None else attention_scale
    found = block_kernel(
        x, statistics, given, heads, scale, prefix, longest, *eps, qk.eps, inner_norm[1], words
    )  # fmt: skip
    return found[0], found[1] if wanted else None


def checked_qk(
    x: Tensor, packed_width: int, heads: int, qk_norm: QkNorm | None, rope: Rope | None, together: bool
) -> tuple[QkTensors, QkSettings, int]:
    """Checks qk-norm and rotation against x [B, N, C], and returns them as arguments of an operator.

    Args:
        packed_width: Rows 3 H D of the qkv layer.
        together: True if the pairs of the layer's channels may have been made adjacent by `fold`.
    """
    head_dim = packed_width // (3 * heads)
    if qk_norm is not None:
        check_qk_norm(qk_norm, heads, head_dim)
    if rope is not None:
        layouts = (*LAYOUTS, "neighbours") if together else LAYOUTS
        rope = checked_rope(rope, (x.shape[0], x.shape[1], 3, heads, head_dim), layouts)
    return flat_settings(x, qk_norm, rope)


def _checked_longest(x: Tensor, keys: Keys) -> int:
    """Checks the keys against x [B, N, C], and returns the longest packed sequence, or 0."""
    if keys.mask is not None:
        check_key_mask(keys.mask, x.shape[0], x.shape[1], x.device)
        return 0
    if x.shape[0] != 1:
        raise ValueError(f"x must have shape [1, total, C] with packed sequences, got {tuple(x.shape)}")
    cu_seqlens: Any = keys.cu_seqlens
    check_lengths(cu_seqlens, keys.max_seqlen, x)
    return keys.max_seqlen

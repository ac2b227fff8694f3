"""Arguments of the operators that are more than one tensor: norms, rotary positions, keys, blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """A LayerNorm or RMSNorm over the last dimension.

    Attributes:
        weight: gamma [C]; None means ones.
        bias: beta [C]; None means zeros. Must be None for an RMSNorm.
        eps: Added to the variance or to the mean square, in units of x squared.
        kind: "layer_norm", (x - mean) / sqrt(variance + eps), or "rms_norm", x / sqrt(mean square + eps).
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6
    kind: str = "layer_norm"


class QkNorm(NamedTuple):
    """The norms of q and k.

    Attributes:
        q, k: Norms of equal kind and epsilon; weight and bias are [D], or [H D] over "width".
        over: "head" normalizes each head, "width" all heads of a token together.
    """

    q: Norm
    k: Norm
    over: str = "head"


class Rope(NamedTuple):
    """Rotary positions: pairs of channels of q and k are rotated, (a, b) -> (a cos - b sin, b cos + a sin).

    Attributes:
        cos, sin: [T, d], [B, T, d] or [B, H, T, d] in any floating dtype, T = N - prefix; B and H may be 1. d is D/2,
            one value per pair (faster), or D with the value of a pair repeated for both of its channels.
        prefix: Number of leading tokens that are not rotated (class token, registers).
        layout: "half" pairs channels j and j + D/2, "interleaved" pairs 2j and 2j + 1.
    """

    cos: Tensor
    sin: Tensor
    prefix: int = 0
    layout: str = "half"


class Keys(NamedTuple):
    """The keys that a query attends to: those of its packed sequence, or all that are not padding.

    Attributes:
        cu_seqlens, max_seqlen: See `attention_varlen`; None for padded images.
        mask: The key_mask of `attention`; None for packed sequences.
    """

    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    mask: Tensor | None = None


class BlockTensors(NamedTuple):
    """The parameters of a block; None for absent ones. All parameters of an absent half are None.

    `fold` sets the sums and drops the norms. It also changes weights and biases of the layers after the norms.
    """

    norm1_weight: Tensor | None = None  # [C]
    norm1_bias: Tensor | None = None
    qkv_weight: Any = None  # [3 H D, C]
    qkv_bias: Tensor | None = None
    proj_weight: Any = None  # [C, H D]
    proj_bias: Tensor | None = None
    scale1: Tensor | None = None  # LayerScale of the attention branch [C]
    norm2_weight: Tensor | None = None
    norm2_bias: Tensor | None = None
    fc1_weight: Any = None  # [F, C]
    fc1_bias: Tensor | None = None
    fc2_weight: Any = None  # [C, F]
    fc2_bias: Tensor | None = None
    scale2: Tensor | None = None  # LayerScale of the MLP branch [C]
    gate_weight: Tensor | None = None  # [F, C]
    gate_bias: Tensor | None = None
    qkv_sum: Tensor | None = None  # row sums of the folded weight, fp32, to correct its rounding; empty for RMSNorm
    fc1_sum: Tensor | None = None
    inner_weight: Tensor | None = None  # norm before fc2 [F]
    inner_bias: Tensor | None = None
    fc2_sum: Tensor | None = None


class BlockScales(NamedTuple):
    """fp32 scales of the inputs of a block's linear layers.

    An input is divided by its scale and rounded to e4m3. None keeps a layer in half precision.

    Attributes:
        qkv, fc1: Per channel of the residual stream [C]; the folded weight is multiplied by them.
        proj, fc2: Scalar scales [] of the attention's output and of the hidden layer.
    """

    qkv: Tensor | None = None
    proj: Tensor | None = None
    fc1: Tensor | None = None
    fc2: Tensor | None = None


def interleave(rope: Rope, head_dim: int) -> Rope:
    """Returns positions of layout "half" for folded weights in which channel j + D/2 follows channel j.

    The weights of q's and k's norms keep their order.
    """
    cos, sin = (table[..., : head_dim // 2] for table in rope[:2])
    return Rope(cos, sin, rope.prefix, "interleaved_half")


def is_padding(mask: Any) -> bool:
    """True if sizes and strides of a mask [B, 1, 1 or N, N] show that it is equal for all heads and queries.

    Its values are not read, which would synchronize with the device.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4:
        return False
    return all(mask.shape[axis] == 1 or mask.stride(axis) == 0 for axis in (1, 2))


def names_keys(mask: Any) -> bool:
    """True if a mask is a padding mask or `Keys`, which fused layers support."""
    return isinstance(mask, Keys) or is_padding(mask)


def keys_of(mask: Tensor | Keys | None, x: Tensor) -> Keys | None:
    """Converts a padding mask to the keys that the tokens of x [B, N, ...] attend to; None means all keys."""
    return mask if mask is None or isinstance(mask, Keys) else Keys(mask=mask[:, 0, 0].expand(x.shape[:2]))

"""Named tuples that group arguments of the operators: norms, rotary embeddings, keys, blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """A LayerNorm or RMSNorm over the last dimension.

    Attributes:
        weight: gamma [C]; None means ones.
        bias: beta [C]; None means zeros. Must be None for an RMSNorm.
        eps: Added to the variance (RMSNorm: to the mean of x^2) before the square root.
        kind: "layer_norm", (x - mean) / sqrt(variance + eps), or "rms_norm", x / sqrt(mean(x^2) + eps).
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6
    kind: str = "layer_norm"


class QkNorm(NamedTuple):
    """The norms of q and k.

    Attributes:
        q, k: Norms of equal kind and epsilon. Weight and bias have shape [D] if `over` is "head", [H D] if "width".
        over: "head" normalizes each head, "width" all heads of a token together.
    """

    q: Norm
    k: Norm
    over: str = "head"


class Rope(NamedTuple):
    """Rotary positions: each pair (a, b) of channels of q and k becomes (a cos - b sin, b cos + a sin).

    Attributes:
        cos, sin: [T, d], [B, T, d] or [B, H, T, d] in any floating dtype, with T = N - prefix; B and H may be 1. d is
            D/2 for one value per pair (faster), or D if both channels of a pair have an entry, with equal values.
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
        cu_seqlens, max_seqlen: See `attention_varlen`; None and 0 if `mask` is used.
        mask: The key_mask of `attention`; None for packed sequences.
    """

    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    mask: Tensor | None = None


class BlockTensors(NamedTuple):
    """The parameters of a block. Absent parameters are None; so are all parameters of an absent half.

    `block.fold` folds norms and gate into weight and bias of qkv, fc1 and, after an inner norm, fc2. It sets `*_sum` of
    these layers, and sets the fields of norms and gate to None.
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
    qkv_sum: Tensor | None = None  # s in `kernels/linear/folding.py`, fp32 [3 H D]; for RMSNorm a tensor of shape [0]
    fc1_sum: Tensor | None = None
    inner_weight: Tensor | None = None  # norm before fc2 [F]
    inner_bias: Tensor | None = None
    fc2_sum: Tensor | None = None


class BlockScales(NamedTuple):
    """fp32 scales of the inputs of a block's linear layers.

    An input is divided by its scale and rounded to e4m3. None keeps a linear layer in half precision.

    Attributes:
        qkv, fc1: One scale per channel of the residual stream [C]; the folded weight is multiplied by these scales.
        proj, fc2: Scalar scales [] of the attention's output and of the hidden activations.
    """

    qkv: Tensor | None = None
    proj: Tensor | None = None
    fc1: Tensor | None = None
    fc2: Tensor | None = None


def interleave(rope: Rope, head_dim: int) -> Rope:
    """Converts positions of layout "half" for a folded qkv weight in which channel j + D/2 follows channel j.

    The parameters of the q and k norms keep their order.
    """
    cos, sin = (table[..., : head_dim // 2] for table in rope[:2])
    return Rope(cos, sin, rope.prefix, "interleaved_half")


def is_padding(mask: Any) -> bool:
    """True if sizes and strides of a mask [B, H, N_q, N_kv] show that all heads and queries have equal values.

    Does not read the values, because that would synchronize with the device.
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

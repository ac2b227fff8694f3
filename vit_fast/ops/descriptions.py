"""Arguments of the operators that are more than one tensor: norms, rotary positions, keys, blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import check_choice

NORMS = ("layer_norm", "rms_norm")
OVER = ("head", "width")
LAYOUTS = ("half", "interleaved")


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
        over: "head" normalises each head, "width" all heads of a token together.
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

    Attributes:
        norm1_weight, norm1_bias: [C].
        qkv_weight, qkv_bias: [3 H D, C] and [3 H D].
        proj_weight, proj_bias: [C, H D] and [C].
        scale1: LayerScale of the attention branch [C].
        norm2_weight, norm2_bias: [C].
        fc1_weight, fc1_bias: [F, C] and [F].
        fc2_weight, fc2_bias: [C, F] and [C].
        scale2: LayerScale of the MLP branch [C].
        gate_weight, gate_bias: [F, C] and [F].
        qkv_sum, fc1_sum, fc2_sum: Row sums of weights folded by `fold`, fp32, which correct their rounding; empty for
            RMSNorms. The parameters of folded norms are None.
        inner_weight, inner_bias: A norm before fc2 [F].
    """

    norm1_weight: Tensor | None = None
    norm1_bias: Tensor | None = None
    qkv_weight: Any = None  # None without the attention half
    qkv_bias: Tensor | None = None
    proj_weight: Any = None
    proj_bias: Tensor | None = None
    scale1: Tensor | None = None
    norm2_weight: Tensor | None = None
    norm2_bias: Tensor | None = None
    fc1_weight: Any = None
    fc1_bias: Tensor | None = None
    fc2_weight: Any = None
    fc2_bias: Tensor | None = None
    scale2: Tensor | None = None
    gate_weight: Tensor | None = None
    gate_bias: Tensor | None = None
    qkv_sum: Tensor | None = None
    fc1_sum: Tensor | None = None
    inner_weight: Tensor | None = None
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


def is_rms(norm: str) -> bool:
    """True for "rms_norm"; raises ValueError for unknown norms."""
    check_choice("norm", norm, NORMS)
    return norm == "rms_norm"


def check_norm(name: str, norm: Norm, width: int) -> None:
    """Raises ValueError unless the norm is for `width` channels; `name` is the argument's name."""
    check_choice(name, norm.kind, NORMS)
    if norm.kind == "rms_norm" and norm.bias is not None:
        raise ValueError(f"{name}.bias must be None for 'rms_norm', got a tensor")
    for part, tensor in (("weight", norm.weight), ("bias", norm.bias)):
        if tensor is not None and tuple(tensor.shape) != (width,):
            raise ValueError(f"{name}.{part} must have shape {(width,)}, got {tuple(tensor.shape)}")


def check_qk_norm(qk_norm: QkNorm, heads: int, head_dim: int) -> None:
    """Raises ValueError unless the norms are for this number of heads of D channels."""
    q, k, over = qk_norm
    check_choice("qk_norm.over", over, OVER)
    width = head_dim if over == "head" else heads * head_dim
    check_norm("qk_norm.q", q, width)
    check_norm("qk_norm.k", k, width)
    if (q.kind, q.eps) != (k.kind, k.eps):
        raise ValueError(
            f"qk_norm.q and qk_norm.k must have equal kind and eps, got {q.kind}, {q.eps} and {k.kind}, {k.eps}"
        )
    for part in ("weight", "bias"):
        if (getattr(q, part) is None) != (getattr(k, part) is None):
            raise ValueError(f"qk_norm.q and qk_norm.k must both have a {part} or neither, got one")


def checked_rope(rope: Rope, shape: Sequence[int], layouts: Sequence[str] = LAYOUTS) -> Rope:
    """Returns rope with tables [B or 1, H or 1, T, D/2].

    Args:
        layouts: Supported layouts.
    Raises:
        ValueError: the tables do not fit qkv of this shape, [B, N, 3, H, D].
    """
    B, N, _, H, D = shape
    cos, sin, prefix, layout = rope
    check_choice("rope.layout", layout, tuple(layouts))
    if D % 2:
        raise ValueError(f"head_dim must be even for rope, got {D}")
    if not 0 <= prefix <= N:
        raise ValueError(f"rope.prefix must be between 0 and {N}, the number of tokens, got {prefix}")
    if cos.shape != sin.shape:
        raise ValueError(f"rope.cos and rope.sin must have equal shapes, got {tuple(cos.shape)} and {tuple(sin.shape)}")
    T = N - prefix
    # compare with shapes of equal rank only: a comparison with B would fix the batch size in an exported graph
    fits = (
        (cos.dim() == 2 and cos.shape[0] == T)
        or (cos.dim() == 3 and cos.shape[:-1] == (B, T))
        or (cos.dim() == 4 and cos.shape[0] in (1, B) and cos.shape[1] in (1, H) and cos.shape[2] == T)
    )
    if not fits or cos.shape[-1] not in (D, D // 2):
        raise ValueError(
            f"rope.cos must have shape {(T, D // 2)}, {(B, T, D // 2)} or {(B, H, T, D // 2)}, where B and H may be 1 "
            f"and the last dimension may be {D}, got {tuple(cos.shape)}"
        )
    return Rope(_by_pair(cos, D, layout), _by_pair(sin, D, layout), prefix, layout)


def interleave(rope: Rope, head_dim: int) -> Rope:
    """Returns positions of layout "half" for folded weights in which channel j + D/2 follows channel j.

    The weights of q's and k's norms keep their order.
    """
    cos, sin = (table[..., : head_dim // 2] for table in rope[:2])
    return Rope(cos, sin, rope.prefix, "interleaved_half")


def _by_pair(table: Tensor, head_dim: int, layout: str) -> Tensor:
    if table.shape[-1] == head_dim:
        table = table[..., ::2] if layout == "interleaved" else table[..., : head_dim // 2]
    return table[None, None] if table.dim() == 2 else table[:, None] if table.dim() == 3 else table

"""Named tuples that group arguments of the operators, and the checks of these arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import check_choice, check_type

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
E4M3 = torch.float8_e4m3fn
# Kernels number tokens with int32. 256 leaves room for a last tile that extends past the last token.
MAX_TOKENS = 2**31 - 256
NO_TERMS = "attention must not have a bias, a window mask, relative positions, windows or a scale per head"  # in FP8
_NORMS = ("layer_norm", "rms_norm")


class Norm(NamedTuple):
    """A LayerNorm or RMSNorm over the last dimension.

    Attributes:
        weight: gamma [C]; None means ones.
        bias: beta [C]; None means zeros. Must be None for an RMSNorm.
        eps: Added to the variance (RMSNorm: to the mean of x^2) before the square root.
        kind: "layer_norm" for (x - mean) / sqrt(variance + eps), "rms_norm" for x / sqrt(mean(x^2) + eps).
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6
    kind: str = "layer_norm"


class QkNorm(NamedTuple):
    """The norms of q and k, which have H heads of D channels.

    Attributes:
        q, k: Norms with equal kind and eps. Weights and biases are [D] if `over` is "head", or [H * D] if "width".
        over: "head" normalizes each head, "width" normalizes all heads of a token together.
    """

    q: Norm
    k: Norm
    over: str = "head"


class Rope(NamedTuple):
    """Rotary embeddings: each pair (a, b) of channels of q and k becomes (a cos - b sin, b cos + a sin).

    Attributes:
        cos, sin: Tables [T, d], [B, T, d] or [B or 1, H or 1, T, d] with T = N - prefix for qkv [B, N, 3, H, D]; fp32,
            fp16, bf16 or, with backends other than triton, fp64. d is D/2 (one value per pair) or D (two equal values).
        prefix: Number of leading tokens that are not rotated (class token, registers).
        layout: "half" pairs channels j and j + D/2, "interleaved" pairs 2j and 2j + 1.
    """

    cos: Tensor
    sin: Tensor
    prefix: int = 0
    layout: str = "half"


class Keys(NamedTuple):
    """The keys that a query attends to: all keys of its packed sequence, or all keys that are not padding.

    Attributes:
        cu_seqlens: See `attention_varlen`; None if `mask` is used.
        max_seqlen: See `attention_varlen`; 0 if `mask` is used.
        mask: The key_mask of `attention`; None for packed sequences.
    """

    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    mask: Tensor | None = None


class ScoreTerms(NamedTuple):
    """Tensors that change the scores of attention; None means absent. See `attention` for shapes and dtypes.

    Attributes:
        rel_h, rel_w: The pair `rel`, as values or as tables. `checked_terms` requires one form of both.
        scale: Multiplier of q k^T per head [H], instead of a number.
        groups: int32 or int64 [W, n]: the numbers of the tokens in each of W groups (windows) per image. Each of the
            W * n tokens must be in one group. A query attends to the keys of its group. N_q and N_kv of the other
            tensors are then n, and their batch is B * W, with the groups of an image adjacent.
    """

    bias: Tensor | None = None
    window_mask: Tensor | None = None
    rel_h: Tensor | None = None
    rel_w: Tensor | None = None
    scale: Tensor | None = None
    groups: Tensor | None = None


class BlockTensors(NamedTuple):
    """The parameters of a block. Absent parameters, and all parameters of an absent half (attention or MLP), are None.

    `fold` in `folded.py` folds the norms into the weights, merges the gate into fc1, sets `*_sum`, and sets the fields
    of norms and gate to None. A layer in e4m3 has the reciprocal scale of its input in `*_factor`, and a scale per
    weight row. The row scales of qkv and fc1 are in `*_row_scale`. The row scales of proj and fc2 are multiplied into
    scale1 and scale2. `fold` divides proj_bias and fc2_bias by these row scales, because the kernels compute
    scale1 * (x W^T + proj_bias) and scale2 * (x W^T + fc2_bias).
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
    qkv_sum: Tensor | None = None  # row sums of a folded weight, fp32 [3 H D]; empty ([0]) for RMSNorm
    fc1_sum: Tensor | None = None
    inner_weight: Tensor | None = None  # [F], inner norm before fc2
    inner_bias: Tensor | None = None
    fc2_sum: Tensor | None = None
    qkv_factor: Tensor | None = None  # fp32 [C], like fc1_factor; proj_factor and fc2_factor are [1]
    proj_factor: Tensor | None = None
    fc1_factor: Tensor | None = None
    fc2_factor: Tensor | None = None
    qkv_row_scale: Tensor | None = None  # fp32 [3 H D]
    fc1_row_scale: Tensor | None = None

    @property
    def is_fp8(self) -> bool:
        return any(factor is not None for factor in self[21:25])


class BlockScales(NamedTuple):
    """fp32 scales that divide the inputs of linear layers before rounding to e4m3. None means no rounding."""

    qkv: Tensor | None = None  # [C], one scale per channel of the residual stream
    proj: Tensor | None = None  # []
    fc1: Tensor | None = None  # [C]
    fc2: Tensor | None = None  # []


def interleave(rope: Rope, head_dim: int) -> Rope:
    """Converts rope of layout "half" to "interleaved_half", because `fold` moved channel j + D/2 next to channel j.

    See `QkSettings` in `rotary.py` for "interleaved_half".
    """
    cos, sin = (table[..., : head_dim // 2] for table in rope[:2])
    return Rope(cos, sin, rope.prefix, "interleaved_half")


def is_padding(mask: Any) -> bool:
    """True for a boolean mask [B, H, N_q, N_kv] whose dimensions H and N_q have size 1 or stride 0.

    Does not read the values of the mask, because reading them would synchronize with the device.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4:
        return False
    return all(mask.shape[axis] == 1 or mask.stride(axis) == 0 for axis in (1, 2))


def four_sizes(attn_mask: Tensor, query: Tensor, key: Tensor) -> tuple[int, ...] | None:
    """Returns the sizes of a mask with four dimensions; None if it does not fit the scores or their device."""
    shape, sizes = (*query.shape[:3], key.shape[2]), (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    fits = len(sizes) == 4 and all(size in (1, whole) for size, whole in zip(sizes, shape))
    return sizes if fits and attn_mask.device == key.device else None


def key_mask_of(attn_mask: Tensor, query: Tensor, key: Tensor) -> Tensor | None:
    """Converts a padding mask of scaled_dot_product_attention to bool [B, N_kv]; returns None for any other mask."""
    if attn_mask.dim() < 2 or four_sizes(attn_mask, query, key) is None:
        return None
    mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return mask[:, 0, 0] if is_padding(mask) else None


def names_keys(mask: Any) -> bool:
    """True for the masks that fused modules support: padding masks and `Keys`."""
    return isinstance(mask, Keys) or is_padding(mask)


def keys_of(mask: Tensor | Keys | None, x: Tensor) -> Keys | None:
    """Converts a padding mask of the tokens of x [B, N, ...] to `Keys`; returns `Keys` and None unchanged."""
    return mask if mask is None or isinstance(mask, Keys) else Keys(mask=mask[:, 0, 0].expand(x.shape[:2]))


def check_tensors(**tensors: object) -> None:
    for name, tensor in tensors.items():
        check_type(name, tensor, Tensor)


def check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in (*DTYPES, torch.float64):
        raise ValueError(
            f"{name} must be torch.float32, torch.float16, torch.bfloat16 or torch.float64, got {tensor.dtype}"
        )


def check_keys(keys: Keys, batch: int, tokens: int, device: torch.device) -> None:
    """Raises ValueError if `keys` does not fit [batch, tokens]. Reads no tensor values, to avoid a synchronization."""
    cu_seqlens, max_seqlen, mask = keys
    if mask is not None and (mask.dtype != torch.bool or mask.device != device or mask.shape != (batch, tokens)):
        raise ValueError(
            f"key_mask must be torch.bool [{batch}, {tokens}] on {device}, "
            f"got {mask.dtype} {list(mask.shape)} on {mask.device}"
        )
    if cu_seqlens is not None:
        if cu_seqlens.dtype != torch.int32 or cu_seqlens.device != device:
            raise ValueError(
                f"cu_seqlens must be torch.int32 on {device}, got {cu_seqlens.dtype} on {cu_seqlens.device}"
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(f"cu_seqlens must have shape [S + 1] for S sequences, got {tuple(cu_seqlens.shape)}")
        if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int | torch.SymInt) or max_seqlen < 0:
            raise ValueError(f"max_seqlen must be an integer >= 0, got {max_seqlen!r}")


def check_norm(name: str, norm: Norm, width: int) -> None:
    check_choice(name if name == "norm" else f"{name}.kind", norm.kind, _NORMS)
    if norm.kind == "rms_norm" and norm.bias is not None:
        raise ValueError(f"the bias of {name} must be None for 'rms_norm', got a tensor")
    for part, tensor in (("weight", norm.weight), ("bias", norm.bias)):
        if tensor is not None and tuple(tensor.shape) != (width,):
            raise ValueError(f"{name}.{part} must have shape {(width,)}, got {tuple(tensor.shape)}")


def check_qk_norm(qk_norm: QkNorm, heads: int, head_dim: int) -> None:
    q, k, over = qk_norm
    check_choice("qk_norm.over", over, ("head", "width"))
    width = head_dim if over == "head" else heads * head_dim
    check_norm("qk_norm.q", q, width)
    check_norm("qk_norm.k", k, width)
    if (q.kind, q.eps) != (k.kind, k.eps):
        raise ValueError(
            f"qk_norm.q and qk_norm.k must have equal kind and eps, got {q.kind}, {q.eps} and {k.kind}, {k.eps}"
        )
    for part in ("weight", "bias"):
        if (getattr(q, part) is None) != (getattr(k, part) is None):
            raise ValueError(f"qk_norm.q.{part} and qk_norm.k.{part} must both be tensors or both be None")


def checked_rope(rope: Rope, shape: Sequence[int], is_folded: bool = False, by_pair: bool = True) -> Rope:
    """Checks the rotary embeddings for qkv [B, N, 3, H, D]; returns them with tables [B or 1, H or 1, T, D/2].

    `is_folded` allows the layout that `interleave` returns. Without `by_pair`, tables [..., D] stay [..., D].
    """
    B, N, _, H, D = shape
    cos, sin, prefix, layout = rope
    check_choice("rope.layout", layout, ("half", "interleaved", *(("interleaved_half",) if is_folded else ())))
    if D % 2:
        raise ValueError(f"head_dim must be even for rope, got {D}")
    if not 0 <= prefix <= N:
        raise ValueError(f"rope.prefix must be between 0 and {N}, the number of tokens, got {prefix}")
    if cos.shape != sin.shape:
        raise ValueError(f"rope.cos and rope.sin must have equal shapes, got {tuple(cos.shape)} and {tuple(sin.shape)}")
    T = N - prefix
    # check the rank first: for a 2-d table, (T,) == (B, T) compares T with B, so an export would make B constant
    fits = (
        (cos.dim() == 2 and cos.shape[0] == T)
        or (cos.dim() == 3 and cos.shape[:-1] == (B, T))
        or (cos.dim() == 4 and cos.shape[0] in (1, B) and cos.shape[1] in (1, H) and cos.shape[2] == T)
    )
    if not fits or cos.shape[-1] not in (D, D // 2):
        raise ValueError(
            f"rope.cos must have shape [T, d], [B, T, d] or [B or 1, H or 1, T, d] with T = {T}, B = {B}, H = {H} "
            f"and d = {D // 2} or {D}, got {tuple(cos.shape)}"
        )
    cos, sin = (_one_value_per_pair(table, D if by_pair else 0, layout) for table in (cos, sin))
    return Rope(cos, sin, prefix, layout)


def _one_value_per_pair(table: Tensor, head_dim: int, layout: str) -> Tensor:
    if table.shape[-1] == head_dim:
        table = table[..., ::2] if layout == "interleaved" else table[..., : head_dim // 2]
    return table[None, None] if table.dim() == 2 else table[:, None] if table.dim() == 3 else table


def as_matrix(tensor: Tensor) -> Tensor:
    """Returns [..., C] as contiguous [M, C]; copies only if the layout requires it."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()

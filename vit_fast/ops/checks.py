"""Argument checks that several operators share. Without them, torch or a kernel would raise less clear errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..arguments import check_choice
from ..errors import UnsupportedInputError, check_type
from .backends import kernel_reasons
from .descriptions import Norm, QkNorm, Rope

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Token indices are 32-bit in the kernels, and the last tile may extend past the last token. Offsets are 64-bit.
MAX_ROWS = 2**31 - 256
_NORMS = ("layer_norm", "rms_norm")
_FLOATING = ("torch.float32", "torch.float16", "torch.bfloat16", "torch.float64")


def check_tensors(**tensors: object) -> None:
    """Raises TypeError unless all of these arguments are tensors."""
    for name, tensor in tensors.items():
        check_type(name, tensor, Tensor)


def check_dtype(name: str, tensor: Tensor) -> None:
    if str(tensor.dtype) not in _FLOATING:
        raise ValueError(f"{name} must be {', '.join(_FLOATING[:-1])} or {_FLOATING[-1]}, got {tensor.dtype}")


def check_alike(q: Tensor, k: Tensor, v: Tensor, shape: str) -> None:
    """Raises ValueError unless q, k and v have as many dimensions as `shape` and equal dtypes and devices."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != shape.count(",") + 1:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        check_dtype(name, tensor)
        if reason := unlike(name, tensor, q):
            raise ValueError(reason)


def unlike(name: str, tensor: Tensor, q: Tensor) -> str:
    """Returns an error message if the tensor's dtype or device differs from that of q, else ""."""
    if tensor.dtype == q.dtype and tensor.device == q.device:
        return ""
    return f"{name} must have q's dtype and device, {q.dtype} on {q.device}, got {tensor.dtype} on {tensor.device}"


def check_key_mask(key_mask: Tensor, batch: int, tokens: int, device: torch.device) -> None:
    """Raises ValueError unless the mask is bool [batch, tokens] on `device`."""
    fits = key_mask.dim() == 2 and key_mask.shape == (batch, tokens)
    if key_mask.dtype != torch.bool or key_mask.device != device or not fits:
        raise ValueError(
            f"key_mask must be torch.bool [{batch}, {tokens}] on {device}, "
            f"got {key_mask.dtype} {list(key_mask.shape)} on {key_mask.device}"
        )


def check_lengths(cu_seqlens: Tensor, max_seqlen: int, tokens: Tensor) -> None:
    """Raises ValueError for invalid arguments. Does not read the values of cu_seqlens, which are on the device."""
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.device != tokens.device:
        raise ValueError(
            f"cu_seqlens must be torch.int32 on {tokens.device}, got {cu_seqlens.dtype} on {cu_seqlens.device}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape [S + 1], got {tuple(cu_seqlens.shape)}")
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int | torch.SymInt) or max_seqlen < 0:
        raise ValueError(f"max_seqlen must be an int of at least 0, got {max_seqlen!r}")


def is_rms(norm: str) -> bool:
    """True for "rms_norm"; raises ValueError for unknown norms."""
    check_choice("norm", norm, _NORMS)
    return norm == "rms_norm"


def check_norm(name: str, norm: Norm, width: int) -> None:
    """Raises ValueError unless weight and bias match the kind and have `width` channels; `name` is for the message."""
    check_choice(name, norm.kind, _NORMS)
    if norm.kind == "rms_norm" and norm.bias is not None:
        raise ValueError(f"{name}.bias must be None for 'rms_norm', got a tensor")
    for part, tensor in (("weight", norm.weight), ("bias", norm.bias)):
        if tensor is not None and tuple(tensor.shape) != (width,):
            raise ValueError(f"{name}.{part} must have shape {(width,)}, got {tuple(tensor.shape)}")


def check_qk_norm(qk_norm: QkNorm, heads: int, head_dim: int) -> None:
    """Raises ValueError unless the norms match each other, the number of heads and head_dim."""
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
            raise ValueError(f"qk_norm.q and qk_norm.k must either both have a {part} or both have none")


def checked_rope(rope: Rope, shape: Sequence[int], is_folded: bool = False) -> Rope:
    """Checks the rotary embeddings and returns them with tables [B or 1, H or 1, T, D/2].

    Args:
        shape: Shape of qkv, [B, N, 3, H, D].
        is_folded: True if the qkv weight is folded; this allows the layout that `interleave` returns.
    Raises:
        ValueError: head_dim is odd, or prefix, layout or the shapes of the tables do not match qkv.
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
    # check the rank first: comparing another size with B would fix the batch size in an exported graph
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
    return Rope(_one_value_per_pair(cos, D, layout), _one_value_per_pair(sin, D, layout), prefix, layout)


def _one_value_per_pair(table: Tensor, head_dim: int, layout: str) -> Tensor:
    if table.shape[-1] == head_dim:
        table = table[..., ::2] if layout == "interleaved" else table[..., : head_dim // 2]
    return table[None, None] if table.dim() == 2 else table[:, None] if table.dim() == 3 else table


def require_supported(what: str, parameters: Mapping[str, Tensor | None], x: Tensor, dtype: torch.dtype) -> None:
    """Raises UnsupportedInputError with all reasons why the kernels cannot run on x [..., C] with these parameters.

    Args:
        dtype: Dtype of the matmuls: that of autocast if it is enabled, else that of x.
    """
    reasons = kernel_reasons(x.device, dtype)
    if x.dtype not in DTYPES:
        reasons.append(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    if (tokens := x.numel() // max(x.shape[-1], 1)) > MAX_ROWS:
        reasons.append(f"x must have at most {MAX_ROWS} tokens, got {tokens}")
    for name, tensor in parameters.items():
        if tensor is None:
            continue
        if tensor.device != x.device:
            reasons.append(f"{name} must be on {x.device} like x, got {tensor.device}")
        if tensor.dtype not in (dtype, torch.float32):
            whose = "x" if dtype == x.dtype else "autocast"
            reasons.append(f"{name} must be float32 or have the dtype of {whose}, {dtype}, got {tensor.dtype}")
    if reasons:
        raise UnsupportedInputError(f"{what} with backend='triton'", reasons)


def as_matrix(tensor: Tensor) -> Tensor:
    """Returns [..., C] as contiguous [M, C]; copies only if the layout requires it."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def count_tokens(shape: Sequence[int]) -> int:
    """Returns the number of tokens M of a tensor [..., C] with this shape."""
    return math.prod(int(size) for size in shape[:-1])

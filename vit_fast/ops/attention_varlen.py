"""Softmax attention of packed sequences: public functions, validation, dispatch to a backend."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .attention import attention, attention_qkvpacked, autocast, check_alike, check_dtype, is_exporting, scale_of
from .attention_op import as_batch, attention_kernel
from .backends import resolve_backend
from .checks import check_tensors
from .descriptions import Keys


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax self-attention of sequences that lie one behind the other, each by itself; not causal.

    Args:
        q: Queries [total, H, D]; fp32, fp16 or bf16 (fp64 too with eager and sdpa). With triton D is 16 to 128 and
            contiguous; other strides are free. So are k and v.
        cu_seqlens: int32 [S + 1] on q's device: sequence i is tokens cu_seqlens[i] to cu_seqlens[i + 1], the first
            element is 0, and sequences may be empty. Triton does not read it on the host, so nothing waits for it, and
            elements that fall or pass `total` are not found; eager and sdpa find them.
        max_seqlen: Tokens of the longest sequence. With triton it decides tiles, not results.
        scale: Multiplier of q k^T, dimensionless. None means D**-0.5.
        backend: "eager", "sdpa", "triton" or "auto" (by q's device).
    Returns:
        [total, H, D] in q.dtype (under autocast, with sdpa and triton, in autocast's), accumulated in fp32. Tokens
        behind the last sequence are in none: 0.
    Raises:
        ValueError: shapes, dtypes or devices disagree, or cu_seqlens is wrong and was read.
        UnsupportedInputError: this backend cannot run this input; lists all reasons.
    Source: flash_attn_varlen_func of github.com/Dao-AILab/flash-attention for the conventions.
    """
    check_tensors(q=q, k=k, v=v, cu_seqlens=cu_seqlens)
    backend = resolve_backend(backend, q.device, q.dtype)
    if backend == "triton":
        q, k, v = autocast(q, k, v)
    check_alike(q, k, v, "[total, H, D]")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != q.shape:
            raise ValueError(f"{name} must have q's shape {tuple(q.shape)}, got {tuple(tensor.shape)}")
    check_lengths(cu_seqlens, max_seqlen, q)
    if is_exporting():
        return _with_block_mask(q, k, v, cu_seqlens, scale)
    if backend == "triton":
        out: Tensor = attention_kernel([q, k, v], cu_seqlens, None, max_seqlen, scale_of(q, scale))[0]
        return out
    lengths = _lengths_read(cu_seqlens, max_seqlen, q.shape[0])
    if backend == "eager":
        return reference.attention_varlen(q, k, v, cu_seqlens, scale=scale)
    return _by_torch(q, k, v, lengths, scale)


def attention_varlen_qkvpacked(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, scale: float | None = None, backend: str = "auto"
) -> Tensor:
    """`attention_varlen` on the qkv linear's output, without a copy.

    Args:
        qkv: Packed projections [total, 3, H, D]; fp32, fp16 or bf16 (fp64 too with eager and sdpa).
        cu_seqlens: As for `attention_varlen`; so are the others.
    Returns:
        [total, H, D] in qkv.dtype, contiguous: the input of the proj linear.
    Raises:
        ValueError: qkv is not [total, 3, H, D] of a floating dtype, or cu_seqlens is wrong and was read.
        UnsupportedInputError: this backend cannot run this input; lists all reasons.
    """
    check_tensors(qkv=qkv, cu_seqlens=cu_seqlens)
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv must have shape [total, 3, H, D], got {tuple(qkv.shape)}")
    backend = resolve_backend(backend, qkv.device, qkv.dtype)
    if backend == "triton" and not is_exporting():
        (qkv,) = autocast(qkv)
        check_dtype("qkv", qkv)
        check_lengths(cu_seqlens, max_seqlen, qkv)
        out: Tensor = attention_kernel([qkv], cu_seqlens, None, max_seqlen, scale_of(qkv, scale))[0]
        return out
    q, k, v = qkv.unbind(1)
    return attention_varlen(q, k, v, cu_seqlens, max_seqlen, scale=scale, backend=backend).contiguous()


def attention_among(qkv: Tensor, keys: Keys | None, *, scale: float | None = None, backend: str = "auto") -> Tensor:
    """Attention on the qkv linear's output, to whatever keys.

    Args:
        qkv: [B, N, 3, H, D]; [total, 3, H, D] or [1, total, 3, H, D] where keys are those of packed sequences.
        keys: None means all of an image.
        scale: As for `attention`; so is backend.
    Returns:
        Of qkv's shape without the 3.
    """
    if keys is None:
        return attention_qkvpacked(qkv, scale=scale, backend=backend)
    if keys.cu_seqlens is not None:
        if qkv.dim() == 5:
            return attention_among(qkv.squeeze(0), keys, scale=scale, backend=backend)[None]
        return attention_varlen_qkvpacked(qkv, keys.cu_seqlens, keys.max_seqlen, scale=scale, backend=backend)
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return attention(q, k, v, scale=scale, key_mask=keys.mask, backend=backend).transpose(1, 2)


def check_lengths(cu_seqlens: Tensor, max_seqlen: int, tokens: Tensor) -> None:
    """Raises ValueError for what can be said of the lengths without reading them."""
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.device != tokens.device:
        raise ValueError(
            f"cu_seqlens must be torch.int32 on {tokens.device}, got {cu_seqlens.dtype} on {cu_seqlens.device}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape [S + 1], got {tuple(cu_seqlens.shape)}")
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int | torch.SymInt) or max_seqlen < 0:
        raise ValueError(f"max_seqlen must be an int of at least 0, got {max_seqlen!r}")


def _lengths_read(cu_seqlens: Tensor, max_seqlen: int, total: int) -> list[int]:
    """Reads the lengths, which waits for the device, and checks them."""
    bounds: list[int] = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] > total or min(lengths, default=0) < 0:
        shown = f"{bounds[:8]}{' ...' if len(bounds) > 8 else ''}"
        raise ValueError(f"cu_seqlens must start with 0, never fall and end with at most {total}, got {shown}")
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(f"max_seqlen must be at least the longest sequence, {max(lengths)}, got {max_seqlen}")
    return lengths


def _by_torch(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float | None) -> Tensor:
    """torch's own attention, a call for all sequences of one length that follow each other, as windows do."""
    mixed, start = [], 0
    for length, group in itertools.groupby(lengths):
        end = start + length * len(list(group))
        if length:
            query, key, value = (tensor[start:end].unflatten(0, (-1, length)).transpose(1, 2) for tensor in (q, k, v))
            out = F.scaled_dot_product_attention(query, key, value, scale=scale)
            mixed.append(out.transpose(1, 2).flatten(0, 1))
        start = end
    if start < q.shape[0] or not mixed:
        everything = torch.ones((), dtype=torch.bool, device=q.device)
        mixed.append(q[start:].masked_fill(everything, 0))  # as in the definition
    return torch.cat(mixed)


def _with_block_mask(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None) -> Tensor:
    """torch's own attention over all tokens, masked: what another runtime can be told, where lengths are not known."""
    token = torch.arange(q.shape[0], device=q.device)
    sequence = (token[:, None] >= cu_seqlens[None, 1:]).sum(1)  # [total]
    inside = sequence < cu_seqlens.shape[0] - 1
    allowed = (sequence[:, None] == sequence[None, :]) & inside[None, :]
    q, k, v = (as_batch(tensor) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, allowed, scale=scale)[0].transpose(0, 1)

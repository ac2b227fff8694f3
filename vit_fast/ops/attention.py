"""Softmax attention of batches and packed sequences: public functions, validation and dispatch to a backend."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .attention_op import as_batch, attention_kernel, unlike, unsupported_reasons
from .backends import resolve_backend
from .descriptions import Keys, check_dtype, check_key_mask, check_lengths, check_tensors, is_padding
from .registration import constant_to_compiler, in_transform, is_exporting, matmul_dtype


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Computes softmax attention, softmax(scale * q k^T) v, without a causal mask.

    Args:
        q: Queries [B, H, N_q, D]; fp32, fp16 or bf16 (also fp64 with eager and sdpa). With triton, D must be
            between 16 and 128, with stride 1; other strides are arbitrary.
        k: Keys [B, H, N_kv, D], with the dtype and device of q.
        v: Values, with the shape, dtype and device of k.
        scale: Multiplier of q k^T. None means D**-0.5.
        key_mask: bool [B, N_kv], False for padding. The output of an image is 0 if its mask is all False.
        backend: "eager", "sdpa", "triton" or "auto" (chosen by the device and dtype of q).
    Returns:
        [B, H, N_q, D] in q.dtype; triton accumulates in fp32. Under autocast, the output has autocast's dtype.
    Raises:
        ValueError: shapes, dtypes or devices do not match.
        UnsupportedInputError: the backend cannot run this input; lists all reasons.
    Source: "Attention Is All You Need", arXiv 1706.03762, equation 1; FlashAttention-2, arXiv 2307.08691.
    """
    check_tensors(q=q, k=k, v=v)
    backend = resolve_backend(backend, q.device, q.dtype)
    if backend == "triton":
        q, k, v = _autocast(q, k, v)
    _check_alike(q, k, v, "[B, H, N, D]")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have equal shapes, got {tuple(k.shape)} and {tuple(v.shape)}")
    if (q.shape[0], q.shape[1], q.shape[3]) != (k.shape[0], k.shape[1], k.shape[3]):
        raise ValueError(f"B, H and D of q and k must be equal, got shapes {tuple(q.shape)} and {tuple(k.shape)}")
    if key_mask is not None:
        check_key_mask(key_mask, k.shape[0], k.shape[2], k.device)
    if backend == "eager":
        return reference.attention(q, k, v, scale=scale, key_mask=key_mask)
    if backend == "sdpa" or is_exporting():
        mask = None if key_mask is None else key_mask[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    out: Tensor = attention_kernel([q, k, v], None, key_mask, 0, softmax_scale(q, scale))[0]
    return out


def attention_qkvpacked(qkv: Tensor, *, scale: float | None = None, backend: str = "auto") -> Tensor:
    """Computes `attention` from the output of the qkv linear layer, without a copy.

    Args:
        qkv: Output [B, N, 3, H, D] of that layer; fp32, fp16 or bf16 (also fp64 with eager and sdpa).
        scale, backend: See `attention`, which also lists the errors.
    Returns:
        [B, N, H, D], in the dtype that `attention` returns; contiguous with triton.
    """
    check_tensors(qkv=qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv must have shape [B, N, 3, H, D], got {tuple(qkv.shape)}")
    return attention_among(qkv, None, scale=scale, backend=backend)


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
    """Computes softmax self-attention within each packed sequence, without a causal mask.

    Args:
        q, k, v: [total, H, D]; dtypes and strides as in `attention`.
        cu_seqlens: int32 [S + 1] on the device of q. Sequence i consists of tokens cu_seqlens[i] to
            cu_seqlens[i + 1] - 1. The first element is 0, and sequences may be empty. eager and sdpa raise an error if
            values decrease or exceed `total`. triton does not check the values, to avoid a synchronization.
        max_seqlen: Length of the longest sequence. triton uses it only to select tile sizes.
        scale, backend: See `attention`.
    Returns:
        [total, H, D], in the dtype that `attention` returns. Tokens after the last sequence are 0.
    Raises:
        ValueError: shapes, dtypes or devices do not match, or cu_seqlens is invalid (eager and sdpa only).
        UnsupportedInputError: the backend cannot run this input; lists all reasons.
    Source: the conventions of flash_attn_varlen_func, github.com/Dao-AILab/flash-attention.
    """
    check_tensors(q=q, k=k, v=v, cu_seqlens=cu_seqlens)
    backend = resolve_backend(backend, q.device, q.dtype)
    if backend == "triton":
        q, k, v = _autocast(q, k, v)
    _check_alike(q, k, v, "[total, H, D]")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != q.shape:
            raise ValueError(f"{name} must have q's shape {tuple(q.shape)}, got {tuple(tensor.shape)}")
    check_lengths(cu_seqlens, max_seqlen, q)
    if is_exporting():
        return _with_block_mask(q, k, v, cu_seqlens, scale)
    if backend == "triton":
        out: Tensor = attention_kernel([q, k, v], cu_seqlens, None, max_seqlen, softmax_scale(q, scale))[0]
        return out
    lengths = _read_lengths(cu_seqlens, max_seqlen, q.shape[0])
    if backend == "eager":
        return reference.attention_varlen(q, k, v, cu_seqlens, scale=scale)
    return _varlen_by_sdpa(q, k, v, lengths, scale)


def attention_varlen_qkvpacked(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, scale: float | None = None, backend: str = "auto"
) -> Tensor:
    """Computes `attention_varlen` from the output of the qkv linear layer, without a copy.

    Args:
        qkv: Output [total, 3, H, D] of that layer; fp32, fp16 or bf16 (also fp64 with eager and sdpa).
        cu_seqlens, max_seqlen, scale, backend: See `attention_varlen`, which also lists the errors.
    Returns:
        [total, H, D], in the dtype that `attention` returns; contiguous.
    """
    check_tensors(qkv=qkv, cu_seqlens=cu_seqlens)
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv must have shape [total, 3, H, D], got {tuple(qkv.shape)}")
    return attention_among(qkv, Keys(cu_seqlens, max_seqlen), scale=scale, backend=backend)


def attention_among(qkv: Tensor, keys: Keys | None, *, scale: float | None = None, backend: str = "auto") -> Tensor:
    """Computes attention of qkv: a batch [B, N, 3, H, D] or packed sequences [(1,) total, 3, H, D]."""
    cu_seqlens, max_seqlen, key_mask = keys or (None, 0, None)
    backend = resolve_backend(backend, qkv.device, qkv.dtype)
    if backend == "triton" and not is_exporting():
        (qkv,) = _autocast(qkv)
        check_dtype("qkv", qkv)
        if cu_seqlens is not None:
            check_lengths(cu_seqlens, max_seqlen, qkv)
        if key_mask is not None:
            check_key_mask(key_mask, qkv.shape[0], qkv.shape[1], qkv.device)
        out: Tensor = attention_kernel([qkv], cu_seqlens, key_mask, max_seqlen, softmax_scale(qkv, scale))[0]
        return out
    if cu_seqlens is None:
        q, k, v = qkv.transpose(1, 3).unbind(2)  # each [B, H, N, D], views
        return attention(q, k, v, scale=scale, key_mask=key_mask, backend=backend).transpose(1, 2)
    q, k, v = qkv.flatten(0, -4).unbind(1)  # each [total, H, D], views
    mixed = attention_varlen(q, k, v, cu_seqlens, max_seqlen, scale=scale, backend=backend).contiguous()
    return mixed if qkv.dim() == 4 else mixed[None]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Drop-in replacement for torch.nn.functional.scaled_dot_product_attention, with the same signature and results.

    The Triton kernel runs calls without a mask, or with a boolean padding mask that is equal for all queries and heads.
    A mask is recognized by sizes and strides; its values are not read. torch's function runs all other calls, e.g. with
    dropout, causal masks, grouped queries or torch.func transforms, or if `sdpa_kernel` allows only MATH.
    """
    tensors = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    # torch's function runs nested tensors, subclasses such as DTensor, and torch.fx Proxies. Check the tensors first:
    # under torch.fx, dropout_p is a Proxy too, and comparing it with 0 would raise an error.
    ordinary = all(type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_nested for tensor in tensors)
    plain = ordinary and dropout_p == 0.0 and not is_causal and not enable_gqa
    if plain and _auto_is_triton(query):
        q, k, v = _autocast(query, key, value)
        key_mask = None if attn_mask is None else key_mask_of(attn_mask, q, k)
        understood = attn_mask is None or key_mask is not None
        if understood and not unsupported_reasons(q, k, v, softmax_scale(q, scale)):
            return attention(q, k, v, scale=scale, key_mask=key_mask, backend="triton")
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _check_alike(q: Tensor, k: Tensor, v: Tensor, shape: str) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != shape.count(",") + 1:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        check_dtype(name, tensor)
        if reason := unlike(name, tensor, q):
            raise ValueError(reason)


def softmax_scale(tensor: Tensor, scale: float | None) -> float:
    # max avoids 0 ** -0.5, and keeps a symbolic head dimension symbolic
    return max(tensor.shape[-1], 1) ** -0.5 if scale is None else float(scale)


def key_mask_of(attn_mask: Tensor, query: Tensor, key: Tensor) -> Tensor | None:
    """Converts a padding mask of scaled_dot_product_attention to bool [B, N_kv]; returns None for other masks."""
    shape = (*query.shape[:3], key.shape[2])
    sizes = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    fits = attn_mask.dim() > 1 and len(sizes) == 4 and all(size in (1, whole) for size, whole in zip(sizes, shape))
    if attn_mask.device != key.device or not fits or not is_padding(attn_mask.expand(shape)):
        return None
    return attn_mask.expand(shape)[:, 0, 0]


def _auto_is_triton(query: Tensor) -> bool:
    """Returns True if "auto" resolves to triton and the user did not disable torch's fused kernels."""
    if query.dim() != 4 or in_transform() or is_exporting():
        return False
    return _fused_sdpa_is_allowed() and resolve_backend("auto", query.device, query.dtype) == "triton"


@constant_to_compiler
def _fused_sdpa_is_allowed() -> bool:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts the tensors to autocast's dtype if autocast is enabled, as SDPA does."""
    return tuple(tensor.to(matmul_dtype(tensor)) for tensor in tensors)


def _read_lengths(cu_seqlens: Tensor, max_seqlen: int, total: int) -> list[int]:
    """Returns the checked lengths of the sequences. Reading them synchronizes with the device."""
    bounds: list[int] = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] > total or min(lengths, default=0) < 0:
        shown = f"{bounds[:8]}{' ...' if len(bounds) > 8 else ''}"
        raise ValueError(f"cu_seqlens must start with 0, never decrease and end with at most {total}, got {shown}")
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(f"max_seqlen must be at least the longest sequence, {max(lengths)}, got {max_seqlen}")
    return lengths


def _varlen_by_sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float | None) -> Tensor:
    """Calls SDPA once per group of consecutive sequences of equal length, such as windows."""
    outputs, start = [], 0
    for length, group in itertools.groupby(lengths):
        end = start + length * len(list(group))
        if length:
            query, key, value = (tensor[start:end].unflatten(0, (-1, length)).transpose(1, 2) for tensor in (q, k, v))
            out = F.scaled_dot_product_attention(query, key, value, scale=scale)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        start = end
    if start < q.shape[0] or not outputs:
        everything = torch.ones((), dtype=torch.bool, device=q.device)
        outputs.append(q[start:].masked_fill(everything, 0).to(matmul_dtype(q)))  # 0 even if q contains NaN
    return torch.cat(outputs)


def _with_block_mask(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None) -> Tensor:
    """Calls SDPA with a block-diagonal mask [total, total], for runtimes without variable-length attention."""
    token = torch.arange(q.shape[0], device=q.device)
    sequence = (token[:, None] >= cu_seqlens[None, 1:]).sum(1)  # [total]
    inside = sequence < cu_seqlens.shape[0] - 1
    allowed = (sequence[:, None] == sequence[None, :]) & inside[None, :]
    q, k, v = (as_batch(tensor) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, allowed, scale=scale)[0].transpose(0, 1)

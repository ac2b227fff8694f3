"""Softmax attention of batches and packed sequences: the public functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import check_type
from . import reference
from .attention_bias import additive_mask, bias_of_mask, by_groups, checked_terms, score_terms, with_rel
from .attention_operator import heads_first, run_attention, unsupported_reasons
from .backends import resolve_backend
from .descriptions import Keys, ScoreTerms, check_dtype, check_keys, check_tensors, key_mask_of
from .registration import constant_to_compiler, in_transform, is_exporting, matmul_dtype

_BATCH, _PACKED = "[B, H, N, D]", "[total, H, D]"
_NUMBERS = (type(None), float, int, Tensor, torch.SymFloat, torch.SymInt)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | Tensor | None = None,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
    window_mask: Tensor | None = None,
    rel: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Computes softmax attention, softmax(scale * q k^T + bias) v, without a causal mask.

    The value -inf in `bias` or `window_mask` masks a key; for triton, also finite values below -2.3e38. The output and
    the gradients of a query without keys are 0. Mask all keys of a query by -inf only: if all its scores are finite,
    but below about -1e5, the gradients of triton and of torch's flash attention are inaccurate.

    Args:
        q: Queries [B, H, N_q, D]: batch, heads, tokens, head_dim; fp32, fp16, bf16 or fp64.
        k: Keys [B, H, N_kv, D] with q's device and dtype. Under autocast, q, k and v may mix fp32, fp16 and bf16.
        v: Values [B, H, N_kv, D] with k's device and dtype.
        scale: Multiplier of q k^T: a number, or a tensor [H]; None means D**-0.5. For triton, a number must be positive
            and finite.
        key_mask: bool [B, N_kv], False for padding.
        bias: [H or 1, N_q, N_kv] or [B or 1, H or 1, N_q, N_kv], in fp32 or q's dtype; added to the scores.
        window_mask: [W, N_q, N_kv] without a gradient, in fp32 or q's dtype. Batch element b adds row b % W, as in the
            shifted windows of Swin.
        rel: Pair (rel_h [B, H, N_q, Kh], rel_w [B, H, N_q, Kw]) in fp32 or q's dtype, for keys on a grid with
            N_kv = Kh * Kw. Adds rel_h[..., m // Kw] + rel_w[..., m % Kw] to the score of key m, as in SAM and MViTv2.
            Or tables (Rh [h, Kh, D], Rw [w, Kw, D]) for queries on a grid with N_q = h * w: the values for query n are
            then Rh[n // w] q and Rw[n % w] q.
        backend: "eager", "sdpa", "triton", or "auto" to choose triton or sdpa by device, dtype and TF32 setting.
            triton does not support fp64, and requires D between 16 and 128 with stride 1 in q, k and v.
    Returns:
        [B, H, N_q, D] in q.dtype. Under autocast, the dtype is the autocast dtype if q is not fp64.
    Raises:
        ValueError: shapes, dtypes or devices do not match, or the backend is unknown.
        UnsupportedInputError: triton cannot run this input. The message lists all reasons.
    Source: "Attention Is All You Need", arXiv 1706.03762, equation 1; FlashAttention-2, arXiv 2307.08691.
    """
    check_tensors(q=q, k=k, v=v)
    keys, terms = None if key_mask is None else Keys(mask=key_mask), score_terms(scale, bias, window_mask, rel)
    return _attend([q, k, v], keys, scale, backend, terms)


def attention_qkvpacked(
    qkv: Tensor,
    *,
    scale: float | Tensor | None = None,
    bias: Tensor | None = None,
    window_mask: Tensor | None = None,
    rel: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Computes `attention` from the output of the qkv linear layer, without separate copies of q, k and v.

    Args:
        qkv: Output of the qkv layer as [B, N, 3, H, D]. See `attention` for dtypes and D.
        scale, bias, window_mask, rel, backend: See `attention`, which also lists the errors.
    Returns:
        [B, N, H, D] in the dtype that `attention` returns.
    """
    check_tensors(qkv=qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv must have shape [B, N, 3, H, D], got {tuple(qkv.shape)}")
    return _attend([qkv], None, scale, backend, score_terms(scale, bias, window_mask, rel))


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
        q, k, v: Queries, keys and values [total, H, D] of all sequences. See `attention` for dtypes, strides and D.
        cu_seqlens: int32 [S + 1] for S sequences, on q's device. Sequence i consists of tokens cu_seqlens[i] to
            cu_seqlens[i + 1] - 1. The values must start with 0, never decrease, and end with at most `total`.
            triton does not check the values, because reading them would synchronize with the GPU.
        max_seqlen: Length of the longest sequence, or a larger number.
        scale, backend: See `attention`.
    Returns:
        [total, H, D] in the dtype that `attention` returns. The output of tokens after the last sequence is 0.
    Raises:
        ValueError: shapes, dtypes or devices do not match, or cu_seqlens, max_seqlen or backend is invalid.
        UnsupportedInputError: triton cannot run this input. The message lists all reasons.
    Source: flash_attn_varlen_func in github.com/Dao-AILab/flash-attention.
    """
    check_tensors(q=q, k=k, v=v, cu_seqlens=cu_seqlens)
    return _attend([q, k, v], Keys(cu_seqlens, max_seqlen), scale, backend)


def attention_varlen_qkvpacked(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, scale: float | None = None, backend: str = "auto"
) -> Tensor:
    """Computes `attention_varlen` from the output of the qkv linear layer, without separate copies of q, k and v.

    Args:
        qkv: Output of the qkv layer as [total, 3, H, D]. See `attention` for dtypes and D.
        cu_seqlens, max_seqlen, scale, backend: See `attention_varlen`, which also lists the errors.
    Returns:
        [total, H, D] in the dtype that `attention` returns.
    """
    check_tensors(qkv=qkv, cu_seqlens=cu_seqlens)
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv must have shape [total, 3, H, D], got {tuple(qkv.shape)}")
    return attention_among(qkv, Keys(cu_seqlens, max_seqlen), scale=scale, backend=backend)


def attention_among(
    qkv: Tensor, keys: Keys | None, *, scale: float | None = None, backend: str = "auto",
    terms: ScoreTerms | None = None,
) -> Tensor:  # fmt: skip
    """Attends to `keys` (None: all). `qkv` is [B, N, 3, H, D], or packed [total, 3, H, D] or [1, total, 3, H, D].

    `terms` must be None for packed sequences.
    """
    return _attend([qkv], keys, scale, backend, terms)


def _attend(
    qkv: Sequence[Tensor], keys: Keys | None, scale: Any, backend: str, terms: ScoreTerms | None = None
) -> Tensor:
    """Checks the tensors and computes attention. See `attention_forward` for the layouts of `qkv` and the output.

    A tensor in terms.scale replaces `scale`.
    """
    first = qkv[0]
    if not isinstance(scale, _NUMBERS) and not hasattr(scale, "__float__"):  # e.g. numpy's numbers have it
        check_type("scale", scale, float, Tensor, type(None))
    cu_seqlens, max_seqlen, key_mask = keys or (None, 0, None)  # faster than `Keys()`
    backend = resolve_backend(backend, first.device, first.dtype)
    runs_kernel = backend == "triton" and not is_exporting()
    # e.g. under autocast if q is an fp32 parameter
    mixed = len(qkv) == 3 and not qkv[1].dtype is qkv[2].dtype is first.dtype
    if mixed or first.dtype is not matmul_dtype(first):
        qkv = [tensor.to(matmul_dtype(tensor)) for tensor in qkv]  # like SDPA under autocast
    if len(qkv) == 1:
        check_dtype("qkv", first)
    elif message := _mismatch(qkv, _BATCH if cu_seqlens is None else _PACKED):
        raise ValueError(message)
    if keys is not None:
        check_keys(keys, first.shape[0], first.shape[1] if len(qkv) == 1 else qkv[1].shape[2], first.device)
    if terms is not None:
        if len(qkv) == 1:
            batch, tokens, _, heads, width = (1, *first.shape)[-5:]
            sizes = batch, heads, tokens, tokens, width
        else:
            sizes = (*first.shape[:3], qkv[1].shape[2], first.shape[3])
        terms = checked_terms(terms, keys, sizes, first.device, qkv[0].dtype)
    if runs_kernel:
        return run_attention(qkv, keys, softmax_scale(first, scale), terms)
    if terms is not None and terms.groups is not None:
        alone = terms._replace(groups=None)
        return by_groups(lambda part: _attend([part], None, scale, backend, alone), first, terms.groups)
    q, k, v = heads_first(qkv)
    if terms is not None:
        terms = with_rel(terms, q)
    if cu_seqlens is not None:
        if is_exporting():
            out = _with_block_mask(q, k, v, cu_seqlens, scale)
        else:
            attend = reference.attention if backend == "eager" else F.scaled_dot_product_attention
            out = _by_sequences(attend, q, k, v, cu_seqlens, max_seqlen, scale)
        return out[None] if first.dim() == 5 else out
    if backend == "eager":
        out = reference.attention(q, k, v, scale=scale, key_mask=key_mask, terms=terms)
    else:
        mask = None if key_mask is None else key_mask[:, None, None, :]
        if terms is not None:
            mask = additive_mask(terms, q, mask)
            if terms.scale is not None:
                q, scale = (q * terms.scale[:, None, None]).to(q.dtype), 1.0
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return out if len(qkv) == 3 else out.transpose(1, 2)


def _by_sequences(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """Calls `attend` once per group of consecutive sequences of equal length; returns [total, H, D].

    Reads cu_seqlens, which synchronizes with the device. Raises ValueError if cu_seqlens or max_seqlen is invalid.
    """
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))  # [total, H, D]
    bounds: list[int] = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] > len(q) or min(lengths, default=0) < 0:
        shown = f"{bounds[:8]}{' ...' if len(bounds) > 8 else ''}"
        limit = f"{len(q)}, the number of tokens"
        raise ValueError(f"cu_seqlens must start with 0, never decrease and end with at most {limit}, got {shown}")
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(f"max_seqlen must be at least {max(lengths)}, the longest sequence, got {max_seqlen}")
    outputs, start = [], 0
    for length, group in itertools.groupby(lengths):
        end = start + length * len(list(group))
        if length:
            query, key, value = (tensor[start:end].unflatten(0, (-1, length)).transpose(1, 2) for tensor in (q, k, v))
            outputs.append(attend(query, key, value, scale=scale).transpose(1, 2).flatten(0, 1))
        start = end
    if start < len(q) or not outputs:
        everything = torch.ones((), dtype=torch.bool, device=q.device)
        outputs.append(q[start:].masked_fill(everything, 0).to(matmul_dtype(q)))  # 0 even if q contains NaN
    return torch.cat(outputs)


def _with_block_mask(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None) -> Tensor:
    """Calls SDPA with a block-diagonal mask, for exported models; returns [total, H, D]."""
    token = torch.arange(q.shape[2], device=q.device)
    sequence = (token[:, None] >= cu_seqlens[None, 1:]).sum(1)  # [total]
    inside = sequence < cu_seqlens.shape[0] - 1
    allowed = (sequence[:, None] == sequence[None, :]) & inside[None, :]
    return F.scaled_dot_product_attention(q, k, v, allowed, scale=scale)[0].transpose(0, 1).contiguous()


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
    """Drop-in replacement for torch.nn.functional.scaled_dot_product_attention, with the same signature.

    On supported GPUs, Triton kernels run the calls without dropout, causal mask and grouped-query attention. A boolean
    mask whose dimensions H and N_q have size 1 or stride 0 masks keys. Other masks are added to the scores, as the bias
    of `attention`. All other calls run torch's function.
    """
    given = query, key, value, attn_mask, dropout_p, is_causal
    return attend_as_torch("auto", *given, scale=scale, enable_gqa=enable_gqa)


def attend_as_torch(backend: str, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Computes scaled_dot_product_attention with a backend; runs torch's function for calls that it does not support.

    The arguments after `backend` are those of torch's function.
    """
    if type(query) in (Tensor, torch.nn.Parameter):  # not a Proxy of torch.fx, which has no dtype
        backend = resolve_backend(backend, query.device, query.dtype)
        allowed = backend != "sdpa" and not in_transform() and not is_exporting() and _fused_sdpa_is_allowed()
        inputs = as_attention(query, key, value, *args, **kwargs) if allowed else None
        if inputs is not None:
            qkv, key_mask, terms, factor = inputs
            shape = *query.shape[:-1], value.shape[-1]
            if backend == "eager":
                y = reference.attention(*qkv, scale=factor, key_mask=key_mask, terms=terms)
                return y[..., : shape[-1]].reshape(shape)
            if not unsupported_reasons(*qkv, factor):
                keys = None if key_mask is None else Keys(mask=key_mask)
                return run_attention(qkv, keys, factor, terms)[..., : shape[-1]].reshape(shape)
    return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)


def as_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, ScoreTerms | None, float] | None:  # fmt: skip
    """Returns q, k, v [B, H, N, D], key mask, bias and scale of a call of torch's function.

    D is the larger width of q and v; zeros fill missing channels. Returns None if `attention` cannot compute the call.
    """
    tensors = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    # Calls with nested tensors, subclasses such as DTensor, or torch.fx Proxies run torch's function. Check the tensors
    # before dropout_p, which may also be a Proxy: torch.fx cannot evaluate `Proxy == 0.0` as a condition.
    ordinary = all(type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_nested for tensor in tensors)
    if not ordinary or dropout_p != 0.0 or is_causal or enable_gqa:
        return None
    if not 3 <= query.dim() == key.dim() == value.dim() or (query.dim() > 4 and attn_mask is not None):
        return None
    by_batch = [each[None] if each.dim() == 3 else each.flatten(0, -4) for each in (query, key, value)]
    q, k, v = (each.to(matmul_dtype(each)) for each in by_batch)  # like SDPA under autocast
    if q.shape[-1] == k.shape[-1] != v.shape[-1]:  # zeros change neither the scores nor the other channels
        width = max(q.shape[-1], v.shape[-1])
        q, k, v = (F.pad(each, (0, width - each.shape[-1])) for each in (q, k, v))
    if _mismatch((q, k, v), _BATCH):
        return None
    key_mask = None if attn_mask is None else key_mask_of(attn_mask, q, k)
    terms = None if attn_mask is None or key_mask is not None else bias_of_mask(attn_mask, q, k)
    if attn_mask is not None and key_mask is None and terms is None:
        return None
    return (q, k, v), key_mask, terms, softmax_scale(query, scale)


def _mismatch(qkv: Sequence[Tensor], shape: str) -> str:
    """Returns an error message if q, k and v do not match or do not have the layout `shape`, else ""."""
    q, k, v = qkv
    for name, tensor in zip("qkv", qkv):
        if tensor.dim() != shape.count(",") + 1:
            return f"{name} must have shape {shape}, got {tuple(tensor.shape)}"
        check_dtype(name, tensor)
        if tensor.dtype != q.dtype or tensor.device != q.device:
            got = f"{tensor.dtype} on {tensor.device}"
            return f"{name} must have the dtype and device of q ({q.dtype} on {q.device}), got {got}"
        if shape == _PACKED and tensor.shape != q.shape:
            return f"{name} must have q's shape {tuple(q.shape)}, got {tuple(tensor.shape)}"
    if k.shape != v.shape:
        return f"k and v must have equal shapes, got {tuple(k.shape)} and {tuple(v.shape)}"
    if (*q.shape[:-2], q.shape[-1]) != (*k.shape[:-2], k.shape[-1]):
        return f"q and k [B, H, N, D] must have equal B, H and D, got shapes {tuple(q.shape)} and {tuple(k.shape)}"
    return ""


def softmax_scale(tensor: Tensor, scale: Any) -> float:
    """Returns `scale` as a number; D**-0.5 for None, or for a tensor, which kernels multiply by instead."""
    # max avoids 0 ** -0.5. Unlike an `if`, max does not specialize a symbolic head_dim (SymInt).
    return max(tensor.shape[-1], 1) ** -0.5 if scale is None or isinstance(scale, Tensor) else float(scale)


@constant_to_compiler
def _fused_sdpa_is_allowed() -> bool:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()

"""The operators `vit_fast::attention` and `vit_fast::attention_backward`.

Inputs are batches, optionally with a key mask, or packed sequences. q, k and v are three tensors, or slices of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from .backends import kernel_reasons
from .descriptions import DTYPES, E4M3
from .registration import Gradient, operator

MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 128
_MAX_GRID = 2**31 - 1
_SMALLEST_TILE = 32


def unlike(name: str, tensor: Tensor, q: Tensor) -> str:
    """Returns an error message if the tensor's dtype or device differs from that of q, else ""."""
    if tensor.dtype == q.dtype and tensor.device == q.device:
        return ""
    return f"{name} must have q's dtype and device, {q.dtype} on {q.device}, got {tensor.dtype} on {tensor.device}"


def unsupported_reasons(q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[str]:
    """Returns all reasons why the kernel cannot compute attention of q, k, v [B, H, N, D]."""
    reasons = kernel_reasons(q.device, q.dtype)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            reasons.append(f"{name} must have shape [B, H, N, D], got {tuple(tensor.shape)}")
            continue
        if tensor.dtype not in DTYPES:
            reasons.append(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}")
        if reason := unlike(name, tensor, q):
            reasons.append(reason)
        if tensor.stride(-1) != 1:
            reasons.append(f"{name} must have stride 1 along D, got {tensor.stride(-1)}: call .contiguous()")
        if tensor.shape[2] == 0:
            reasons.append(f"{name} must have at least one token, got N = 0")
    if q.dim() == k.dim() == v.dim() == 4:
        if k.shape != v.shape or (q.shape[0], q.shape[1], q.shape[3]) != (k.shape[0], k.shape[1], k.shape[3]):
            reasons.append(
                "q, k and v must have shapes [B, H, N_q, D], [B, H, N_kv, D] and [B, H, N_kv, D], got "
                f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
            )
        if not MIN_HEAD_DIM <= q.shape[3] <= MAX_HEAD_DIM:
            reasons.append(f"head_dim must be between {MIN_HEAD_DIM} and {MAX_HEAD_DIM}, got {q.shape[3]}")
        longest = max(q.shape[2], k.shape[2])
        if q.shape[0] * q.shape[1] * -(-longest // _SMALLEST_TILE) > _MAX_GRID:
            reasons.append(f"B * H * N / {_SMALLEST_TILE} must be at most {_MAX_GRID}: split the batch")
    if not 0 < scale < math.inf:  # math.isfinite does not accept a symbolic scale
        reasons.append(f"scale must be a positive finite number, got {scale}")
    return reasons


def as_batch(packed: Tensor) -> Tensor:
    return packed.transpose(0, 1).unsqueeze(0)  # [total, H, D] to [1, H, total, D]


def _heads_first(qkv: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v [B, H, N, D] as views of the argument `qkv` of `attention_forward`."""
    first = qkv[0]
    if len(qkv) == 1:
        q, k, v = (first if first.dim() == 5 else first[None]).transpose(1, 3).unbind(2)
    else:
        q, k, v = qkv if first.dim() == 4 else map(as_batch, qkv)
    return q, k, v


def _new_output(qkv: Sequence[Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates the output in the layout of q, and the log-sum-exps. Also returns the output as [B, H, N_q, D]."""
    q = _heads_first(qkv)[0]
    batch, heads, tokens, head_dim = q.shape
    memory = q.new_empty((batch, tokens, heads, head_dim), dtype=dtype)  # flattening [H, D] for proj needs no copy
    view = memory.transpose(1, 2)
    separate = len(qkv) == 3
    out = memory[0] if qkv[0].dim() == (3 if separate else 4) else view if separate else memory
    return out, view, q.new_empty((batch, heads, tokens), dtype=torch.float32)


def attention_forward(
    qkv: Sequence[Tensor], cu_seqlens: Tensor | None, key_mask: Tensor | None, max_seqlen: int, scale: float,
    out_factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns softmax(scale q k^T) v in the layout of q, and the base-2 log-sum-exp of each softmax, fp32 [B, H, N_q].

    Args:
        qkv: q, k and v [B, H, N, D], or one tensor [B, N, 3, H, D]; for packed sequences 3 x [total, H, D],
            [total, 3, H, D] or [1, total, 3, H, D].
        cu_seqlens: Boundaries of packed sequences; None for batches.
        max_seqlen: Length of the longest packed sequence; 0 for batches.
        key_mask: bool [B, N_kv], False for padding.
        out_factor: Reciprocal scale of an output in e4m3, fp32 [1]; None returns the output in q's dtype.
    """
    q, k, v = _heads_first(qkv)
    out, view, lse = _new_output(qkv, None if out_factor is None else E4M3)
    if cu_seqlens is not None and not q.shape[2]:
        return out, lse
    if reasons := unsupported_reasons(q, k, v, scale):
        raise UnsupportedInputError("attention with backend='triton'", reasons)
    from ..kernels.attention import attention

    options = _kernel_options(cu_seqlens, key_mask, max_seqlen)
    attention.attention_forward(q, k, v, view, lse, scale, out_factor, **options)
    return out, lse


def _kernel_options(cu_seqlens: Tensor | None, key_mask: Tensor | None, max_seqlen: int) -> dict[str, Any]:
    return {
        "sequences": None if cu_seqlens is None else cu_seqlens.contiguous(),
        "key_mask": None if key_mask is None else _last_stride_one(key_mask),
        "longest": max_seqlen,
    }


def _last_stride_one(tensor: Tensor) -> Tensor:
    # a gradient that `sum` expanded from a scalar has stride 0
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def attention_gradient(
    grad_output: Tensor, qkv: Sequence[Tensor], out: Tensor, lse: Tensor, cu_seqlens: Tensor | None,
    key_mask: Tensor | None, max_seqlen: int, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of the argument `qkv` of `attention_forward`, contiguous."""
    gradients = _fake_gradient(grad_output, qkv)
    q, k, v = _heads_first(qkv)
    if cu_seqlens is not None and not q.shape[2]:
        return gradients
    from ..kernels.attention import attention

    o, do = (_output_view(tensor, qkv) for tensor in (out, _last_stride_one(grad_output)))
    options = _kernel_options(cu_seqlens, key_mask, max_seqlen)
    attention.attention_backward(q, k, v, o, do, lse, *_heads_first(gradients), scale, **options)
    return gradients


def _output_view(out: Tensor, qkv: Sequence[Tensor]) -> Tensor:
    if out.dim() == 3:
        return as_batch(out)
    return out if len(qkv) == 3 else out.transpose(1, 2)


def _fake_gradient(grad_output: Tensor, qkv: Sequence[Tensor], *args: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in qkv]


def attention_flop(batch: int, heads: int, n_q: int, n_kv: int, head_dim: int) -> int:
    """Returns the FLOP of the two matmuls in a forward, 2 per multiply-add. A backward has five such matmuls."""
    return 4 * batch * heads * n_q * n_kv * head_dim


def _flop(qkv: Any, cu_seqlens: Any, key_mask: Any, max_seqlen: int, scale: float) -> int:
    """Returns the FLOP of a forward. For packed sequences, it is an upper bound, with max_seqlen keys per query."""
    if len(qkv) == 1:
        *leading, tokens, _, heads, head_dim = qkv[0]
        batch, n_kv = math.prod(leading), tokens
    elif len(qkv[0]) == 3:
        (tokens, heads, head_dim), batch, n_kv = qkv[0], 1, 0
    else:
        (batch, heads, tokens, head_dim), n_kv = qkv[0], qkv[1][2]
    return attention_flop(batch, heads, tokens, n_kv if cu_seqlens is None else max_seqlen, head_dim)


def _save(args: Sequence[Any], output: Any) -> tuple[Sequence[Tensor | None], Any]:
    qkv, cu_seqlens, key_mask, *rest = args
    return (*output, cu_seqlens, key_mask, *qkv), rest


def _backward(grad_output: Tensor, saved: Sequence[Any], rest: Any) -> Sequence[Tensor | None]:
    out, lse, cu_seqlens, key_mask, *qkv = saved
    return attention_backward_kernel(grad_output, qkv, out, lse, cu_seqlens, key_mask, *rest)


attention_kernel = operator(
    "attention", "(Tensor[] qkv, Tensor? cu_seqlens, Tensor? key_mask, SymInt max_seqlen, float scale) "
    "-> (Tensor, Tensor)",
    attention_forward, what="attention", fake=lambda qkv, *args: _new_output(qkv)[::2], flop=_flop,
    gradient=Gradient(_save, _backward),
)  # fmt: skip
attention_backward_kernel = operator(
    "attention_backward", "(Tensor grad_output, Tensor[] qkv, Tensor out, Tensor lse, Tensor? cu_seqlens, "
    "Tensor? key_mask, SymInt max_seqlen, float scale) -> Tensor[]",
    attention_gradient, what="attention", fake=_fake_gradient,
    flop=lambda grad_output, qkv, out, lse, *args: _flop(qkv, *args) * 5 // 2,
)  # fmt: skip

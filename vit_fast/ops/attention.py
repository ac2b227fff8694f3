"""Softmax attention: public functions, validation, dispatch to a backend."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedInputError
from . import reference
from .backends import resolve_backend

DTYPES = ("torch.float32", "torch.float16", "torch.bfloat16", "torch.float64")


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, backend: str = "auto") -> Tensor:
    """Softmax attention, softmax(scale * q k^T) v, not causal.

    Args:
        q: Queries [B, H, N_q, D]; fp32, fp16 or bf16 (fp64 too with eager and sdpa).
        k: Keys [B, H, N_kv, D], q's dtype and device.
        v: Values, shaped as k.
        scale: Multiplier of q k^T, dimensionless. None means D**-0.5.
        backend: "eager", "sdpa", "triton" or "auto" (by q's device).
    Returns:
        [B, H, N_q, D] in q.dtype.
    Raises:
        ValueError: shapes, dtypes or devices disagree.
        UnsupportedInputError: this backend cannot run this input; lists all reasons.
    Source: "Attention Is All You Need", arXiv 1706.03762, equation 1.
    """
    _check_inputs(q, k, v)
    backend = resolve_backend(backend, q.device)
    if backend == "eager":
        return reference.attention(q, k, v, scale=scale)
    if backend == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    raise UnsupportedInputError("attention with backend='triton'", ["the Triton kernel is not part of this version"])


def attention_qkvpacked(qkv: Tensor, *, scale: float | None = None, backend: str = "auto") -> Tensor:
    """Softmax attention on the qkv linear's output as it lies.

    Args:
        qkv: Packed projections [B, N, 3, H, D]; fp32, fp16 or bf16 (fp64 too with eager and sdpa).
        scale: Multiplier of q k^T, dimensionless. None means D**-0.5.
        backend: "eager", "sdpa", "triton" or "auto" (by qkv's device).
    Returns:
        [B, N, H, D] in qkv.dtype: the proj linear's input as it lies.
    Raises:
        ValueError: qkv is not [B, N, 3, H, D] of a floating dtype.
        UnsupportedInputError: this backend cannot run this input; lists all reasons.
    """
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}: accepted is [B, N, 3, H, D]")
    q, k, v = qkv.transpose(1, 3).unbind(2)  # each [B, H, N, D], views
    return attention(q, k, v, scale=scale, backend=backend).transpose(1, 2)


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
    """Stands in for torch.nn.functional.scaled_dot_product_attention: same signature, same answers.

    A mask, dropout, causality, grouped queries, and whatever else the kernel does not do go to torch's own function.
    """
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: accepted is [B, H, N, D]")
        if str(tensor.dtype) not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}: accepted are {', '.join(DTYPES)}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}: they must agree"
            )
    if k.shape != v.shape:
        raise ValueError(f"k has shape {tuple(k.shape)}, v has {tuple(v.shape)}: they must be equal")
    if (q.shape[0], q.shape[1], q.shape[3]) != (k.shape[0], k.shape[1], k.shape[3]):
        raise ValueError(f"q has shape {tuple(q.shape)}, k has {tuple(k.shape)}: B, H and D must be equal")

"""Attention of packed sequences with the backends eager and sdpa, and for exported models."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .registration import matmul_dtype


def by_sequences(
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


def with_block_mask(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None) -> Tensor:
    """Calls SDPA with a block-diagonal mask, for exported models; returns [total, H, D]."""
    token = torch.arange(q.shape[2], device=q.device)
    sequence = (token[:, None] >= cu_seqlens[None, 1:]).sum(1)  # [total]
    inside = sequence < cu_seqlens.shape[0] - 1
    allowed = (sequence[:, None] == sequence[None, :]) & inside[None, :]
    return F.scaled_dot_product_attention(q, k, v, allowed, scale=scale)[0].transpose(0, 1).contiguous()

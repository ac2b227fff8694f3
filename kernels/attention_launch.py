"""What the forward and backward launchers of attention share: layouts, descriptors, arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .attention_policy import split_head_dim

LOG2_E = 1.4426950408889634
# Integers that must not decide what is compiled: lengths, and strides, whose alignment is the constant ALIGN.
UNSPECIALISED = ["n_heads", "n_q", "n_kv"] + [
    f"{name}_stride_{axis}" for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv") for axis in "bhn"
]
_VECTOR_BYTES = 16
_TMA_ALIGNMENT = 16  # bytes, of the address and of every stride
_TMA_MAX_STRIDE = 2**40  # bytes
_MAX_TILE_ROWS = 256


def access_of(*tensors: torch.Tensor) -> str:
    """What the layout of these tensors [B, H, N, D] allows: "tma", "vector" or "scalar" (see `Problem.access`).

    Rows in e4m3, which are only written, may go by half as many bytes: with 72 channels that is what q, k and v allow.
    """
    if tma_allows(*tensors):
        return "tma"
    aligned = all(
        tensor.storage_offset() * tensor.element_size() % _VECTOR_BYTES == 0
        and tensor.data_ptr() % _VECTOR_BYTES == 0
        and _common_alignment(tensor) * max(2, tensor.element_size()) >= _VECTOR_BYTES
        for tensor in tensors
    )
    return "vector" if aligned else "scalar"


def tma_allows(*tensors: torch.Tensor) -> bool:
    """Whether TMA descriptors can describe all of these tensors [B, H, N, D]."""
    return all(_tma_allows(tensor) for tensor in tensors)


def _tma_allows(tensor: torch.Tensor) -> bool:
    size = tensor.element_size()
    if tensor.data_ptr() % _TMA_ALIGNMENT or tensor.storage_offset() * size % _TMA_ALIGNMENT:
        return False
    for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1]):
        # the stride of a dimension of length 1 is never used: _descriptor puts a legal one
        if length > 1 and (stride <= 0 or stride * size % _TMA_ALIGNMENT or stride * size >= _TMA_MAX_STRIDE):
            return False
    return all(0 < length < 2**31 for length in tensor.shape)


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A TMA descriptor of [B, H, N, D] that moves boxes of `rows` by `columns` of one head."""
    legal = _TMA_ALIGNMENT // tensor.element_size()
    strides = [stride if length > 1 else legal for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1])]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, columns])


def tile_arguments(name: str, tensor: torch.Tensor, rows: int, tma: bool) -> dict[str, Any]:
    """The two arguments `name` and `name`_hi through which a kernel reaches `rows`-row tiles of a tensor.

    Descriptors of the two column blocks, or the tensor itself twice; None where the block or the tile is absent.
    """
    lo, hi = split_head_dim(tensor.shape[-1])
    if rows == 0:
        return {name: None, f"{name}_hi": None}
    if not tma:
        return {name: tensor, f"{name}_hi": tensor if hi else None}
    return {
        name: descriptor(tensor, rows, lo),
        f"{name}_hi": descriptor(tensor, rows, hi) if hi else None,
    }


def stride_arguments(name: str, tensor: torch.Tensor, align: int) -> dict[str, int]:
    """The strides of [B, H, N, D] in units of `align` elements, as a kernel's arguments."""
    return {
        f"{name}_stride_b": tensor.stride(0) // align,
        f"{name}_stride_h": tensor.stride(1) // align,
        f"{name}_stride_n": tensor.stride(2) // align,
    }


def needs_wide_offsets(*tensors: torch.Tensor) -> bool:
    """Whether rows of one tile may lie 2^31 elements apart."""
    return any(_MAX_TILE_ROWS * abs(tensor.stride(2)) >= 2**31 for tensor in tensors)


def _common_alignment(*tensors: torch.Tensor) -> int:
    """The largest power of two up to 16 that divides every stride of rows, heads and images that is used."""
    used = (stride for tensor in tensors for length, stride in zip(tensor.shape[:3], tensor.stride()[:3]) if length > 1)
    return math.gcd(16, *used)


def shared_constants(q: torch.Tensor, *others: torch.Tensor, tma: bool, precision: str) -> dict[str, Any]:
    """The compile-time arguments that every attention kernel takes."""
    lo, hi = split_head_dim(q.shape[-1])
    return {
        "D": q.shape[-1],
        "LO": lo,
        "HI": hi,
        "PRECISION": precision,
        "TMA": tma,
        "WIDE": needs_wide_offsets(q, *others),
        "ALIGN": _common_alignment(q, *others),
    }

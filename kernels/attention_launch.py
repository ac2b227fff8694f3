"""What the forward and backward launchers of attention share: layouts, descriptors, arguments."""

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .attention_policy import split_head_dim

LOG2_E = 1.4426950408889634
_TMA_ALIGNMENT = 16  # bytes, of the address and of every stride
_TMA_MAX_STRIDE = 2**40  # bytes
_MAX_TILE_ROWS = 256


def fp32_precision() -> str:
    """How fp32 products are computed: "tf32" where torch allows it for matmuls, else "ieee"."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


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
    strides = [
        stride if length > 1 else legal for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1])
    ]
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


def stride_arguments(name: str, tensor: torch.Tensor) -> dict[str, int]:
    """The strides of [B, H, N, D] in elements, as a kernel's arguments."""
    return {
        f"{name}_stride_b": tensor.stride(0),
        f"{name}_stride_h": tensor.stride(1),
        f"{name}_stride_n": tensor.stride(2),
    }


def needs_wide_offsets(*tensors: torch.Tensor) -> bool:
    """Whether rows of one tile may lie 2^31 elements apart."""
    return any(_MAX_TILE_ROWS * abs(tensor.stride(2)) >= 2**31 for tensor in tensors)


def layout_constants(q: torch.Tensor, *others: torch.Tensor, tma: bool) -> dict[str, Any]:
    """The compile-time arguments that every attention kernel takes."""
    lo, hi = split_head_dim(q.shape[-1])
    precision = fp32_precision() if q.dtype == torch.float32 else "ieee"
    return {
        "D": q.shape[-1],
        "LO": lo,
        "HI": hi,
        "PRECISION": precision,
        "TMA": tma,
        "WIDE": needs_wide_offsets(q, *others),
    }

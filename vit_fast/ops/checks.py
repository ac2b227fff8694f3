"""Checks and conversions of the Triton operators' inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import UnsupportedInputError, check_type
from .backends import kernel_reasons

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Row numbers are 32-bit in the kernels, and the last tile may extend past the last row. Element offsets are 64-bit.
MAX_ROWS = 2**31 - 256


def check_tensors(**tensors: object) -> None:
    """Raises TypeError unless all of these arguments are tensors."""
    for name, tensor in tensors.items():
        check_type(name, tensor, Tensor)


def unsupported_reasons(x: Tensor, parameters: Mapping[str, Tensor | None], dtype: torch.dtype) -> list[str]:
    """Returns all reasons why the kernels cannot run on x [..., C] with these parameters.

    Args:
        dtype: Dtype of the matmuls: that of autocast if it is enabled, else that of x.
    """
    reasons = kernel_reasons(x.device, dtype)
    if x.dtype not in DTYPES:
        reasons.append(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    if x.numel() // max(x.shape[-1], 1) > MAX_ROWS:
        reasons.append(f"x must have at most {MAX_ROWS} tokens, got {x.numel() // x.shape[-1]}")
    for name, tensor in parameters.items():
        if tensor is None:
            continue
        if tensor.device != x.device:
            reasons.append(f"{name} must be on {x.device} like x, got {tensor.device}")
        if tensor.dtype not in (dtype, torch.float32):
            whose = "x" if dtype == x.dtype else "autocast"
            reasons.append(f"{name} must be float32 or have the dtype of {whose}, {dtype}, got {tensor.dtype}")
    return reasons


def require_supported(what: str, parameters: Mapping[str, Tensor | None], x: Tensor, dtype: torch.dtype) -> None:
    """Raises UnsupportedInputError with every reason why `what` cannot run with matmuls of this dtype."""
    reasons = unsupported_reasons(x, parameters, dtype)
    if reasons:
        raise UnsupportedInputError(f"{what} with backend='triton'", reasons)


def contiguous_rows(tensor: Tensor) -> Tensor:
    """Returns [..., C] as contiguous [M, C]; copies only if the layout requires it."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def rows_of(shape: Sequence[int]) -> int:
    """Returns the number of tokens of a tensor [..., C] with this shape."""
    return math.prod(int(size) for size in shape[:-1])

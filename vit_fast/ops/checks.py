"""Checks and conversions of the Triton operators' inputs; detection of gradients and torch.func transforms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import UnsupportedInputError, check_type
from .backends import constant_to_compiler, kernel_reasons

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Row numbers are 32-bit in the kernels, up to the end of the last tile; offsets of elements are 64-bit.
MAX_ROWS = 2**31 - 256


def check_tensors(**tensors: object) -> None:
    """Raises TypeError unless all of these arguments are tensors."""
    for name, tensor in tensors.items():
        check_type(name, tensor, Tensor)


def unsupported_reasons(x: Tensor, parameters: Mapping[str, Tensor | None], dtype: torch.dtype) -> list[str]:
    """Returns all reasons why the kernels cannot run on x [..., C] with these parameters.

    Args:
        dtype: Dtype of the matmuls: x's, or autocast's if x is fp32.
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


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of matmuls with x: autocast's if autocast is on, otherwise x.dtype."""
    device_type = x.device.type
    if x.dtype == torch.float64 or device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return x.dtype  # torch cannot query autocast for meta
    return torch.get_autocast_dtype(device_type)


def rows_of(shape: Sequence[int]) -> int:
    """Returns the number of tokens of a tensor [..., C] with this shape."""
    return math.prod(int(size) for size in shape[:-1])


@constant_to_compiler
def in_transform() -> bool:
    """Returns True inside a torch.func transform or a forward-mode level; torch.compile guards both stacks."""
    if forward_ad._current_level < 0 and torch._C._functorch.peek_interpreter_stack() is None:
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    functionalize = torch._C._functorch.TransformType.Functionalize  # runs custom operators like others
    return forward_ad._current_level >= 0 or any(level.key() != functionalize for level in levels)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Returns True if autograd or a torch.func transform may need gradients of an operator on these tensors."""
    if in_transform():
        return True
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)

"""Makes bf16 and e4m3 right under Triton's interpreter, for tests only.

Without it `tl.dot` multiplies the bit patterns of bf16 operands and casts to bf16 truncate (triton 3.6 to 3.9).
Operands are widened to fp32 before the product, which is exact, and casts round to nearest even as the hardware does.
Casts to e4m3 send ties away from zero, wrap around past 448 and make NaN a number; casts from it take NaN for 480.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter


def _widen(handle: Any) -> Any:
    if handle.dtype.scalar == tl.float8e4nv:
        return interpreter.TensorHandle(_from_e4m3(handle.data), tl.float32)
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _round_to_bf16(values: np.ndarray) -> np.ndarray:
    floats = (
        np.ascontiguousarray(values) if values.dtype == np.float32 else np.ascontiguousarray(values).view(np.float32)
    )
    bits = floats.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(floats), np.uint16(0x7FC0), rounded)


def _round_to_e4m3(values: np.ndarray) -> np.ndarray:
    """Rounds as cvt.rn.satfinite does."""
    floats = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).clamp(-448, 448)
    return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _from_e4m3(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(values)).view(torch.float8_e4m3fn).float().numpy()


@cache
def make_bf16_exact() -> None:
    """Patch the interpreter once for this process."""
    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot
    convert_float = interpreter._convert_float

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return create_dot(self, _widen(a), _widen(b), d, *rest)

    def convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source == tl.float32 and target == tl.bfloat16:
            return _round_to_bf16(values)
        if source == tl.float32 and target == tl.float8e4nv:
            return _round_to_e4m3(values)
        if source == tl.float8e4nv and target == tl.float32:
            return _from_e4m3(values)
        return convert_float(values, source, target, rounding)

    builder.create_dot = dot
    interpreter._convert_float = convert

"""Patches of Triton's interpreter for tests: `correct` changes results, `accelerate` does not.

Without `correct`, `tl.dot` multiplies the bit patterns of bf16 operands, and casts to bf16 truncate (triton 3.6 - 3.9).
Casts to and from e4m3 are incorrect for ties, large values and NaN. The patch widens operands to fp32, which is exact.

Without `accelerate`, half of the time is spent on searching triton.language for functions to replace, in every call of
a device function. The interpreter also checks integers for overflow, and computes erf of one number at a time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


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
    floats = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).clamp(-448, 448)
    return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _from_e4m3(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(values)).view(torch.float8_e4m3fn).float().numpy()


@cache
def correct() -> None:
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


@cache
def _languages(function: Any) -> tuple[Any, ...]:
    return tuple(value for value in function.__globals__.values() if value is tl or value is tl.core)


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    if any(tl.core.is_builtin(language.load) for language in _languages(self.fn)):
        interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


@cache
def _shape_of_tensor(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.numel, self.shape = _shape_of_tensor(tuple(type.shape) if type.is_block() else ())


@cache
def _shape_of_block(shape: tuple[int, ...]) -> tuple[Any, int]:
    if not shape:
        raise TypeError("0d block_type is forbidden")
    return core.tuple(shape), core.validate_block_shape(shape)


def _init_block(self: Any, element_ty: Any, shape: Any) -> None:
    assert isinstance(shape, list | core.tuple)
    self.element_ty = element_ty
    sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
    self.shape, self.numel = _shape_of_block(sizes)


def _erf(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.array(values, dtype=np.float64)).erf_().numpy().astype(np.float32)


@cache
def accelerate() -> None:
    interpreter.InterpretedFunction.__call__ = _call_device_function
    options = interpreter.interpreter_builder.options
    assert not options.debug  # otherwise overflows decide about assertions
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    interpreter.np_erf_fp32 = _erf
    core.tensor.__init__ = _init_tensor
    core.block_type.__init__ = _init_block
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")

"""Makes Triton's interpreter faster, for tests only: the same operations on the same numbers, with less around them.

The interpreter replaces triton.language's functions by its own when a kernel starts, and searches for them again
whenever a kernel calls a device function, where it nearly always finds them replaced already: half of its time. Half of
the rest goes into what surrounds the numbers: it looks for overflows of integers and throws away what it found,
describes every result anew, down to the types of its shape's sizes, promotes types that are one, broadcasts shapes
that are the same, and computes erf of one number after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@cache
def _languages(function: Any) -> tuple[Any, ...]:
    """The modules of triton.language that a device function sees."""
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
    """A tensor's number of elements and its shape, of the sizes."""
    return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.numel, self.shape = _shape_of_tensor(tuple(type.shape) if type.is_block() else ())


@cache
def _shape_of_block(shape: tuple[int, ...]) -> tuple[Any, int]:
    """A block's shape, of sizes that are allowed, and its number of elements."""
    if not shape:
        raise TypeError("0d block_type is forbidden")
    return core.tuple(shape), core.validate_block_shape(shape)


def _init_block(self: Any, element_ty: Any, shape: Any) -> None:
    assert isinstance(shape, list | core.tuple)
    self.element_ty = element_ty
    sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
    self.shape, self.numel = _shape_of_block(sizes)


def _name_of_block(self: Any) -> str:
    return f"<{self.shape}, {self.element_ty}>"


def _equal_when_same(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or equal(self, other)


def _numpy_types(find: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    """Returns the types of a scalar or a block, cached per type; pointers are addresses."""
    found: dict[str, np.dtype] = {}

    def kept(type: Any) -> np.dtype:
        scalar = type.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    return kept


def _promote(promote: Callable[..., Any]) -> Callable[..., Any]:
    """Returns two tensors of equal type unchanged; only the operands of a division need promotion."""

    def promoted(self: Any, lhs: Any, rhs: Any, *allowed: bool, **how: bool) -> Any:
        if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor) and len(allowed) < 4 and not how:
            scalar = lhs.type.scalar
            if scalar is rhs.type.scalar and not scalar.is_ptr():
                return self.broadcast_impl_value(lhs, rhs)
        return promote(self, lhs, rhs, *allowed, **how)

    return promoted


def _broadcast(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    return broadcasted


def _erf(values: np.ndarray) -> np.ndarray:
    """Computes erf of fp32 in fp64, as the interpreter does, for the whole array at once."""
    return torch.from_numpy(np.array(values, dtype=np.float64)).erf_().numpy().astype(np.float32)


@cache
def search_once() -> None:
    """Patch the interpreter; a second time changes nothing."""
    interpreter.InterpretedFunction.__call__ = _call_device_function
    options = interpreter.interpreter_builder.options
    assert not options.debug, "overflows are looked for: what is asserted of them decides"
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    interpreter.np_erf_fp32 = _erf
    interpreter._get_np_dtype = _numpy_types(interpreter._get_np_dtype)
    core.tensor.__init__ = _init_tensor
    core.block_type.__init__ = _init_block
    core.block_type.name = property(_name_of_block)
    core.dtype.__eq__ = _equal_when_same(core.dtype.__eq__)
    TritonSemantic.binary_op_type_checking_impl = _promote(TritonSemantic.binary_op_type_checking_impl)
    TritonSemantic.broadcast_impl_value = _broadcast(TritonSemantic.broadcast_impl_value)

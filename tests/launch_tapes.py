"""A tape of what the functions in C that launch are called with, under the stand-in driver."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from triton.backends.nvidia import driver as nvidia

BF16, FP32 = torch.bfloat16, torch.float32


Arguments = tuple[Any, ...]


class Tapes(threading.local):
    """Arguments of the C functions that launch kernels, per thread."""

    def __init__(self) -> None:
        self.tape: list[tuple[Any, ...]] = []


tapes = Tapes()


def listen() -> None:
    """Put a tape before every launcher in C; before any kernel is compiled."""
    wrap = nvidia.wrap_handle_tensordesc

    def wrap_taped(launcher: Any, *args: Any) -> Any:
        def taped(*arguments: Any) -> None:
            tapes.tape.append((launcher, *arguments))
            launcher(*arguments)

        return wrap(taped, *args)

    nvidia.wrap_handle_tensordesc = wrap_taped


def taped(call: Callable[[], Any]) -> tuple[list[list[Any]], Any]:
    """The launches of a call, flat, and its result."""
    tapes.tape = []
    result = call()
    return [list(flattened(arguments)) for arguments in tapes.tape], result


def flattened(arguments: Any) -> Iterator[Any]:
    for value in arguments:
        if isinstance(value, list | tuple):
            yield from flattened(value)
        elif type(value).__name__ == "PyCUtensorMap":
            words = ctypes.string_at(id(value) + type(value).__basicsize__ - 128, 128)
            yield Address(int.from_bytes(words[:8], "little"))
            yield words[8:]
        else:
            yield Address(value.data_ptr()) if isinstance(value, Tensor) else value


class Address(int):
    """A number that is known to be one."""


def described(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def zeros(*shape: int, dtype: torch.dtype = BF16, offset: int = 0) -> Tensor:
    """A tensor that starts `offset` elements behind an aligned address."""
    size = torch.Size(shape)
    return torch.zeros(size.numel() + offset, dtype=dtype)[offset:].view(size)

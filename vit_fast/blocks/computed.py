"""Tensors that a module computes from its parameters and buffers alone, e.g. a bias from a small MLP or a mask."""

from __future__ import annotations

import operator as operators
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .outlines import CLASSES
from .parts import Derived, Slot, tensor_of

# An ATen operator with its overload, or a function of the module `operator`, and arguments
Step = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]
RESULT, DEVICE, DTYPE, LARGEST = "result", "device", "dtype", "largest"  # in steps: (RESULT, number), (DEVICE,), ...


@dataclass(unsafe_hash=True)  # torch.compile cannot call methods of frozen dataclasses
class Computed(Derived):
    """The result of operators on the tensors at `slots`.

    A step refers to earlier tensors by (RESULT, number), which counts `slots` first, then steps. (DEVICE,) and (DTYPE,)
    are those of the tensor `like`, and (LARGEST, factor) a multiple of the largest number of its dtype.
    """

    slots: tuple[Slot, ...]
    steps: tuple[Step, ...]
    output: int  # the number of the result
    like: Slot

    def compute(self) -> Tensor:
        like = tensor_of(*self.like)
        results = [tensor_of(*slot) for slot in self.slots]
        for name, args, kwargs in self.steps:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload) if overload else getattr(operators, packet)
            given = {own: _argument(each, results, like) for own, each in kwargs}
            results.append(operator(*(_argument(each, results, like) for each in args), **given))
        return results[self.output]


def _argument(given: Any, results: list[Any], like: Tensor) -> Any:
    if not isinstance(given, tuple):
        return given
    kind = given[0] if given else ""
    if kind == RESULT:
        return results[given[1]]
    if kind == DEVICE:
        return like.device
    if kind == DTYPE:
        return like.dtype
    if kind == LARGEST:
        return given[1] * torch.finfo(like.dtype).max
    return [_argument(each, results, like) for each in given]


CLASSES[Computed.__name__] = Computed

"""Weights prepared for the Triton kernels, kept for inference and prepared again whenever a parameter has changed.

A kept value is used only if every tensor it was made from is the same storage at the same place, of the same version,
shape and dtype. torch counts a version for every in-place change it can see: optimizer steps, load_state_dict, copy_,
init functions. It cannot see a write through `.data`, memory shared with numpy or DLPack, or a raw pointer, nor the
replay of a CUDA graph that updates parameters: after one of those call `clear_prepared_weights()`. Nothing is kept

- in training, which prepares anew each step;
- on any CUDA stream but the default one: work on another would not be ordered after the preparation. A CUDA graph is
  captured, and torch.compile's are warmed up, on such a stream: the preparation is then part of the graph, a replay
  follows its parameters, and nothing is kept in the graph's private memory;
- for tensors made in inference mode, which have no version;
- where FSDP may be at work: it frees a parameter's memory and fills it again without a new version.

A value lives as long as the weight that it was made from, and holds no other tensor alive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

Value = TypeVar("Value")

# weight -> {purpose: (what it was made from, value)}
_prepared: Any = WeakTensorKeyDictionary()


def prepared(
    purpose: Hashable, weight: Tensor, others: tuple[Tensor | None, ...], prepare: Callable[[], Value]
) -> Value:
    """prepare(), or its earlier result while nothing that it depends on has changed.

    Args:
        purpose: What is prepared, with everything the result depends on besides tensors.
        weight: The tensor with which the result lives and dies.
        others: The other tensors that the result is made from.
        prepare: Makes the result.
    """
    tensors = (weight, *others)
    if _refilled_unseen() or not _on_default_stream(weight):
        return prepare()
    if any(tensor.is_inference() for tensor in tensors if tensor is not None):
        return prepare()
    kept = _prepared.setdefault(weight, {})
    found = kept.get(purpose)
    if found is None or not all(map(_is_unchanged, found[0], tensors)):
        found = kept[purpose] = (tuple(None if tensor is None else _Origin(tensor) for tensor in tensors), prepare())
    value: Value = found[1]
    return value


def in_dtype(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight as the matmul reads it: contiguous, in the dtype of the activations; itself where it is that already."""
    return weight.to(dtype).contiguous()


def prepared_in_dtype(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`in_dtype`, kept for inference."""
    if weight.dtype == dtype and weight.is_contiguous():
        return weight  # not kept: it would keep itself alive
    return prepared(("cast", dtype), weight, (), lambda: in_dtype(weight, dtype))


def clear_prepared_weights() -> None:
    """Forget every prepared weight: after writes that torch cannot see (`.data`, numpy, DLPack, graph replays)."""
    _prepared.clear()


def _refilled_unseen() -> bool:
    """Whether FSDP may be at work, which frees a parameter's memory and fills it again without counting a version."""
    return (
        "torch.distributed.fsdp" in sys.modules
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
    )


class _Origin:
    """What a tensor was when something was made from it."""

    def __init__(self, tensor: Tensor) -> None:
        # The weak reference keeps the address of the storage's bookkeeping, not its memory, from being used again.
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.state = _state(tensor)


def _state(tensor: Tensor) -> tuple[Any, ...]:
    return tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _is_unchanged(origin: _Origin | None, tensor: Tensor | None) -> bool:
    """Whether neither the memory nor the values of a tensor, or its absence, are others than they were."""
    if origin is None or tensor is None:
        return origin is None and tensor is None
    return bool(origin.storage.cdata == tensor.untyped_storage()._cdata) and origin.state == _state(tensor)


def _on_default_stream(tensor: Tensor) -> bool:
    if not tensor.is_cuda:
        return True
    return torch.cuda.current_stream(tensor.device) == torch.cuda.default_stream(tensor.device)

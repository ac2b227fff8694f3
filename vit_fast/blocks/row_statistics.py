"""Passes LayerNorm statistics and e4m3 tokens from block to block if a library's own loop calls the blocks.

Per thread, a block stores its output tensor and facts about its tokens. The next block uses them if its input is that
very tensor: the same object and memory, not written to since (by torch's version counter), on the same stream. Nothing
is stored in transforms, during CUDA-graph capture, or in a checkpointed forward, which must repeat exactly.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.checks import in_transform


class RowFacts(NamedTuple):
    """Facts about the tokens of a tensor.

    Attributes:
        statistics: LayerNorm statistics for the operators, or None.
        x8: The same tokens in e4m3, or None.
        reader: The cached weights (`ops/fp8.py`) that x8 was written for.
        maker: The parts of the block that returned the tensor, if it runs in e4m3.
    """

    statistics: Tensor | None = None
    x8: Tensor | None = None
    reader: Any = None
    maker: Any = None


NOTHING = RowFacts()
_AS_IT_IS = contextlib.nullcontext()


class _Entry(NamedTuple):
    """The output of a block, with everything that identifies the tensor, and the facts about its tokens."""

    key: tuple[int, ...]
    alive: weakref.ref[Tensor]  # drops the entry when the tensor is freed, because its id may be reused
    rows: RowFacts


class _Last(threading.local):
    entry: _Entry | None = None


_last = _Last()


def remember(y: Tensor, rows: RowFacts) -> None:
    """Stores facts about the tokens of y, until y is freed or another block returns.

    Args:
        y: Output of a block.
        rows: Facts from its last operator.
    """
    last = _last
    last.entry = None
    if rows is NOTHING or not _is_followed(y):
        return

    def forget(gone: weakref.ref[Tensor]) -> None:
        if last.entry is not None and last.entry.alive is gone:
            last.entry = None

    last.entry = _Entry(_key(y), weakref.ref(y, forget), rows)


def recall(x: Tensor) -> RowFacts:
    """Returns the facts about x if x is the unmodified output of the previous block, else NOTHING."""
    entry = _last.entry
    if entry is None or entry.key[0] != id(x) or not _is_followed(x) or entry.key != _key(x):
        return NOTHING
    return entry.rows


def counted() -> contextlib.AbstractContextManager[Any]:
    """Enables version counters of tensors, also in inference mode."""
    if not torch.is_inference_mode_enabled():
        return _AS_IT_IS
    return _OutOfInferenceMode()


class _OutOfInferenceMode:
    """`torch.inference_mode(False)` and `torch.no_grad()` in one context, which takes a quarter of the time."""

    def __enter__(self) -> None:
        self._guard = torch._C._InferenceMode(False)
        self._guard.__enter__()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *raised: object) -> None:
        self._guard.__exit__(*raised)  # also restores the gradient mode


def _is_followed(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.is_inference() or tensor.is_meta or in_transform():
        return False
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def _key(tensor: Tensor) -> tuple[int, ...]:
    stream = torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else 0
    return id(tensor), tensor._version, tensor.data_ptr(), stream

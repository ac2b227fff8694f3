"""Passes LayerNorm statistics and e4m3 tokens from block to block if a library's own loop calls the blocks.

The next block uses them if its input is the previous output: the same tensor with equal address, version counter and
stream. Nothing is stored in torch.func transforms, CUDA-graph capture and checkpointed forwards.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.registration import in_transform


class TokenFacts(NamedTuple):
    """Facts about a tensor of tokens."""

    statistics: Tensor | None = None  # LayerNorm statistics as the operators return them
    x8: Tensor | None = None  # the tokens in e4m3
    reader: Any = None  # the cached weights (`FrozenFp8`) of the block that x8 was scaled for
    maker: Any = None  # the parts of the block that returned the tensor, if this block runs in e4m3


NOTHING = TokenFacts()


class _Last(threading.local):
    output: Any = None  # weak reference to the output of the last block
    key: tuple[int, ...] | None = None  # `_key` of this output
    facts = NOTHING


_last = _Last()


def remember(y: Tensor, facts: TokenFacts) -> None:
    """Stores facts about the output y of a block until another block returns."""
    key = None if facts is NOTHING else _key(y)
    if key is None:
        _last.output, _last.facts = None, NOTHING
    else:
        _last.output, _last.key, _last.facts = weakref.ref(y), key, facts


def recall(x: Tensor) -> TokenFacts:
    """Returns the facts about x if x is the unmodified output of the previous block, else NOTHING."""
    last = _last
    return last.facts if last.output is not None and last.output() is x and last.key == _key(x) else NOTHING


class VersionsCounted:
    """Leaves inference mode, whose tensors have no version counter. Faster than torch.inference_mode(False)."""

    _guard: Any = None

    def __enter__(self) -> None:
        if torch.is_inference_mode_enabled():
            self._guard = torch._C._InferenceMode(False)
            self._guard.__enter__()
            torch._C._set_grad_enabled(False)

    def __exit__(self, *raised: object) -> None:
        if self._guard is not None:
            self._guard.__exit__(*raised)  # also restores grad mode


def _key(tensor: Tensor) -> tuple[int, ...] | None:
    """Returns version, address and stream of a tensor; None if changes could not be detected."""
    if type(tensor) is not Tensor or tensor.is_inference() or tensor.is_meta or in_transform():
        return None
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    stream = torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else 0
    return tensor._version, tensor.data_ptr(), stream

"""Windows of tokens on a grid."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.registration import constant_to_compiler


@dataclass(frozen=True)
class Windows:
    """Groups of tokens on a grid of `size`, e.g. (height, width), whose tokens are numbered in row-major order.

    A window covers `window` adjacent tokens per dimension. Like torch.roll by the negative `shift`, the first window
    starts at `shift`, and windows at the end wrap around. If `dilated`, the tokens of a window are size / window apart,
    as in the grid attention of MaxViT. `window` must divide `size`.
    """

    size: tuple[int, ...]
    window: tuple[int, ...]
    shift: tuple[int, ...]
    dilated: bool = False

    def groups(self, device: torch.device) -> Tensor:
        """Returns the groups of `ScoreTerms`, int32 [W, n]: windows and their tokens, both in row-major order."""
        return _groups(self.size, self.window, self.shift, self.dilated, device)


@constant_to_compiler
@functools.lru_cache(256)
def _groups(
    size: tuple[int, ...], window: tuple[int, ...], shift: tuple[int, ...], dilated: bool, device: torch.device
) -> Tensor:
    dims = range(len(size))
    with torch.inference_mode(False):  # the tensor is cached, also for calls with gradients
        tokens = torch.arange(math.prod(size), dtype=torch.int32, device=device).view(size)
        pairs = [(w, n // w) if dilated else (n // w, w) for n, w in zip(size, window)]
        cut = tokens.roll([-each for each in shift], list(dims)).view([each for pair in pairs for each in pair])
        order = (*(2 * i + dilated for i in dims), *(2 * i + (not dilated) for i in dims))
        return cut.permute(order).reshape(-1, math.prod(window))

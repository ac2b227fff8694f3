"""Windows of tokens on a grid."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.registration import constant_to_compiler


@dataclass(frozen=True)
class Windows:
    """Groups of tokens on a grid of `size` (height, width), whose tokens are numbered row by row.

    A window covers `window` adjacent rows and columns. Like torch.roll by the negative `shift`, the first window starts
    at row and column `shift`, and windows at the end wrap around. If `dilated`, the rows and columns of a window are
    size / window apart, as in the grid attention of MaxViT. `window` must divide `size`.
    """

    size: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)
    dilated: bool = False

    def groups(self, device: torch.device) -> Tensor:
        """Returns the groups of `ScoreTerms`, int32 [W, n]: windows and their tokens, both row by row."""
        return _groups(self.size, self.window, self.shift, self.dilated, device)


@constant_to_compiler
@functools.lru_cache(256)
def _groups(
    size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int], dilated: bool, device: torch.device
) -> Tensor:
    (H, W), (h, w) = size, window
    with torch.inference_mode(False):  # the tensor is cached, also for calls with gradients
        tokens = torch.arange(H * W, dtype=torch.int32, device=device).view(H, W).roll((-shift[0], -shift[1]), (0, 1))
        cut = tokens.view(h, H // h, w, W // w) if dilated else tokens.view(H // h, h, W // w, w)
        order = (1, 3, 0, 2) if dilated else (0, 2, 1, 3)
        return cut.permute(order).reshape(-1, h * w)

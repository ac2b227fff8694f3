"""Fused classes of modules that contain fused blocks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from .block import run_blocks
from .fused import FusedModule


class FusedContainer(FusedModule):
    """A module that contains fused blocks. It has no row in the report of `fuse`."""

    kind = "blocks"

    @classmethod
    def fits(cls, module: Any, blocks: Collection[nn.Module]) -> bool:
        """Returns True if the fused class can run an instance of `original`, given the blocks that are fused."""
        raise NotImplementedError


class FusedBlocks(FusedContainer):
    """A Sequential of fused blocks, which passes LayerNorm statistics from each to the next."""

    @classmethod
    def fits(cls, module: Any, blocks: Collection[nn.Module]) -> bool:
        return len(module) > 1 and all(block in blocks for block in module)

    def forward(self, input: Tensor, *rope: Tensor) -> Tensor:
        """Maps [B, N, C] to [B, N, C]."""
        blocks: Any = self  # also a Sequential
        return run_blocks(blocks, input, *rope)

"""Weights in e4m3 that are kept from call to call, and looked after as folded ones are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .descriptions import BlockScales, BlockTensors
from .fp8 import Fp8Block, quantize_block
from .fp8_op import Fp8Linear
from .frozen import Frozen


class Quantised(Frozen):
    """The linear layers of one block that runs in e4m3, those among them that stay in half precision too.

    Args:
        sources: Where the parameters are, all of them.
        block: Gives them.
        scales: Of the operands; they are what they are for as long as this lives.
        dtype: Of the activations.
        norm: The kind of the norms.
        paired_head: As `quantize_block` takes it.
    Attributes:
        layers: The block as `fused_block_fp8` takes it; in the same memory for as long as this lives.
    """

    def __init__(
        self,
        sources: Sequence[tuple[nn.Module, str]],
        block: Callable[[], BlockTensors],
        scales: BlockScales,
        dtype: torch.dtype,
        norm: str,
        paired_head: int,
    ) -> None:
        self._scales = scales
        self.layers: Any = None
        super().__init__(sources, block, dtype, norm, paired_head)

    def _made(self) -> list[Tensor]:
        layers = quantize_block(self._block(), self._scales, self.dtype, self._norm, self.paired_head)
        # one in half precision may hold the parameters themselves, which are not ours to write to
        made = [
            [_own(tensor) if linear.operand_factor is None else tensor for tensor in linear] for linear in layers[:4]
        ]
        if self.layers is None:
            self.layers = Fp8Block._make([*map(Fp8Linear._make, made), layers.paired_head])
        return [tensor for tensors in made for tensor in tensors if tensor is not None]


def _own(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()

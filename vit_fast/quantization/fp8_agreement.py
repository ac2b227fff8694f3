"""Search for the linear layers that must stay in half precision, so that the model's top-1 class rarely changes."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..blocks.fp8_scales import LINEARS
from ..blocks.fused import device_of, dtype_of
from ..errors import UnsupportedInputError, type_name
from ..ops.descriptions import BlockScales
from .fp8_emulation import EmulatedBlock
from .schemes import fewest_kept

IMAGES_FOR_ORDER = 32
"""Number of images used to rank the layers by sensitivity."""

IMAGES: weakref.WeakKeyDictionary[nn.Module, list[Tensor]] = weakref.WeakKeyDictionary()
"""Calibration images of each model."""

Linear = tuple[str, str]  # a block's name, and one of LINEARS


def as_taken(model: nn.Module, batch: Tensor) -> Tensor:
    """Moves a batch to the model's device and, if it is floating, to its dtype."""
    return batch.detach().to(device_of(model), dtype_of(model) if batch.is_floating_point() else None)


@dataclass(frozen=True)
class Found:
    """Layers that must stay in half precision.

    Attributes:
        kept: Names of LINEARS by block.
        agreement: Share of images with the same top-1 class as without rounding.
        images: Number of images.
    """

    kept: dict[str, set[str]]
    agreement: float
    images: int


def find_kept(
    copied: nn.Module, blocks: Sequence[EmulatedBlock], scales: Mapping[str, BlockScales], batches: Sequence[Tensor],
    wanted: float, always: Mapping[str, Collection[str]],
) -> Found:  # fmt: skip
    """Finds the fewest linear layers to keep in half precision for the required top-1 agreement.

    A layer's sensitivity is the change of the logits if this layer alone is rounded. Bisection finds how many of the
    most sensitive layers must be kept.

    Args:
        copied: A copy of the model, whose `blocks` run in emulated FP8.
        blocks: Its blocks.
        scales: Scales by block.
        batches: Images.
        wanted: Required share of images with the same top-1 class.
        always: Layers that are kept in any case, by block.
    Raises:
        UnsupportedInputError: the agreement is not reached even with one rounded layer; reports the agreements.
        ValueError: the model returns no logits.
    """

    def logits(rounded: Callable[[Linear], bool], images: Sequence[Tensor]) -> Tensor:
        for block in blocks:
            own = scales[block.name]._asdict()
            block.scales = BlockScales(**{k: own[k] if rounded((block.name, k)) else None for k in LINEARS})
        with torch.inference_mode():
            outputs = [copied(batch) for batch in images]
        found = [each for each in map(logits_of, outputs) if each is not None]
        if len(found) < len(outputs):
            got = type_name(outputs[0])
            raise ValueError(f"the model must return logits [B, classes] for min_agreement, got {got}")
        return torch.cat(found)

    starts = itertools.accumulate(map(len, batches), initial=0)
    first = [batch[: IMAGES_FOR_ORDER - i] for batch, i in zip(batches, starts) if i < IMAGES_FOR_ORDER]
    exact = logits(lambda linear: False, batches)
    linears = [(block.name, k) for block in blocks for k in LINEARS if k not in always.get(block.name, ())]
    reached: dict[int, float] = {}  # by number of layers kept

    def passes(kept: Collection[Linear]) -> bool:
        chosen = set(linears) - set(kept)
        same = logits(chosen.__contains__, batches).argmax(-1) == exact.argmax(-1)
        reached[len(kept)] = same.double().mean().item()
        return reached[len(kept)] >= wanted

    also: Sequence[Linear] = ()
    if not passes(()):
        few = exact[: sum(map(len, first))]
        damage = {one: (logits(one.__eq__, first) - few).square().sum().item() for one in linears}
        also = fewest_kept(sorted(linears, key=lambda one: -damage[one]), passes, len(linears) - 1) or ()
        if not also:
            enough = max(reached)
            reason = (
                f"the top-1 agreement on {len(exact)} images is {reached[enough]:.1%} with {enough} of "
                f"{len(linears)} linear layers in half precision, and {reached[0]:.1%} with none"
            )
            raise UnsupportedInputError(f"fuse with precision='fp8', min_agreement={wanted:g}", [reason])
    kept = {block.name: set(always.get(block.name, ())) for block in blocks}
    for name, linear in also:
        kept[name].add(linear)
    return Found(kept, reached[len(also)], len(exact))


def logits_of(output: object) -> Tensor | None:
    """Returns the logits [B, classes] in the output of a model; None if it has none."""
    logits = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
    return logits.float() if isinstance(logits, Tensor) and logits.dim() == 2 else None

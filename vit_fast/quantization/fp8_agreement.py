"""Search for the linear layers that must stay in half precision to preserve the model's top-1 class."""

from __future__ import annotations

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
"""Number of images used to rank the layers by how much the output changes if one layer is rounded."""

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
        kept: By block, names of LINEARS.
        agreement: Share of the images with the same top-1 class as without rounding.
        images: Number of images.
    """

    kept: dict[str, set[str]]
    agreement: float
    images: int


def find_kept(
    copied: nn.Module,
    blocks: Sequence[EmulatedBlock],
    scales: Mapping[str, BlockScales],
    batches: Sequence[Tensor],
    wanted: float,
    always: Mapping[str, Collection[str]],
) -> Found:
    """Finds the fewest linear layers to keep in half precision for the required top-1 agreement.

    Ranks the layers by how much the output changes if one layer is rounded, and finds by bisection how many of the most
    sensitive ones must be kept.

    Args:
        copied: A copy of the model, whose `blocks` run in emulated FP8.
        scales: By block.
        batches: Images.
        wanted: Required share of images with the same top-1 class.
        always: By block, layers that are always kept.
    Raises:
        UnsupportedInputError: the agreement is not reached even with one rounded layer; reports the best agreement.
        ValueError: the model returns no logits.
    """

    def logits(rounded: Callable[[Linear], bool], images: Sequence[Tensor]) -> Tensor:
        for block in blocks:
            own = scales[block.name]._asdict()
            block.scales = BlockScales(**{k: own[k] if rounded((block.name, k)) else None for k in LINEARS})
        with torch.inference_mode():
            return torch.cat([_logits(copied(batch)) for batch in images])

    first = _some(batches)
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
        fewest = fewest_kept(sorted(linears, key=lambda one: -damage[one]), passes, len(linears) - 1)
        if fewest is None:
            enough = max(reached)
            raise UnsupportedInputError(
                f"fuse with precision='fp8', min_agreement={wanted:g}",
                [
                    f"the top-1 agreement on {len(exact)} images is {reached[enough]:.1%} with {enough} of "
                    f"{len(linears)} linear layers in half precision, and {reached[0]:.1%} with none"
                ],
            )
        also = fewest
    kept = {block.name: set(always.get(block.name, ())) for block in blocks}
    for name, linear in also:
        kept[name].add(linear)
    return Found(kept, reached[len(also)], len(exact))


def _some(batches: Sequence[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    for batch in batches:
        left = IMAGES_FOR_ORDER - sum(map(len, found))
        if left > 0:
            found.append(batch[:left])
    return found


def logits_of(output: object) -> Tensor | None:
    """Returns the logits [B, classes] in the output of a model; None if it has none."""
    logits = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
    return logits.float() if isinstance(logits, Tensor) and logits.dim() == 2 else None


def _logits(output: object) -> Tensor:
    logits = logits_of(output)
    if logits is None:
        raise ValueError(f"the model must return logits [B, classes] for min_agreement, got {type_name(output)}")
    return logits

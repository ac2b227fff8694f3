"""Which linear layers have to stay in half precision for a model to give the answers that it gave: by measuring it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..blocks.fp8_scales import LINEARS
from ..blocks.fused import device_of, dtype_of
from ..errors import UnsupportedInputError
from ..ops.descriptions import BlockScales
from .fp8_shadow import Simulated
from .schemes import fewest_kept

IMAGES_FOR_ORDER = 32
"""That tell how much each layer changes the answers when it alone is rounded."""

IMAGES: weakref.WeakKeyDictionary[nn.Module, list[Tensor]] = weakref.WeakKeyDictionary()
"""What each model was calibrated on."""

Linear = tuple[str, str]  # a block's name, and one of LINEARS


def as_taken(model: nn.Module, batch: Tensor) -> Tensor:
    """A batch on the model's device, and in its dtype where it is floating."""
    return batch.detach().to(device_of(model), dtype_of(model) if batch.is_floating_point() else None)


@dataclass(frozen=True)
class Found:
    """What has to stay in half precision.

    Attributes:
        kept: By block, names of LINEARS.
        agreement: Share of the images with the same top class as without rounding.
        images: How many were asked.
    """

    kept: dict[str, set[str]]
    agreement: float
    images: int


def find_kept(
    shadow: nn.Module,
    blocks: Sequence[Simulated],
    scales: Mapping[str, BlockScales],
    batches: Sequence[Tensor],
    wanted: float,
    always: Mapping[str, Collection[str]],
) -> Found:
    """The fewest linear layers to keep until the top class is the same on enough images.

    All layers are ordered by what each alone does to the answers; how many of the first have to be kept is found by
    bisection.

    Args:
        shadow: A copy of the model, whose `blocks` are simulated.
        scales: By block.
        batches: Images.
        wanted: Share of them.
        always: By block, layers that are kept in any case.
    Raises:
        UnsupportedInputError: not even one layer can be rounded; says the best that was reached.
        ValueError: the model gives no logits.
    """

    def answers(rounded: Callable[[Linear], bool], images: Sequence[Tensor]) -> Tensor:
        for block in blocks:
            own = scales[block.name]._asdict()
            block.scales = BlockScales(**{k: own[k] if rounded((block.name, k)) else None for k in LINEARS})
        with torch.inference_mode():
            return torch.cat([_logits(shadow(batch)) for batch in images])

    first = _some(batches)
    exact = answers(lambda linear: False, batches)
    linears = [(block.name, k) for block in blocks for k in LINEARS if k not in always.get(block.name, ())]
    reached: dict[int, float] = {}  # by number of layers kept

    def passes(kept: Collection[Linear]) -> bool:
        chosen = set(linears) - set(kept)
        same = answers(chosen.__contains__, batches).argmax(-1) == exact.argmax(-1)
        reached[len(kept)] = same.double().mean().item()
        return reached[len(kept)] >= wanted

    also: Sequence[Linear] = ()
    if not passes(()):
        few = exact[: sum(map(len, first))]
        damage = {one: (answers(one.__eq__, first) - few).square().sum().item() for one in linears}
        found = fewest_kept(sorted(linears, key=lambda one: -damage[one]), passes, len(linears) - 1)
        if found is None:
            enough = max(reached)
            raise UnsupportedInputError(
                f"fuse with precision='fp8', min_agreement={wanted:g}",
                [
                    f"with {enough} of {len(linears)} linear layers kept, the top class is the same on "
                    f"{reached[enough]:.1%} of {len(exact)} images, with none on {reached[0]:.1%}"
                ],
            )
        also = found
    kept = {block.name: set(always.get(block.name, ())) for block in blocks}
    for name, linear in also:
        kept[name].add(linear)
    return Found(kept, reached[len(also)], len(exact))


def _some(batches: Sequence[Tensor]) -> list[Tensor]:
    """The first images."""
    found: list[Tensor] = []
    for batch in batches:
        left = IMAGES_FOR_ORDER - sum(map(len, found))
        if left > 0:
            found.append(batch[:left])
    return found


def logits_of(output: object) -> Tensor | None:
    """[B, classes], of what a model returns; None where that is something else."""
    logits = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
    return logits.float() if isinstance(logits, Tensor) and logits.dim() == 2 else None


def _logits(output: object) -> Tensor:
    logits = logits_of(output)
    if logits is None:
        raise ValueError(f"min_agreement needs a model that returns logits [B, classes], got {type(output).__name__}")
    return logits

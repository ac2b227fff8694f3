"""Token budgets for packed images; CUDA graph capture, and a check that the model has not changed since."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..arguments import check_integer
from ..blocks.block import parts_of
from ..blocks.fused import FusedNormMlp
from ..blocks.plain import Watch, is_hooked, touch_reasons
from ..errors import check_type

WARM_UP_RUNS = 3  # kernels are compiled and autotuned, and workspaces allocated, before the capture


def pack(
    lengths: Sequence[int], sequences: Sequence[int], budgets: Sequence[int], max_sequences: int
) -> list[tuple[int, list[int]]]:
    """Packs images into bins of the largest budget by first-fit decreasing; a bin gets the smallest budget that fits.

    `lengths` and `sequences` are the tokens and attention sequences of each image. Returns the budget of each bin, and
    its images in the order of the call.
    """
    largest = max(budgets)
    bins: list[tuple[list[int], list[int]]] = []  # free tokens and sequences, and the images
    for image in sorted(range(len(lengths)), key=lambda image: -lengths[image]):
        length, number = lengths[image], sequences[image]
        found = next((one for one in bins if length <= one[0][0] and number <= one[0][1]), None)
        if found is None:
            found = [largest, max_sequences], []
            bins.append(found)
        found[0][0] -= length
        found[0][1] -= number
        found[1].append(image)
    return [(min(b for b in budgets if b >= largest - free[0]), sorted(images)) for free, images in bins]


def budgets_for(sizes: Sequence[Sequence[int]], patch_size: int = 1, count: int = 4) -> tuple[int, ...]:
    """Suggests token budgets: those that need the fewest padding tokens if each image runs alone.

    Args:
        sizes: (height, width) or (frames, height, width) of each image, as in spatial_shapes and image_grid_thw.
        patch_size: Pixels per side of a patch, if height and width are in pixels.
        count: Maximum number of budgets.
    Returns:
        Multiples of 64 tokens, ascending; the last one fits the patches of the largest image. For a NaFlexVit, add
        its class and register tokens to each budget, once per image.
    Raises:
        ValueError: sizes is empty, or a size is not two or three positive integers.
    """
    check_integer("patch_size", patch_size, 1)
    check_integer("count", count, 1)
    check_type("sizes", sizes, list, tuple)
    rounded: list[int] = []
    for size in sizes:
        if len(size) not in (2, 3) or any(int(side) < 1 for side in size):
            raise ValueError(f"sizes must be (height, width) or (frames, height, width), got {tuple(size)}")
        *frames, height, width = map(int, size)
        patches = (frames or [1])[0] * -(-height // patch_size) * -(-width // patch_size)
        rounded.append(-(-patches // 64) * 64)
    if not rounded:
        raise ValueError("sizes must contain at least one image, got none")
    options = sorted(set(rounded))
    images = [0, *itertools.accumulate(rounded.count(option) for option in options)]
    tokens = [0, *itertools.accumulate(option * rounded.count(option) for option in options)]
    # best[end]: least padding for the first `end` options, and the budgets for it
    best: list[tuple[float, tuple[int, ...]]] = [(0, ()), *[(float("inf"), ())] * len(options)]
    for _ in range(min(count, len(options))):
        longer = list(best)
        for start, end in itertools.combinations(range(len(options) + 1), 2):
            top = options[end - 1]
            padding = best[start][0] + top * (images[end] - images[start]) - (tokens[end] - tokens[start])
            longer[end] = min(longer[end], (padding, (*best[start][1], top)))
        best = longer
    return best[-1][1]


@dataclass
class GraphStats:
    """Counters of a `GraphRunner`.

    Attributes:
        graphs: Captured graphs.
        hits: Runs per budget; a call may need several.
        tokens: Tokens of images in these runs.
        padding: Padding tokens in these runs.
        fallbacks: Calls that ran eagerly.
    """

    graphs: int = 0
    hits: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    padding: int = 0
    fallbacks: int = 0

    @property
    def padding_share(self) -> float:
        """Share of padding tokens in all runs."""
        return self.padding / max(self.padding + self.tokens, 1)


def capture(run: Callable[[], Any], device: torch.device, pool: Any) -> Callable[[], Any]:
    """Captures a CUDA graph, and returns a function that replays it. Each replay overwrites the outputs."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = run()

    def replay() -> Any:
        graph.replay()
        return output

    return replay


class Watched:
    """Records a model at capture time: modules, parameters, buffers, and settings of fused blocks."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._modules = model, list(model.modules())
        edges, values = [], [(model, "__class__", type(model)), (type(model), "forward", type(model).forward)]
        for module in self._modules:
            edges += [(module, name, child) for name, child in module._modules.items() if child is not None]
            values += parts_of(module).watch.values if isinstance(module, FusedNormMlp) else ()
        self._watch = Watch(model, edges, values)
        self._forward, self._known = vars(model).get("forward"), self._hooked_or_replaced()
        self._tensors = [
            (place, name, tensor, tensor.data_ptr())
            for module in self._modules
            for place in (module._parameters, module._buffers)
            for name, tensor in place.items()
            if tensor is not None
        ]

    def change(self, runner: object) -> str | None:
        """Returns an error message if the model changed after the capture; `runner` may replace its forward."""
        for place, name, tensor, address in self._tensors:
            if place.get(name) is not tensor or tensor.data_ptr() != address:
                return "tensors must not be replaced or moved after the capture: build another GraphRunner"
        if any(module.training for module in self._modules):
            return "the model must be in evaluation mode: call eval()"
        forward = vars(self._model).get("forward")
        if forward is not self._forward and forward is not runner:
            return "the model's forward was replaced on the instance: call `del model.forward`"
        if self._watch.holds(self._model) and not is_hooked(self._model):
            return None
        if new := [reason for reason in self._hooked_or_replaced() if reason not in self._known]:
            return f"{new[0]}: revert this, or build another GraphRunner"
        if self._watch.holds(self._model):  # the same hooks as at capture time
            return None
        return "modules and settings must not be replaced or unfused after the capture: build another GraphRunner"

    def _hooked_or_replaced(self) -> list[str]:
        own = ["the model has hooks, which would no longer run"] if is_hooked(self._model) else []
        return own + touch_reasons([named for named in self._model.named_modules() if named[0]])

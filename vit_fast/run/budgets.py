"""Token budgets: how images are packed into them, and the capture of graphs that a model must not outgrow."""

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

WARM_UP_RUNS = 3  # compile and autotune kernels and allocate their workspaces before the capture


def pack(
    lengths: Sequence[int], sequences: Sequence[int], budgets: Sequence[int], max_sequences: int
) -> list[tuple[int, list[int]]]:
    """Packs images by first-fit decreasing into the largest budget; each bin takes the smallest budget that fits.

    Args:
        lengths: Tokens of each image, none above the largest budget.
        sequences: Attention sequences of each image, none above `max_sequences`.
        budgets: Tokens of the buffers.
        max_sequences: Sequences of the buffers.
    Returns:
        The budget of each bin, and its images in the order of the call.
    """
    largest = max(budgets)
    bins: list[tuple[list[int], list[int]]] = []  # what is free, and images
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
    """Suggests token budgets for images, with the fewest padding tokens if each image runs alone.

    Args:
        sizes: (height, width) or (frames, height, width) of each image, as in spatial_shapes and image_grid_thw.
        patch_size: Pixels per patch, if height and width are in pixels.
        count: Budgets at most.
    Returns:
        Multiples of 64 tokens, ascending; the last one fits the patches of the largest image. The class tokens and
        registers of a NaFlexVit count, too: add them to each budget, once per image.
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
    # best[end]: least padding of the first `end` options, with its budgets
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
    """Counts of a `GraphRunner`.

    Attributes:
        graphs: Captured graphs.
        hits: Runs per budget; a call may take several.
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
        """Padding tokens among all tokens that ran."""
        return self.padding / max(self.padding + self.tokens, 1)


def capture(run: Callable[[], Any], device: torch.device, pool: Any) -> Callable[[], Any]:
    """Captures a CUDA graph; returns what replays it and returns its outputs, which the next replay overwrites."""
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
    """A model as graphs were captured: its modules, parameters, buffers, and settings of its fused blocks."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._modules = model, list(model.modules())
        edges, values = [], [(model, "__class__", type(model)), (type(model), "forward", type(model).forward)]
        for module in self._modules:
            edges += [(module, name, child) for name, child in module._modules.items() if child is not None]
            values += parts_of(module).watch.values if isinstance(module, FusedNormMlp) else ()
        self._watch = Watch(model, edges, values)
        self._forward, self._known = vars(model).get("forward"), self._touched()
        self._tensors = [
            (place, name, tensor, tensor.data_ptr())
            for module in self._modules
            for place in (module._parameters, module._buffers)
            for name, tensor in place.items()
            if tensor is not None
        ]

    def change(self, runner: object) -> str | None:
        """Returns what changed since, and no graph knows of; called before every replay.

        Args:
            runner: May have replaced the model's own forward.
        """
        for place, name, tensor, address in self._tensors:
            if place.get(name) is not tensor or tensor.data_ptr() != address:
                return "tensors must not be replaced or moved after the capture: build another GraphRunner"
        if any(module.training for module in self._modules):
            return "the model must be in evaluation mode: call eval()"
        forward = vars(self._model).get("forward")
        if forward is not self._forward and forward is not runner:
            return "the model's forward was replaced on the instance: remove what replaced it"
        if self._watch.holds(self._model) and not is_hooked(self._model):
            return None
        if new := [reason for reason in self._touched() if reason not in self._known]:
            return f"{new[0]}: undo this, or build another GraphRunner"
        if self._watch.holds(self._model):  # the model has the hooks that it was captured with
            return None
        return "modules and settings must not be replaced after the capture, or unfused: build another GraphRunner"

    def _touched(self) -> list[str]:
        own = ["the model has hooks, which would no longer run"] if is_hooked(self._model) else []
        return own + touch_reasons([named for named in self._model.named_modules() if named[0]])

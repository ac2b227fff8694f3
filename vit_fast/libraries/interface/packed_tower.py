"""Packs the images of a vision tower's calls into buffers with a fixed number of tokens, for `GraphRunner`.

Unused tokens of the buffers form a separate sequence.
"""

from __future__ import annotations

import abc
import itertools
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import raise_unsupported

OUTPUT_OPTIONS = ("output_hidden_states", "output_attentions", "return_dict")
IGNORED_OPTIONS = ("use_cache", "interpolate_pos_encoding")  # generate() passes them; these towers ignore them

Options = tuple[tuple[str, Any], ...]
Part = tuple[Sequence[int], int, Any]  # images that ran together, the size of their buffers, and the outputs


@dataclass
class Call:
    """A call of a tower, read on the host."""

    lengths: Sequence[int]  # tokens of each image
    sequences: Sequence[int]  # attention sequences of each image: 1, or the frames of a video
    inputs: Any  # as the other methods of the PackedTower need them
    options: Options = ()  # keyword arguments that change the outputs
    reasons: Sequence[str] = ()  # why the call cannot be packed


class PackedTower(abc.ABC):
    """Packs the calls of a vision tower. Each family has a subclass."""

    axis = 0  # token axis of the outputs
    unit = 1  # tokens that are merged into one; budgets are multiples of it
    needs_fused = True  # the library's own attention reads lengths on the host
    tokens_per_image: int | None = None  # given if the first axis of buffers and outputs is images, not tokens

    def __init__(self, tower: nn.Module, shapes: Mapping[str, tuple[int, ...]], like: Tensor | None = None) -> None:
        self.tower: Any = tower
        self.shapes = shapes  # of one token of each input
        self.like = next(tower.parameters()) if like is None else like  # has the dtype and device of the inputs

    @abc.abstractmethod
    def read(self, *args: Any, **kwargs: Any) -> Call:
        """Reads a call, with the tower's arguments."""

    @abc.abstractmethod
    def tokens(self, call: Call, images: Sequence[int]) -> dict[str, Sequence[Tensor]]:
        """Returns the tokens of some images, in order, under the names of `shapes`."""

    def metadata(self, call: Call, images: Sequence[int], budget: int, sequences: int) -> dict[str, Tensor]:
        """Computes inputs such as cu_seqlens on the host; their shapes depend only on budget and sequences."""
        frames = ([call.lengths[image] // call.sequences[image]] * call.sequences[image] for image in images)
        ends = itertools.accumulate(itertools.chain.from_iterable(frames))
        return {"cu_seqlens": pad_to(torch.tensor([0, *ends], dtype=torch.int32), sequences + 2, budget)}

    @abc.abstractmethod
    def run(self, buffers: dict[str, Tensor], options: dict[str, Any]) -> Any:
        """Runs the tower without reading anything on the host."""

    def fill(self, buffers: dict[str, Tensor], budget: int, sequences: int, call: Call, images: Sequence[int]) -> None:
        """Writes images into the buffers without waiting for the device; the first call allocates the buffers."""
        with torch.device("cpu"):  # a user may have set another default device
            metadata = self.metadata(call, images, budget, sequences)
        if not buffers:
            rows = min(budget // self.tokens_per_image, sequences) if self.tokens_per_image else budget
            for name, shape in self.shapes.items():
                buffers[name] = self.like.new_zeros((rows, *shape))
            for name, values in metadata.items():
                buffers[name] = torch.empty_like(values, device=self.like.device)
        for name, pieces in self.tokens(call, images).items():
            whole, buffer = torch.cat(list(pieces)) if pieces[1:] else pieces[0], buffers[name]
            rows = sum(call.lengths[image] for image in images) // (self.tokens_per_image or 1)
            if whole.shape != (shape := (rows, *buffer.shape[1:])):  # copy_ would broadcast it
                raise ValueError(f"{name} must have shape {list(shape)} for these image sizes, got {list(whole.shape)}")
            buffer[: len(whole)].copy_(whole)
        for name, values in metadata.items():
            pinned = values.pin_memory() if self.like.is_cuda else values
            buffers[name].copy_(pinned, non_blocking=True)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the tower; if `graph_vision_tower` replaced its forward, calls the original one without hooks."""
        return getattr(self.tower.forward, "original", self.tower)(*args, **kwargs)

    def join(self, call: Call, parts: Iterable[Part]) -> Any:
        """Copies the outputs of all parts into one, in the order of the images of the call."""
        pieces: dict[int, Sequence[Any]] = {}
        outputs: Any = None
        for images, budget, outputs in parts:
            lengths = [call.lengths[image] for image in images]
            if len(images) == len(call.lengths):  # one part, already in order
                images, lengths = (0,), [sum(lengths)]
            split: list[Sequence[Any]] = []
            for leaf in pytree.tree_leaves(outputs):
                if not isinstance(leaf, Tensor):
                    split.append([leaf] * len(lengths))
                    continue
                per_row = self.tokens_per_image or budget // leaf.shape[self.axis]
                rows = [length // per_row for length in lengths]
                copied = leaf.narrow(self.axis, 0, sum(rows)).clone()
                # a single piece goes to the caller, and torch forbids in-place changes of views that split returns
                split.append(copied.split(rows, self.axis) if len(rows) > 1 else [copied])
            pieces.update(zip(images, zip(*split)))
        ordered = zip(*(pieces[image] for image in sorted(pieces)))
        leaves = [torch.cat(one, self.axis) if isinstance(one[0], Tensor) and one[1:] else one[0] for one in ordered]
        return with_leaves(outputs, leaves)

    def options_of(self, kwargs: dict[str, Any]) -> tuple[Options, list[str]]:
        """Returns the options among keyword arguments, and a reason for each unsupported argument."""
        given = {name: value for name, value in kwargs.items() if value is not None}
        options = ((name, given[name]) for name in OUTPUT_OPTIONS if name in given)
        reasons = [f"{name} must not be given" for name in given if name not in (*OUTPUT_OPTIONS, *IGNORED_OPTIONS)]
        if self.needs_fused:  # the library's own attention does not get the lengths of the images
            layers = (each for each in self.tower.modules() if hasattr(type(each), "function_reasons"))
            own = [reason for layer in itertools.islice(layers, 1) for reason in layer.function_reasons(layer)]
            if own or kwargs.get("output_attentions"):
                need = "output_attentions must not be set, and attn_implementation must select plain attention"
                reasons.append(": ".join([need, *own]))
        return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in options), reasons

    def settings(self) -> Options:
        """Returns the settings in the tower's config that change its outputs; arguments of a call take precedence."""
        config = getattr(self.tower, "config", None)
        names = (*OUTPUT_OPTIONS, "_attn_implementation")
        registry = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
        function = registry.get(getattr(config, "_attn_implementation", None))
        return *((name, repr(getattr(config, name, None))) for name in names), ("attention function", id(function))


class ImageTower(PackedTower):
    """A tower for images [channels, height, width] of one size."""

    needs_fused = False

    def __init__(self, tower: nn.Module, shape: Sequence[int], tokens: int, like: Tensor) -> None:
        super().__init__(tower, {"images": tuple(shape)}, like.new_empty(0))
        self.tokens_per_image = tokens

    def read(self, pixel_values: Tensor, **kwargs: Any) -> Call:
        options, reasons = self.options_of(kwargs)
        shape, batch = self.shapes["images"], len(pixel_values)
        if tuple(pixel_values.shape[1:]) != shape:
            reasons.append(f"each image must have shape {shape}, got {tuple(pixel_values.shape[1:])}")
        return Call([self.tokens_per_image or 1] * batch, [1] * batch, pixel_values, options, reasons)

    def tokens(self, call: Call, images: Sequence[int]) -> dict[str, Sequence[Tensor]]:
        return {"images": [call.inputs[images[0] : images[-1] + 1]]}  # consecutive: images of one size stay in order

    def metadata(self, call: Call, images: Sequence[int], budget: int, sequences: int) -> dict[str, Tensor]:
        return {}

    def run(self, buffers: dict[str, Tensor], options: dict[str, Any]) -> Any:
        outputs, batch = self.eager(buffers["images"], **options), len(buffers["images"])
        shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        requirement = "the first axis of each output must be the batch"
        invalid = [f"{requirement}, got shape {shape} for {batch} images" for shape in shapes if shape[:1] != (batch,)]
        raise_unsupported("GraphRunner", invalid[:1])
        return outputs


class PaddedTower(PackedTower):
    """A tower whose first input [B, N, ...] is padded. Packs the real tokens, and pads the outputs with zeros."""

    axis = 1
    prefix = 0  # class and register tokens before the patches of an image

    def join(self, call: Call, parts: Iterable[Part]) -> Any:
        packed = super().join(call, parts)
        batch, width = len(call.lengths), self.prefix + call.inputs[0].shape[1]
        real = torch.arange(width, device="cpu") < torch.tensor(call.lengths, device="cpu")[:, None]
        places = real.flatten().nonzero()[:, 0]
        if self.like.is_cuda:
            places = places.pin_memory().to(self.like.device, non_blocking=True)
        leaves = pytree.tree_leaves(packed)
        for index, leaf in enumerate(leaves):
            if leaf is not None:
                leaves[index] = leaf.new_zeros((batch, width, *leaf.shape[2:]))
                leaves[index].flatten(0, 1).index_copy_(0, places, leaf[0])
        return self.finish(call, with_leaves(packed, leaves))

    @abc.abstractmethod
    def finish(self, call: Call, outputs: Any) -> Any:
        """Runs the tower's head."""


def read_grids(grids: Tensor, mask: Tensor) -> tuple[Tensor, list[int], bool]:
    """Copies grids [B, 2] to the host; returns them, their patch counts, and True if `mask` [B, N] matches them."""
    grids, mask = grids.cpu(), mask.cpu()
    patches = grids.prod(1)
    fits = torch.equal(mask.bool(), torch.arange(mask.shape[1], device="cpu") < patches[:, None])
    return grids, patches.tolist(), fits and bool((patches <= mask.shape[1]).all())


def pad_to(values: Tensor, length: int, value: int = 0) -> Tensor:
    return torch.cat([values, values.new_full((length - len(values), *values.shape[1:]), value)])


def with_leaves(outputs: Any, leaves: list[Any]) -> Any:
    found = pytree.tree_unflatten(leaves, pytree.tree_structure(outputs))
    if isinstance(outputs, OrderedDict):  # transformers' ModelOutput: restore the order of the fields
        for name in outputs:
            found.move_to_end(name)
    return found

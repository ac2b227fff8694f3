"""Packed calls of vision towers: how images of any size are laid out in buffers of a fixed number of tokens.

`GraphRunner` packs the images of a call into such buffers, whose unused tokens form a sequence of their own. A class
here knows one family: what its calls contain, which metadata its tower needs, and how outputs are split by image.
"""

from __future__ import annotations

import abc
import inspect
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..blocks.plain import forward_is_replaced
from ..errors import UnsupportedInputError
from .image_model import comes_from, pair

OUTPUT_OPTIONS = ("output_hidden_states", "output_attentions", "return_dict")
NO_OPTIONS = ("use_cache", "interpolate_pos_encoding")  # generate() passes them; these towers ignore them

Options = tuple[tuple[str, Any], ...]


@dataclass
class Call:
    """A call of a tower, read on the host.

    Attributes:
        lengths: Tokens of each image.
        sequences: Attention sequences of each image: 1, or the frames of a video.
        inputs: What the family's `fill` and `join` need.
        options: Keyword arguments that change the outputs.
        reasons: Why it cannot be packed.
    """

    lengths: Sequence[int]
    sequences: Sequence[int]
    inputs: Any
    options: Options = ()
    reasons: Sequence[str] = ()


class Part(NamedTuple):
    """Images that ran together: their numbers in the call, the size of the buffers, and the outputs in them."""

    images: Sequence[int]
    budget: int
    outputs: Any


class PackedTower(abc.ABC):
    """A tower, and how its calls are packed.

    Args:
        tower: The module; not copied.
    """

    axis = 0  # of the tokens in the outputs
    unit = 1  # tokens that are merged to one: budgets are multiples of it
    needs_fused = True  # the library's own attention reads lengths on the host

    def __init__(self, tower: nn.Module) -> None:
        self.tower: Any = tower

    @abc.abstractmethod
    def read(self, *args: Any, **kwargs: Any) -> Call:
        """Reads a call, with the tower's own arguments.

        Raises:
            ValueError: the inputs contradict each other, or contain no image.
        """

    @abc.abstractmethod
    def buffers(self, tokens: int, sequences: int) -> dict[str, Tensor]:
        """Allocates everything that changes between calls."""

    @abc.abstractmethod
    def fill(self, buffers: dict[str, Tensor], call: Call, images: Sequence[int]) -> None:
        """Writes some images of a call into the buffers."""

    @abc.abstractmethod
    def run(self, buffers: dict[str, Tensor], options: dict[str, Any]) -> Any:
        """Runs the tower on the buffers, without reading anything on the host."""

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the tower; its own forward, without hooks, if `graph_vision_tower` replaced it."""
        if forward_is_replaced(self.tower):
            return type(self.tower).forward(self.tower, *args, **kwargs)
        return self.tower(*args, **kwargs)

    def join(self, call: Call, parts: Iterable[Part]) -> Any:
        """Copies the outputs of all parts into one, in the order of the images of the call."""
        pieces: dict[int, list[Any]] = {}
        outputs: Any = None
        for images, budget, outputs in parts:
            used = sum(call.lengths[image] for image in images)
            leaves = [self._rows(leaf, budget, 0, used, copy=True) for leaf in pytree.tree_leaves(outputs)]
            if len(images) == len(call.lengths):
                return rebuilt(outputs, leaves)
            start = 0
            for image in images:
                pieces[image] = [self._rows(leaf, used, start, call.lengths[image]) for leaf in leaves]
                start += call.lengths[image]
        ordered = zip(*(pieces[image] for image in range(len(call.lengths))))
        return rebuilt(
            outputs, [torch.cat(one, self.axis) if isinstance(one[0], Tensor) else one[0] for one in ordered]
        )

    def tokens_per_row(self, leaf: Tensor, budget: int) -> int:
        """Tokens behind one row of an output."""
        return budget // leaf.shape[self.axis]

    def _rows(self, leaf: Any, budget: int, start: int, length: int, *, copy: bool = False) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        each = self.tokens_per_row(leaf, budget)
        rows = leaf.narrow(self.axis, start // each, length // each)
        return rows.clone() if copy else rows

    @property
    def like(self) -> Tensor:
        """A parameter, for dtype and device."""
        return next(self.tower.parameters())

    def bounds(self, sequences: int) -> Tensor:
        """Allocates cu_seqlens of that many sequences and of the padding."""
        return torch.zeros(sequences + 2, dtype=torch.int32, device=self.like.device)

    def options_of(self, kwargs: dict[str, Any]) -> tuple[Options, list[str]]:
        """Returns the options among keyword arguments, and a reason per argument that is none."""
        found = {name: kwargs[name] for name in OUTPUT_OPTIONS if kwargs.get(name) is not None}
        found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        others = [name for name in kwargs if name not in (*OUTPUT_OPTIONS, *NO_OPTIONS)]
        reasons = [f"{name} must not be given" for name in others if kwargs[name] is not None]
        if self.needs_fused and (kwargs.get("output_attentions") or self.tower.config._attn_implementation == "eager"):
            # for these, layers run the library's own attention, and it does not know the lengths of the images
            reasons.append("output_attentions must not be set, and attn_implementation must not be 'eager'")
        return tuple(found.items()), reasons

    def settings(self) -> Options:
        """Returns what the outputs depend on beside the options."""
        config = getattr(self.tower, "config", None)
        return tuple((name, repr(getattr(config, name, None))) for name in (*OUTPUT_OPTIONS, "_attn_implementation"))


class ImageTower(PackedTower):
    """A tower for images of one size, the rows of a batch.

    Args:
        tower: The module.
        shape: Of an image, [channels, height, width].
        tokens: Of an image.
        like: A tensor with the dtype and device of the images.
    """

    needs_fused = False

    def __init__(self, tower: nn.Module, shape: Sequence[int], tokens: int, like: Tensor) -> None:
        super().__init__(tower)
        self.shape, self.tokens, self._like = tuple(shape), tokens, like.new_empty(0)

    @property
    def like(self) -> Tensor:
        return self._like

    def read(self, pixel_values: Tensor, **kwargs: Any) -> Call:
        """Images [B, channels, height, width]."""
        options, reasons = self.options_of(kwargs)
        if pixel_values.dim() != 4 or not len(pixel_values):
            raise ValueError(f"pixel_values must contain images [B, C, H, W], got {tuple(pixel_values.shape)}")
        if tuple(pixel_values.shape[1:]) != self.shape:
            reasons.append(f"images must have shape {self.shape}, got {tuple(pixel_values.shape[1:])}")
        batch = len(pixel_values)
        return Call([self.tokens] * batch, [1] * batch, pixel_values, options, reasons)

    def buffers(self, tokens: int, sequences: int) -> dict[str, Tensor]:
        return {"images": self._like.new_zeros((min(tokens // self.tokens, sequences), *self.shape))}

    def fill(self, buffers: dict[str, Tensor], call: Call, images: Sequence[int]) -> None:
        buffers["images"][: len(images)].copy_(call.inputs[images[0] : images[-1] + 1])  # of one size: packed in order

    def run(self, buffers: dict[str, Tensor], options: dict[str, Any]) -> Any:
        outputs = self.eager(buffers["images"], **options)
        batch = len(buffers["images"])
        shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        if wrong := [shape for shape in shapes if shape[:1] != (batch,)]:
            reason = f"the first axis of each output must be the batch, got {wrong[0]} for {batch} images"
            raise UnsupportedInputError("GraphRunner", [reason])
        return outputs

    def tokens_per_row(self, leaf: Tensor, budget: int) -> int:
        return self.tokens


def image_tower(tower: Any) -> ImageTower | None:
    """Packs a tower of transformers for images of the size in its configuration; None for another model."""
    config = getattr(tower, "config", None)
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if not comes_from("transformers", tower) or not size or not patch:
        return None
    takes = inspect.signature(type(tower).forward).parameters
    if "pixel_values" not in takes or "patch_attention_mask" in takes:  # such a mask is read on the host
        return None
    (height, width), (rows, columns) = pair(size), pair(patch)
    channels = int(getattr(config, "num_channels", 3))
    tokens = (height // rows) * (width // columns)
    return ImageTower(tower, (channels, height, width), tokens, next(tower.parameters()))


class PaddedTower(PackedTower):
    """A tower whose images are padded to one number of tokens: packs those that are not padding.

    The first of a call's inputs is [B, N, ...]. Padding is 0 in the outputs.
    """

    axis = 1
    prefix = 0  # class tokens and registers in front of the patches of an image

    def copy_tokens(self, buffer: Tensor, padded: Tensor, call: Call, images: Sequence[int]) -> None:
        """Copies the tokens of some images, [images, N, ...], one behind the other to the buffer."""
        index = self._index(call, images, range(len(images)), padded.shape[1])
        put(buffer, padded.flatten(0, 1)[index])

    def join(self, call: Call, parts: Iterable[Part]) -> Any:
        batch, width = len(call.lengths), self.prefix + call.inputs[0].shape[1]
        leaves: list[Any] = []
        outputs: Any = None

        def padded(leaf: Any) -> Any:
            return leaf if leaf is None else leaf.new_zeros((batch * width, *leaf.shape[2:]))

        for images, _, outputs in parts:
            found = pytree.tree_leaves(outputs)
            index = self._index(call, images, images, width)
            leaves = leaves or [padded(leaf) for leaf in found]
            for whole, leaf in zip(leaves, found):
                if leaf is not None:
                    whole.index_copy_(0, index, leaf[0, : len(index)])
        leaves = [leaf if leaf is None else leaf.unflatten(0, (batch, width)) for leaf in leaves]
        return self.finish(call, rebuilt(outputs, leaves))

    @abc.abstractmethod
    def finish(self, call: Call, outputs: Any) -> Any:
        """Runs the tower's head on padded outputs."""

    def _index(self, call: Call, images: Sequence[int], places: Sequence[int], width: int) -> Tensor:
        """Numbers of the images' tokens among padded ones, where image i is at places[i]."""
        rows = [place * width + row for image, place in zip(images, places) for row in range(call.lengths[image])]
        return on_device(rows, self.like.device)


def read_padding(there: Tensor, shapes: Tensor) -> tuple[list[Any], list[int], bool]:
    """Reads grids [B, 2] on the host, with their numbers of patches, and whether `there` [B, N] is their mask."""
    shapes = shapes.to(there.device)
    first = torch.arange(there.shape[1], device=there.device) < shapes.prod(1, keepdim=True)
    fits = (there.bool() == first).all(1, keepdim=True)
    read = torch.cat([shapes, fits], 1).tolist()
    return [row[:2] for row in read], [row[0] * row[1] for row in read], all(row[2] for row in read)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Returns numbers as an int64 tensor, without waiting for the device."""
    found = torch.tensor(numbers)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def images_of(tensor: Tensor, images: Sequence[int]) -> Tensor:
    """Returns some rows of a tensor with a row per image."""
    return tensor if len(images) == len(tensor) else tensor[on_device(images, tensor.device)]


def write_bounds(bounds: Tensor, call: Call, images: Sequence[int], budget: int) -> None:
    """Writes cu_seqlens of some images, and of the padding behind them."""
    ends = itertools.accumulate(call.lengths[image] for image in images)
    upload(bounds, torch.tensor([0, *ends]), budget)


def copy_rows(buffer: Tensor, rows: Tensor, call: Call, images: Sequence[int]) -> None:
    """Copies the tokens of some images, which follow each other in `rows`, to the buffer."""
    starts = [0, *itertools.accumulate(call.lengths)]
    done = 0
    for first, last in _runs(images):
        chosen = rows[starts[first] : starts[last + 1]]
        put(buffer[done:], chosen)
        done += len(chosen)


def put(buffer: Tensor, tokens: Tensor) -> None:
    """Copies tokens to the start of a buffer; raises ValueError where `copy_` would broadcast."""
    if tokens.shape[1:] != buffer.shape[1:]:
        raise ValueError(f"each token must have shape {list(buffer.shape[1:])}, got {list(tokens.shape[1:])}")
    buffer[: len(tokens)].copy_(tokens)


def upload(buffer: Tensor, values: Tensor, rest: int | float = 0) -> None:
    """Copies values from the host to the start of a buffer, and fills the rest of it; never waits for the device."""
    whole = torch.full(buffer.shape, rest, dtype=buffer.dtype)
    whole[: len(values)] = values
    buffer.copy_(whole.pin_memory() if buffer.is_cuda else whole, non_blocking=True)


def rebuilt(outputs: Any, leaves: list[Any]) -> Any:
    """Returns outputs of the same structure with other leaves."""
    found = pytree.tree_unflatten(leaves, pytree.tree_structure(outputs))
    if isinstance(outputs, OrderedDict):  # of transformers: build a new one, it has the order of its fields
        for name in outputs:
            found.move_to_end(name)
    return found


def _runs(images: Sequence[int]) -> list[tuple[int, int]]:
    """First and last numbers of runs of consecutive images."""
    runs: list[tuple[int, int]] = []
    for image in images:
        if runs and runs[-1][1] == image - 1:
            runs[-1] = (runs[-1][0], image)
        else:
            runs.append((image, image))
    return runs

"""CUDA graphs for image models and packed vision towers, and token budgets for packed images."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..blocks.block import parts_of
from ..blocks.fused import FusedModule, FusedNormMlp
from ..blocks.plain import Watch, forward_is_replaced, is_hooked
from ..errors import UnsupportedInputError, check_batch_sizes, check_choice, check_integer, check_type
from ..fusion import fuse as fusion
from ..libraries.interface.image_model import required_input_reasons
from ..libraries.interface.packed_tower import Call, ImageTower, Options, PackedTower, Part
from ..libraries.known import fused_form, packed_tower
from .runtime import capture

Fallback = Literal["error", "eager"]


@dataclass
class GraphStats:
    """Counters of a `GraphRunner`."""

    graphs: int = 0  # captured graphs
    hits: dict[int, int] = field(default_factory=dict)  # number of runs by size; a call may need several runs
    tokens: int = 0  # tokens of images in all runs
    padding: int = 0  # padding tokens in all runs
    fallbacks: int = 0  # calls that ran eagerly because of their inputs or a change of the model

    @property
    def padding_share(self) -> float:
        """Share of padding tokens in all runs."""
        return self.padding / max(self.padding + self.tokens, 1)


class GraphRunner:
    """Runs a model by replaying CUDA graphs, captured for a few sizes, to avoid launch overhead.

    With an example, sizes are batch sizes, and all images have one shape. With budgets, sizes are numbers of tokens:
    images of any size are packed into the budgets, and padding fills the rest. No image attends to padding.

    A call copies its images into the buffers of the smallest size that fits, replays the graph, and copies the outputs.
    If the images do not fit into one graph, several graphs run in sequence. Several threads or streams may call the
    runner; their calls run one at a time.

    The model is frozen (`vit_fast.freeze`) and captured in evaluation mode without gradients. In-place updates of its
    parameters take effect at the next call if torch tracks them, otherwise after refresh(). Changes of modules, hooks
    or devices require another runner. FP8 scales must not change. Calls under autocast run no graph.

    Args:
        model: The model, on one CUDA device. The modes "default" and "max-autotune-no-cudagraphs" of torch.compile are
            supported; other modes capture their own CUDA graphs. With budgets, the model must be a vision tower that
            docs/classes.md lists with "token budgets".
        example: Images [any, channels, height, width] with the size, dtype and device of later calls.
        batch_sizes: With an example: batch sizes to capture, by default 1, 8 and 32.
        budgets: Instead of an example: numbers of tokens, see `vit_fast.budgets_for`. Captured when needed.
        max_images: With budgets: maximum number of images in one graph, by default 64. Each temporal patch of a video
            counts as an image.
        fallback: "error" raises an error for a call that no graph can run; "eager" runs the call without a graph. On
            the CPU, an example requires "eager"; budgets run without graphs, but pack and pad as on a GPU.
        fuse: With an example: call `vit_fast.fuse(model, example=example)` if no part of the model is fused.
    Raises:
        ValueError: an argument is invalid.
        UnsupportedInputError: no graph can run the model and fallback is "error", or the tower does not fit budgets.
    """

    def __init__(
        self, model: nn.Module, example: Tensor | None = None, batch_sizes: Sequence[int] | None = None, *,
        budgets: Sequence[int] | None = None, max_images: int | None = None, fallback: Fallback = "error",
        fuse: bool = True,
    ) -> None:  # fmt: skip
        check_type("model", model, nn.Module)
        check_choice("fallback", fallback, get_args(Fallback))
        given = {"example": example, "budgets": budgets, "batch_sizes": batch_sizes, "max_images": max_images}
        given = {name: value for name, value in given.items() if value is not None}
        if list(given) not in (["example"], ["example", "batch_sizes"], ["budgets"], ["budgets", "max_images"]):
            requirement = "pass example and optionally batch_sizes, or budgets and optionally max_images"
            got = ", ".join(name if name == "example" else f"{name}={value!r}" for name, value in given.items())
            raise ValueError(f"{requirement}: got {got or 'None for all'}")
        self.model, self._fallback = model.eval() or model, fallback
        self._tower: PackedTower
        if example is not None:
            sizes = (1, 8, 32) if batch_sizes is None else batch_sizes
            check_type("example", example, Tensor)
            check_batch_sizes(sizes)
            if example.dim() < 2:
                raise ValueError(f"example must have at least 2 dimensions, got shape {tuple(example.shape)}")
            self._tower, self._sequences = _Batches(model, example.shape[1:], 1, example), max(sizes)
        else:
            sizes, self._sequences = budgets or (), 64 if max_images is None else max_images
            check_batch_sizes(sizes, "budgets")
            check_integer("max_images", self._sequences, 1)
            self._tower = _fit_tower(model)
            if wrong := [budget for budget in sizes if budget % self._tower.unit]:
                raise ValueError(f"budgets must be multiples of {self._tower.unit} tokens, got {wrong[0]}")
        self.budgets, self._device = tuple(sorted(set(sizes))), self._tower.like.device
        reasons = _no_graph_reasons(model, self._tower.like)
        if example is not None:
            reasons += required_input_reasons(model) + _host_reads(model) + _hooks(model) + _autocast(self._device)
            if reasons and fallback == "error":
                raise UnsupportedInputError("GraphRunner", [*reasons, "fallback='eager' runs the model without graphs"])
        self.captured, self._eager = not reasons, bool(reasons) and example is not None
        if fuse and example is not None:
            fusion.fuse_plain(model, example)
        if self.captured:
            fusion.freeze(self.model)
        self._frozen = fusion.frozen_of(self.model)  # keeps them alive: the graphs read their memory
        self._watched, self._lock, self._stats = Watched(model), threading.Lock(), GraphStats()
        self._graphs: dict[tuple[int, Options, Options], tuple[dict[str, Tensor], Callable[[], Any]]] = {}
        self._memory: tuple[Any, Any] = None, None  # stream and memory pool of the captures
        if self.captured and self._device.type == "cuda":
            self._memory = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
        self._last_done: torch.cuda.Event | None = None
        if self.captured and example is not None:
            one = self._tower.read(example.new_zeros((1, *example.shape[1:])))
            for size in self.budgets:
                self._graph(size, one, [0])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of calling the model, e.g. with images [B, channels, height, width].

        Raises:
            ValueError: images differ from the example in shape, dtype or device, or do not match their grids or sizes.
            UnsupportedInputError: no graph can run the call, and fallback is "error"; lists all reasons.
        """
        call = self._tower.read(*args, **kwargs)
        if min(call.lengths, default=1) < 1:
            how = "check the grids or sizes of the images"
            raise ValueError(f"each image must have at least one token, got {call.lengths} tokens: {how}")
        if self._eager or not call.lengths:
            with torch.no_grad():
                return self._tower.eager(*args, **kwargs)
        if reasons := [*call.reasons, *self._reasons(call, (args, kwargs))]:
            if self._fallback == "error":
                raise UnsupportedInputError("GraphRunner", reasons)
            with self._lock:
                self._stats.fallbacks += 1
            return self._tower.eager(*args, **kwargs)  # gradients remain enabled here
        with self._exclusive():
            for frozen in self._frozen:
                frozen.ensure_current()
            return self._tower.join(call, self._parts(call))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as the model's own forward, because CUDA graphs cannot be copied."""
        return own_forward, (self.model,)

    @property
    def original(self) -> Callable[..., Any]:
        """The model's own forward, which `PackedTower.eager` calls."""
        return own_forward(self.model)

    def stats(self) -> GraphStats:
        """Returns the counts so far."""
        with self._lock:
            return copy.deepcopy(self._stats)

    def refresh(self) -> None:
        """Updates the frozen weights, also after changes that torch does not track, e.g. writes through `.data`.

        Raises:
            RuntimeError: the model changed in a way that the graphs do not support, e.g. parameters were moved.
        """
        if self.captured and (change := self._watched.change(self)):
            raise RuntimeError(change)
        with self._exclusive():
            for frozen in self._frozen:
                frozen.refresh()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Waits for the previous use of the buffers and frozen weights, on the host and on the device."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        with self._lock, torch.no_grad():
            if stream is not None and self._last_done is not None:
                stream.wait_event(self._last_done)
            try:
                yield
            finally:  # after an error, launched kernels may still use the buffers
                if stream is not None:
                    self._last_done = stream.record_event()

    def _reasons(self, call: Call, given: Any) -> Iterator[str]:
        if (longest := max(call.lengths)) > self.budgets[-1]:
            yield f"an image must have at most {self.budgets[-1]} tokens, the largest budget, got {longest}"
        if max(call.sequences) > self._sequences:
            requirement = f"a video must have at most max_images={self._sequences} steps of its time axis"
            yield f"{requirement}, got {max(call.sequences)}: each step counts as an image"
        if change := self._watched.change(self):
            yield change
        leaves = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
            yield "inputs must not require gradients: call detach()"
        if strange := {leaf.device for leaf in leaves if leaf.is_cuda} - {self._device}:
            yield f"inputs must be on {self._device} or the CPU, got {', '.join(map(str, strange))}"
        yield from _autocast(self._device)
        if torch.compiler.is_compiling():
            yield "the runner must not be called while torch compiles or exports a model"

    def _parts(self, call: Call) -> Iterator[Part]:
        """Runs the images of a call in parts. Each part overwrites the outputs of the previous one."""
        for budget, images in pack(call.lengths, call.sequences, self.budgets, self._sequences):
            run = self._graph(budget, call, images)
            used = sum(call.lengths[image] for image in images)
            self._stats.hits[budget] = self._stats.hits.get(budget, 0) + 1
            self._stats.tokens += used
            self._stats.padding += budget - used
            yield images, budget, run()

    @torch.inference_mode(False)  # calls outside of inference mode cannot write into inference tensors
    @torch.no_grad()
    def _graph(self, budget: int, call: Call, images: Sequence[int]) -> Callable[[], Any]:
        """Writes images into the buffers of a budget; returns a function that runs the model on the buffers."""
        key = budget, call.options, self._tower.settings()
        buffers, run = self._graphs.get(key, ({}, None))
        self._tower.fill(buffers, budget, self._sequences, call, images)
        if run is None:
            run = partial(self._tower.run, buffers, dict(call.options))
            if self.captured:
                run = capture(run, *self._memory)
                # weights may have been frozen again since the last capture
                self._frozen += [each for each in fusion.frozen_of(self.model) if each not in self._frozen]
                self._stats.graphs += 1
            self._graphs[key] = buffers, run
        return run


def own_forward(model: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(model).forward, model)


class _Batches(ImageTower):
    """A model for images like the example. An image counts as one token."""

    def read(self, images: Tensor) -> Call:  # type: ignore[override]  # callers may pass images by name
        check_type("images", images, Tensor)
        like, shape = self.like, self.shapes["images"]
        if images.shape[1:] != shape or images.dtype != like.dtype or images.device != like.device:
            raise ValueError(
                f"images must be [B, {', '.join(map(str, shape))}] {like.dtype} on {like.device} like "
                f"the example, got {tuple(images.shape)} {images.dtype} on {images.device}"
            )
        return Call([1] * len(images), [1] * len(images), images)


def _no_graph_reasons(model: nn.Module, like: Tensor) -> list[str]:
    reasons = [] if like.is_cuda else [f"example must be on a CUDA device, got {like.device}"]
    if devices := {parameter.device for parameter in model.parameters()} - {like.device}:
        reasons.append(f"the model must be on the example's device, {like.device}, got {', '.join(map(str, devices))}")
    return reasons


def _host_reads(model: nn.Module) -> list[str]:
    for cls in dict.fromkeys(type(module) for module in model.modules()):
        if reason := getattr(cls, "host_reads", ""):
            return [reason]
        if "patch_attention_mask" in inspect.signature(cls.forward).parameters:
            return [f"{cls.__name__} copies its patch mask to the host, which CUDA graphs cannot capture"]
    return []


def _hooks(model: nn.Module) -> list[str]:
    return [
        f"{name or 'the model'} must have no hooks, because graphs do not run them: remove them"
        for name, module in model.named_modules()
        if is_hooked(module)
    ]


def _autocast(device: torch.device) -> list[str]:
    # a graph would ignore autocast, or reuse weights that were cast during the capture
    active = torch.is_autocast_enabled(device.type)
    return ["autocast must be off: convert the model to half precision"] if active else []


def _fit_tower(model: nn.Module) -> PackedTower:
    """Returns a tower that can run packed in a graph, or raises UnsupportedInputError."""
    tower, reasons = packed_tower(model), []
    if tower is None:
        reason = f"the model's class must support token budgets (docs/classes.md), got {type(model).__name__}"
        raise UnsupportedInputError("GraphRunner with budgets", [reason])
    if forward_is_replaced(model):
        reasons = ["the model's forward was replaced on the instance: call `del model.forward`"]
    reasons += _hooks(model)
    for name, module in model.named_modules():
        if not tower.needs_fused:
            continue
        is_known = isinstance(module, FusedModule) or type(module).__module__.startswith("torch.")
        if not is_known and fused_form(type(module)) is not None:
            reasons.append(f"{name or 'the model'} must be fused: call vit_fast.fuse first")
        elif tower.like.is_cuda and getattr(module, "vit_fast_backend", "triton") != "triton":
            reasons.append(f"{name or 'the model'} must have backend 'triton': call vit_fast.fuse(model, 'triton')")
    if reasons:
        raise UnsupportedInputError("GraphRunner with budgets", reasons)
    return tower


class Watched:
    """A model at capture time: modules, parameters, buffers, and settings of fused blocks."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._modules = model, list(model.modules())
        edges, values = [], [(model, "__class__", type(model)), (type(model), "forward", type(model).forward)]
        for module in self._modules:
            edges += [(module, name, child) for name, child in module._modules.items() if child is not None]
            values += parts_of(module).watch.values if isinstance(module, FusedNormMlp) else ()
        self._watch = Watch(model, edges, values)
        self._forward = vars(model).get("forward")
        self._tensors = [
            (place, name, tensor, tensor.data_ptr())
            for module in self._modules
            for place in (module._parameters, module._buffers)
            for name, tensor in place.items()
            if tensor is not None
        ]

    def change(self, runner: object) -> str | None:
        """Returns an error message if the model changed after the capture; `runner` may replace its forward."""
        changed = (
            "the captured model must stay in evaluation mode with the same tensors, modules, hooks, forwards and "
            "settings: revert the change, or build another GraphRunner"
        )
        for place, name, tensor, address in self._tensors:
            if place.get(name) is not tensor or tensor.data_ptr() != address:
                return changed
        forward, model = vars(self._model).get("forward"), self._model
        same = (forward is self._forward or forward is runner) and not is_hooked(model)
        same = same and self._watch.holds(model) and not any(module.training for module in self._modules)
        return None if same else changed


def pack(
    lengths: Sequence[int], sequences: Sequence[int], budgets: Sequence[int], max_sequences: int
) -> list[tuple[int, list[int]]]:
    """Packs images by their numbers of tokens and sequences (first-fit decreasing) -> (budget, images) of each run."""
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
    """Returns the token budgets that need the fewest padding tokens if each image runs alone.

    Args:
        sizes: (height, width) or (time, height, width) of each image, as in spatial_shapes and image_grid_thw.
        patch_size: Pixels per side of a patch; 1 if height and width are numbers of patches.
        count: Maximum number of budgets.
    Returns:
        Multiples of 64 tokens, ascending; the last budget fits the patches of the largest image. For timm's NaFlexVit,
        add to each budget the class and register tokens of its images.
    Raises:
        ValueError: sizes is empty, or a size is not two or three positive integers.
    """
    check_integer("patch_size", patch_size, 1)
    check_integer("count", count, 1)
    check_type("sizes", sizes, list, tuple)
    rounded: list[int] = []
    for size in sizes:
        if len(size) not in (2, 3) or any(int(side) < 1 for side in size):
            raise ValueError(f"sizes must be positive (height, width) or (time, height, width), got {tuple(size)}")
        *time, height, width = map(int, size)
        patches = (time or [1])[0] * -(-height // patch_size) * -(-width // patch_size)
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

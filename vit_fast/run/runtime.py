"""torch.compile with what a Vision Transformer needs, and replay of captured CUDA graphs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..arguments import check_batch_sizes, check_choice
from ..errors import UnsupportedInputError, check_type
from ..fusion.freezing import freeze, frozen_of
from ..libraries.image_model import needs_more
from ..ops.frozen import Frozen

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Fallback = Literal["error", "eager"]


def compile(
    model: nn.Module, mode: CompileMode = "default", *, dynamic_batch: bool = False, fullgraph: bool = True
) -> nn.Module:
    """torch.compile for a Vision Transformer, ours, fused or any other: one graph, without a break.

    Args:
        model: The model; its parameters are shared, not copied.
        mode: "default" compiles fastest. "reduce-overhead" replays CUDA graphs, for small batches, where launching
            kernels costs more than running them; its outputs are overwritten by the next call. "max-autotune" also
            times candidates for every matmul, which takes minutes; its "-no-cudagraphs" form can be captured. What they
            gain is measured by `vit-fast bench --candidates sdpa,sdpa+compile`; records are under benchmarks/results.
        dynamic_batch: Whether one graph serves every batch size from 2 (and one more serves 1), instead of one graph
            each. Needs inputs whose first axis is the batch.
        fullgraph: Whether a graph break is an error.
    Returns:
        The compiled model; attributes and state_dict as torch.compile gives them.
    Raises:
        ValueError: the mode is unknown.
    """
    check_type("model", model, nn.Module)
    check_choice("mode", mode, get_args(CompileMode))
    compiled: Any = torch.compile(model, mode=mode, fullgraph=fullgraph, dynamic=None if dynamic_batch else False)
    if dynamic_batch:
        compiled.register_forward_pre_hook(_mark_batch_dynamic, with_kwargs=True)
    if mode in ("reduce-overhead", "max-autotune"):
        compiled.register_forward_pre_hook(_look_after_frozen)
    return compiled


def compile_frozen(function: Callable[..., Any], *, fullgraph: bool = True) -> Callable[..., Any]:
    """Compiles a model for inference with its weights as constants, which torch lays out for its products.

    This is torch._inductor.config.freezing, set during a call and restored after it: torch reads it while it traces,
    too, so that the option of torch.compile alone freezes nothing. Later changes of the weights are not followed.
    """
    from torch._inductor import config

    compiled = torch.compile(function, fullgraph=fullgraph, dynamic=False)

    def run(*args: Any, **kwargs: Any) -> Any:
        before, config.freezing = config.freezing, True
        try:
            with torch.no_grad():
                return compiled(*args, **kwargs)
        finally:
            config.freezing = before

    return run


_at_fixed_addresses: weakref.WeakSet[Frozen] = weakref.WeakSet()


def _look_after_frozen(module: nn.Module, args: Any) -> None:
    """Does what a replayed graph cannot: takes changed weights over. Frozen ones are not copied at each replay."""
    for frozen in frozen_of(module):
        if frozen not in _at_fixed_addresses:
            for tensor in frozen.tensors:
                torch._dynamo.mark_static_address(tensor)
            _at_fixed_addresses.add(frozen)
        frozen.ensure_current()


def _mark_batch_dynamic(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tells the compiler that the first axis varies; of size 1 it is left alone, since torch specialises on 1."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] > 1:
            torch._dynamo.mark_dynamic(value, 0)


def pick_batches(batch: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """How a batch is cut over captured sizes: (images, captured size) a piece.

    The smallest captured size that fits takes what is left; the largest is repeated while more is left than that.
    """
    largest = max(sizes)
    pieces = [(largest, largest)] * (batch // largest)
    rest = batch % largest
    if rest:
        pieces.append((rest, min(size for size in sizes if size >= rest)))
    return pieces


class GraphRunner:
    """Runs a model by replaying CUDA graphs captured for a few batch sizes: no launch cost left.

    A call copies its images into the buffer of the smallest captured batch that fits, replays, and copies the outputs
    out; a larger batch is cut into pieces. Calls from several threads or streams are safe: they take turns, and each
    waits on the device for the one before.

    The model is frozen (`vit_fast.freeze`), so that no weight is folded inside a graph, and captured in evaluation mode
    and without gradients. Changed values of its parameters are taken over at the next call where torch can see them,
    and by refresh() in any case. Their storage, device and dtype must not change, nor the model's mode, nor the scales
    of one in FP8.

    Args:
        model: On one CUDA device. A model compiled with mode "reduce-overhead" or "max-autotune" makes CUDA graphs of
            its own and cannot be captured: use "default" or "max-autotune-no-cudagraphs".
        example: Images [any, channels, height, width] of the dtype and on the device of the calls to come.
        batch_sizes: Sizes to capture, in images; each holds its own activations on the device.
        fallback: Where there is no CUDA device: "error" raises, "eager" runs the model plainly.
    Raises:
        ValueError: the example or the batch sizes are not usable.
        UnsupportedInputError: the model and the example are not on a CUDA device and fallback is "error"; all reasons.
            Or an output's first axis is not the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Tensor,
        batch_sizes: Sequence[int] = (1, 8, 32),
        *,
        fallback: Fallback = "error",
    ) -> None:
        check_type("model", model, nn.Module)
        check_type("example", example, Tensor)
        check_choice("fallback", fallback, get_args(Fallback))
        check_batch_sizes(batch_sizes)
        if example.dim() < 2:
            raise ValueError(f"example has shape {tuple(example.shape)}: accepted is [B, channels, height, width]")
        reasons = _no_graph_reasons(model, example)
        if reasons and fallback == "error":
            raise UnsupportedInputError("GraphRunner", [*reasons, "fallback='eager' runs the model plainly"])
        self.model = model.eval()
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self.captured = not reasons
        self._image_shape, self._dtype, self._device = example.shape[1:], example.dtype, example.device
        self._lock = threading.Lock()
        if self.captured:
            freeze(self.model)
        self._frozen = frozen_of(self.model)  # held: the graphs read their memory, also when the model gives them up
        self._captured_from = [(parameter, parameter.data_ptr()) for parameter in self.model.parameters()]
        sizes = self.batch_sizes if self.captured else ()
        self._graphs = {size: _Graph(self.model, example, size) for size in sizes}
        self._last_done: torch.cuda.Event | None = None

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Any:
        """What model(images) returns, for images [B, channels, height, width]; every output's first axis is the batch.

        Raises:
            ValueError: images differ from the example in shape, dtype or device.
        """
        check_type("images", images, Tensor)
        if images.shape[1:] != self._image_shape or images.dtype != self._dtype or images.device != self._device:
            raise ValueError(
                f"images are {tuple(images.shape)} {images.dtype} on {images.device}: accepted are "
                f"[B, {', '.join(map(str, self._image_shape))}] {self._dtype} on {self._device}, as the example"
            )
        if not self.captured or not len(images):
            return self.model(images)
        with self._lock:
            stream = torch.cuda.current_stream(self._device)
            if self._last_done is not None:
                stream.wait_event(self._last_done)
            for frozen in self._frozen:
                frozen.ensure_current()
            outputs, start = [], 0
            for count, size in pick_batches(len(images), self.batch_sizes):
                outputs.append(self._graphs[size].replay(images[start : start + count]))
                start += count
            self._last_done = stream.record_event()
        return outputs[0] if len(outputs) == 1 else pytree.tree_map(lambda *parts: torch.cat(parts), *outputs)

    def refresh(self) -> None:
        """Takes over the weights as they are now, also what torch could not see changing (`.data`, other libraries).

        Raises:
            RuntimeError: parameters were replaced or lie elsewhere since the capture.
        """
        now = list(self.model.parameters())
        held = len(now) == len(self._captured_from) and all(
            parameter is before and parameter.data_ptr() == address
            for parameter, (before, address) in zip(now, self._captured_from)
        )
        if self.captured and not held:
            raise RuntimeError("parameters were replaced or moved since the capture: make another GraphRunner")
        with self._lock:
            for frozen in self._frozen:
                frozen.refresh()


def _no_graph_reasons(model: nn.Module, example: Tensor) -> list[str]:
    """Why CUDA graphs cannot be captured; empty when they can."""
    reasons = []
    if not torch.cuda.is_available():
        reasons.append("this machine has no CUDA device")
    if example.device.type != "cuda":
        reasons.append(f"example is on {example.device}: accepted is a CUDA device")
    reasons += needs_more(model)
    reasons += [reason for module in model.modules() if (reason := getattr(type(module), "host_reads", ""))]
    devices = {parameter.device for parameter in model.parameters()} - {example.device}
    if devices:
        reasons.append(f"the model is on {', '.join(map(str, devices))}, example on {example.device}")
    return reasons


def _require_images_first(outputs: Any, batch: int) -> None:
    """Raises UnsupportedInputError if what a model gave for `batch` images cannot be cut by image."""
    shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    if wrong := [shape for shape in shapes if shape[:1] != (batch,)]:
        reason = f"for {batch} images an output is {wrong[0]}: accepted are outputs whose first axis is the batch"
        raise UnsupportedInputError("GraphRunner", [reason])


class _Graph:
    """One batch size: its input buffer, its graph, its output buffers."""

    WARM_UP_RUNS = 3  # kernels are compiled, autotuned and their workspaces allocated before the capture

    def __init__(self, model: nn.Module, example: Tensor, batch: int) -> None:
        self.batch = batch
        self.input = example.new_zeros((batch, *example.shape[1:]))
        with torch.cuda.device(example.device), torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(self.WARM_UP_RUNS):
                    _require_images_first(model(self.input), batch)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.output = model(self.input)

    def replay(self, images: Tensor) -> Any:
        """The outputs for up to `batch` images, in memory of their own; what pads them is left from earlier calls."""
        self.input[: len(images)].copy_(images)
        self.graph.replay()
        return pytree.tree_map_only(Tensor, lambda tensor: tensor[: len(images)].clone(), self.output)

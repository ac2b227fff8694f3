"""torch.compile and CUDA graphs for Vision Transformers."""

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
    """Compiles a Vision Transformer (vit-fast's, fused, or any other) to one graph without graph breaks.

    Args:
        model: The model; its parameters are shared, not copied.
        mode: "default" compiles fastest. "reduce-overhead" replays CUDA graphs, for small batches, where launching
            kernels costs more than running them; its outputs are overwritten by the next call. "max-autotune" also
            times candidates for every matmul, which takes minutes; its "-no-cudagraphs" form can be captured. Measure
            the gain by `vit-fast bench --candidates sdpa,sdpa+compile`; benchmarks/results contains records.
        dynamic_batch: True compiles one graph for all batch sizes from 2 (and another for size 1), instead of one graph
            per size. The first axis of all inputs must be the batch.
        fullgraph: True raises an error for a graph break.
    Returns:
        The compiled model; attributes and state_dict as of torch.compile.
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
    """Compiles a model for inference with its weights as constants, whose layout torch optimizes.

    Sets torch._inductor.config.freezing during each call: torch also reads it while tracing, so that the option of
    torch.compile alone freezes nothing. Later changes of the weights have no effect.
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
    """Updates frozen weights before a replay and marks them static, so that no replay copies them."""
    for frozen in frozen_of(module):
        if frozen not in _at_fixed_addresses:
            for tensor in frozen.tensors:
                torch._dynamo.mark_static_address(tensor)
            _at_fixed_addresses.add(frozen)
        frozen.ensure_current()


def _mark_batch_dynamic(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Marks the first axis as dynamic, except for size 1, for which torch always specialises."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] > 1:
            torch._dynamo.mark_dynamic(value, 0)


def pick_batches(batch: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Splits a batch over captured sizes: (images, captured size) of each piece.

    Repeats the largest size; the smallest size that fits runs the remainder.
    """
    largest = max(sizes)
    pieces = [(largest, largest)] * (batch // largest)
    rest = batch % largest
    if rest:
        pieces.append((rest, min(size for size in sizes if size >= rest)))
    return pieces


class GraphRunner:
    """Runs a model by replaying CUDA graphs, captured for a few batch sizes, to avoid launch overhead.

    A call copies its images into the buffer of the smallest captured batch that fits, replays, and copies the outputs
    out. A larger batch is split. Calls from several threads or streams are safe: they run one at a time, and each
    waits on the device for the previous one.

    The model is frozen (`vit_fast.freeze`), so that no graph folds weights, and captured in evaluation mode without
    gradients. In-place updates of its parameters take effect at the next call if torch tracks them, and after
    refresh() in any case. Storage, device and dtype of the parameters, the model's mode, and FP8 scales must not
    change.

    Args:
        model: On one CUDA device. A model compiled with mode "reduce-overhead" or "max-autotune" makes its own CUDA
            graphs and cannot be captured: use "default" or "max-autotune-no-cudagraphs".
        example: Images [any, channels, height, width] with dtype and device of later calls.
        batch_sizes: Sizes to capture, in images; each has its own activations on the device.
        fallback: Without a CUDA device, "error" raises and "eager" runs the model without graphs.
    Raises:
        ValueError: the example or the batch sizes are invalid.
        UnsupportedInputError: the model or the example is not on a CUDA device and fallback is "error", or the first
            axis of an output is not the batch; lists all reasons.
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
            raise ValueError(f"example must have shape [B, channels, height, width], got {tuple(example.shape)}")
        reasons = _no_graph_reasons(model, example)
        if reasons and fallback == "error":
            raise UnsupportedInputError("GraphRunner", [*reasons, "fallback='eager' runs the model without graphs"])
        self.model = model.eval()
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self.captured = not reasons
        self._image_shape, self._dtype, self._device = example.shape[1:], example.dtype, example.device
        self._lock = threading.Lock()
        if self.captured:
            freeze(self.model)
        self._frozen = frozen_of(self.model)  # the graphs read their memory, even after the model drops them
        self._captured_from = [(parameter, parameter.data_ptr()) for parameter in self.model.parameters()]
        sizes = self.batch_sizes if self.captured else ()
        self._graphs = {size: _Graph(self.model, example, size) for size in sizes}
        self._last_done: torch.cuda.Event | None = None

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Any:
        """Returns model(images) for images [B, channels, height, width]; the first axis of each output is the batch.

        Raises:
            ValueError: images differ from the example in shape, dtype or device.
        """
        check_type("images", images, Tensor)
        if images.shape[1:] != self._image_shape or images.dtype != self._dtype or images.device != self._device:
            raise ValueError(
                f"images must be [B, {', '.join(map(str, self._image_shape))}] {self._dtype} on {self._device} like "
                f"the example, got {tuple(images.shape)} {images.dtype} on {images.device}"
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
        """Updates the frozen weights, also after changes that torch does not track (`.data`, other libraries).

        Raises:
            RuntimeError: parameters were replaced or moved after the capture.
        """
        now = list(self.model.parameters())
        held = len(now) == len(self._captured_from) and all(
            parameter is before and parameter.data_ptr() == address
            for parameter, (before, address) in zip(now, self._captured_from)
        )
        if self.captured and not held:
            raise RuntimeError("parameters must not be replaced or moved after the capture: build another GraphRunner")
        with self._lock:
            for frozen in self._frozen:
                frozen.refresh()


def _no_graph_reasons(model: nn.Module, example: Tensor) -> list[str]:
    reasons = []
    if not torch.cuda.is_available():
        reasons.append("this machine has no CUDA device")
    if example.device.type != "cuda":
        reasons.append(f"example must be on a CUDA device, got {example.device}")
    reasons += needs_more(model)
    reasons += [reason for module in model.modules() if (reason := getattr(type(module), "host_reads", ""))]
    devices = {parameter.device for parameter in model.parameters()} - {example.device}
    if devices:
        reasons.append(f"the model must be on the example's {example.device}, got {', '.join(map(str, devices))}")
    return reasons


def _require_images_first(outputs: Any, batch: int) -> None:
    """Raises UnsupportedInputError unless the first axis of each output is the batch."""
    shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    if wrong := [shape for shape in shapes if shape[:1] != (batch,)]:
        reason = f"the first axis of each output must be the batch, got {wrong[0]} for {batch} images"
        raise UnsupportedInputError("GraphRunner", [reason])


class _Graph:
    """The graph of one batch size, with its input and output buffers."""

    WARM_UP_RUNS = 3  # compile and autotune kernels and allocate their workspaces before the capture

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
        """Returns a copy of the outputs of up to `batch` images; earlier images pad the input."""
        self.input[: len(images)].copy_(images)
        self.graph.replay()
        return pytree.tree_map_only(Tensor, lambda tensor: tensor[: len(images)].clone(), self.output)

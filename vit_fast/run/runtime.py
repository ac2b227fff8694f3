"""Prepares a model for calls: torch.compile, the capture of a CUDA graph, and warm-up of Triton kernels."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import check_batch_sizes, check_choice, check_type
from ..fusion.fuse import frozen_of
from ..libraries.known import IMAGE_MODELS
from ..ops.backends import compile_launches, interpreter_is_active, triton_unavailable_reasons
from .compile_backend import Backend

CompileBackend = Literal["vit_fast", "inductor"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def compile(
    model: nn.Module, mode: CompileMode = "default", *, dynamic_batch: bool = False, fullgraph: bool = True,
    backend: CompileBackend = "vit_fast",
) -> nn.Module:  # fmt: skip
    """Compiles a model with torch.compile.

    Args:
        model: Any model, fused or not. The compiled model shares its parameters.
        mode: Mode of torch.compile. "default" compiles fastest. "reduce-overhead" replays CUDA graphs, which helps if
            launching kernels takes longer than running them, as with small batches. With CUDA graphs, each call
            overwrites the outputs of the previous call. "max-autotune" also times candidates for matmuls, which takes
            minutes. "max-autotune-no-cudagraphs" is "max-autotune" without CUDA graphs, for use with GraphRunner.
        dynamic_batch: True compiles one graph for all batch sizes from 2, and one for size 1, instead of one graph per
            size. The first axis of each input must be the batch.
        fullgraph: True raises an error at a graph break.
        backend: "vit_fast" replaces attention cores by fused attention, also those that no module contains. Inductor
            compiles the rest. "inductor" replaces nothing.
    Returns:
        The result of torch.compile. The keys of its state_dict start with "_orig_mod.". After the first call, its
        attribute `vit_fast_reports` contains a report of the backend for each graph; print it to show a table.
    Raises:
        ValueError: mode or backend is unknown.
    """
    check_type("model", model, nn.Module)
    check_choice("mode", mode, get_args(CompileMode))
    check_choice("backend", backend, get_args(CompileBackend))
    replacing, dynamic = Backend(), None if dynamic_batch else False
    chosen: Any = replacing if backend == "vit_fast" else backend
    compiled: Any = torch.compile(model, backend=chosen, mode=mode, fullgraph=fullgraph, dynamic=dynamic)
    vars(compiled)["vit_fast_reports"] = replacing.reports
    if dynamic_batch:
        compiled.register_forward_pre_hook(_mark_batch_dynamic, with_kwargs=True)
    if mode in ("reduce-overhead", "max-autotune"):
        compiled.register_forward_pre_hook(_update_frozen)
    return compiled


def compile_frozen(function: Callable[..., Any], *, fullgraph: bool = True) -> Callable[..., Any]:
    """Compiles a model for inference with its weights as constants; later changes of the weights have no effect."""
    from torch._inductor import config

    # torch reads config.freezing also while it traces (see `run`). The argument `options` prevents torch from reusing
    # code that it compiled without freezing for another model of the same class.
    compiled: Any = torch.compile(function, fullgraph=fullgraph, dynamic=False, options={"freezing": True})

    def run(*args: Any, **kwargs: Any) -> Any:
        with config.patch(freezing=True), torch.no_grad():
            return compiled(*args, **kwargs)

    return run


def _update_frozen(module: nn.Module, args: Any) -> None:
    """Updates frozen weights before a replay, and marks them as static, so that replays do not copy them."""
    for frozen in frozen_of(module):
        if not frozen.marked_static:
            for tensor in frozen.tensors:
                torch._dynamo.mark_static_address(tensor)
            frozen.marked_static = True
        frozen.ensure_current()


def _mark_batch_dynamic(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Marks the first axis as dynamic, except for size 1, which torch always specializes."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] > 1:
            torch._dynamo.mark_dynamic(value, 0)


def capture(run: Callable[[], Any], side: torch.cuda.Stream, pool: Any) -> Callable[[], Any]:
    """Captures a CUDA graph of `run` on a stream; returns a function that replays it. Replays overwrite the outputs.

    Graphs with the same pool share memory if they are captured on the same stream.
    """
    with torch.cuda.device(side.device):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles and autotunes kernels, and allocates workspaces
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # torch's own capture stream is on one device. Other threads may allocate memory during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            output = run()

    def replay() -> Any:
        graph.replay()
        return output

    return replay


@dataclass(frozen=True)
class WarmUp:
    """Result of a warm-up."""

    kernels: int  # number of kernels that later calls need and that were not loaded yet
    compiled: int  # number of compiled kernels; Triton's cache on disk contained the rest
    seconds: float
    reasons: tuple[str, ...] = ()  # why nothing was compiled, e.g. no GPU or no triton

    def __str__(self) -> str:
        if self.reasons:
            return f"nothing to compile: {'; '.join(self.reasons)}"
        cached = self.kernels - self.compiled
        return f"{self.kernels} kernels in {self.seconds:.1f} s: {self.compiled} compiled, {cached} from the cache"


def warm_up(
    model: nn.Module, batch_sizes: Sequence[int], training: bool = False, *, example: Tensor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WarmUp:  # fmt: skip
    """Compiles the kernels that a model needs, so that its first call compiles none.

    Finds the kernels by calling a copy of the model once per batch size without launching kernels. Compiles the missing
    kernels and stores them in Triton's cache on disk. Call warm_up with the model on the device of later calls, and
    under the same autocast. The model and the random number generators stay unchanged.

    Args:
        model: A VisionTransformer or a fused model; not compiled by torch.compile.
        batch_sizes: Batch sizes of later calls. The first call at another batch size may compile a few kernels.
        training: True compiles the kernels of training (forward and backward), False the kernels of inference.
        example: Images [any, channels, height, width] with the size, dtype and device of later calls. None means images
            with the size, dtype and device of the model.
        progress: Called with the number of finished kernels and the number of all kernels.
    Returns:
        The number of kernels and the duration; or the reasons why nothing was compiled.
    Raises:
        ValueError: batch_sizes are not positive integers, example is empty, or the model requires an example.
        RuntimeError: a kernel does not compile.
    """
    check_type("model", model, nn.Module)
    check_batch_sizes(batch_sizes)
    if example is None:
        known = next((known for library in IMAGE_MODELS if (known := library.recognize(model)) is not None), None)
        parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
        if known is None or parameter is None:
            raise ValueError(
                f"example must be given for a {type(model).__qualname__}: pass images [any batch size, channels, "
                "height, width] with the dtype and device of later calls"
            )
        example = torch.zeros(1, known.in_chans, *known.image_hw, dtype=parameter.dtype, device=parameter.device)
    check_type("example", example, Tensor)
    if example.dim() < 2 or example.shape[0] < 1:
        raise ValueError(f"example must have at least 2 dimensions and 1 image, got shape {tuple(example.shape)}")
    start = time.perf_counter()
    reasons = triton_unavailable_reasons(example.device)  # this runs a kernel: call it before recording launches
    if not reasons and interpreter_is_active():
        reasons = ("Triton's interpreter runs the kernels (TRITON_INTERPRET is set)",)
    if reasons:
        return WarmUp(0, 0, time.perf_counter() - start, reasons)

    # the copy shares the parameters, but not the buffers
    copied = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    copied.train(training)

    wanted = [parameter for parameter in copied.parameters() if parameter.requires_grad]

    def call_each() -> None:
        for size in sorted(set(batch_sizes)):
            with torch.set_grad_enabled(training):
                results = pytree.tree_leaves(copied(example[:1].expand(size, *example.shape[1:]).contiguous()))
                outputs = [value for value in results if isinstance(value, Tensor) and value.requires_grad]
                if outputs and wanted:
                    torch.autograd.grad(outputs, wanted, list(map(torch.zeros_like, outputs)), allow_unused=True)

    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with (
        torch.random.fork_rng(devices),
        torch.autograd.set_multithreading_enabled(False),  # run backward in this thread, which records launches
        torch.autograd.set_detect_anomaly(False),  # without launches, outputs may contain NaN
    ):
        kernels, compiled = compile_launches(call_each, progress)
    return WarmUp(kernels, compiled, time.perf_counter() - start)

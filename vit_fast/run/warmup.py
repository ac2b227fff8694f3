"""Compiles kernels before the first call of a model, e.g. when a server starts or a container is built."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..arguments import check_batch_sizes
from ..errors import check_type
from ..libraries.known import IMAGE_MODELS
from ..ops.backends import compile_launches, nothing_to_compile_reasons


@dataclass(frozen=True)
class WarmUp:
    """Result of a warm-up.

    Attributes:
        kernels: Number of kernels that later calls need and that were not loaded yet.
        compiled: How many of them were compiled; the others were in Triton's cache on disk.
        seconds: Duration.
        reasons: Reasons why nothing was compiled, e.g. no GPU or no triton.
    """

    kernels: int
    compiled: int
    seconds: float
    reasons: tuple[str, ...] = ()

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

    Calls a copy of the model, which shares its parameters, once per batch size, and records the launches without
    running them. Then compiles the missing kernels, in parallel if that is faster, and stores them in Triton's cache on
    disk. Call it on the device of later calls, and under torch.autocast if they use it. Random number generators,
    buffers and gradients stay unchanged.

    Args:
        model: A VisionTransformer or a fused model; not compiled by torch.compile.
        batch_sizes: Batch sizes of later calls. For ViT-S, B and L, the first call with another size of 12 or more
            images (in training 33 or more) compiles at most one kernel; with smaller sizes, a few.
        training: True compiles the kernels of training steps, forward and backward, instead of those of inference.
        example: Images [any, channels, height, width] like those of later calls; None means images of the model's size
            in the dtype of its parameters.
        progress: Called with the number of finished and of all kernels.
    Returns:
        The number of kernels and the duration; or the reasons why Triton cannot run here.
    Raises:
        ValueError: batch_sizes are not positive integers, or the example is missing or empty.
        RuntimeError: a kernel does not compile.
    """
    check_type("model", model, nn.Module)
    check_batch_sizes(batch_sizes)
    if example is None:
        example = _example(model)
    check_type("example", example, Tensor)
    if example.dim() < 2 or example.shape[0] < 1:
        raise ValueError(f"example must have shape [any, channels, height, width], got {tuple(example.shape)}")
    start = time.perf_counter()
    if reasons := nothing_to_compile_reasons(example.device):  # this runs a kernel: call it before recording launches
        return WarmUp(0, 0, time.perf_counter() - start, reasons)

    def call_each() -> None:
        for size in sorted(set(batch_sizes)):
            images = example[:1].expand(size, *example.shape[1:]).contiguous()
            _call(stand_in, images, training)

    with _isolated_copy(model, training) as stand_in:
        kernels, compiled = compile_launches(call_each, progress)
    return WarmUp(kernels, compiled, time.perf_counter() - start)


def _example(model: nn.Module) -> Tensor:
    known = next((known for library in IMAGE_MODELS if (known := library.recognise(model)) is not None), None)
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if known is None or parameter is None:
        raise ValueError(
            f"example must be given for a {type(model).__qualname__}: pass images [any, channels, height, width] with "
            "the dtype and device of later calls"
        )
    return torch.zeros(1, known.in_chans, *known.image_hw, dtype=parameter.dtype, device=parameter.device)


@contextlib.contextmanager
def _isolated_copy(model: nn.Module, training: bool) -> Iterator[nn.Module]:
    """Yields a copy that shares the parameters but not the buffers; restores random number generators."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with (
        torch.random.fork_rng(devices),
        torch.autograd.set_multithreading_enabled(False),  # run backward in this thread, which records launches
        torch.autograd.set_detect_anomaly(False),  # without launches, outputs may contain NaN
    ):
        yield copy.deepcopy(model, shared).train(training)


def _call(model: nn.Module, images: Tensor, training: bool) -> None:
    if not training:
        with torch.no_grad():
            model(images)
        return
    with torch.enable_grad():
        outputs = [value for value in pytree.tree_leaves(model(images)) if isinstance(value, Tensor)]
        outputs = [output for output in outputs if output.requires_grad]
        wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, [torch.zeros_like(output) for output in outputs], allow_unused=True)

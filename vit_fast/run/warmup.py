"""Kernels compiled before the first call: for a server that must answer at once, or a container that is built once."""

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
    """What a warm-up did.

    Attributes:
        kernels: Kernels that the calls to come need and this process had not loaded yet.
        compiled: Of these, how many had to be compiled; the others lay in Triton's cache on disk.
        seconds: How long it took.
        reasons: Why there was nothing to compile, where that is known: no GPU, no triton.
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
    model: nn.Module,
    batch_sizes: Sequence[int],
    training: bool = False,
    *,
    example: Tensor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WarmUp:
    """Compiles the kernels that calls of a model will need, so that the first call compiles none.

    A copy of the model that shares its parameters is called once for each batch size, without launching what is not
    compiled yet; that is then compiled, in parallel processes where that helps, and kept in Triton's cache on disk too.
    Call it as the model will be called: on its device, and under torch.autocast if that is used. Random numbers,
    buffers and gradients stay as they are.

    Args:
        model: Ours, or one that `fuse` has changed; not compiled by torch.compile.
        batch_sizes: Images of the calls to come. Another size compiles at its first call what it alone needs: at most
            one kernel from twelve images on without gradients, from 33 on in training, a few below (ViT-S, B and L).
        training: Whether they are training steps, forward and backward; else without gradients, in evaluation mode.
        example: Images [any, channels, height, width] like theirs; None stands for images of the size that the model
            was made for, in its parameters' dtype.
        progress: Called with how many kernels are done, and of how many.
    Returns:
        How many kernels, and how long it took; nothing where Triton does not run, with the reasons.
    Raises:
        ValueError: batch_sizes is empty or has other than positive numbers; an example is needed, or has no images.
        RuntimeError: a kernel does not compile.
    """
    check_type("model", model, nn.Module)
    check_batch_sizes(batch_sizes)
    if example is None:
        example = _example(model)
    check_type("example", example, Tensor)
    if example.dim() < 2 or example.shape[0] < 1:
        raise ValueError(f"example has shape {tuple(example.shape)}: accepted is [any, channels, height, width]")
    start = time.perf_counter()
    # a small kernel runs for this, while launches are not held back yet
    reasons = nothing_to_compile_reasons(example.device)
    if reasons:
        return WarmUp(0, 0, time.perf_counter() - start, reasons)

    def call_each() -> None:
        for size in sorted(set(batch_sizes)):
            images = example[:1].expand(size, *example.shape[1:]).contiguous()
            _call(stand_in, images, training)

    with _untouched(model, training) as stand_in:
        kernels, compiled = compile_launches(call_each, progress)
    return WarmUp(kernels, compiled, time.perf_counter() - start)


def _example(model: nn.Module) -> Tensor:
    known = next((known for library in IMAGE_MODELS if (known := library.recognise(model)) is not None), None)
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if known is None or parameter is None:
        raise ValueError(
            f"model is a {type(model).__qualname__} of unknown input: give an example, images [any, channels, height, "
            "width] of the dtype and on the device of the calls to come"
        )
    return torch.zeros(1, known.in_chans, *known.image_hw, dtype=parameter.dtype, device=parameter.device)


@contextlib.contextmanager
def _untouched(model: nn.Module, training: bool) -> Iterator[nn.Module]:
    """A copy whose calls leave no trace: the parameters are the same, buffers its own, random numbers are put back."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with (
        torch.random.fork_rng(devices),
        torch.autograd.set_multithreading_enabled(False),  # the backward in this thread, where launches are held back
        torch.autograd.set_detect_anomaly(False),  # what was not launched computes anything, NaN too
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

"""Makes a choice run: a function of the model's inputs that computes as the choice says."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..apps.data import CALIBRATION_IMAGES, as_inputs
from ..apps.data import photographs as read
from ..errors import UnsupportedInputError
from ..fusion.calibration import calibrate
from ..fusion.freezing import freeze
from ..fusion.fuse import fuse
from ..libraries.known import recognise
from ..ops.backends import fp8_reasons
from ..quantization.fp8_agreement import as_taken, logits_of
from ..run.runtime import GraphRunner, compile, compile_frozen
from .candidate import DTYPES, Candidate, CompileMode
from .optimized import (
    Function,
    Optimized,
    hook_reasons,
    in_pieces,
    of_images,
    only_images,
    tensors_in,
    with_inputs,
    with_threads,
)
from .runtimes import OnnxFile, session


def build(
    choice: Candidate,
    model: nn.Module,
    example: Any,
    output: Any,
    photographs: Sequence[str | Path],
    min_agreement: float = 0.0,
) -> Optimized:
    """A model in its chosen form. The model itself is left as it is.

    Args:
        choice: What to build.
        model: In evaluation mode; the result may share its weights, so give a copy that nobody else holds.
        example: What it is called with: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        output: What it gives for that.
        photographs: Files to calibrate int8 and fp8 with; none means the photograph inside matplotlib's wheel.
        min_agreement: Share of these images that a classifier in fp8 must answer as the model does: as many of its
            layers stay in bf16.
    Raises:
        UnsupportedInputError: the choice cannot be had for this model or here; all reasons.
    """
    dtypes = tuple(leaf.dtype for leaf in tensors_in(output) if leaf.is_floating_point())
    if choice != Candidate() and (reasons := hook_reasons(model)):
        raise UnsupportedInputError(choice.name, reasons)
    if choice.runs_file:  # which cuts batches and counts threads by itself
        function = session(choice, model, example, output, photographs)
        return Optimized(model, choice, function, output_dtypes=dtypes)
    function = _module(choice, model, example, photographs, min_agreement)
    if choice.split is not None:
        function = in_pieces(function, choice.split)
    if choice.threads is not None:
        function = with_threads(function, choice.threads)
    return Optimized(model, choice, function, output_dtypes=dtypes)


def changed_copy(
    choice: Candidate, model: nn.Module, example: Any, photographs: Sequence[str | Path], min_agreement: float = 0.0
) -> nn.Module:
    """A copy of the model in the choice's number format and fused as it says; it shares parameters where it can.

    Args:
        choice, model, example, photographs, min_agreement: As of build.
    Raises:
        UnsupportedInputError: nothing in the model can be fused, the backend cannot run here, or min_agreement cannot
            be reached.
    """
    if choice.precision == "fp8" and (reasons := fp8_reasons(tensors_in(example)[0].device)):
        raise UnsupportedInputError(choice.name, reasons)
    shared = choice.precision is None and not choice.channels_last
    work = sharing_copy(model) if shared else copy.deepcopy(model).eval()
    if choice.precision is not None:
        work = work.to(DTYPES[choice.precision])
    if choice.precision == "fp8":
        batches = _calibration_images(choice, model, example, photographs)
        calibrate(work, batches)
        with torch.no_grad():
            classifies = logits_of(work(as_taken(work, batches[0]))) is not None
        fuse(work, precision="fp8", min_agreement=min_agreement if classifies and min_agreement else None)
    elif choice.backend_of("attention") or choice.backend_of("norm + MLP"):
        _fuse_parts(work, choice)
    if choice.channels_last:
        work.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
    if choice.frozen and choice.engine != "compile" and not freeze(work):
        raise UnsupportedInputError(choice.name, ["nothing in the model can be frozen"])
    return work


def _calibration_images(
    choice: Candidate, model: nn.Module, example: Any, photographs: Sequence[str | Path]
) -> Sequence[Tensor]:
    """Batches to look for ranges on: photographs, and where nobody says how they are prepared, the example."""
    images = only_images(example)
    if images is None:
        raise UnsupportedInputError(choice.name, ["expected models that are called with images alone"])
    data = None
    try:
        data = recognise(model).data_config
    except UnsupportedInputError:
        if not photographs:
            return [images]
    height, width = images.shape[2:]
    inputs = as_inputs(read(photographs or None, CALIBRATION_IMAGES), data, (height, width), images.shape[1])
    return inputs.split(len(images))


def _fuse_parts(work: nn.Module, choice: Candidate) -> None:
    named = {backend for backend in (choice.attention, choice.mlp) if backend is not None}
    # "triton" before the others: it is refused where it cannot run
    report = fuse(work, max(named))  # the last in the alphabet
    rows = [row for row in report.fused if choice.backend_of(row.part) is not None]
    if not rows:
        reasons = [f"{row.name}: {'; '.join(row.reasons)}" for row in report.left[:3]]
        raise UnsupportedInputError(choice.name, reasons or ["nothing in the model is known to vit_fast.fuse"])
    for row in rows:
        module: Any = work.get_submodule(row.name)
        module.set_fused_backend(str(choice.backend_of(row.part)))


def _module(
    choice: Candidate, model: nn.Module, example: Any, photographs: Sequence[str | Path], min_agreement: float
) -> Function:
    if choice == Candidate():
        return model
    if isinstance(model, OnnxFile):
        raise UnsupportedInputError(choice.name, ["the model is a file: expected runtimes of files"])
    work = changed_copy(choice, model, example, photographs, min_agreement)
    # other libraries' models may break the graph
    function: Function = compile_function(work, choice.compile_mode, fullgraph=False)
    if choice.compile_mode == "max-autotune":
        function = _in_memory_of_their_own(function)
    dtype = None if choice.precision is None else DTYPES[choice.precision]
    if choice.graphs:
        images = only_images(example)
        if images is None:
            raise UnsupportedInputError(choice.name, ["CUDA graphs are replayed of calls with one tensor"])
        size = choice.split or len(images)
        runner = GraphRunner(work, images if dtype is None else images.to(dtype), (size,))
        function = of_images(runner, model, example, f"a model optimized as {choice.name!r}")
    if dtype is not None or choice.channels_last:
        function = with_inputs(function, lambda value: _as(value, dtype, choice.channels_last))
    return function


def compile_function(function: Function, mode: CompileMode, *, fullgraph: bool) -> Function:
    """Compiles a function or module in a mode; each shape is compiled for itself."""
    if mode == "none":
        return function
    if mode == "freezing":
        return compile_frozen(function, fullgraph=fullgraph)
    if not isinstance(function, nn.Module):
        raise UnsupportedInputError("torch.compile", ["only modules of torch are compiled"])
    return compile(function, mode, fullgraph=fullgraph)


def _in_memory_of_their_own(function: Function) -> Function:
    """The function, whose outputs the next replay of its CUDA graph would write over."""
    return lambda *args, **kwargs: pytree.tree_map_only(Tensor, torch.clone, function(*args, **kwargs))


def _as(value: Tensor, dtype: torch.dtype | None, channels_last: bool) -> Tensor:
    last = torch.channels_last if channels_last and value.dim() == 4 else torch.preserve_format
    return value.to(dtype=dtype or value.dtype, memory_format=last)


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy with the very same parameters and buffers."""
    kept: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, kept).eval()

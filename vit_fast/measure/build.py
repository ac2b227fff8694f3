"""Builds a candidate: a function of the model's inputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..apps.data import CALIBRATION_IMAGES, as_inputs
from ..apps.data import read_images as read
from ..errors import UnsupportedInputError
from ..fusion.calibration import calibrate
from ..fusion.freezing import freeze
from ..fusion.fuse import fuse
from ..libraries.known import recognise
from ..ops.backends import fp8_reasons
from ..quantization.fp8_emulation import as_taken, logits_of
from ..run.graph_runner import GraphRunner
from .candidate import DTYPES, Candidate
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
    candidate: Candidate,
    model: nn.Module,
    example: Any,
    output: Any,
    image_files: Sequence[str | Path],
    min_agreement: float = 0.0,
) -> Optimized:
    """Builds a candidate for a model in evaluation mode, which is not changed; the result may share its weights.

    Args:
        candidate, model, example: What to build; the example is a tensor, a tuple of arguments, or a mapping of them.
        output: The model's output for the example.
        image_files: Image files to calibrate int8 and fp8 with; empty means the sample image of matplotlib.
        min_agreement: Top-1 agreement of a classifier in fp8 on these images; sensitive layers stay in bf16.
    Raises:
        UnsupportedInputError: the candidate is not available for this model or here; all reasons.
    """
    dtypes = tuple(leaf.dtype for leaf in tensors_in(output) if leaf.is_floating_point())
    if candidate != Candidate() and (reasons := hook_reasons(model)):
        raise UnsupportedInputError(candidate.name, reasons)
    if candidate.runs_file:  # the runtime splits batches and sets threads itself
        function = session(candidate, model, example, output, image_files)
        return Optimized(model, candidate, function, output_dtypes=dtypes)
    function = _module(candidate, model, example, image_files, min_agreement)
    if candidate.split is not None:
        function = in_pieces(function, candidate.split)
    if candidate.threads is not None:
        function = with_threads(function, candidate.threads)
    return Optimized(model, candidate, function, output_dtypes=dtypes)


def changed_copy(
    candidate: Candidate, model: nn.Module, example: Any, image_files: Sequence[str | Path], min_agreement: float = 0.0
) -> nn.Module:
    """Returns a copy of the model in the candidate's precision, fused and frozen; it shares parameters if possible.

    Raises:
        UnsupportedInputError: nothing can be fused, the backend is unavailable, or min_agreement cannot be reached.
    """
    if candidate.precision == "fp8" and (reasons := fp8_reasons(tensors_in(example)[0].device)):
        raise UnsupportedInputError(candidate.name, reasons)
    shared = candidate.precision is None and not candidate.channels_last
    work = sharing_copy(model) if shared else copy.deepcopy(model).eval()
    if candidate.precision is not None:
        work = work.to(DTYPES[candidate.precision])
    if candidate.precision == "fp8":
        batches = _calibration_images(candidate, model, example, image_files)
        calibrate(work, batches)
        with torch.no_grad():
            classifies = logits_of(work(as_taken(work, batches[0]))) is not None
        fuse(work, precision="fp8", min_agreement=min_agreement if classifies and min_agreement else None)
    elif candidate.backend_of("attention") or candidate.backend_of("norm + MLP"):
        _fuse_parts(work, candidate)
    if candidate.channels_last:
        work.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
    if candidate.frozen and candidate.engine != "compile" and not freeze(work):
        raise UnsupportedInputError(candidate.name, ["no module of the model can be frozen"])
    return work


def _calibration_images(
    candidate: Candidate, model: nn.Module, example: Any, image_files: Sequence[str | Path]
) -> Sequence[Tensor]:
    """Batches of image_files, or the example if the preprocessing of the model is unknown."""
    images = only_images(example)
    if images is None:
        raise UnsupportedInputError(candidate.name, ["the model must take one tensor"])
    data = None
    try:
        data = recognise(model).data_config
    except UnsupportedInputError:
        if not image_files:
            return [images]
    height, width = images.shape[2:]
    inputs = as_inputs(read(image_files or None, CALIBRATION_IMAGES), data, (height, width), images.shape[1])
    return inputs.split(len(images))


def _fuse_parts(work: nn.Module, candidate: Candidate) -> None:
    named = {backend for backend in (candidate.attention, candidate.mlp) if backend is not None}
    report = fuse(work, max(named))  # triton if it is among them, which raises an error if it is unavailable
    rows = [row for row in report.fused if candidate.backend_of(row.part) is not None]
    if not rows:
        reasons = [f"{row.name}: {'; '.join(row.reasons)}" for row in report.skipped[:3]]
        raise UnsupportedInputError(candidate.name, reasons or ["vit_fast.fuse supports no module of the model"])
    for row in rows:
        module: Any = work.get_submodule(row.name)
        module.set_fused_backend(str(candidate.backend_of(row.part)))


def _module(
    candidate: Candidate, model: nn.Module, example: Any, image_files: Sequence[str | Path], min_agreement: float
) -> Function:
    if candidate == Candidate():
        return model
    if isinstance(model, OnnxFile):
        raise UnsupportedInputError(candidate.name, ["an ONNX file needs ONNX Runtime or OpenVINO"])
    work = changed_copy(candidate, model, example, image_files, min_agreement)
    function: Function = candidate.compiled(work, fullgraph=False)  # models of other libraries may have graph breaks
    if candidate.compile_mode in ("reduce-overhead", "max-autotune"):
        function = _with_own_outputs(function)
    dtype = None if candidate.precision is None else DTYPES[candidate.precision]
    if candidate.graphs:
        images = only_images(example)
        if images is None:
            raise UnsupportedInputError(candidate.name, ["CUDA graphs need a model that takes one tensor"])
        size = candidate.split or len(images)
        runner = GraphRunner(work, images if dtype is None else images.to(dtype), (size,))
        function = of_images(runner, model, example, f"a model optimized as {candidate.name!r}")
    if dtype is not None or candidate.channels_last:
        function = with_inputs(function, lambda value: _as(value, dtype, candidate.channels_last))
    return function


def _with_own_outputs(function: Function) -> Function:
    """Copies the outputs, which the next replay of a CUDA graph overwrites."""
    return lambda *args, **kwargs: pytree.tree_map_only(Tensor, torch.clone, function(*args, **kwargs))


def _as(value: Tensor, dtype: torch.dtype | None, channels_last: bool) -> Tensor:
    last = torch.channels_last if channels_last and value.dim() == 4 else torch.preserve_format
    return value.to(dtype=dtype or value.dtype, memory_format=last)


def sharing_copy(model: nn.Module) -> nn.Module:
    """Returns a copy that shares parameters and buffers."""
    kept: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, kept).eval()

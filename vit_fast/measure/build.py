"""Builds a candidate, a way to run a model, as an `Optimized`."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..apps.data import CALIBRATION_IMAGES, as_inputs
from ..apps.data import read_images as read
from ..blocks.plain import is_hooked
from ..errors import UnsupportedInputError
from ..fusion.calibration import calibrate
from ..fusion.fuse import freeze, fuse
from ..libraries.known import recognize
from ..ops.backends import fp8_reasons
from ..quantization.fp8 import as_model_input, logits_of
from ..run.graph_runner import GraphRunner
from .candidate import DTYPES, GRAPH_MODES, ORIGINAL, Candidate, leaves_of, tensors_in
from .runtimes import OnnxFile, open_file, provide_onnx

Function = Callable[..., Any]


class Optimized:
    """A callable for inference that runs an independent copy of a model as a candidate.

    It takes the model's inputs and returns outputs in the model's dtypes. It has no parameters or submodules.
    """

    __slots__ = ("_function", "_output_dtypes", "candidate")  # setting another attribute raises an error

    def __init__(self, candidate: Candidate, function: Function, output_dtypes: tuple[torch.dtype, ...]) -> None:
        self.candidate, self._function, self._output_dtypes = candidate, function, output_dtypes

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._function(*args, **kwargs)
        if self.candidate == ORIGINAL:
            return output
        dtypes = iter(self._output_dtypes)
        return map_floating(lambda value: value.to(next(dtypes, value.dtype)), output)

    def __getattr__(self, name: str) -> Any:
        remedy = "to change the model, change the original and call vit_fast.optimize again"
        raise AttributeError(f"an optimized model can only be called, and has no attribute {name!r}: {remedy}")

    def eval(self) -> Optimized:
        return self  # the copy is always in eval mode

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.candidate.engine != "torch" or not isinstance(self._function, nn.Module):
            reason = "it cannot be pickled: use result.save(path) and vit_fast.load_optimized(path, model)"
            raise UnsupportedInputError(f"a model optimized as {self.candidate.name!r}", [reason])
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimized:
        return self


def build(
    candidate: Candidate, model: nn.Module, example: Any, output: Any, image_files: Sequence[str | Path],
    min_agreement: float = 0.0, folder: Path | None = None,
) -> Optimized:  # fmt: skip
    """Builds a candidate for a model. `output` is the model's output for the example. Weights may be shared.

    ONNX files of the model are written to `folder`, and reused by later candidates.
    """
    hooked = [name or "the model" for name, module in model.named_modules() if is_hooked(module)]
    if candidate != ORIGINAL and hooked:
        raise UnsupportedInputError(candidate.name, [f"hooks of {', '.join(hooked[:3])} would not run: remove them"])
    function: Function = model
    if candidate.runs_file:  # _session splits batches and sets threads
        function = _session(candidate, model, example, output, image_files, folder)
    elif candidate != ORIGINAL:
        if isinstance(model, OnnxFile):
            raise UnsupportedInputError(candidate.name, ["an ONNX file runs only in ONNX Runtime or OpenVINO"])
        work = changed_copy(candidate, model, example, image_files, min_agreement)
        function = candidate.compiled(work, fullgraph=False)  # models of other libraries may have graph breaks
        if candidate.engine in GRAPH_MODES:
            compiled = function  # the next replay of its CUDA graphs overwrites the outputs
            function = lambda *args, **named: pytree.tree_map_only(Tensor, torch.clone, compiled(*args, **named))  # noqa: E731
        dtype = None if candidate.precision is None else DTYPES[candidate.precision]
        if candidate.graphs:
            if (images := only_images(example)) is None:
                raise UnsupportedInputError(candidate.name, ["CUDA graphs need a model that takes one tensor"])
            runner = GraphRunner(work, images.to(dtype or images.dtype), (candidate.split or len(images),), fuse=False)
            function = _of_images(runner, model, example, candidate)
        if dtype is not None:
            function = with_inputs(function, lambda value: value.to(dtype))
        if candidate.split is not None:
            function = _in_pieces(function, candidate.split)
        if candidate.threads is not None:
            function = _with_threads(function, candidate.threads)
    return Optimized(candidate, function, tuple(leaf.dtype for leaf in leaves_of(output)))


def changed_copy(
    candidate: Candidate, model: nn.Module, example: Any, image_files: Sequence[str | Path], min_agreement: float = 0.0
) -> nn.Module:
    """Returns a copy of the model in the candidate's precision, fused and frozen; shares parameters if possible."""
    if candidate.precision == "fp8" and (reasons := fp8_reasons(tensors_in(example)[0].device)):
        raise UnsupportedInputError(candidate.name, reasons)
    shared: dict[int, Any] = {}
    if candidate.precision is None:
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    work = copy.deepcopy(model, shared)
    work.eval()
    if candidate.precision is not None:
        work = work.to(DTYPES[candidate.precision])
    if candidate.precision == "fp8":
        batches = _calibration_images(candidate, model, example, image_files)
        calibrate(work, batches)
        with torch.no_grad():
            classifies = logits_of(work(as_model_input(work, batches[0]))) is not None
        fuse(work, precision="fp8", min_agreement=min_agreement if classifies and min_agreement else None)
    elif candidate.attention or candidate.mlp:
        _fuse_parts(work, candidate, example)
    if candidate.frozen and not freeze(work):
        raise UnsupportedInputError(candidate.name, ["vit_fast.freeze supports no module of the model"])
    return work


def _calibration_images(
    candidate: Candidate, model: nn.Module, example: Any, image_files: Sequence[str | Path]
) -> Sequence[Tensor]:
    """Returns batches of image_files. The default is a sample image, or the example for an unknown model."""
    images, data = only_images(example), None
    if images is None:
        raise UnsupportedInputError(candidate.name, ["the model must take one tensor and no other argument"])
    try:
        data = recognize(model).data_config
    except UnsupportedInputError:
        if not image_files:
            return [images]
    height, width = images.shape[2:]
    inputs = as_inputs(read(image_files or None, CALIBRATION_IMAGES), data, (height, width), images.shape[1])
    return inputs.split(len(images))


def _fuse_parts(work: nn.Module, candidate: Candidate, example: Any) -> None:
    backends = {"attention": candidate.attention, "MLP": candidate.mlp}
    if candidate.precision is not None:
        dtype = DTYPES[candidate.precision]
        example = map_floating(lambda value: value.to(dtype), example)
    best = max(filter(None, backends.values()))  # triton raises an error if it is unavailable
    report = fuse(work, best, example=example)
    fused = [(row, backends["attention" if row.part.startswith("attention") else "MLP"]) for row in report.fused]
    if not any(backend for _, backend in fused):
        reasons = [f"{row.name}: {'; '.join(row.reasons)}" for row in report.skipped[:3]]
        raise UnsupportedInputError(candidate.name, reasons or ["vit_fast.fuse supports no module of the model"])
    for row, backend in fused:
        if backend is not None:
            module: Any = work.get_submodule(row.name)
            module.set_fused_backend(backend)


def _session(
    candidate: Candidate, model: nn.Module, example: Any, output: Any, image_files: Sequence[str | Path],
    folder: Path | None,
) -> Function:  # fmt: skip
    """Exports a model; returns a function with the model's signature that runs the file in a runtime."""
    images = only_images(example)
    leaves, spec = pytree.tree_flatten(output)
    if images is None:
        raise UnsupportedInputError(candidate.name, ["the model must take one tensor and no other argument"])
    if len(tensors_in(output)) != 1 or len(leaves) != 1:
        found = f"{len(leaves)} values, of which {len(tensors_in(output))} are tensors"
        reason = f"the model must return one tensor and no other value, got {found}"
        raise UnsupportedInputError(candidate.name, [reason])
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as place:
        path = provide_onnx(candidate, lambda: model, Path(place), images, image_files)
        run: Function = open_file(candidate, path, images, model.image_hw if isinstance(model, OnnxFile) else None)
    if candidate.engine == "openvino":
        run = _in_pieces(run, candidate.split or len(images))
    # files that write_onnx exports have fp32 inputs and outputs
    as_given = isinstance(model, OnnxFile) or (candidate.engine == "openvino" and images.dtype == torch.bfloat16)

    def computed(images: Tensor) -> Any:
        given = images if as_given or not images.is_floating_point() else images.float()
        return pytree.tree_unflatten([run(given)], spec)

    return _of_images(computed, model, example, candidate)


def _in_pieces(function: Function, size: int) -> Function:
    """Calls the function for `size` images at a time, and concatenates the outputs along the first axis."""

    def run(*args: Any, **kwargs: Any) -> Any:
        batch = next((leaf.shape[0] for leaf in tensors_in((args, kwargs)) if leaf.dim()), 0)
        if batch <= size:
            return function(*args, **kwargs)

        def piece(start: int, value: Tensor) -> Tensor:
            return value[start : start + size] if value.dim() and value.shape[0] == batch else value

        given = (pytree.tree_map_only(Tensor, partial(piece, at), (args, kwargs)) for at in range(0, batch, size))
        pieces = [function(*some, **named) for some, named in given]
        return pytree.tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *pieces)

    return run


def _with_threads(function: Function, count: int) -> Function:
    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(before)

    return run


def map_floating(convert: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Converts the floating-point tensors in a nested structure."""
    return pytree.tree_map_only(Tensor, lambda value: convert(value) if value.is_floating_point() else value, values)


def with_inputs(function: Function, convert: Callable[[Tensor], Tensor]) -> Function:
    """Converts floating-point inputs before each call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        some, named = map_floating(convert, (args, kwargs))
        return function(*some, **named)

    return run


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def call(function: Function, example: Any) -> Any:
    args, kwargs = arguments(example)
    return function(*args, **kwargs)


def only_images(example: Any) -> Tensor | None:
    """Returns the tensor of an example that is a single tensor; otherwise None."""
    args, kwargs = arguments(example)
    values = [*args, *kwargs.values()]
    return values[0] if len(values) == 1 and isinstance(values[0], Tensor) else None


def _of_images(function: Callable[[Tensor], Any], model: nn.Module, example: Any, candidate: Candidate) -> Function:
    """Lets callers pass the images by position, by the name in the example, or by forward's first parameter."""
    names = {*arguments(example)[1], *list(inspect.signature(model.forward).parameters)[:1]}

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *(kwargs[name] for name in names & kwargs.keys())]
        others = [name for name, value in kwargs.items() if name not in names and value is not None]
        if len(given) == 1 and not others and isinstance(given[0], Tensor):
            return function(given[0])
        called = ", ".join([type(value).__name__ for value in given] + others) or "nothing"
        what = f"a model optimized as {candidate.name!r}"
        raise UnsupportedInputError(what, [f"it must be called with one tensor of images, got {called}"])

    return run

"""Makes a choice run: a function of the model's inputs that computes as the choice says."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..data import default_photograph
from ..errors import UnsupportedInputError
from ..freezing import freeze
from ..fused import FusedModule
from ..fusion import fuse
from ..runtime import GraphRunner
from .choices import DTYPES, Choice
from .drop_in import Function, Optimized, hook_reasons, in_pieces, with_inputs, with_threads

OPSET = 20


def build(choice: Choice, model: nn.Module, example: Any, output: Any, photographs: Sequence[str | Path]) -> Optimized:
    """A model in its chosen form. The model itself is left as it is.

    Args:
        choice: What to build.
        model: In evaluation mode.
        example: What it is called with: a tensor, or a tuple of arguments.
        output: What it gives for that.
        photographs: Files to calibrate int8 with; none means the photograph inside matplotlib's wheel.
    Raises:
        UnsupportedInputError: the choice cannot be had for this model or here; all reasons.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    dtypes = tuple(leaf.dtype for leaf in leaves if leaf.is_floating_point())
    if choice != Choice() and (reasons := hook_reasons(model)):
        raise UnsupportedInputError(choice.name, reasons)
    function, shares = (
        _session(choice, model, example, output, photographs)
        if choice.engine == "onnxruntime"
        else _module(choice, model, example)
    )
    if choice.split is not None:
        function = in_pieces(function, choice.split)
    if choice.threads is not None and choice.engine != "onnxruntime":
        function = with_threads(function, choice.threads)
    return Optimized(model, choice, function, shares_weights=shares, output_dtypes=dtypes)


def arguments(example: Any) -> tuple[Any, ...]:
    """An example as positional arguments."""
    return example if isinstance(example, tuple) else (example,)


def prepared_module(choice: Choice, model: nn.Module) -> nn.Module:
    """A copy of the model in the choice's number format and fused as it says; it shares parameters where it can.

    Raises:
        UnsupportedInputError: nothing in the model can be fused, or the backend cannot run here.
    """
    shares = _shares_weights(choice)
    kept = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())} if shares else {}
    work = copy.deepcopy(model, kept).eval()
    if choice.precision is not None:
        work = work.to(DTYPES[choice.precision])
    if choice.attention is not None or choice.mlp is not None:
        _fuse_parts(work, choice)
    if choice.channels_last:
        work.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
    if choice.frozen and choice.engine != "compile" and not freeze(work):
        raise UnsupportedInputError(choice.name, ["nothing in the model can be frozen"])
    return work


def _shares_weights(choice: Choice) -> bool:
    return choice.precision is None and not choice.channels_last


def _fuse_parts(work: nn.Module, choice: Choice) -> None:
    wanted = {"attention": choice.attention, "norm + MLP": choice.mlp}
    named = [backend for backend in wanted.values() if backend is not None]
    # "triton" before the others: it is refused where it cannot run
    report = fuse(work, max(named))  # the last in the alphabet
    rows = [row for row in report.fused if row.part in wanted]
    if not rows:
        reasons = [f"{row.name}: {'; '.join(row.reasons)}" for row in report.left[:3]]
        raise UnsupportedInputError(choice.name, reasons or ["nothing in the model is known to vit_fast.fuse"])
    for row in rows:
        module: Any = work.get_submodule(row.name)
        backend = wanted[row.part]
        if backend is not None and isinstance(module, FusedModule):
            module.set_fused_backend(backend)
        elif backend is not None:
            module.backend = backend


def _module(choice: Choice, model: nn.Module, example: Any) -> tuple[Function, bool]:
    """A function by torch, and whether it reads the model's own weights."""
    if choice == Choice():
        return model, True
    work = prepared_module(choice, model)
    function: Function = work
    frozen_in = choice.engine != "torch" and choice.frozen
    if choice.engine != "torch":
        # of other libraries' models a graph may break; each shape is compiled for itself
        how: dict[str, Any] = {"options": {"freezing": True}} if frozen_in else {"mode": _mode(choice)}
        function = torch.compile(work, dynamic=False, **how)
    dtype = None if choice.precision is None else DTYPES[choice.precision]
    if choice.graphs:
        images = arguments(example)
        if len(images) != 1 or not isinstance(images[0], Tensor):
            raise UnsupportedInputError(choice.name, ["CUDA graphs are replayed of calls with one tensor"])
        size = choice.split or images[0].shape[0]
        function = GraphRunner(work, images[0] if dtype is None else images[0].to(dtype), (size,))
    if dtype is not None or choice.channels_last:
        function = with_inputs(function, lambda value: _as(value, dtype, choice.channels_last))
    return function, _shares_weights(choice) and not frozen_in


def _mode(choice: Choice) -> str:
    return "default" if choice.engine == "compile" else choice.engine


def _as(value: Tensor, dtype: torch.dtype | None, channels_last: bool) -> Tensor:
    last = torch.channels_last if channels_last and value.dim() == 4 else torch.preserve_format
    return value.to(dtype=dtype or value.dtype, memory_format=last)


def _session(
    choice: Choice, model: nn.Module, example: Any, output: Any, photographs: Sequence[str | Path]
) -> tuple[Function, bool]:
    """A session of ONNX Runtime; the file is gone once it is loaded."""
    images = arguments(example)
    if len(images) != 1 or not isinstance(images[0], Tensor) or not isinstance(output, Tensor):
        raise UnsupportedInputError(choice.name, ["accepted are models that take images and give one tensor"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_onnx(choice, model, path, images[0], photographs)
        from vit_fast.export import OnnxRunner

        device = images[0].device
        threads = None if device.type != "cpu" else choice.threads or torch.get_num_threads()
        runner = OnnxRunner(path, str(device), threads=threads, max_batch=choice.split or images[0].shape[0])
    # its interface is in fp32 whatever it computes in
    return with_inputs(runner, Tensor.float), False


def write_onnx(choice: Choice, model: nn.Module, path: Path, images: Tensor, photographs: Sequence[str | Path]) -> None:
    """Exports the model to where the images are, in the choice's number format.

    Raises:
        UnsupportedInputError: it is of no known library, or not of its own image size.
    """
    from vit_fast.export import export_onnx
    from vit_fast.libraries.known import recognise

    size = recognise(model).image_hw
    if tuple(images.shape[2:]) != tuple(size):
        raise UnsupportedInputError(choice.name, [f"images are {tuple(images.shape[2:])}: accepted is {tuple(size)}"])
    export_onnx(
        model,
        path,
        opset=OPSET,
        precision=choice.precision or "fp32",
        target="ort-cuda" if images.device.type == "cuda" else "ort-cpu",
        calibration=(photographs or [default_photograph()]) if choice.precision == "int8" else None,
        verify=False,  # it is held against the model as all candidates are
    )

"""ONNX Runtime as a subject: the same model exported by vit_fast.export, on its CPU and CUDA providers."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from vit_fast.data import default_photograph
from vit_fast.errors import UnsupportedInputError
from vit_fast.libraries import timm

from . import subjects_ours, subjects_peers
from .models import OutputOf
from .subjects import Subject, Task, register

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
BF16_OPSET, OPSET = 22, 20
# Share of the largest logit: int8 is another number format, and the rule for fp32 says nothing about it.
INT8_BUDGET = 0.35


def build(int8: bool, io_binding: bool, task: Task) -> Callable[[Tensor], Tensor]:
    """An ONNX Runtime session of the task's model, exported for its device; fp32 in and out at the file's border.

    Raises:
        UnsupportedInputError: ONNX Runtime cannot run this dtype here.
        ProviderError: CUDA was asked for and did not come up.
    """
    from vit_fast.export import export_onnx

    precision = PRECISIONS.get(task.dtype)
    if precision is None or (precision == "bf16" and task.device.type == "cpu"):
        raise UnsupportedInputError("onnxruntime", [f"no file in {task.dtype} runs on {task.device.type}"])
    if int8 and task.dtype != torch.float32:
        raise UnsupportedInputError("onnxruntime-int8", [f"it replaces fp32, not {task.dtype}"])
    if task.model.onnx is not None and (int8 or precision != "fp32"):
        raise UnsupportedInputError("onnxruntime", [f"{task.model.name} is run as it is: accepted is fp32, not int8"])
    with tempfile.TemporaryDirectory() as folder:
        path = task.model.onnx or Path(folder) / "model.onnx"
        if task.model.onnx is None:
            export_onnx(
                _exportable(task),
                path,
                opset=BF16_OPSET if precision == "bf16" else OPSET,
                precision="int8" if int8 else precision,  # type: ignore[arg-type]  # PRECISIONS holds accepted ones
                target="ort-cuda" if task.device.type == "cuda" else "ort-cpu",
                calibration=[default_photograph()] if int8 else None,
                verify=False,  # the benchmark's own gate does that, on its images
            )
        return _run(path, task, io_binding)


def _run(path: Path, task: Task, io_binding: bool = True) -> Callable[[Tensor], Tensor]:
    """A file as a function of images; it may be removed afterwards."""
    from vit_fast.export import OnnxRunner

    threads = torch.get_num_threads() if task.device.type == "cpu" else None
    runner = OnnxRunner(path, str(task.device), threads=threads, max_batch=task.batch_size, io_binding=io_binding)

    def run(images: Tensor) -> Tensor:
        logits: Tensor = runner(images.float())
        return logits.to(task.dtype)

    return run


def build_by_torch(task: Task) -> Callable[[Tensor], Tensor]:
    """The same model in the file that torch.onnx.export makes of it, with any batch.

    Raises:
        UnsupportedInputError: the task is not in fp32, or is a file already.
    """
    _refuse_all_but_fp32("torch-onnx", task)
    images = torch.zeros(2, task.model.in_chans, *task.model.image_hw)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        shapes = ({0: torch.export.Dim("batch")},)
        torch.onnx.export(_exportable(task), (images,), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
        return _run(path, task)


def build_by_timm(task: Task) -> Callable[[Tensor], Tensor]:
    """timm's model in the file that timm's own exporter makes of it, for this batch alone.

    Raises:
        UnsupportedInputError: the task is not in fp32, or timm has no such model.
    """
    from timm.utils.onnx import onnx_export

    _refuse_all_but_fp32("timm-onnx", task)
    model = subjects_peers.build(timm, dataclasses.replace(task, device=torch.device("cpu")))
    images = torch.zeros(task.batch_size, task.model.in_chans, *task.model.image_hw)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx_export(model, str(path), example_input=images, check=False, use_dynamo=True)
        return _run(path, task)


def _refuse_all_but_fp32(name: str, task: Task) -> None:
    if task.dtype != torch.float32 or task.model.onnx is not None:
        raise UnsupportedInputError(name, ["accepted are models, in fp32"])


def _exportable(task: Task) -> nn.Module:
    if task.model.make is not None:
        model = task.model.make()
        return model.model if isinstance(model, OutputOf) else model
    return subjects_ours.build("sdpa", dataclasses.replace(task, dtype=torch.float32, device=torch.device("cpu")))


for name, summary, int8, io_binding in (
    ("onnxruntime", "ONNX Runtime, exported by vit_fast.export, inputs and outputs bound", False, True),
    ("onnxruntime-nobinding", "the same through session.run, as most people call it", False, False),
    ("onnxruntime-int8", "ONNX Runtime, static int8 calibrated on a photograph", True, True),
):
    register(
        Subject(
            name,
            summary,
            functools.partial(build, int8, io_binding),
            packages=PACKAGES,
            peer=False,
            compilable=False,
            budget=(lambda eager_error, largest: INT8_BUDGET * largest) if int8 else None,
            precision="int8" if int8 else None,
        )
    )
for name, summary, build_file in (
    ("torch-onnx", "ONNX Runtime, exported by torch.onnx.export", build_by_torch),
    ("timm-onnx", "ONNX Runtime, timm's model exported by timm", build_by_timm),
):
    register(
        Subject(name, summary, build_file, packages=(*PACKAGES, *name.split("-")[:1]), peer=True, compilable=False)
    )

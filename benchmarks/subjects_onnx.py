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

from . import subjects_ours
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
    from vit_fast.export import OnnxRunner, export_onnx

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
        threads = torch.get_num_threads() if task.device.type == "cpu" else None
        runner = OnnxRunner(path, str(task.device), threads=threads, max_batch=task.batch_size, io_binding=io_binding)

    def run(images: Tensor) -> Tensor:
        logits: Tensor = runner(images.float())
        return logits.to(task.dtype)

    return run


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

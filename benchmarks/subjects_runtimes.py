"""Runtimes outside torch as subjects: the same model exported by vit_fast.export, or a file as it is."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vit_fast.apps.data import default_photograph
from vit_fast.errors import UnsupportedInputError
from vit_fast.libraries import timm

from . import subjects_models
from .machine import short_name
from .models import Model, OutputOf
from .subjects import Task, register

BF16_OPSET, OPSET = 22, 20
MOST_FILES = 4  # that are kept for further batch sizes
# Share of the largest logit: int8 is another number format, and the rule for fp32 says nothing about it.
INT8_TOLERANCE = 0.35

Function = Callable[[Tensor], Tensor]
Open = Callable[[Path, Task], Function]


def build(open_file: Open, task: Task, *, int8: bool = False) -> Function:
    """A runtime's session of the task's model, exported for its device; fp32 in and out at the file's border.

    Args:
        open_file: Makes a function of images of a file, which may be removed afterwards.
        task: What it is to compute.
        int8: Whether products are in int8.
    Raises:
        UnsupportedInputError: the runtime cannot run this dtype here.
        ProviderError: a provider was asked for and did not come up.
    """
    by_openvino, on_cpu = open_file is _open_openvino, task.device.type == "cpu"
    # OpenVINO converts to bf16 by itself
    precision = "int8" if int8 else "fp32" if by_openvino else short_name(task.dtype)
    reasons = ["it has no kernels in bf16 for a CPU"] if precision == "bf16" and on_cpu else []
    if by_openvino and not (on_cpu and task.dtype in (torch.float32, torch.bfloat16)):
        reasons.append("expected a CPU, and fp32 or bf16")
    if int8 and task.dtype != torch.float32:
        reasons.append(f"int8 replaces fp32, not {short_name(task.dtype)}")
    if task.model.onnx is not None and (int8 or task.dtype != torch.float32):
        reasons.append(f"{task.model.name} is run as it is: expected fp32")
    if reasons:
        raise UnsupportedInputError("openvino" if by_openvino else "onnxruntime", reasons)
    if task.model.onnx is not None:
        return open_file(task.model.onnx, task)
    target = "generic" if by_openvino else "ort-cpu" if on_cpu else "ort-cuda"
    return open_file(_exported(task, precision, target), task)


# The files of this run, and the weights in each: one serves all batch sizes.
_files: dict[tuple[Model, str, str], tuple[object, tempfile.TemporaryDirectory[str]]] = {}


def _exported(task: Task, precision: Any, target: Any) -> Path:
    """The task's model as a file."""
    from vit_fast.export import export_onnx

    key = task.model, precision, target
    weights, folder = _files.pop(key, (None, None))
    if folder is None or weights is not task.weights:
        folder = tempfile.TemporaryDirectory()
        export_onnx(
            _exportable(task),
            Path(folder.name) / "model.onnx",
            opset=BF16_OPSET if precision == "bf16" else OPSET,
            precision=precision,
            target=target,
            calibration=[default_photograph()] if precision == "int8" else None,
            verify=False,  # the benchmark's own gate does that, on its images
        )
    while len(_files) >= MOST_FILES:
        del _files[next(iter(_files))]
    _files[key] = task.weights, folder
    return Path(folder.name) / "model.onnx"


def _open_onnxruntime(path: Path, task: Task, device: str | None = None, io_binding: bool = True) -> Function:
    from vit_fast.export import OnnxRunner

    threads = torch.get_num_threads() if task.device.type == "cpu" else None
    device = device or str(task.device)
    runner = OnnxRunner(path, device, threads=threads, max_batch=task.batch_size, io_binding=io_binding)
    return lambda images: runner(images.float()).to(task.dtype)


def _open_tensorrt(path: Path, task: Task) -> Function:
    if task.device.type == "cpu":
        raise UnsupportedInputError("tensorrt", ["accepted is a GPU"])
    return _open_onnxruntime(path, task, f"tensorrt:{task.device.index or 0}")


def _open_openvino(path: Path, task: Task) -> Function:
    from vit_fast.export.openvino import OpenvinoRunner

    runner = OpenvinoRunner(path, precision=short_name(task.dtype))
    return lambda images: runner(images.float()).to(task.dtype)


def build_by_torch(task: Task) -> Function:
    """The same model in the file that torch.onnx.export makes of it, with any batch.

    Raises:
        UnsupportedInputError: the task is not in fp32, or is a file already.
    """
    _refuse_all_but_fp32("torch-onnx", task)
    images = torch.zeros(2, *task.model.shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        shapes = ({0: torch.export.Dim("batch")},)
        torch.onnx.export(_exportable(task), (images,), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
        return _open_onnxruntime(path, task)


def build_by_timm(task: Task) -> Function:
    """timm's model in the file that timm's own exporter makes of it, for this batch alone.

    Raises:
        UnsupportedInputError: the task is not in fp32, or timm has no such model.
    """
    from timm.utils.onnx import onnx_export

    _refuse_all_but_fp32("timm-onnx", task)
    model = subjects_models.build_peer(timm, dataclasses.replace(task, device=torch.device("cpu")))
    images = torch.zeros(task.batch_size, *task.model.shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx_export(model, str(path), example_input=images, check=False, use_dynamo=True)
        return _open_onnxruntime(path, task)


def _refuse_all_but_fp32(name: str, task: Task) -> None:
    if task.dtype != torch.float32 or task.model.onnx is not None:
        raise UnsupportedInputError(name, ["accepted are models, in fp32"])


def _exportable(task: Task) -> nn.Module:
    if task.model.make is not None:
        model = task.model.make()
        return model.model if isinstance(model, OutputOf) else model
    return subjects_models.build("sdpa", dataclasses.replace(task, dtype=torch.float32, device=torch.device("cpu")))


def build_torchao(fp8: bool, task: Task) -> nn.Module:
    """Our model with the weights of its linears in int8 or e4m3, and their inputs, by row, as they come.

    Raises:
        UnsupportedInputError: in e4m3, the task is no whole model in bf16.
    """
    if fp8 and (task.dtype != torch.bfloat16 or not task.whole):
        raise UnsupportedInputError("torchao-fp8", ["accepted are whole models in bf16"])
    from torchao import quantization

    int8 = quantization.Int8DynamicActivationInt8WeightConfig
    e4m3 = quantization.Float8DynamicActivationFloat8WeightConfig
    model = subjects_models.build("sdpa", task)
    quantization.quantize_(model, e4m3(granularity=quantization.PerRow()) if fp8 else int8())
    return model


on_ort, file = ("onnx", "onnxscript", "onnxruntime"), {"compilable": False, "trainable": False, "seconds": 7.0}
int8 = {"precision": "int8", "tolerance": INT8_TOLERANCE, "trainable": False, "seconds": 9.0}
bound = "ONNX Runtime, exported by vit_fast.export, inputs and outputs bound"
register("onnxruntime", bound, partial(build, _open_onnxruntime), packages=on_ort, peer=True, **file)
unbound, open_unbound = "the same through session.run, as most people do", partial(_open_onnxruntime, io_binding=False)
register("onnxruntime-nobinding", unbound, partial(build, open_unbound), packages=on_ort, peer=True, **file)
by_tensorrt = "the same by ONNX Runtime's TensorRT provider"
register("tensorrt", by_tensorrt, partial(build, _open_tensorrt), packages=on_ort, peer=True, **file)
on_openvino, packages = "OpenVINO on a CPU, exported by vit_fast.export", ("onnx", "onnxscript", "openvino")
register("openvino", on_openvino, partial(build, _open_openvino), packages=packages, peer=True, **file)
calibrated = "ONNX Runtime, static int8 calibrated on a photograph"
build_int8 = partial(build, _open_onnxruntime, int8=True)
register("onnxruntime-int8", calibrated, build_int8, packages=on_ort, compilable=False, **int8)
dynamic = "our model, torchao's int8 weights and dynamic activations"
register("torchao-int8", dynamic, partial(build_torchao, False), packages=("torchao",), peer=True, **int8)
e4m3 = "our model, torchao's float8 weights and dynamic activations, by row"
fp8 = {"precision": "fp8", "tolerance": INT8_TOLERANCE, "trainable": False}
register("torchao-fp8", e4m3, partial(build_torchao, True), packages=("torchao",), peer=True, **fp8)
by_torch, by_timm = "ONNX Runtime, exported by torch.onnx.export", "ONNX Runtime, timm's model exported by timm"
register("torch-onnx", by_torch, build_by_torch, packages=(*on_ort, "torch"), peer=True, **file)
register("timm-onnx", by_timm, build_by_timm, packages=(*on_ort, "timm"), peer=True, **file)

"""Runtimes outside torch as candidates: the same model exported by vit_fast.export, or a file as it is."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from vit_fast.errors import UnsupportedInputError
from vit_fast.libraries import timm
from vit_fast.measure.candidate import AS_FILE, RUNTIMES, Candidate

from . import candidates_models
from .candidates import Task, register
from .machine import short_name
from .models import Model, OutputOf

MOST_FILES = 4  # that are cached for further batch sizes
# Share of the largest logit: int8 is another number format, and the rule for fp32 says nothing about it.
INT8_TOLERANCE = 0.35

Function = Callable[[Tensor], Tensor]


def build(candidate: Candidate, task: Task, *, io_binding: bool = True) -> Function:
    """Opens the task's model in a runtime, exported for its device, or the file that was given.

    Raises:
        UnsupportedInputError: the runtime cannot run this dtype here.
        ProviderError: a provider was asked for and did not come up.
    """
    fp32, on_cpu = task.dtype == torch.float32, task.device.type == "cpu"
    reasons = []
    if candidate.engine == "openvino":
        if not (on_cpu and task.dtype in (torch.float32, torch.bfloat16)):
            reasons.append("expected a CPU, and fp32 or bf16")
    elif task.dtype == torch.bfloat16 and on_cpu:
        reasons.append("it has no kernels in bf16 for a CPU")
    if candidate.engine == "tensorrt" and on_cpu:
        reasons.append("expected a GPU")
    if candidate.precision == "int8" and not fp32:
        reasons.append(f"int8 replaces fp32, not {short_name(task.dtype)}")
    if task.model.onnx is not None and (candidate.precision or not fp32):
        reasons.append(f"{task.model.name} is run as it is: expected fp32")
    if reasons:
        raise UnsupportedInputError(RUNTIMES[candidate.engine], reasons)
    if not fp32:
        candidate = dataclasses.replace(candidate, precision="bf16" if task.dtype == torch.bfloat16 else "fp16")
    return _open(candidate, task.model.onnx or _exported(candidate, task), task, io_binding)


def _open(candidate: Candidate, path: Path, task: Task, io_binding: bool = True) -> Function:
    from vit_fast.measure.runtimes import open_file

    run = open_file(candidate, path, _images(task), task.model.image_hw, io_binding=io_binding)
    return lambda images: run(images.float()).to(task.dtype)


def _images(task: Task) -> Tensor:
    return torch.zeros(task.batch_size, *task.model.shape, dtype=task.dtype, device=task.device)


# The files of this run, and the weights in each: one serves all batch sizes.
_files: dict[tuple[Model, Candidate, torch.device], tuple[object, tempfile.TemporaryDirectory[str]]] = {}


def _exported(candidate: Candidate, task: Task) -> Path:
    from vit_fast.measure.runtimes import write_onnx

    key = task.model, candidate, task.device
    weights, folder = _files.pop(key, (None, None))
    if folder is None or weights is not task.weights:
        folder = tempfile.TemporaryDirectory()
        write_onnx(candidate, _exportable(task), Path(folder.name) / "model.onnx", _images(task), ())
    while len(_files) >= MOST_FILES:
        del _files[next(iter(_files))]
    _files[key] = task.weights, folder
    return Path(folder.name) / "model.onnx"


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
        return _open(AS_FILE, path, task)


def build_by_timm(task: Task) -> Function:
    """timm's model in the file that timm's own exporter makes of it, for this batch alone.

    Raises:
        UnsupportedInputError: the task is not in fp32, or timm has no such model.
    """
    from timm.utils.onnx import onnx_export

    _refuse_all_but_fp32("timm-onnx", task)
    model = candidates_models.build_peer(timm, dataclasses.replace(task, device=torch.device("cpu")))
    images = torch.zeros(task.batch_size, *task.model.shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx_export(model, str(path), example_input=images, check=False, use_dynamo=True)
        return _open(AS_FILE, path, task)


def _refuse_all_but_fp32(name: str, task: Task) -> None:
    if task.dtype != torch.float32 or task.model.onnx is not None:
        raise UnsupportedInputError(name, ["expected models, in fp32"])


def _exportable(task: Task) -> nn.Module:
    if task.model.make is not None:
        model = task.model.make()
        return model.model if isinstance(model, OutputOf) else model
    return candidates_models.build("sdpa", dataclasses.replace(task, dtype=torch.float32, device=torch.device("cpu")))


def build_torchao(fp8: bool, task: Task) -> nn.Module:
    """Our model with the weights of its linears in int8 or e4m3, and their inputs, by row, as they come.

    Raises:
        UnsupportedInputError: in e4m3, the task is no whole model in bf16.
    """
    if fp8 and (task.dtype != torch.bfloat16 or not task.whole):
        raise UnsupportedInputError("torchao-fp8", ["expected whole models in bf16"])
    from torchao import quantization

    int8 = quantization.Int8DynamicActivationInt8WeightConfig
    e4m3 = quantization.Float8DynamicActivationFloat8WeightConfig
    model = candidates_models.build("sdpa", task)
    quantization.quantize_(model, e4m3(granularity=quantization.PerRow()) if fp8 else int8())
    return model


on_ort, file = ("onnx", "onnxscript", "onnxruntime"), {"compilable": False, "trainable": False, "seconds": 7.0}
int8 = {"precision": "int8", "tolerance": INT8_TOLERANCE, "trainable": False, "seconds": 9.0}
fp8 = {"precision": "fp8", "tolerance": INT8_TOLERANCE, "trainable": False}
# fmt: off
for name, summary, build_it, packages, traits in (
    ("onnxruntime", "ONNX Runtime, exported by vit_fast.export, inputs and outputs bound",
     partial(build, AS_FILE), on_ort, file),
    ("onnxruntime-nobinding", "the same through session.run, as most people do",
     partial(build, AS_FILE, io_binding=False), on_ort, file),
    ("tensorrt", "the same by ONNX Runtime's TensorRT provider", partial(build, Candidate("tensorrt")), on_ort, file),
    ("openvino", "OpenVINO on a CPU, exported by vit_fast.export", partial(build, Candidate("openvino")),
     ("onnx", "onnxscript", "openvino"), file),
    ("torchao-int8", "our model, torchao's int8 weights and dynamic activations", partial(build_torchao, False),
     ("torchao",), int8),
    ("torchao-fp8", "our model, torchao's float8 weights and dynamic activations, by row", partial(build_torchao, True),
     ("torchao",), fp8),
    ("torch-onnx", "ONNX Runtime, exported by torch.onnx.export", build_by_torch, (*on_ort, "torch"), file),
    ("timm-onnx", "ONNX Runtime, timm's model exported by timm", build_by_timm, (*on_ort, "timm"), file),
):
    register(name, summary, build_it, packages=packages, peer=True, **traits)
# fmt: on
in_int8 = partial(build, Candidate("onnxruntime", precision="int8"))
calibrated = "ONNX Runtime, static int8 calibrated on a photograph"
register("onnxruntime-int8", calibrated, in_int8, packages=on_ort, compilable=False, **int8)

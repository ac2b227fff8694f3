"""ONNX Runtime and OpenVINO: an exported model in a runtime, and an ONNX file as a model."""

from __future__ import annotations

import functools
import hashlib
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vit_fast.config import Size

from ..apps.data import find_images, sample_image
from ..errors import UnsupportedInputError
from ..libraries.known import recognize
from .candidate import Candidate

OPSET, BF16_OPSET = 20, 22
Run = Callable[[Tensor], Tensor]


class OnnxFile(nn.Module):
    """An ONNX file as a module, run by ONNX Runtime with its default settings and torch's number of threads.

    `image_hw` is height and width of the images, if they are dynamic in the file. Raises the errors of OnnxRunner.
    """

    def __init__(self, path: str | Path, device: torch.device | str = "cpu", image_hw: Size | None = None) -> None:
        super().__init__()
        from vit_fast.export import OnnxRunner
        from vit_fast.export.runtime.metadata import copy_model, parts_of

        self.path, self.image_hw = Path(path), image_hw
        if len(parts_of(self.path)) > 1:  # ONNX Runtime maps external weights, which may change
            self._folder = tempfile.TemporaryDirectory()
            copied = Path(self._folder.name) / self.path.name
            copy_model(self.path, copied)
            self.path = copied
        self.device = torch.device(device)
        threads = torch.get_num_threads() if self.device.type == "cpu" else None
        self.runner = OnnxRunner(self.path, str(self.device), threads=threads, image_hw=image_hw)
        digest = hashlib.sha256()
        for part in parts_of(self.path):
            digest.update(part.read_bytes())
        self._digest = digest.hexdigest()[:16]
        self.eval()

    def get_extra_state(self) -> str:
        """Returns a hash of the file and its external weights."""
        return self._digest

    def forward(self, images: Tensor) -> Tensor:
        """Returns the file's first output [B, ...]; raises ValueError if dtype or shape do not match."""
        output: Tensor = self.runner(images)
        return output


def open_reference(path: Path, image_hw: Size | None) -> Run:
    """Opens a file on the CPU without graph optimizations: the reference for a file."""
    from vit_fast.export import OnnxRunner

    runner = OnnxRunner(path, "cpu", image_hw=image_hw, optimize=False)
    return lambda images: torch.as_tensor(runner(images.cpu()))


def write_onnx(
    candidate: Candidate, model: nn.Module, path: Path, images: Tensor, image_files: Sequence[str | Path]
) -> None:
    """Exports a model in the candidate's precision; copies an ONNX file, or quantizes it to int8."""
    calibration = find_images(image_files or [sample_image()]) if candidate.precision == "int8" else None
    on_ort: Any = "ort-cuda" if images.device.type == "cuda" else "ort-cpu"
    if isinstance(model, OnnxFile):
        from vit_fast.export.quantize import quantize_file
        from vit_fast.export.runtime.metadata import copy_model

        if candidate.precision is None or candidate.engine == "openvino":
            copy_model(model.path, path)
        else:
            quantize_file(model.path, path, on_ort, calibration or ())
        return
    from vit_fast.export import export_onnx

    size = recognize(model).image_hw
    if tuple(images.shape[2:]) != tuple(size):
        raise UnsupportedInputError(
            candidate.name, [f"the image size must be {tuple(size)}, got {tuple(images.shape[2:])}"]
        )
    targets: dict[str, Any] = {"tensorrt": "tensorrt", "openvino": "generic"}
    export_onnx(
        model,
        path,
        opset=BF16_OPSET if candidate.precision == "bf16" else OPSET,
        precision="fp32" if candidate.engine == "openvino" else candidate.precision or "fp32",  # OpenVINO converts
        target=targets.get(candidate.engine, on_ort),
        calibration=calibration,
        verify=False,  # every candidate is checked anyway
    )


def open_file(
    candidate: Candidate, path: Path, images: Tensor, image_hw: Size | None, *, io_binding: bool = True
) -> Run:
    """Loads a file, which may be removed afterwards, for images like these; `image_hw` is needed if it is dynamic."""
    on_cpu = images.device.type == "cpu"
    threads = (candidate.threads or torch.get_num_threads()) if on_cpu else None
    if candidate.engine == "openvino":
        if not on_cpu:
            raise UnsupportedInputError(candidate.name, [f"images must be on the CPU, got {images.device}"])
        precision = "bf16" if candidate.precision == "bf16" or images.dtype == torch.bfloat16 else "fp32"
        return _Openvino(path, threads, precision, images_in_bf16=images.dtype == torch.bfloat16)
    from vit_fast.export import OnnxRunner

    where = f"tensorrt:{images.device.index or 0}" if candidate.engine == "tensorrt" else str(images.device)
    options: dict[str, Any] = {"image_hw": image_hw, "cuda_graph": candidate.graphs, "io_binding": io_binding}
    return OnnxRunner(path, where, threads=threads, max_batch=candidate.split or len(images), **options)


@functools.cache
def _core() -> Any:
    """Returns the only openvino.Core of the process."""
    # Each Core installs a stack for signal handlers, and restores the previous stack when it is deleted. With several
    # Cores, that stack may be freed already; the next signal with a Python handler then crashes the process.
    import openvino

    return openvino.Core()


class _Openvino:
    """Runs an ONNX file in OpenVINO on the CPU; `precision` is that of the matmuls of a file in fp32.

    If images are in bf16, although the file takes fp32, OpenVINO converts them. If torch did, its threads would keep
    the cores busy while OpenVINO runs, which took 2 ms of 7.
    """

    def __init__(self, path: Path, threads: int | None, precision: str, images_in_bf16: bool) -> None:
        import openvino

        core, hint = _core(), {"fp32": "f32", "bf16": "bf16"}[precision]
        if precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise UnsupportedInputError("openvino", ["this CPU has no bf16 matmuls: use fp32"])
        model = core.read_model(path)
        self._tensor: Any = None
        if images_in_bf16:
            processor = openvino.preprocess.PrePostProcessor(model)
            processor.input().tensor().set_element_type(openvino.Type.bf16)
            model = processor.build()
            self._tensor = functools.partial(openvino.Tensor, type=openvino.Type.bf16)
        options = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads or torch.get_num_threads()}
        self._request = core.compile_model(model, "CPU", options).create_infer_request()
        self._lock = threading.Lock()  # a request computes one batch at a time

    def __call__(self, images: Tensor) -> Tensor:
        if self._tensor is None:
            given: Any = np.ascontiguousarray(images.numpy())
        else:  # numpy has no bf16
            array = np.ascontiguousarray(images.to(torch.bfloat16).view(torch.int16).numpy())
            given = self._tensor(array, shape=array.shape)
        with self._lock:
            return torch.from_numpy(self._request.infer({0: given}, share_inputs=True)[0])

"""ONNX Runtime and OpenVINO: an exported model in a runtime, and an ONNX file as a model."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from vit_fast.config import Size

from ..apps.data import find_images, sample_image
from ..errors import UnsupportedInputError
from ..files import file_aside
from ..libraries.known import find
from .candidate import Candidate

if TYPE_CHECKING:
    from ..export import OnnxRunner

Run = Callable[[Tensor], Tensor]


class OnnxFile(nn.Module):
    """An ONNX file as a module, run by ONNX Runtime with its default settings and torch's number of threads.

    `image_hw` is height and width of the images, if the file does not fix them.
    """

    def __init__(self, path: str | Path, device: torch.device | str = "cpu", image_hw: Size | None = None) -> None:
        super().__init__()
        from vit_fast.export import OnnxRunner
        from vit_fast.export.runtime.metadata import copy_model, parts_of

        self.path, self.image_hw = Path(path), image_hw
        if len(parts_of(self.path)) > 1:  # ONNX Runtime memory-maps external weights, which may change on disk
            self._folder = tempfile.TemporaryDirectory()
            copied = Path(self._folder.name) / self.path.name
            copy_model(self.path, copied)
            self.path = copied
        self.device = torch.device(device)
        threads = torch.get_num_threads() if self.device.type == "cpu" else None
        self.runner = OnnxRunner(self.path, str(self.device), threads=threads, image_hw=image_hw)
        self._run = _main_output(self.runner)
        content = hashlib.sha256()
        for part in parts_of(self.path):
            with part.open("rb") as file:
                hashlib.file_digest(file, lambda: content)  # reads in pieces
        self._digest = content.hexdigest()[:16]
        self.eval()

    def get_extra_state(self) -> str:
        return self._digest

    def forward(self, images: Tensor) -> Tensor:
        """Returns the file's main output [B, ...]; raises ValueError if dtype or shape do not match."""
        return self._run(images)


def _main_output(runner: OnnxRunner) -> Run:
    """Returns a function of images to the main output of a file; other inputs of the file are random."""
    from vit_fast.export.runtime.metadata import images_and_others
    from vit_fast.export.runtime.runner import outputs_of

    index = runner.signature.main
    if runner.info.metadata.get("inputs") is None:
        return lambda images: outputs_of(runner(images))[index]
    name, _, others = images_and_others(runner.info)
    return lambda images: outputs_of(runner({name: images} | others(len(images))))[index]


def open_reference(path: Path, image_hw: Size | None) -> Run:
    """Opens a file on the CPU without graph optimizations: the reference for a file."""
    from vit_fast.export.runtime.runner import OnnxRunner

    run = _main_output(OnnxRunner(path, "cpu", image_hw=image_hw, optimize=False))
    return lambda images: torch.as_tensor(run(images.cpu()))


def file_name(candidate: Candidate) -> str:
    """Returns the name of the ONNX file in a folder of files of one model."""
    precision = None if candidate.engine == "openvino" else candidate.precision  # OpenVINO converts
    return f"{candidate.engine}-{precision or 'fp32'}.onnx"


def provide_onnx(
    candidate: Candidate, model: Callable[[], nn.Module], folder: Path, images: Tensor,
    image_files: Sequence[str | Path] = (),
) -> Path:  # fmt: skip
    """Returns the candidate's ONNX file in a folder; exports it if it is missing, int8 from the file in fp32."""
    path, source = folder / file_name(candidate), None
    if not path.exists():
        given = model()
        if candidate.precision == "int8" and not isinstance(given, OnnxFile):
            in_fp32 = dataclasses.replace(candidate, precision=None)
            source = provide_onnx(in_fp32, lambda: given, folder, images, image_files)
        with file_aside(path) as aside:
            write_onnx(candidate, given, aside, images, image_files, source)
    return path


def write_onnx(
    candidate: Candidate, model: nn.Module, path: Path, images: Tensor, image_files: Sequence[str | Path],
    source: Path | None = None,
) -> None:  # fmt: skip
    """Exports a model in the candidate's precision. An ONNX file, or `source`, is copied, or quantized to int8."""
    from vit_fast.export import export_onnx
    from vit_fast.export.runtime.metadata import copy_model

    in_openvino, precision = candidate.engine == "openvino", candidate.precision
    calibration = find_images(image_files or [sample_image()]) if precision == "int8" else None
    on_ort: Any = "ort-cuda" if images.device.type == "cuda" else "ort-cpu"
    if isinstance(model, OnnxFile):
        source = model.path
    if source is not None and precision == "int8":
        from vit_fast.export.quantize import quantize_file

        quantize_file(source, path, on_ort, calibration or ())
        return
    if source is not None:
        copy_model(source, path)
        return
    known, found = find(model), tuple(images.shape[2:])
    if known is not None and found != tuple(known.image_hw):
        raise UnsupportedInputError(candidate.name, [f"the image size must be {tuple(known.image_hw)}, got {found}"])
    export_onnx(
        model,
        path,
        precision="fp32" if in_openvino else precision or "fp32",  # OpenVINO converts
        target="generic" if in_openvino else "tensorrt" if candidate.engine == "tensorrt" else on_ort,
        calibration=calibration,
        example=images[:1] if known is None else None,
        verify=False,  # every candidate is checked anyway
    )


def open_file(candidate: Candidate, path: Path, images: Tensor, image_hw: Size | None) -> Run:
    """Loads a file for images like `images`; see OnnxFile for `image_hw`. The file may then be removed."""
    on_cpu = images.device.type == "cpu"
    threads = (candidate.threads or torch.get_num_threads()) if on_cpu else None
    if candidate.engine == "openvino":
        if not on_cpu:
            raise UnsupportedInputError(candidate.name, [f"images must be on the CPU, got {images.device}"])
        return _Openvino(path, threads, candidate.precision == "bf16", images.dtype == torch.bfloat16)
    from vit_fast.export.runtime.runner import OnnxRunner

    where = f"tensorrt:{images.device.index or 0}" if candidate.engine == "tensorrt" else str(images.device)
    batch = candidate.split or len(images)
    runner = OnnxRunner(path, where, threads=threads, max_batch=batch, image_hw=image_hw, cuda_graph=candidate.graphs)
    return _main_output(runner)


@functools.cache
def _core() -> Any:
    # Each Core installs a stack for signal handlers, and restores the previous stack when the Core is deleted. With
    # several Cores, the restored stack may be freed already. Then the next signal with a Python handler crashes.
    import openvino

    return openvino.Core()


class _Openvino:
    """Runs an ONNX file in OpenVINO on the CPU; with `bf16`, OpenVINO computes fp32 matmuls in bf16.

    OpenVINO also converts bf16 images to fp32. If torch converted them, torch's threads would keep spinning while
    OpenVINO runs, which took 2 ms of 7.
    """

    def __init__(self, path: Path, threads: int | None, bf16: bool, images_in_bf16: bool) -> None:
        import openvino

        from vit_fast.export.runtime.metadata import images_and_others, inspect_onnx, read_signature

        info = inspect_onnx(path)
        is_named = info.metadata.get("inputs") is not None
        self._index = read_signature(info, any_inputs=is_named).main
        self._input: str | int = 0
        self._others: Callable[[int], dict[str, Any]] = lambda count: {}
        if is_named:
            self._input, _, self._others = images_and_others(info)
        core, bf16 = _core(), bf16 or images_in_bf16
        if bf16 and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise UnsupportedInputError("openvino", ["this CPU has no bf16 matmuls: use fp32"])
        model = core.read_model(path)
        self._tensor: Any = None
        if images_in_bf16:
            processor = openvino.preprocess.PrePostProcessor(model)
            processor.input(self._input).tensor().set_element_type(openvino.Type.bf16)
            model = processor.build()
            self._tensor = functools.partial(openvino.Tensor, type=openvino.Type.bf16)
        options = {"INFERENCE_PRECISION_HINT": "bf16" if bf16 else "f32", "INFERENCE_NUM_THREADS": threads}
        self._request = core.compile_model(model, "CPU", options).create_infer_request()
        self._lock = threading.Lock()  # a request computes one batch at a time

    def __call__(self, images: Tensor) -> Tensor:
        if self._tensor is None:
            given: Any = np.ascontiguousarray(images.numpy())
        else:  # numpy has no bf16
            array = np.ascontiguousarray(images.to(torch.bfloat16).view(torch.int16).numpy())
            given = self._tensor(array, shape=array.shape)
        with self._lock:
            found = self._request.infer({self._input: given} | self._others(len(images)), share_inputs=True)
            return torch.from_numpy(found[self._index])

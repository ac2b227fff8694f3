"""OpenVINO on a CPU, where the package openvino is installed."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vit_fast.errors import UnsupportedInputError


class OpenvinoRunner:
    """Runs an ONNX file in OpenVINO on the CPU.

    Args:
        path: The .onnx file; it may be removed afterwards.
        threads: Threads of the CPU; None means torch's.
        precision: "fp32" or "bf16": the number format of the matrix products of a file in fp32.
    Raises:
        ImportError: openvino is not installed.
        UnsupportedInputError: this CPU has no products in bf16.
        RuntimeError: OpenVINO cannot load the file.
    """

    def __init__(self, path: Path, *, threads: int | None = None, precision: str = "fp32") -> None:
        import openvino

        core, hint = openvino.Core(), {"fp32": "f32", "bf16": "bf16"}[precision]
        if precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise UnsupportedInputError("openvino", ["this CPU has no products in bf16; use fp32"])
        options = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads or torch.get_num_threads()}
        self._request = core.compile_model(core.read_model(path), "CPU", options).create_infer_request()
        self._lock = threading.Lock()  # a request computes one batch at a time

    def __call__(self, images: Tensor) -> Tensor:
        """Returns the file's first output [B, ...] for images [B, ...], which are read in place."""
        array = np.ascontiguousarray(images.numpy())
        with self._lock:
            return torch.from_numpy(self._request.infer({0: array}, share_inputs=True)[0])

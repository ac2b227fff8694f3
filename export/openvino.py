"""OpenVINO on a CPU, where the package openvino is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class OpenvinoRunner:
    """Runs an ONNX file in OpenVINO, in fp32 where its products are: bf16 is not taken unasked.

    Args:
        path: The .onnx file; it may be removed afterwards.
        threads: Threads of the CPU; None means torch's.
    Raises:
        ImportError: openvino is not installed.
        RuntimeError: OpenVINO cannot load the file.
    """

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        import openvino

        core = openvino.Core()
        options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads or torch.get_num_threads()}
        self._session = core.compile_model(core.read_model(path), "CPU", options)

    def __call__(self, images: Tensor) -> Tensor:
        """The file's first output [B, ...] for images [B, ...] as it takes them."""
        return torch.from_numpy(self._session(np.ascontiguousarray(images.numpy()))[0])

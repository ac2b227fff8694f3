"""A stand-in for NVIDIA's Triton Inference Server, which serves a model repository with ONNX Runtime.

It reads config.pbtxt with the server's schema, runs the warm-up requests, and implements the extensions for binary
data and classification.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format

NUMPY = {"UINT8": np.uint8, "FP32": np.float32, "FP16": np.float16}


def module_at(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def schema() -> Any:
    """Returns the server's protobuf schema, without importing tritonclient, which requires gRPC."""
    spec = importlib.util.find_spec("tritonclient")
    assert spec is not None and spec.origin is not None
    return module_at(Path(spec.origin).parent / "grpc" / "model_config_pb2.py")


def read_config(folder: Path) -> Any:
    return text_format.Parse((folder / "config.pbtxt").read_text(encoding="utf-8"), schema().ModelConfig())


def _datatype(tensor: Any) -> str:
    name: str = schema().DataType.Name(tensor.data_type)
    return name.removeprefix("TYPE_")


class Served:
    """A model of a repository."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime

        self.config = read_config(folder)
        assert self.config.name == folder.name
        self.session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
        labels = self.config.output[0].label_filename
        self.labels = (folder / labels).read_text(encoding="utf-8").splitlines() if labels else None
        batch = [-1] if self.config.max_batch_size else []
        self.facts = {
            kind: [{"name": t.name, "datatype": _datatype(t), "shape": [*batch, *t.dims]} for t in tensors]
            for kind, tensors in (("inputs", self.config.input), ("outputs", self.config.output))
        }
        for request in self.config.model_warmup:
            (value,) = request.inputs.values()
            self.run(np.zeros([request.batch_size] * len(batch) + [*value.dims], NUMPY[_datatype(value)]))
        self.warm_ups = len(self.config.model_warmup)

    def run(self, array: np.ndarray) -> np.ndarray:
        assert len(array) <= (self.config.max_batch_size or len(array))
        result: np.ndarray = self.session.run(None, {self.config.input[0].name: array})[0]  # rejects other shapes
        return result

    def infer(self, request: dict[str, Any], raw: bytes) -> dict[str, Any]:
        entry, wanted = request["inputs"][0], request["outputs"][0]
        assert entry["parameters"]["binary_data_size"] == len(raw)
        assert entry["datatype"] == self.facts["inputs"][0]["datatype"]
        result = self.run(np.frombuffer(raw, NUMPY[entry["datatype"]]).reshape(entry["shape"]))
        top = wanted["parameters"]["classification"]
        labels = [f":{label}" for label in self.labels or ()] or [""] * result.shape[-1]
        lines = [f"{row[i]:f}:{i}{labels[i]}" for row in result for i in np.argsort(-row)[:top]]
        shape = [len(result), min(top, result.shape[-1])]
        return {"outputs": [{"name": wanted["name"], "datatype": "BYTES", "shape": shape, "data": lines}]}


def opener(models: dict[str, Served]) -> Callable[[Any], io.BytesIO]:
    """Replaces urllib.request.urlopen: answers requests for metadata and inference of these models."""

    def answer(request: Any) -> io.BytesIO:
        address = request if isinstance(request, str) else request.full_url
        model = models[address.partition("/v2/models/")[2].partition("/")[0]]
        if isinstance(request, str):
            return io.BytesIO(json.dumps(model.facts).encode())
        cut = int(request.get_header("Inference-header-content-length"))
        return io.BytesIO(json.dumps(model.infer(json.loads(request.data[:cut]), request.data[cut:])).encode())

    return answer

"""A stand-in for NVIDIA's Triton Inference Server, which serves a model repository with ONNX Runtime."""

from __future__ import annotations

import importlib.util
import io
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
from google.protobuf import text_format


def schema() -> Any:
    """Returns the server's protobuf schema, without importing tritonclient, which requires gRPC."""
    spec = importlib.util.find_spec("tritonclient")
    assert spec is not None and spec.origin is not None
    return SimpleNamespace(**runpy.run_path(str(Path(spec.origin).parent / "grpc" / "model_config_pb2.py")))


def read_config(folder: Path) -> Any:
    return text_format.Parse((folder / "config.pbtxt").read_text(encoding="utf-8"), schema().ModelConfig())


def answer(repository: Path, request: Any) -> io.BytesIO:
    """Replaces urllib.request.urlopen: answers requests for a model's metadata, and for its most probable classes."""
    address = request if isinstance(request, str) else request.full_url
    folder = repository / address.partition("/v2/models/")[2].partition("/")[0]
    config, names = read_config(folder), schema().DataType
    kinds = {t.name: names.Name(t.data_type).removeprefix("TYPE_") for t in (*config.input, *config.output)}
    if isinstance(request, str):
        entry, output = ({"name": name, "datatype": kind} for name, kind in kinds.items())
        return io.BytesIO(json.dumps({"inputs": [entry], "outputs": [output]}).encode())
    size = int(request.get_header("Inference-header-content-length"))
    asked, pixels = json.loads(request.data[:size]), request.data[size:]
    (entry,), (output,) = asked["inputs"], asked["outputs"]
    assert entry["datatype"] == kinds[entry["name"]] and entry["parameters"]["binary_data_size"] == len(pixels)
    session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    images = np.frombuffer(pixels, np.uint8).reshape(entry["shape"])
    ((row,),) = session.run([output["name"]], {entry["name"]: images})
    labels = (folder / config.output[0].label_filename).read_text(encoding="utf-8").splitlines()
    best = np.argsort(-row)[: output["parameters"]["classification"]]
    return io.BytesIO(json.dumps({"outputs": [{"data": [f"{row[i]:f}:{i}:{labels[i]}" for i in best]}]}).encode())

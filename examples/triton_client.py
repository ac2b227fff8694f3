"""Classifies an image with NVIDIA Triton Inference Server, over HTTP and with the standard library only.

    vit-fast export vit_base_patch16_224 --weights W -o vit.onnx --preprocess --returns probabilities \
        --triton-repository models
    docker run --gpus all -p 8000:8000 -v $PWD/models:/models nvcr.io/nvidia/tritonserver:YY.MM-py3 \
        tritonserver --model-repository /models
    python examples/triton_client.py http://localhost:8000 vit image.jpg

The model takes uint8 pixels (--preprocess), so the client only decodes the image. The server reads class names from
labels.txt. Protocol: github.com/kserve/open-inference-protocol, with Triton's extensions for binary data and
classification.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any

import numpy as np
from PIL import Image


def ask(server: str, model: str, pixels: np.ndarray, top: int) -> list[tuple[str, float]]:
    """Returns the most probable classes of an image.

    Args:
        server: Address of the server, e.g. http://localhost:8000.
        model: Name of the model on the server.
        pixels: uint8 [height, width, channels].
        top: Number of classes.
    Returns:
        Class names and model outputs, the most probable first.
    Raises:
        ValueError: The model does not take uint8 pixels.
    """
    with urllib.request.urlopen(f"{server}/v2/models/{model}") as response:
        metadata = json.load(response)
    entry, output = metadata["inputs"][0], metadata["outputs"][0]
    if entry["datatype"] != "UINT8":
        raise ValueError(f"{model} must take UINT8, got {entry['datatype']}; export it with --preprocess")
    raw = np.ascontiguousarray(pixels[None]).tobytes()
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": entry["name"],
                    "shape": [1, *pixels.shape],
                    "datatype": "UINT8",
                    "parameters": {"binary_data_size": len(raw)},
                }
            ],
            "outputs": [{"name": output["name"], "parameters": {"classification": top}}],
        }
    ).encode()
    request = urllib.request.Request(
        f"{server}/v2/models/{model}/infer",
        data=header + raw,
        headers={"Inference-Header-Content-Length": str(len(header)), "Content-Type": "application/octet-stream"},
    )
    with urllib.request.urlopen(request) as response:
        result: dict[str, Any] = json.load(response)
    best = []
    for line in result["outputs"][0]["data"]:
        value, index, *name = line.split(":", 2)
        best.append((name[0] if name else f"class {index}", float(value)))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server")
    parser.add_argument("model")
    parser.add_argument("image")
    parser.add_argument("--top", type=int, default=5)
    given = parser.parse_args()
    pixels = np.asarray(Image.open(given.image).convert("RGB"))
    for name, value in ask(given.server, given.model, pixels, given.top):
        print(f"{value:9.4f}  {name}")


if __name__ == "__main__":
    main()

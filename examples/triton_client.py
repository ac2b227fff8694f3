"""Asks NVIDIA's Triton Inference Server what photographs show, over HTTP with nothing but the standard library.

    vit-fast export vit_base_patch16_224 --weights W -o vit.onnx --preprocess --softmax --triton-repository models
    docker run --gpus all -p 8000:8000 -v $PWD/models:/models nvcr.io/nvidia/tritonserver:YY.MM-py3 \
        tritonserver --model-repository /models
    python examples/triton_client.py http://localhost:8000 vit photograph.jpg

The model's file takes uint8 pixels (--preprocess), so that nothing is prepared here but the decoding. The server names
the classes by labels.txt. Protocol: github.com/kserve/open-inference-protocol, with Triton's extensions for binary data
and classification.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any

import numpy as np
from PIL import Image


def ask(server: str, model: str, pixels: np.ndarray, top: int) -> list[tuple[str, float]]:
    """The most probable classes of one photograph.

    Args:
        server: Address, such as http://localhost:8000.
        model: The model's name on the server.
        pixels: uint8 [height, width, channels].
        top: How many classes.
    Returns:
        Names and values, the best first.
    """
    with urllib.request.urlopen(f"{server}/v2/models/{model}") as response:
        described = json.load(response)
    entry, output = described["inputs"][0], described["outputs"][0]
    if entry["datatype"] != "UINT8":
        raise ValueError(f"{model} takes {entry['datatype']}: accepted is UINT8, a file exported with --preprocess")
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
        answer: dict[str, Any] = json.load(response)
    best = []
    for line in answer["outputs"][0]["data"]:
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

"""Images, two kinds of which are none, and a model whose classes have names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vit_fast import VisionTransformer, create_model
from vit_fast.apps.data import find_images
from vit_fast.apps.prediction import Predicted, predict_to_parquet


def named_model() -> VisionTransformer:
    model = create_model("vit_test").eval()
    model.class_names = tuple(f"name {i}" for i in range(10))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def write_images(folder: Path, count: int, bad: tuple[str, ...]) -> Path:
    generator = np.random.default_rng(0)
    folder.mkdir()
    for i in range(count):
        Image.fromarray(generator.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(folder / f"{i:02}.png")
    for name in bad:
        (folder / name).write_bytes(b"no image")
    return folder


def predict(model: VisionTransformer, folder: Path, out: Path, **options: Any) -> Predicted:
    return predict_to_parquet(model, find_images([folder]), out, class_names=model.class_names, **options)

"""A small model and a short run, for the tests of training."""

from __future__ import annotations

import torch

from vit_fast import create_model
from vit_fast.apps.training import TrainConfig
from vit_fast.model import VisionTransformer


def small_model(**overrides: object) -> VisionTransformer:
    torch.manual_seed(0)
    return create_model("vit_test", **{"num_classes": 2, "drop_path_rate": 0.1, **overrides})


def settings(**overrides: object) -> TrainConfig:
    return TrainConfig(**{"epochs": 2, "batch_size": 8, "lr": 1e-3, **overrides})

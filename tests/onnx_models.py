"""Small models of every family that can be exported, with random weights that hide nothing behind zeros."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
import torchlib_once  # noqa: F401  # halves the time of every export
from fused_models import SUBJECTS, transformers_subject
from torch import nn

import vit_fast

NAMES = [f"thing {i}" for i in range(10)]


def own_vit(**fields: Any) -> nn.Module:
    shape: dict[str, Any] = {"depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 10, "patch_size": 8}
    return vit_fast.create_model("vit_test", backend="eager", **(shape | fields))


LIBRARIES = (
    "timm-vit", "timm-siglip", "transformers-vit", "transformers-dinov2", "transformers-clip", "transformers-siglip",
    "torchvision-vit",
)  # fmt: skip
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "vit": own_vit,
    "vit_avg_pool": lambda: own_vit(global_pool="avg"),
    "deit_distilled": lambda: own_vit(distilled=True),
    "dinov2_registers": lambda: own_vit(init_values=0.5, reg_tokens=4, no_embed_class=True),
    "clip_quickgelu": lambda: own_vit(pre_norm=True, act_layer="quick_gelu", norm_eps=1e-5),
    "siglip": lambda: own_vit(class_token=False, global_pool="map", act_layer="gelu_tanh"),
    "hybrid": lambda: own_vit(stem_channels=(8,), patch_size=4),
    "sincos": lambda: own_vit(pos_embed="sincos2d"),
    "transformers-two-heads": transformers_subject("DeiTForImageClassificationWithTeacher").make,
    **{name: SUBJECTS[name].make for name in LIBRARIES},
}


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """Returns the model in evaluation mode with random parameters: norms around one, the others around zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_gain = parameter.dim() == 1 and "norm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.1 * noise if is_gain else 0.15 * noise)
    return model.eval()


def make(family: str) -> nn.Module:
    return randomized(FAMILIES[family]())


FILES: dict[str, dict[str, Any]] = {
    "plain": {"target": "ort-cpu", "class_names": NAMES},
    "generic": {},
    "beside": {"external_data": True},
    "fixed": {"dynamic_batch": False, "output": "features", "external_data": True},
    "pixels": {"preprocess": True, "class_names": NAMES},
    "sizes": {"dynamic_size": True, "target": "ort-cpu"},
}


class Exports:
    """Files of a model, exported on first use, not verified."""

    def __init__(self, folder: Path, model: nn.Module, files: dict[str, dict[str, Any]]) -> None:
        self.folder, self.model, self.files = folder, model, files

    def __call__(self, name: str) -> Path:
        path = self.folder / f"{name}.onnx"
        if not path.exists():
            vit_fast.export.export_onnx(self.model, path, verify=False, **self.files[name])
        return path


def with_metadata(path: Path, to: Path, key: str, value: str) -> Path:
    """Copies a file and replaces an entry of its metadata, in JSON."""
    proto = onnx.load(path)
    (entry,) = (entry for entry in proto.metadata_props if entry.key == f"vit_fast.{key}")
    entry.value = value
    onnx.save(proto, to)
    return to

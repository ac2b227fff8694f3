"""Small models of every family that can be exported, with random weights that hide nothing behind zeros."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch
import torchlib_once  # noqa: F401  # halves the time of every export
from torch import nn

import vit_fast

SIZE = 32
NAMES = [f"thing {i}" for i in range(10)]
SHAPE: dict[str, Any] = {
    "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 10, "img_size": SIZE, "patch_size": 8,
}  # fmt: skip
HF = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": SIZE,
    "patch_size": 8,
}  # fmt: skip


def own_vit(**fields: Any) -> nn.Module:
    return vit_fast.create_model("vit_test", backend="eager", **(SHAPE | fields))


def timm_vit(**fields: Any) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**(SHAPE | fields))


def of_transformers(config: str, model: str, **fields: Any) -> nn.Module:
    import transformers

    built: nn.Module = getattr(transformers, model)(getattr(transformers, f"{config}Config")(**HF, **fields))
    return built


LABELS = {"id2label": dict(enumerate(NAMES)), "label2id": {name: i for i, name in enumerate(NAMES)}}
transformers_vit = partial(of_transformers, "ViT", "ViTForImageClassification", **LABELS)
transformers_siglip2 = partial(of_transformers, "Siglip2Vision", "Siglip2VisionModel", num_patches=16)


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    shape = {"image_size": SIZE, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    return VisionTransformer(**shape, num_classes=10)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "vit": own_vit,
    "vit_avg_pool": lambda: own_vit(global_pool="avg"),
    "deit_distilled": lambda: own_vit(distilled=True),
    "dinov2_registers": lambda: own_vit(init_values=0.5, reg_tokens=4, no_embed_class=True),
    "clip_quickgelu": lambda: own_vit(pre_norm=True, act_layer="quick_gelu", norm_eps=1e-5),
    "siglip": lambda: own_vit(class_token=False, global_pool="map", act_layer="gelu_tanh"),
    "hybrid": lambda: own_vit(stem_channels=(8,), patch_size=4),
    "sincos": lambda: own_vit(pos_embed="sincos2d"),
    "timm": timm_vit,
    "timm_siglip": lambda: timm_vit(class_token=False, global_pool="map"),
    "transformers_vit": transformers_vit,
    "transformers_two_heads": lambda: of_transformers("DeiT", "DeiTForImageClassificationWithTeacher", num_labels=10),
    "transformers_dinov2": lambda: of_transformers("Dinov2", "Dinov2Model"),
    "transformers_clip": lambda: of_transformers("CLIPVision", "CLIPVisionModel"),
    "transformers_siglip": lambda: of_transformers("SiglipVision", "SiglipVisionModel"),
    "torchvision": torchvision_vit,
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

"""What export has to know about a model of each library: input size, preprocessing, names, features, how to call it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_fast.config import DataConfig, Size
from vit_fast.errors import UnsupportedInputError

Output = Literal["logits", "probabilities", "features"]


@dataclass
class Subject:
    """A model to be exported.

    Attributes:
        model: The module itself, in evaluation mode, in fp32 on the CPU; a copy where the given one was not.
        library: "vit-fast", "timm", "transformers" or "torchvision".
        name: The model's class, or its name where it knows one.
        image_hw: Height and width it was made for.
        in_chans: Channels of the input.
        patch_hw: Height and width of the image region behind one token.
        depth: Encoder blocks.
        attentions: Attention layers, pooling heads included.
        num_classes: Outputs of the head; 0 when there is none.
        data_config: How its images are prepared; None when the model does not say.
        class_names: Names of the outputs; None when the model does not say.
        config: The model's configuration as plain data.
        takes_bytes: Whether `fuse` folded the normalisation into the model, which then takes pixels from 0 to 255.
    """

    model: nn.Module
    library: str
    name: str
    image_hw: Size
    in_chans: int
    patch_hw: Size
    depth: int
    attentions: int
    num_classes: int
    data_config: DataConfig | None = None
    class_names: tuple[str, ...] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    takes_bytes: bool = False

    def set_data_config(self, data_config: DataConfig | None) -> None:
        """How images are prepared; without normalising where the model does that itself."""
        if data_config is not None and self.takes_bytes:
            zeros, scale = (0.0,) * self.in_chans, (1 / 255,) * self.in_chans
            data_config = dataclasses.replace(data_config, mean=zeros, std=scale)
        self.data_config = data_config

    def forward(self, images: Tensor, output: Output, dynamic_size: bool = False) -> Tensor:
        """Images [B, in_chans, height, width] -> logits, probabilities or pooled features [B, ...]."""
        head = "features" if output == "features" or not self.num_classes else "logits"
        result = _FORWARD[self.library](self.model, images, head, dynamic_size)
        return result.softmax(-1) if output == "probabilities" else result

    def copy_in(self, dtype: torch.dtype) -> Subject:
        """The same with a copy of the model in another dtype."""
        return Subject(**{**self.__dict__, "model": copy.deepcopy(self.model).to(dtype)})


def make_subject(model: nn.Module) -> Subject:
    """Recognises a model.

    Raises:
        UnsupportedInputError: it belongs to no library that is known, or is a kind of model that takes no images.
    """
    library = library_of(model)
    if library is None:
        raise UnsupportedInputError(
            f"export of a {type(model).__module__}.{type(model).__qualname__}",
            ["accepted are VisionTransformer models of vit_fast, timm, transformers and torchvision"],
        )
    parameter = next(model.parameters())
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for p in model.parameters()) or model.training:
        if parameter.device.type == "meta":
            raise UnsupportedInputError("export", ["the model's weights are on the meta device: there are none"])
        model = copy.deepcopy(model).to("cpu", torch.float32).eval()
    subject = _DESCRIBE[library](model)
    if any(hasattr(module, "vit_fast_mean") for module in model.modules()):
        subject.takes_bytes = True
        subject.set_data_config(subject.data_config)
    return subject


def library_of(model: nn.Module) -> str | None:
    """Which library a model's class, or the class it was fused from, belongs to."""
    from vit_fast.model import VisionTransformer

    if isinstance(model, VisionTransformer):
        return "vit-fast"
    for cls in type(model).__mro__:
        root = cls.__module__.split(".")[0]
        if root == "timm" and hasattr(model, "forward_head") and hasattr(model, "patch_embed"):
            return root
        if root == "transformers" and hasattr(model, "config") and hasattr(model.config, "patch_size"):
            return root
        if root == "transformers" and hasattr(getattr(model, "config", None), "vision_config"):
            return None
        if root == "torchvision" and cls.__name__ == "VisionTransformer":
            return root
    return None


@contextlib.contextmanager
def prepared(subject: Subject, backend: str, dynamic_size: bool) -> Iterator[None]:
    """For the time of export or of a reference run: a backend made of torch's own operators, any image size if asked.

    Nothing is copied; whatever is switched is switched back.
    """
    with contextlib.ExitStack() as undo:
        for module in subject.model.modules():
            ours = type(module).__module__.startswith("vit_fast.")
            for attribute in ("backend", "vit_fast_backend"):
                if isinstance(getattr(module, attribute, None), str) and (ours or attribute != "backend"):
                    _set(undo, module, attribute, backend)
        _PREPARE[subject.library](undo, subject, dynamic_size)
        yield


def _set(undo: contextlib.ExitStack, owner: Any, attribute: str, value: Any) -> None:
    undo.callback(setattr, owner, attribute, getattr(owner, attribute))
    setattr(owner, attribute, value)


# --- vit-fast -----------------------------------------------------------------------------------------------


def _describe_ours(model: Any) -> Subject:
    config = model.config
    pooling = int(config.global_pool == "map")
    return Subject(
        model, "vit-fast", _variant_of(config, model.data_config) or type(model).__name__, config.image_hw,
        config.in_chans,
        config.patch_pixels, config.depth,
        config.depth + pooling, config.num_classes, model.data_config, model.class_names, config.to_dict(),
    )  # fmt: skip


def _variant_of(config: Any, data_config: Any) -> str | None:
    """The named variant of this shape, whatever its head; of several, the one whose images are prepared alike."""
    from vit_fast.variants import get_variant, list_models

    fields = {"num_classes": config.num_classes, "dynamic_img_size": config.dynamic_img_size}
    same = [name for name in list_models() if get_variant(name).config.replace(**fields) == config]
    alike = [name for name in same if get_variant(name).data == data_config]
    return next(iter(alike or same), None)


def _prepare_ours(undo: contextlib.ExitStack, subject: Subject, dynamic_size: bool) -> None:
    model: Any = subject.model
    if model.config.dynamic_img_size != dynamic_size:
        config = model.config.replace(dynamic_img_size=dynamic_size)
        _set(undo, model, "config", config)
        _set(undo, model.patch_embed, "config", config)


def _forward_timm_like(model: Any, images: Tensor, head: str, dynamic_size: bool) -> Tensor:
    """timm's interface, which is also ours."""
    result: Tensor
    if head == "features":
        result = model.forward_head(model.forward_features(images), pre_logits=True)
    else:
        result = model(images)
    return result


# --- timm ---------------------------------------------------------------------------------------------------


def _describe_timm(model: Any) -> Subject:
    pretrained = getattr(model, "pretrained_cfg", None) or {}
    patch_embed = model.patch_embed
    problems = [
        f"the model has no {attribute}" for attribute in ("blocks", "num_classes") if not hasattr(model, attribute)
    ]
    if not hasattr(patch_embed, "patch_size") or getattr(patch_embed, "img_size", None) is None:
        problems.append("its patch embedding has no fixed image and patch size")
    if problems:
        raise UnsupportedInputError(f"export of timm's {type(model).__name__}", problems)
    data = {name: pretrained[name] for name in ("mean", "std", "interpolation", "crop_pct") if pretrained.get(name)}
    if pretrained.get("crop_mode") in ("center", "squash"):
        data["crop_mode"] = pretrained["crop_mode"]
    names = pretrained.get("label_names")
    return Subject(
        model,
        "timm",
        str(pretrained.get("architecture") or type(model).__name__),
        _pair(patch_embed.img_size),
        patch_embed.proj.in_channels,
        _pair(patch_embed.patch_size),
        len(model.blocks),
        len(model.blocks) + (getattr(model, "attn_pool", None) is not None),
        int(model.num_classes),
        DataConfig(**data) if len(data) >= 4 else None,
        tuple(names) if names and len(names) == model.num_classes else None,
        {name: value for name, value in pretrained.items() if isinstance(value, str | int | float)},
    )


def _prepare_timm(undo: contextlib.ExitStack, subject: Subject, dynamic_size: bool) -> None:
    model: Any = subject.model
    if not dynamic_size or model.dynamic_img_size:
        return
    from timm.layers.format import Format

    embed = model.patch_embed
    if not hasattr(embed, "strict_img_size") or getattr(model, "rope", None) is not None:
        raise UnsupportedInputError(f"dynamic_size with timm's {type(model).__name__}", ["its positions are fixed"])
    _set(undo, model, "dynamic_img_size", True)
    for name, value in (("strict_img_size", False), ("flatten", False), ("output_fmt", Format.NHWC)):
        _set(undo, embed, name, value)


# --- transformers -------------------------------------------------------------------------------------------


_ATTENTION_NAME = "vit_fast_export"


def _describe_transformers(model: Any) -> Subject:
    config = model.config
    patch_hw = _pair(config.patch_size)
    labels = getattr(config, "id2label", None) or {}
    names = tuple(labels[i] for i in sorted(labels, key=int)) if labels else None
    if names and all(re.fullmatch(r"LABEL_\d+", name) for name in names):
        names = None
    if "pixel_attention_mask" in inspect.signature(model.forward).parameters:
        raise UnsupportedInputError(
            f"export of transformers' {type(model).__name__}",
            ["it takes patches with a mask and their sizes (pixel_attention_mask): accepted are images alone"],
        )
    classifies = "ForImageClassification" in type(model).__name__
    pooling = any("MultiheadAttentionPoolingHead" in type(m).__name__ for m in model.modules())
    return Subject(
        model, "transformers", getattr(config, "name_or_path", "") or type(model).__name__, _pair(config.image_size),
        int(config.num_channels), patch_hw, int(config.num_hidden_layers), int(config.num_hidden_layers) + pooling,
        int(config.num_labels) if classifies else 0, None, names if classifies else None, config.to_diff_dict(),
    )  # fmt: skip


def _prepare_transformers(undo: contextlib.ExitStack, subject: Subject, dynamic_size: bool) -> None:
    """Attention without the mask that transformers would otherwise make (all true: images have no padding)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if _ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(_ATTENTION_NAME, _attention_without_mask)
    configs = {
        id(c): c for m in subject.model.modules() if hasattr(c := getattr(m, "config", None), "_attn_implementation")
    }
    for config in configs.values():
        _set(undo, config, "_attn_implementation", _ATTENTION_NAME)


def _attention_without_mask(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return mixed.transpose(1, 2), None


def _forward_transformers(model: Any, images: Tensor, head: str, dynamic_size: bool) -> Tensor:
    options = {"interpolate_pos_encoding": True} if dynamic_size else {}
    result: Tensor
    if head == "logits":
        result = model(pixel_values=images, **options).logits
        return result
    base = model.base_model if "ForImageClassification" in type(model).__name__ else model
    outputs = base(pixel_values=images, **options)
    pooled: Tensor | None = getattr(outputs, "pooler_output", None)
    if pooled is None:
        pooled = getattr(outputs, "image_embeds", None)
    return outputs.last_hidden_state[:, 0] if pooled is None else pooled


# --- torchvision --------------------------------------------------------------------------------------------


def _describe_torchvision(model: Any) -> Subject:
    size, patch = int(model.image_size), int(model.patch_size)
    last = [m for m in model.heads.modules() if isinstance(m, nn.Linear)]
    return Subject(
        model, "torchvision", type(model).__name__, (size, size), 3, (patch, patch), len(model.encoder.layers),
        len(model.encoder.layers), last[-1].out_features if last else 0, None, None,
        {"image_size": size, "patch_size": patch, "hidden_dim": int(model.hidden_dim)},
    )  # fmt: skip


def _prepare_torchvision(undo: contextlib.ExitStack, subject: Subject, dynamic_size: bool) -> None:
    if dynamic_size:
        raise UnsupportedInputError(
            "dynamic_size with torchvision's VisionTransformer", ["it accepts the image size it was made for only"]
        )
    # The fast path of nn.MultiheadAttention is one fused operator that has no ONNX form; it depends on this switch.
    enabled = torch.backends.mha.get_fastpath_enabled()
    undo.callback(torch.backends.mha.set_fastpath_enabled, enabled)
    torch.backends.mha.set_fastpath_enabled(False)


def _forward_torchvision(model: Any, images: Tensor, head: str, dynamic_size: bool) -> Tensor:
    if head == "logits":
        logits: Tensor = model(images)
        return logits
    tokens = model._process_input(images)
    tokens = torch.cat([model.class_token.expand(tokens.shape[0], -1, -1), tokens], dim=1)
    features: Tensor = model.encoder(tokens)[:, 0]
    return features


def _pair(value: Any) -> Size:
    if isinstance(value, int):
        return value, value
    height, width = value
    return int(height), int(width)


_DESCRIBE = {
    "vit-fast": _describe_ours,
    "timm": _describe_timm,
    "transformers": _describe_transformers,
    "torchvision": _describe_torchvision,
}
_PREPARE = {
    "vit-fast": _prepare_ours,
    "timm": _prepare_timm,
    "transformers": _prepare_transformers,
    "torchvision": _prepare_torchvision,
}
_FORWARD = {
    "vit-fast": _forward_timm_like,
    "timm": _forward_timm_like,
    "transformers": _forward_transformers,
    "torchvision": _forward_torchvision,
}

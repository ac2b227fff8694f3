"""The peers: the same architecture in timm, transformers and torchvision, with the very same weights.

Each is built by the library's own class, then given our weights under its own names; a model that the library cannot
express is refused with every reason.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from vit_fast.config import ViTConfig
from vit_fast.errors import UnsupportedInputError

from .subjects import Subject, Task, register

# transformers' names of our activations, where they differ.
HF_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}


def build_timm(task: Task) -> nn.Module:
    """timm's VisionTransformer; its DeiT class for a distilled model."""
    config = task.config
    _refuse("timm", _reasons(config, pos_embed=("learn",), stem_channels=((),)))
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer

    make = TimmVisionTransformer
    if config.distilled:
        make = VisionTransformerDistilled
    model = make(
        img_size=config.image_hw,
        patch_size=config.patch_hw,
        in_chans=config.in_chans,
        num_classes=config.num_classes,
        global_pool=config.global_pool,
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_ratio,
        qkv_bias=config.qkv_bias,
        init_values=config.init_values,
        class_token=config.class_token,
        no_embed_class=config.no_embed_class,
        reg_tokens=config.reg_tokens,
        pre_norm=config.pre_norm,
        fc_norm=config.fc_norm,
        act_layer=config.act_layer,
        norm_layer=functools.partial(nn.LayerNorm, eps=config.norm_eps),
    )
    return _load(model, task, lambda name, weights: weights[name])


def build_transformers(task: Task) -> nn.Module:
    """transformers' ViTForImageClassification with scaled_dot_product_attention."""
    _refuse("transformers' ViT", _plain_vit_reasons(task.config))
    from transformers import ViTConfig as HFViTConfig
    from transformers import ViTForImageClassification

    config = task.config
    hf_config = HFViTConfig(
        hidden_size=config.embed_dim,
        num_hidden_layers=config.depth,
        num_attention_heads=config.num_heads,
        intermediate_size=config.hidden_dim,
        hidden_act=HF_ACTIVATIONS.get(config.act_layer, config.act_layer),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=config.norm_eps,
        image_size=list(config.image_hw),
        patch_size=list(config.patch_hw),
        num_channels=config.in_chans,
        qkv_bias=config.qkv_bias,
        num_labels=config.num_classes,
        attn_implementation="sdpa",
    )
    return _LogitsOf(_load(ViTForImageClassification(hf_config), task, transformers_weight))


def build_torchvision(task: Task) -> nn.Module:
    """torchvision's VisionTransformer."""
    config = task.config
    reasons = _plain_vit_reasons(config) + _reasons(config, act_layer=("gelu",), qkv_bias=(True,), in_chans=(3,))
    for name, (height, width) in (("img_size", config.image_hw), ("patch_size", config.patch_hw)):
        if height != width:
            reasons.append(f"{name}={height}x{width}: accepted is a square")
    if config.num_classes == 0:
        reasons.append("num_classes=0: accepted is a model with a head")
    _refuse("torchvision", reasons)
    from torchvision.models.vision_transformer import VisionTransformer as TorchvisionVisionTransformer

    model = TorchvisionVisionTransformer(
        image_size=config.image_hw[0],
        patch_size=config.patch_hw[0],
        num_layers=config.depth,
        num_heads=config.num_heads,
        hidden_dim=config.embed_dim,
        mlp_dim=config.hidden_dim,
        num_classes=config.num_classes,
        norm_layer=functools.partial(nn.LayerNorm, eps=config.norm_eps),
    )
    return _load(model, task, torchvision_weight)


class _LogitsOf(nn.Module):
    """A transformers model, giving its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits


_HF_LAYER = re.compile(r"vit\.(?:encoder\.layer|layers)\.(\d+)\.(.+)\.(weight|bias)")
_HF_PARTS = {
    "attention.output.dense": "attn.proj",
    "attention.o_proj": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "mlp.fc1": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "mlp.fc2": "mlp.fc2",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
}
_HF_QKV = {
    "attention.attention.query": 0,
    "attention.attention.key": 1,
    "attention.attention.value": 2,
    "attention.q_proj": 0,
    "attention.k_proj": 1,
    "attention.v_proj": 2,
}
_HF_OTHER = {
    "vit.embeddings.cls_token": "cls_token",
    "vit.embeddings.position_embeddings": "pos_embed",
    "vit.embeddings.patch_embeddings.projection.weight": "patch_embed.proj.weight",
    "vit.embeddings.patch_embeddings.projection.bias": "patch_embed.proj.bias",
    "vit.layernorm.weight": "norm.weight",
    "vit.layernorm.bias": "norm.bias",
    "classifier.weight": "head.weight",
    "classifier.bias": "head.bias",
}


def transformers_weight(name: str, weights: dict[str, Tensor]) -> Tensor:
    """Our tensor for a parameter of transformers' ViT, by the names of version 4 or 5."""
    if name in _HF_OTHER:
        return weights[_HF_OTHER[name]]
    match = _HF_LAYER.fullmatch(name)
    if match is None:
        raise KeyError(name)
    number, part, kind = match.groups()
    if part in _HF_QKV:
        return weights[f"blocks.{number}.attn.qkv.{kind}"].chunk(3)[_HF_QKV[part]]
    return weights[f"blocks.{number}.{_HF_PARTS[part]}.{kind}"]


_TORCHVISION_LAYER = re.compile(r"encoder\.layers\.encoder_layer_(\d+)\.(.+)")
_TORCHVISION_PARTS = {
    "ln_1": "norm1",
    "ln_2": "norm2",
    "self_attention.in_proj_": "attn.qkv.",
    "self_attention.out_proj": "attn.proj",
    "mlp.0": "mlp.fc1",
    "mlp.3": "mlp.fc2",
}
_TORCHVISION_OTHER = {
    "class_token": "cls_token",
    "encoder.pos_embedding": "pos_embed",
    "conv_proj.weight": "patch_embed.proj.weight",
    "conv_proj.bias": "patch_embed.proj.bias",
    "encoder.ln.weight": "norm.weight",
    "encoder.ln.bias": "norm.bias",
    "heads.head.weight": "head.weight",
    "heads.head.bias": "head.bias",
}


def torchvision_weight(name: str, weights: dict[str, Tensor]) -> Tensor:
    """Our tensor for a parameter of torchvision's VisionTransformer."""
    if name in _TORCHVISION_OTHER:
        return weights[_TORCHVISION_OTHER[name]]
    match = _TORCHVISION_LAYER.fullmatch(name)
    if match is None:
        raise KeyError(name)
    number, rest = match.groups()
    for theirs, ours in _TORCHVISION_PARTS.items():
        if rest.startswith(theirs):
            return weights[f"blocks.{number}.{ours}{rest.removeprefix(theirs)}"]
    raise KeyError(name)


def _load(model: nn.Module, task: Task, weight_of: Callable[[str, dict[str, Tensor]], Tensor]) -> nn.Module:
    """The peer with our weights, all of them, on the task's device."""
    weights, used = dict(task.weights), {}
    for name in model.state_dict():
        try:
            used[name] = weight_of(name, weights)
        except KeyError:
            raise UnsupportedInputError(type(model).__name__, [f"its parameter {name} has no counterpart"]) from None
    ours, theirs = (sum(tensor.numel() for tensor in tensors.values()) for tensors in (weights, used))
    if ours != theirs:
        raise UnsupportedInputError(type(model).__name__, [f"it takes {theirs} of our {ours} parameters"])
    model = model.to(device=task.device, dtype=task.dtype)
    model.load_state_dict(used)
    return model.eval().requires_grad_(False)


def _plain_vit_reasons(config: ViTConfig) -> list[str]:
    """Why a config is not the plain ViT of the paper."""
    return _reasons(
        config,
        class_token=(True,),
        distilled=(False,),
        reg_tokens=(0,),
        pos_embed=("learn",),
        no_embed_class=(False,),
        pre_norm=(False,),
        global_pool=("token",),
        norm_after_pool=(False,),
        init_values=(None,),
        stem_channels=((),),
    )


def _reasons(config: ViTConfig, **accepted: Iterable[object]) -> list[str]:
    return [
        f"{name}={getattr(config, name)!r}: accepted is {', '.join(map(repr, values))}"
        for name, values in accepted.items()
        if getattr(config, name) not in values
    ]


def _refuse(library: str, reasons: list[str]) -> None:
    if reasons:
        raise UnsupportedInputError(library, reasons)


register(Subject("timm", "timm's VisionTransformer", build_timm, packages=("timm",), peer=True))
register(
    Subject(
        "transformers",
        "transformers' ViTForImageClassification, attn_implementation='sdpa'",
        build_transformers,
        packages=("transformers",),
        peer=True,
    )
)
register(
    Subject(
        "torchvision",
        "torchvision's VisionTransformer",
        build_torchvision,
        packages=("torchvision",),
        peer=True,
    )
)

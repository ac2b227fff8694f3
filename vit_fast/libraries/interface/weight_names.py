"""Translates weights between the names of a library and timm's by a table of patterns, in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...config import ViTConfig
from .image_model import raise_unsupported

Rule = tuple[str, str | None]
"""A pattern that matches the whole name, and its replacement. None drops the tensor and lists it in the report.

Tensors that are replaced by `name@0of3`, `name@1of3` and `name@2of3` are concatenated along the first axis to `name`.
"""


@dataclass
class Converted:
    """A state dict in timm's names.

    Attributes:
        layout: The library of the original names.
        tensors: Tensors by timm's names; names without a rule stay unchanged.
        origins: By new name, the original names.
        ignored: Original names that a rule drops, such as a text tower or a mask token.
        head_problem: Returns the reason why the head of this file does not fit a model with a given config, or None.
    """

    layout: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    head_problem: Callable[[ViTConfig], str | None] = lambda config: None

    def add_batch_axis(self) -> None:
        """Reshapes class token and positions to [1, N, C]."""
        for name in {"cls_token", "pos_embed"} & self.tensors.keys():
            tensor = self.tensors[name]
            self.tensors[name] = tensor.reshape(1, -1, tensor.shape[-1])

    def mark_head_unsupported(self, difference: str) -> None:
        self.head_problem = lambda config: f"{difference}, which ViTConfig does not support"

    def add_head_bias(self, projection: str) -> None:
        """Adds zeros as the bias of the head, because CLIP's projection has none."""
        weight = self.tensors["head.weight"]
        self.tensors["head.bias"] = weight.new_zeros(weight.shape[0])
        self.origins["head.bias"] = (f"zeros: {projection} has no bias",)

    def fold_class_position(self, config: ViTConfig) -> None:
        """Adds the position of the class token to the token, if the model has positions for the patches only."""
        if not config.no_embed_class or not {"cls_token", "pos_embed"} <= self.tensors.keys():
            return
        positions = self.tensors["pos_embed"]
        self.tensors["cls_token"] = self.tensors["cls_token"].double() + positions[:, :1].double()
        self.tensors["pos_embed"] = positions[:, 1:]
        self.origins["cls_token"] = (*self.origins["cls_token"], *self.origins["pos_embed"])


class WeightNames(NamedTuple):
    """A layout of weights in a file that describes several; otherwise, the module of a library has these attributes."""

    NAME: str
    SIGNATURE: str
    convert: Callable[[Mapping[str, Tensor], ViTConfig], Converted]


def parts(pattern: str, names: Sequence[str], whole: str) -> tuple[Rule, ...]:
    """Returns rules that concatenate tensors to `whole`; NAME in the pattern stands for one of the names."""
    return tuple((pattern.replace("NAME", name), f"{whole}@{i}of{len(names)}") for i, name in enumerate(names))


def rename(state: Mapping[str, Tensor], layout: str, rules: Sequence[Rule]) -> Converted:
    """Applies the first rule that matches each name, then concatenates parts."""
    converted = Converted(layout)
    for name, tensor in state.items():
        matches = ((re.fullmatch(pattern, name), replacement) for pattern, replacement in rules)
        match, replacement = next((found for found in matches if found[0]), (None, name))
        if replacement is None:
            converted.ignored.append(name)
            continue
        target = match.expand(replacement) if match else name
        converted.tensors[target], converted.origins[target] = tensor, (name,)
    _join_parts(converted)
    return converted


def _join_parts(converted: Converted) -> None:
    wholes: dict[str, list[str]] = {}
    for name in sorted(name for name in converted.tensors if "@" in name):
        wholes.setdefault(name.partition("@")[0], []).append(name)
    for whole, names in wholes.items():
        tensors = [converted.tensors.pop(name) for name in names]
        origins = [converted.origins.pop(name) for name in names]
        if len(names) == int(names[0].rpartition("of")[2]) and len({tensor.shape[1:] for tensor in tensors}) == 1:
            converted.tensors[whole] = torch.cat(tensors)
            converted.origins[whole] = tuple(original for (original,) in origins)
        else:  # restore the file's names, which the error shows
            for tensor, (original,) in zip(tensors, origins):
                converted.tensors[original], converted.origins[original] = tensor, (original,)


def with_key_biases(state: Mapping[str, Tensor], q_bias: str) -> Mapping[str, Tensor]:
    """Adds zeros as the bias of k if q has a bias and k has none, as in EVA-02 and DINOv3.

    `q_bias` is a pattern of the name of q's bias, with a group before the letter q and one after it.
    """
    found = dict(state)
    for name, tensor in state.items():
        if match := re.fullmatch(q_bias, name):
            found.setdefault(f"{match[1]}k{match[2]}", torch.zeros_like(tensor))
    return found


def take_weights(
    peer: nn.Module,
    weights: Mapping[str, Tensor],
    convert: Callable[[Mapping[str, Tensor], ViTConfig], Converted],
    config: ViTConfig,
) -> None:
    """Copies our weights into a library's model for `config`, in place, under the library's names.

    For this model, `convert` may only rename and concatenate.

    Raises:
        UnsupportedInputError: one of the two models has a parameter that the other lacks; nothing was changed.
        RuntimeError: shapes of a parameter differ.
    """
    peer_state = {name: tensor.to("meta") for name, tensor in peer.state_dict().items()}
    converted = convert(peer_state, config)
    found = {
        peer_name: part
        for name, peer_names in converted.origins.items()
        if name in weights
        for peer_name, part in zip(peer_names, weights[name].chunk(len(peer_names)))
    }
    reasons = [f"its parameter {name} has no counterpart" for name in peer_state if name not in found]
    reasons += [f"vit-fast's parameter {name} has no counterpart" for name in weights if name not in converted.origins]
    raise_unsupported(type(peer).__name__, reasons)
    peer.load_state_dict(found)


# Fields and properties that have ViTConfig's defaults in the plain ViT of the paper.
_PLAIN = (
    "class_token", "distilled", "reg_tokens", "pos_embed", "no_embed_class", "pre_norm", "global_pool",
    "norm_after_pool", "final_norm", "init_values", "stem_channels", "norm_layer", "mlp_layer", "scale_attn_norm",
    "scale_mlp_norm", "qk_norm", "rope", "proj_bias", "embed_norm",
)  # fmt: skip


def plain_vit_reasons(config: ViTConfig) -> list[str]:
    """Returns the reasons why a config is not the plain ViT of the paper."""
    plain = ViTConfig()
    return config_reasons(config, **{name: (getattr(plain, name),) for name in _PLAIN})


def config_reasons(config: ViTConfig, **supported: Iterable[object]) -> list[str]:
    """Returns a reason for each field whose value is not among the supported ones."""
    return [
        f"{name} must be {' or '.join(map(repr, values))}, got {getattr(config, name)!r}"
        for name, values in supported.items()
        if getattr(config, name) not in values
    ]

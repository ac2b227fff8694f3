"""Renames the tensors of a state dict to timm's names by a table of patterns, and records their original names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...config import ViTConfig

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


def parts(pattern: str, names: Sequence[str], whole: str) -> tuple[Rule, ...]:
    """Returns rules that concatenate tensors to `whole`; NAME in the pattern stands for one of the names."""
    return tuple((pattern.replace("NAME", name), f"{whole}@{i}of{len(names)}") for i, name in enumerate(names))


def rename(state: Mapping[str, Tensor], layout: str, rules: Sequence[Rule]) -> Converted:
    """Applies the first rule that matches each name, then concatenates parts."""
    converted = Converted(layout)
    for name, tensor in state.items():
        target: str | None = name
        for pattern, replacement in rules:
            if match := re.fullmatch(pattern, name):
                target = replacement and match.expand(replacement)
                break
        if target is None:
            converted.ignored.append(name)
        else:
            converted.tensors[target] = tensor
            converted.origins[target] = (name,)
    _join_parts(converted)
    return converted


def with_key_biases(state: Mapping[str, Tensor], q_bias: str) -> Mapping[str, Tensor]:
    """Adds zeros as the bias of k if q has a bias and k has none, as in EVA-02 and DINOv3.

    Args:
        q_bias: Pattern of the name of q's bias, with a group before the letter q and one after it.
    """
    found = dict(state)
    for name, tensor in state.items():
        if match := re.fullmatch(q_bias, name):
            found.setdefault(f"{match[1]}k{match[2]}", torch.zeros_like(tensor))
    return found


def strip_wrappers(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Removes the prefixes that DataParallel and torch.compile add to every name."""
    for prefix in ("module.", "_orig_mod."):
        if state and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def _join_parts(converted: Converted) -> None:
    wholes: dict[str, list[str]] = {}
    for name in sorted(name for name in converted.tensors if "@" in name):
        wholes.setdefault(name.partition("@")[0], []).append(name)
    for whole, parts in wholes.items():
        tensors = [converted.tensors[part] for part in parts]
        widths = {tensor.shape[1:] for tensor in tensors}
        if len(parts) == int(parts[0].rpartition("of")[2]) and len(widths) == 1:
            converted.tensors[whole] = torch.cat(tensors)
            converted.origins[whole] = tuple(converted.origins[part][0] for part in parts)
        else:  # restore the file's names, which the error shows
            for part, tensor in zip(parts, tensors):
                (original,) = converted.origins[part]
                converted.tensors[original], converted.origins[original] = tensor, (original,)
        for part in parts:
            del converted.tensors[part], converted.origins[part]

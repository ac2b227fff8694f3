"""Renames a state dict by a table of patterns, and records the origin of each tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import ViTConfig

Rule = tuple[str, str | None]
"""A pattern that must match the whole name, and its replacement; None drops the tensor and lists it in the report.

A replacement `name@0of3` makes the tensor the first of three parts of `name`, concatenated along the first axis.
"""


@dataclass
class Converted:
    """A state dict in timm's names.

    Attributes:
        layout: The library of the original names.
        tensors: Tensors by timm's names; names without a rule stay unchanged.
        origins: By new name, the original names.
        ignored: Original names that a rule drops, such as a text tower or a mask token.
        head_problem: Returns the reason why a model with a given config would use the head of this file incorrectly, or
            None.
    """

    layout: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    head_problem: Callable[[ViTConfig], str | None] = lambda config: None

    def move(self, old: str, new: str, tensor: Tensor) -> None:
        """Replaces one entry by a reshaped one, under a new name or the same one."""
        del self.tensors[old]
        self.tensors[new] = tensor
        self.origins[new] = self.origins.pop(old)

    def fold_class_position(self) -> None:
        """Adds the class token's position to the token itself, for models with positions for the patches only."""
        positions = self.tensors["pos_embed"]
        self.tensors["cls_token"] = self.tensors["cls_token"].double() + positions[:, :1].double()
        self.tensors["pos_embed"] = positions[:, 1:]
        self.origins["cls_token"] = (*self.origins["cls_token"], *self.origins["pos_embed"])


def rename(state: Mapping[str, Tensor], layout: str, rules: Sequence[Rule]) -> Converted:
    """Applies the first rule that matches each name, then concatenates the parts."""
    compiled = [(re.compile(pattern), target) for pattern, target in rules]
    converted = Converted(layout)
    for name, tensor in state.items():
        target: str | None = name
        for pattern, replacement in compiled:
            if match := pattern.fullmatch(name):
                target = None if replacement is None else match.expand(replacement)
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
        q_bias: Pattern of the name of q's bias; its group 2 follows the letter.
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
        else:  # keep the file's names, which the error shows
            for part, tensor in zip(parts, tensors):
                converted.tensors[converted.origins[part][0]] = tensor
                converted.origins[converted.origins[part][0]] = converted.origins[part]
        for part in parts:
            del converted.tensors[part], converted.origins[part]

"""Translates weights between the names of a library and timm's by a table of patterns, in both directions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...config import ViTConfig

Rule = tuple[str, str | None]
"""A pattern that matches the whole name, and its replacement. None drops the tensor and lists it in the report.

Tensors that are replaced by `name@0of3`, `name@1of3` and `name@2of3` are concatenated along the first axis to `name`.
"""


@dataclass
class Converted:
    """A state dict in timm's names."""

    layout: str  # the library of the original names
    tensors: dict[str, Tensor] = field(default_factory=dict)  # names without a rule stay unchanged
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)  # original names, by new name
    ignored: list[str] = field(default_factory=list)  # original names that a rule drops, such as a text tower
    head_problem: str | None = None  # the reason why the head of the source does not fit the model

    def add_batch_axis(self) -> None:
        """Reshapes class token and positions to [1, N, C]."""
        for name in {"cls_token", "pos_embed"} & self.tensors.keys():
            tensor = self.tensors[name]
            self.tensors[name] = tensor.reshape(1, -1, tensor.shape[-1])

    def add_head_bias(self, projection: str) -> None:
        """Adds zeros as the bias of the head, because CLIP's projection has none."""
        self.tensors["head.bias"] = self.tensors["head.weight"].new_zeros(len(self.tensors["head.weight"]))
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
    tensors, origins = converted.tensors, converted.origins
    for name, tensor in state.items():
        matches = ((re.fullmatch(pattern, name), replacement) for pattern, replacement in rules)
        match, replacement = next((found for found in matches if found[0]), (None, name))
        if replacement is None:
            converted.ignored.append(name)
            continue
        target = match.expand(replacement) if match else name
        tensors[target], origins[target] = tensor, (name,)
    partial = sorted(name for name in tensors if "@" in name)
    for whole, group in itertools.groupby(partial, lambda name: name.partition("@")[0]):
        pieces = [(tensors.pop(name), origins.pop(name)[0], name) for name in group]
        complete = len(pieces) == int(pieces[0][2].rpartition("of")[2])
        if complete and len({tensor.shape[1:] for tensor, _, _ in pieces}) == 1:
            tensors[whole] = torch.cat([tensor for tensor, _, _ in pieces])
            origins[whole] = tuple(original for _, original, _ in pieces)
        else:  # restore the source's names, which the error shows
            for tensor, original, _ in pieces:
                tensors[original], origins[original] = tensor, (original,)
    return converted


def with_key_biases(state: Mapping[str, Tensor], q_bias: str) -> Mapping[str, Tensor]:
    """Adds zeros as the bias of k if only q has a bias; the two groups of the pattern `q_bias` surround the q."""
    found = dict(state)
    for name, tensor in state.items():
        if match := re.fullmatch(q_bias, name):
            found.setdefault(f"{match[1]}k{match[2]}", torch.zeros_like(tensor))
    return found


def take_weights(
    peer: nn.Module, weights: Mapping[str, Tensor], convert: Callable[[Mapping[str, Tensor], ViTConfig], Converted],
    config: ViTConfig,
) -> None:  # fmt: skip
    """Copies our weights into a library's model of the same architecture, which `build_peer` built."""
    origins = convert({name: tensor.to("meta") for name, tensor in peer.state_dict().items()}, config).origins
    parts_of = ((origins[name], tensor.chunk(len(origins[name]))) for name, tensor in weights.items())
    peer.load_state_dict({name: part for names, chunks in parts_of for name, part in zip(names, chunks)})


# Fields and properties of the plain ViT of the paper
PLAIN_VIT = {
    name: getattr(ViTConfig(), name)
    for name in (
        "class_token", "distilled", "reg_tokens", "pos_embed", "no_embed_class", "pre_norm", "global_pool",
        "norm_after_pool", "final_norm", "init_values", "stem_channels", "norm_layer", "mlp_layer", "scale_attn_norm",
        "scale_mlp_norm", "qk_norm", "rope", "proj_bias", "embed_norm",
    )
}  # fmt: skip


def config_reasons(config: ViTConfig, **required: object) -> list[str]:
    """Returns a reason for each field whose value is not the required one."""
    values = ((name, value, getattr(config, name)) for name, value in required.items())
    return [f"{name} must be {value!r}, got {got!r}" for name, value, got in values if got != value]

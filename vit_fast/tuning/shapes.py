"""The parts of a model that vit_fast.fuse knows, by the shapes that they work on.

Which backend is the fastest depends on the shape more than on the model: a hierarchical one has several, and another
model may share one. A class is a part, and its images, tokens an image and width: "attention 8x256x384"; images and
tokens are rounded up to powers of two.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..fusion.fuse import fuse, unfuse
from .calls import call, first_batch
from .choices import Choice


def shape_classes(model: nn.Module, example: Any) -> dict[str, str]:
    """The class of every part that can be fused, by the name of its module; of those that were called.

    Args:
        model: In evaluation mode; left as it is.
        example: What it is called with.
    """
    work = sharing_copy(model)
    parts = {row.name: row.part for row in fuse(work, "sdpa").fused}
    if not parts:
        return {}
    unfuse(work)  # its own forwards call every part, which ours may not
    shapes: dict[str, tuple[int, int, int]] = {}
    images = first_batch(example)
    for name in parts:
        recorder = _Recorder(shapes, name, images)
        work.get_submodule(name).register_forward_pre_hook(recorder, with_kwargs=True)
    with torch.no_grad():
        call(work, example)
    return {name: f"{part} {'x'.join(map(str, shapes[name]))}" for name, part in parts.items() if name in shapes}


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy with the very same parameters and buffers."""
    kept: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, kept).eval()


def backends_of(choice: Choice, classes: Mapping[str, str]) -> dict[str, str]:
    """The backend of every part by its module's name; those that stay as they were given are left out."""
    by_class = dict(choice.by_shape)
    found = {name: by_class.get(kind) or choice.backend_of(kind) for name, kind in classes.items()}
    return {name: backend for name, backend in found.items() if backend is not None}


def choice_by_classes(classes: Iterable[str], known: Mapping[str, str]) -> Choice | None:
    """The choice that gives each class the backend known for it; None where that is not known of all."""
    kinds = sorted(set(classes))
    if not kinds or any(kind not in known for kind in kinds):
        return None
    parts = {part: [known[kind] for kind in kinds if kind.startswith(part)] for part in ("attention", "norm + MLP")}
    most: dict[str, str | None] = {part: max(found, key=found.count, default=None) for part, found in parts.items()}
    plain = Choice(attention=most["attention"], mlp=most["norm + MLP"])
    other = tuple((kind, known[kind]) for kind in kinds if known[kind] != plain.backend_of(kind))
    return Choice(attention=plain.attention, mlp=plain.mlp, by_shape=other)


class _Recorder:
    """A hook that notes the shape of a module's first tensor: images, tokens an image, width."""

    def __init__(self, shapes: dict[str, tuple[int, int, int]], name: str, images: int) -> None:
        self.shapes, self.name, self.images = shapes, name, images

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        first = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        if first is not None and first.dim() > 1 and first.numel():
            width = first.shape[-1]
            tokens = max(1, first.numel() // (self.images * width))
            self.shapes[self.name] = _rounded(self.images), _rounded(tokens), width


def _rounded(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()

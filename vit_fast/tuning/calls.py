"""How a model is called with its example: a tensor, a tuple of arguments, or a mapping of keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

Function = Callable[..., Any]


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as positional and keyword arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def call(function: Function, example: Any) -> Any:
    """The function of an example."""
    args, kwargs = arguments(example)
    return function(*args, **kwargs)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in an example, or in what a model gives; those of a mapping of any kind, too."""
    value = dict(value) if isinstance(value, Mapping) and not isinstance(value, dict) else value
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def first_batch(example: Any) -> int:
    """Images in an example: the first axis of its first tensor."""
    return int(tensors_in(example)[0].shape[0])


def only_images(example: Any) -> Tensor | None:
    """The one tensor that is all there is in an example; None of any other."""
    args, kwargs = arguments(example)
    values = [*args, *kwargs.values()]
    return values[0] if len(values) == 1 and isinstance(values[0], Tensor) else None

"""How a model is called with its example: a tensor, a tuple of arguments, or a mapping of keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import UnsupportedInputError

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


def of_images(function: Callable[[Tensor], Any], model: nn.Module, example: Any, what: str) -> Function:
    """A function of images, called as the model is: by place or by name, and with nothing else.

    Args:
        function: It.
        model: Whose arguments' names are taken.
        example: Another name may stand there.
        what: It, in the words of an error.
    """
    names = {*arguments(example)[1], *list(inspect.signature(model.forward).parameters)[:1]}

    def computed(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *(kwargs[name] for name in names & kwargs.keys())]
        others = [name for name, value in kwargs.items() if name not in names and value is not None]
        if len(given) != 1 or others or not isinstance(given[0], Tensor):
            called = ", ".join([type(value).__name__ for value in given] + others) or "nothing"
            raise UnsupportedInputError(what, [f"called with {called}: accepted are images alone"])
        return function(given[0])

    return computed

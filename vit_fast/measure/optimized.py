"""A model that runs as a candidate, with the interface of the original."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..blocks.plain import is_hooked
from ..errors import UnsupportedInputError
from .candidate import Candidate


class Optimized(nn.Module):
    """An independent, read-only copy of a model for inference, run as a candidate.

    It takes the same inputs and returns outputs of the same dtypes. Its modules and methods are hidden, `parameters()`,
    `buffers()` and `state_dict()` return copies, and setting, loading, converting, moving or training raises an error.
    Change the original model and optimize it again.

    `original` must not change, `function` takes its inputs, and `output_dtypes` are of its floating outputs.
    """

    def __init__(
        self, original: nn.Module, candidate: Candidate, function: Function, *, output_dtypes: tuple[torch.dtype, ...]
    ) -> None:
        super().__init__()
        self.candidate = candidate
        self.training = False
        # past nn.Module, which would register them as children
        self.__dict__.update(_original=original, _function=function, _output_dtypes=output_dtypes)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the model; raises UnsupportedInputError in training mode."""
        if self.training:
            raise self._refusal("is in training mode: call eval(), and train the original model")
        output = self._function(*args, **kwargs)
        if self.candidate == Candidate():
            return output
        dtypes = iter(self._output_dtypes)

        def as_before(value: Any) -> Any:
            floating = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(next(dtypes, value.dtype)) if floating else value

        return pytree.tree_map(as_before, output)

    def _refusal(self, reason: str) -> UnsupportedInputError:
        return UnsupportedInputError(f"a model optimized as {self.candidate.name!r}", [reason])

    def _apply(self, fn: Any, recurse: bool = True) -> Optimized:
        """Raises UnsupportedInputError if .to(), .half() or the like would convert or move the weights."""
        for tensor in (*self._original.parameters(), *self._original.buffers()):
            probe = fn(tensor.new_empty(0))
            if probe.dtype != tensor.dtype or probe.device != tensor.device:
                reason = f"cannot be converted to {probe.dtype} on {probe.device}"
                raise self._refusal(f"{reason}: convert or move the original model, and optimize that again")
        return self

    def train(self, mode: bool = True) -> Optimized:
        """Sets the mode; a call in training mode raises an error."""
        self.training = mode
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Returns copies of the parameters; torch raises an error if they are changed."""
        return ((name, _copy_of(value)) for name, value in self._original.named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Returns copies of the buffers, likewise."""
        return ((name, _copy_of(value)) for name, value in self._original.named_buffers(*args, **kwargs))

    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> Any:
        """Returns a copy of the model's state_dict."""
        own = self._original.state_dict(*args, **kwargs)
        own.update({name: value.clone() for name, value in own.items() if isinstance(value, Tensor)})
        if destination is None:
            return own
        destination.update(own)  # called for a submodule
        return destination

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raises UnsupportedInputError."""
        raise self._refusal("is read-only: load the weights into the original model, and optimize that again")

    _load_from_state_dict = load_state_dict  # called for a submodule

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in self.__dict__ or hasattr(type(self), name)
        if not own and hasattr(self.__dict__.get("_original"), name):
            raise self._refusal(f"is read-only: set {name} of the original model, and optimize that again")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if "_original" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        value = getattr(self._original, name)
        if isinstance(value, nn.Module) or callable(value):
            optimized = f"a model optimized as {self.candidate.name!r}"
            raise AttributeError(f"{optimized} does not expose {name}: use the original model")
        return _copy_of(value) if isinstance(value, Tensor) else copy.deepcopy(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimized:
        twin = type(self).__new__(type(self))
        for name, value in self.__dict__.items():  # these two are immutable
            twin.__dict__[name] = value if name in ("_original", "_function") else copy.deepcopy(value, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the result; raises an error if a session, a graph or compiled code of this process runs it."""
        if self.candidate.engine != "torch" or not isinstance(self._function, nn.Module):
            reason = "cannot be pickled: write result.save(path), and call vit_fast.load_optimized(path, model) there"
            raise self._refusal(reason)
        return super().__reduce_ex__(protocol)


def _copy_of(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.detach().clone()


def version_of(tensor: Tensor) -> int:
    """Counts the writes to a tensor; torch does not count those to inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def hook_reasons(model: nn.Module) -> list[str]:
    """Returns a reason if modules of the model have hooks, which a candidate would not run."""
    hooked = [name or "the model" for name, module in model.named_modules() if is_hooked(module)]
    return [f"{', '.join(hooked[:3])} has hooks, which would not run"] if hooked else []


def in_pieces(function: Function, size: int) -> Function:
    """Splits the batch into calls of `size` images; every output's first axis is the batch."""

    def cut(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        batch = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)
        if batch <= size:
            return function(*args, **kwargs)
        pieces = []
        for start in range(0, batch, size):
            part = [
                leaf[start : start + size]
                if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch
                else leaf
                for leaf in leaves
            ]
            some, named = pytree.tree_unflatten(part, spec)
            pieces.append(function(*some, **named))
        return pytree.tree_map(_joined, *pieces)

    return cut


def _joined(*parts: Any) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]


def with_threads(function: Function, count: int) -> Function:
    """Sets torch's number of threads during each call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(before)

    return run


def with_inputs(function: Function, convert: Callable[[Tensor], Tensor]) -> Function:
    """Converts floating inputs before each call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        def converted(value: Any) -> Any:
            return convert(value) if isinstance(value, Tensor) and value.is_floating_point() else value

        some, named = pytree.tree_map(converted, (args, kwargs))
        return function(*some, **named)

    return run


Function = Callable[..., Any]


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns an example as positional and keyword arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def call(function: Function, example: Any) -> Any:
    """Calls a function with an example."""
    args, kwargs = arguments(example)
    return function(*args, **kwargs)


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in an example or an output."""
    value = dict(value) if isinstance(value, Mapping) and not isinstance(value, dict) else value
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def first_batch(example: Any) -> int:
    """Returns the batch size of an example: the first axis of its first tensor."""
    return int(tensors_in(example)[0].shape[0])


def only_images(example: Any) -> Tensor | None:
    """Returns the tensor of an example that contains nothing else, or None."""
    args, kwargs = arguments(example)
    values = [*args, *kwargs.values()]
    return values[0] if len(values) == 1 and isinstance(values[0], Tensor) else None


def of_images(function: Callable[[Tensor], Any], model: nn.Module, example: Any, what: str) -> Function:
    """Makes a function of images callable as the model is: by position, or by the name of its argument or example."""
    names = {*arguments(example)[1], *list(inspect.signature(model.forward).parameters)[:1]}

    def computed(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *(kwargs[name] for name in names & kwargs.keys())]
        others = [name for name, value in kwargs.items() if name not in names and value is not None]
        if len(given) != 1 or others or not isinstance(given[0], Tensor):
            called = ", ".join([type(value).__name__ for value in given] + others) or "nothing"
            raise UnsupportedInputError(what, [f"it must be called with one tensor of images, got {called}"])
        return function(given[0])

    return computed

"""What takes a model's place: the same inputs and outputs, computed in another way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import UnsupportedInputError
from ..plain import is_hooked
from .calls import Function
from .choices import Choice


class Optimized(nn.Module):
    """A model in the fastest way that was found for it; for inference.

    Takes and gives what the model does, in the same dtypes, without gradients. Attributes, parameters and state_dict
    are the model's own. A weight, module or forward that was replaced, a weight that was converted or moved, and where
    weights were converted or compiled in also one that was written to, is noticed by the next call; what torch cannot
    see, writes through `.data`, is not.

    Args:
        original: The model as it was given; held, not changed.
        choice: How it is run.
        function: That, as a function of the model's inputs.
        shares_weights: Whether the function reads the model's own parameters in each call.
        output_dtypes: Of the model's floating outputs, in the order of its leaves.
    """

    def __init__(
        self,
        original: nn.Module,
        choice: Choice,
        function: Function,
        *,
        shares_weights: bool,
        output_dtypes: tuple[torch.dtype, ...],
    ) -> None:
        super().__init__()
        self.original = original
        self.choice = choice
        self._function = function
        self._output_dtypes = output_dtypes
        as_given = choice == Choice()
        # flat, since every call goes through them
        self._held = () if as_given else tuple(_held_by(original))
        self._hooks = () if as_given else tuple(_hooks_of(original))
        self._kinds = () if as_given else tuple((each, each.dtype, each.device) for each in _tensors_of(original))
        self._written = () if shares_weights else tuple((each, version_of(each)) for each in _tensors_of(original))
        self.training = False

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives.

        Raises:
            UnsupportedInputError: its weights were changed since, or it carries hooks, which would not run.
        """
        reasons = self._reasons()
        if reasons:
            raise UnsupportedInputError(f"a model optimized as {self.choice.name!r}", reasons)
        output = self._function(*args, **kwargs)
        if self.choice == Choice():
            return output
        dtypes = iter(self._output_dtypes)

        def as_before(value: Any) -> Any:
            floating = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(next(dtypes, value.dtype)) if floating else value

        return pytree.tree_map(as_before, output)

    def _reasons(self) -> list[str]:
        """What was done to the model since that this would not follow."""
        if self.training:
            return ["it is in training mode: accepted is evaluation mode; train the model it was made from"]
        if self.choice == Choice():
            running = "the model as it was given, which is in training mode: accepted is evaluation mode, model.eval()"
            return [f"it runs {running}"] if self.original.training else []
        replaced = any(place.get(name) is not value for place, name, value in self._held)
        converted = any(each.dtype is not dtype or each.device != device for each, dtype, device in self._kinds)
        if replaced or converted or any(version_of(each) != version for each, version in self._written):
            return ["the model's weights were changed since: optimize it again"]
        return hook_reasons(self.original) if any(self._hooks) else []

    def _apply(self, fn: Any, recurse: bool = True) -> Optimized:
        """Runs on .to(), .half() and the like; what changes nothing is accepted.

        Raises:
            UnsupportedInputError: it would convert or move the weights, for which something else may be the fastest.
        """
        for tensor in _tensors_of(self.original):
            probe = fn(tensor.new_empty(0))
            if probe.dtype != tensor.dtype or probe.device != tensor.device:
                reason = f"to {probe.dtype} on {probe.device}: convert or move the model it was made from, and optimize"
                raise UnsupportedInputError(f"a model optimized as {self.choice.name!r}", [f"{reason} that again"])
        return self

    def train(self, mode: bool = True) -> Optimized:
        """Only marks it: a call in training mode is refused."""
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the model."""
        return self.original.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; torch does not count that of those made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _held_by(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, object]]:
    """Every module, parameter and buffer in a model, and forwards of instances, by where they stand."""
    for module in model.modules():
        yield module.__dict__, "forward", module.__dict__.get("forward")
        for place in (module._modules, module._parameters, module._buffers):
            for name, value in place.items():
                yield place, name, value


def _hooks_of(model: nn.Module) -> Iterator[dict[int, Any]]:
    """Where hooks would stand; see is_hooked."""
    for module in model.modules():
        yield from (module._forward_hooks, module._forward_pre_hooks)
        yield from (module._backward_hooks, module._backward_pre_hooks)


def hook_reasons(model: nn.Module) -> list[str]:
    """The modules of a model whose hooks would not run in its place."""
    hooked = [name or "the model" for name, module in model.named_modules() if is_hooked(module)]
    return [f"{', '.join(hooked[:3])} carries hooks, which would no longer run"] if hooked else []


def in_pieces(function: Function, size: int) -> Function:
    """The function, called on so many images at a time; every output's first axis is the batch."""

    def cut(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        batch = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)
        if batch <= size:  # what holds no images is for the function to refuse
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
    """The function, with so many threads of torch's for its time."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(before)

    return run


def with_inputs(function: Function, convert: Callable[[Tensor], Tensor]) -> Function:
    """The function on floating inputs that were converted."""

    def run(*args: Any, **kwargs: Any) -> Any:
        def converted(value: Any) -> Any:
            return convert(value) if isinstance(value, Tensor) and value.is_floating_point() else value

        some, named = pytree.tree_map(converted, (args, kwargs))
        return function(*some, **named)

    return run

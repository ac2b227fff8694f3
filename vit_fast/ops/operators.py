"""Operators as torch knows them: schema, implementation, autograd.

`torch.library.custom_op` gives the same with more of the host's work a call: here the dispatcher finds the
implementation at once, and autograd's part is one `torch.autograd.Function`. The implementation runs by its launch plan
(`kernels/plan.py`): on shapes seen before nothing of it is executed but its launches, so what it checks is checked once
for them. A vmap rule is registered by torch's own `register_vmap`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

_functions: dict[Any, Callable[..., Any]] = {}

Function = TypeVar("Function", bound=Callable[..., Any])


def operator(name: str, before: Callable[..., object] | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: registers a function of tensors as an operator, for every device, and returns that.

    Args:
        name: "namespace::name". The schema is that of the function's annotations; it changes none of its arguments, and
            no result shares memory with one.
        before: Called with the arguments of every call, what is planned included.
    """
    namespace, short = name.split("::")

    def decorate(function: Callable[..., Any]) -> Any:
        def implementation(*args: Any) -> Any:
            if before is not None:
                before(*args)
            return _run_by_plan()(function, args)

        library = _library(namespace)
        schema = torch.library.infer_schema(function, mutates_args=())
        library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(short, implementation, "CompositeExplicitAutograd")
        registered = getattr(getattr(torch.ops, namespace), short).default
        _functions[registered] = function
        return registered

    return decorate


def function_of(operator: Any) -> Callable[..., Any]:
    """The function that was registered as an operator: for one that is made of others."""
    return _functions[operator]


def fake(operator: Any) -> Callable[[Function], Function]:
    """Decorator: the function says what the results of an operator look like, for those who trace it."""

    def decorate(function: Function) -> Function:
        torch.library.register_fake(operator, function, lib=_library(operator.namespace))
        return function

    return decorate


def differentiable(
    operator: Any, save: Callable[[Any, tuple[Any, ...], Any], None] | None, backward: Callable[..., Any]
) -> None:
    """Registers what autograd does with an operator.

    Args:
        operator: As `operator` returned it.
        save: Called with the context, all inputs, and the output; None keeps nothing.
        backward: Called with the context and the gradients of the outputs; gives one for each input.
    """

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keys: Any, *args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = operator.redispatch(keys & torch._C._after_autograd_keyset, *args)
            if save is not None:
                save(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            found = backward(ctx, *gradients)
            return (None, *found) if isinstance(found, tuple) else (None, found)

    def dispatch(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return Differentiable.apply(keys, *args)  # type: ignore[no-untyped-call]  # torch's own
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)

    _library(operator.namespace).impl(operator._opname, dispatch, "Autograd", with_keyset=True)


@functools.cache
def _library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "FRAGMENT")


@functools.cache
def _run_by_plan() -> Callable[[Callable[..., Any], Sequence[Any]], Any]:
    if importlib.util.find_spec("triton") is None:
        return lambda function, arguments: function(*arguments)  # which says so
    from ..kernels import plan

    return plan.run

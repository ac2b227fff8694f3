"""The Triton operators under torch.func and forward-mode derivatives.

An operator of its own refuses torch.func's grad and vjp with an error about `setup_context`, and lets a
forward-mode tangent pass as if it were zero. Where a transform or a dual level is active, the operator runs inside a
`torch.autograd.Function` instead, which torch.func differentiates and which is asked for the tangent: reverse mode
works, the rest is refused by name. Elsewhere the operator is called as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import UnsupportedInputError
from .backends import constant_to_compiler
from .checks import refuse_double_backward, refuse_vmap

Operator = Callable[..., Any]
_REASON = "the triton operators under torch.func or forward-mode derivatives run uncompiled"


def in_transform() -> bool:
    """Whether a torch.func transform (grad, vjp, jvp, vmap) or a forward-mode level is active."""
    return forward_ad._current_level >= 0 or functorch_is_active()


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will come back through an operator on these tensors; a torch.func transform may always."""
    if in_transform():
        return True
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


@constant_to_compiler
def functorch_is_active() -> bool:
    """Whether a torch.func transform is active; torch.compile enters it while tracing, and guards the stack of them."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def transformable(
    what: str, operator: Operator, save: Callable[..., None] | None = None, backward: Callable[..., Any] | None = None
) -> Operator:
    """The operator, to be called where torch.func may look on.

    Args:
        what: Its name in errors.
        operator: A custom operator.
        save: What it keeps for its backward, as `register_autograd` takes it; None where it has no backward.
        backward: Its backward, likewise.
    """

    class Transformed(torch.autograd.Function):
        forward = staticmethod(operator)
        setup_context = staticmethod(save or _save_nothing)
        vmap = staticmethod(refuse_vmap(what))
        jvp = staticmethod(refuse_forward_mode(what))

    Transformed.backward = staticmethod(backward or refuse_double_backward(what))  # type: ignore[method-assign]  # as above

    routes: dict[str, Operator] = {"eager": Transformed.apply}

    @constant_to_compiler
    def route() -> str:
        # torch.compile cannot trace this: it breaks its graph, and with fullgraph=True says why
        if "torch._dynamo" in sys.modules and "uncompiled" not in routes:
            routes["uncompiled"] = torch.compiler.disable(Transformed.apply, reason=_REASON)
        return "uncompiled" if "uncompiled" in routes else "eager"

    def call(*args: Any) -> Any:
        return routes[route()](*args) if in_transform() else operator(*args)

    return call


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def refuse_forward_mode(what: str) -> Callable[..., NoReturn]:
    """The forward-mode derivative of an operator: an error that says so."""

    def refuse(ctx: Any, *tangents: Any) -> NoReturn:
        raise UnsupportedInputError(
            f"a forward-mode derivative (torch.func.jvp, jacfwd, dual numbers) of {what} with backend='triton'",
            ["the kernels have no such derivative: use backend='eager', or reverse mode"],
        )

    return refuse

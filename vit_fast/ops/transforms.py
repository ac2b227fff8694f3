"""Recognition of torch.func transforms and forward-mode derivatives, under which operators run by another route."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .backends import constant_to_compiler


def in_transform() -> bool:
    """True if a torch.func transform (grad, vjp, jvp, vmap) or a forward-mode level is active."""
    return forward_ad._current_level >= 0 or functorch_is_active()


def needs_gradient(*tensors: Tensor | None) -> bool:
    """True if autograd will come back through an operator on these tensors; a torch.func transform may always."""
    if in_transform():
        return True
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


@constant_to_compiler
def functorch_is_active() -> bool:
    """True if a torch.func transform is active; torch.compile enters it while tracing, and guards the stack of them."""
    return torch._C._functorch.peek_interpreter_stack() is not None

"""Decides if operators may use the parameters of a module without calling its forward.

A module with hooks, a replaced forward, or parameters of a tensor subclass (torchao, DTensor) must be called.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils.module_tracker import ModuleTracker

from ..errors import type_name

Edge = tuple[nn.Module, str, nn.Module]  # parent, name, child
PLAIN = (nn.Parameter, Tensor, type(None))  # other subclasses may override operators
_STORES = ("_modules", "_parameters", "_buffers")
_RECORDERS = "transformers.utils.output_capturing"
# Hooks that record these outputs, (key, index), do not prevent fusion. Fused modules are still called, and attention
# returns weights only on request.
_HARMLESS = (("hidden_states", 0), ("attentions", 1))
_FORWARDS: dict[type, Any] = {}  # forward of each inspected class, as defined by its library


def is_hooked(module: nn.Module) -> bool:
    """True if a module has hooks. Hooks with which transformers records outputs do not count."""
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    hooks = module._forward_hooks
    return bool(hooks) and not all(map(_only_records, hooks.values()))


def _only_records(hook: Any) -> bool:
    if getattr(hook, "__module__", None) != _RECORDERS or not hasattr(hook, "__code__"):
        return False
    if torch.compiler.is_compiling():  # torch.compile cannot trace the code below, which ran before tracing
        return True
    held = dict(zip(hook.__code__.co_freevars, hook.__closure__ or ()))
    recorded = tuple(held[name].cell_contents for name in ("key", "index") if name in held)
    return recorded in _HARMLESS


def has_global_hooks() -> bool:
    """True if hooks are registered for all modules, apart from those with which torch counts operations by module."""
    hooks = modules._global_forward_hooks, modules._global_forward_pre_hooks, modules._global_backward_hooks
    if not any(hooks) and not modules._global_backward_pre_hooks:
        return False
    every = [each for place in (*hooks, modules._global_backward_pre_hooks) for each in place.values()]
    return not all(isinstance(getattr(each, "__self__", None), ModuleTracker) for each in every)


def forward_is_replaced(module: nn.Module) -> bool:
    """True if a forward is set on the instance and differs from the forward of the class."""
    if "forward" not in module.__dict__:
        return False
    forward = module.__dict__["forward"]
    own = getattr(forward, "__self__", None) is module  # set by transformers 4, and accelerate after removing hooks
    return not (own and getattr(forward, "__func__", None) is type(module).forward)


def _class_is_patched(module_class: Any) -> bool:
    """True if the forward of a class or its `original` is not from a class body, or changed since first seen."""
    for cls in (module_class, getattr(module_class, "original", module_class)):
        if cls not in _FORWARDS:
            owner = next(base for base in cls.__mro__ if "forward" in vars(base))
            is_known = owner is nn.Module or "original_forward" in vars(owner)
            if not is_known and getattr(cls.forward, "__qualname__", "") != f"{owner.__qualname__}.forward":
                return True
            _FORWARDS[cls] = cls.forward
        if _FORWARDS[cls] is not cls.forward:
            return True
    return False


def is_touched(module: nn.Module) -> bool:
    """True if a module must be called, because it has hooks, a replaced forward or unusual parameters."""
    # avoid function calls, because this runs in every forward
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    if module._forward_hooks and is_hooked(module):
        return True
    if "forward" in module.__dict__ and forward_is_replaced(module):
        return True
    if not torch.compiler.is_compiling():
        cls: Any = type(module)
        original = getattr(cls, "original", cls)
        as_known = _FORWARDS.get(cls) is cls.forward and _FORWARDS.get(original) is original.forward
        if not as_known and _class_is_patched(cls):
            return True
    for parameter in module._parameters.values():  # noqa: SIM110  # a generator is slower, here and below
        if type(parameter) not in PLAIN:
            return True
    return False


def touch_reasons(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Returns the reasons of `is_touched` for (name, module) pairs."""
    reasons = []
    for name, module in modules:
        if is_hooked(module):
            reasons.append(f"{name} has hooks, which a fused module would not run")
        reasons += forward_reasons(module, name)
        for own, parameter in module._parameters.items():
            reasons += tensor_reasons(f"{name}.{own}", parameter)
    return reasons


def forward_reasons(module: nn.Module, name: str = "") -> list[str]:
    reasons = []
    if forward_is_replaced(module):
        reasons.append(f"{f'{name}.' if name else 'its '}forward was replaced on the instance")
    if _class_is_patched(type(module)):
        of = f" of {name}" if name else ""
        reasons.append(f"{type(module).__qualname__}.forward was replaced on the class{of}")
    return reasons


def tensor_reasons(name: str, tensor: Tensor | None) -> list[str]:
    if type(tensor) in PLAIN:
        return []
    return [f"{name} must be an ordinary tensor, got {type_name(tensor)}"]


def _touch(module: nn.Module) -> list[Any]:
    return [is_touched(module), is_hooked(module), module.__dict__.get("forward")]


class Watch:
    """Checks that the inspected modules (`edges`) and the attributes that were read (`values`) did not change."""

    def __init__(self, owner: nn.Module, edges: list[Edge], values: list[tuple[Any, str, object]]) -> None:
        self.owner, self.values = owner, tuple(values)
        self.modules = tuple(child for _, _, child in edges)
        self._direct: list[tuple[dict[str, Any], str, object]] = []  # avoids nn.Module.__getattr__, which is slow
        self._others: list[tuple[Any, str, object]] = []
        unique = {(id(owner), name): (owner, name, value) for owner, name, value in values}  # both halves read the same
        for owner, name, value in unique.values():
            own = getattr(owner, "__dict__", {})
            if name in own:
                self._direct.append((own, name, value))
            elif value is None and isinstance(owner, nn.Module):
                self._direct += [(place, name, None) for place in (own, *map(own.get, _STORES))]
            else:
                self._others.append((owner, name, value))
        classes = {type(child) for child in self.modules}
        classes |= {getattr(cls, "original", cls) for cls in classes}
        self._forwards = tuple((cls, cls.forward) for cls in classes)
        touched = {id(child) for child in self.modules if is_touched(child)}
        self._touched = tuple((*edge, type(edge[2]), *_touch(edge[2])) for edge in edges if id(edge[2]) in touched)
        self._plain = tuple(
            (parent._modules, name, child, type(child), child.__dict__, child._parameters)
            for parent, name, child in edges
            if id(child) not in touched
        )

    def holds(self, owner: nn.Module) -> bool:
        """True if `owner` is the block that was read, and no class, child, hook, forward or attribute changed."""
        if owner is not self.owner:  # a shallow copy, or a replica of nn.DataParallel
            return False
        for cls, forward in self._forwards:
            if cls.forward is not forward:
                return False
        plain = nn.Parameter
        for children, name, child, cls, own, parameters in self._plain:
            if children.get(name) is not child or child.__class__ is not cls:
                return False
            if own["_forward_pre_hooks"] or own["_backward_hooks"] or (own["_forward_hooks"] and is_hooked(child)):
                return False
            if own["_backward_pre_hooks"] or ("forward" in own and forward_is_replaced(child)):
                return False
            if parameters:
                for parameter in parameters.values():
                    if parameter.__class__ is not plain and parameter.__class__ not in PLAIN:
                        return False
        for parent, name, child, cls, *touch in self._touched:
            if parent._modules.get(name) is not child or type(child) is not cls or _touch(child) != touch:
                return False
        for attributes, name, value in self._direct:
            now = attributes.get(name)
            if now is not value and now != value:
                return False
        for other, name, value in self._others:  # noqa: SIM110
            if getattr(other, name, None) != value:
                return False
        return True

"""The call of a module that was captured: its arguments, the attributes that it may depend on, and its output."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.fused import FusedModule
from ..blocks.parts import Slot
from .capture import InDouble, UnreadableError

SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
SAME = "the same tensor"
_OF_MODULES = set(vars(nn.Module())) | {"training", "forward"}


@dataclass(frozen=True)
class Call:
    """Arguments of a forward: tokens, and constants. A tensor may be given several times, as query, key and value."""

    name: int | str  # position or name of the tokens
    others: tuple[tuple[int | str, Any], ...]
    place: int | None  # position of the output in a tuple of otherwise None; None if forward returns a tensor
    length: int = 1

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Call:
        given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}  # type: ignore[dict-item]
        name = next((name for name, value in given.items() if isinstance(value, Tensor)), None)
        if name is None:
            raise UnreadableError("its forward gets no tensor")
        x = given.pop(name)
        others = tuple((each, SAME if value is x else value) for each, value in given.items())
        unknown = [str(each) for each, value in others if not _is_constant(value)]
        if unknown:
            raise UnreadableError(f"its forward gets more than tokens and constants (argument {', '.join(unknown)})")
        if isinstance(output, Tensor):
            return cls(name, others, None)
        tensors = [i for i, each in enumerate(output) if each is not None] if type(output) in (tuple, list) else []
        if len(tensors) != 1 or not isinstance(output[tensors[0]], Tensor):
            raise UnreadableError("its forward returns more than one tensor")
        return cls(name, others, tensors[0], len(output))

    def tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the tokens of a call; None if the call differs from the captured one in anything else."""
        given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}  # type: ignore[dict-item]
        x = given.pop(self.name, None)
        if len(given) != len(self.others):
            return None
        for name, value in self.others:
            now = given.get(name, self)
            if not (now is x if value is SAME else type(now) is type(value) and now == value):
                return None
        return x

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        given = {name: x if value is SAME else value for name, value in self.others} | {self.name: x}
        args = [given[i] for i in range(len(given)) if i in given]
        with InDouble() if x.dtype == torch.float64 else nullcontext():
            output = module(*args, **{name: value for name, value in given.items() if isinstance(name, str)})
        if (self.place is None) is not isinstance(output, Tensor):
            raise UnreadableError("the structure of its output depends on its input")
        return output if self.place is None else output[self.place]

    def returned(self, y: Tensor) -> Any:
        if self.place is None:
            return y
        return tuple(y if i == self.place else None for i in range(self.length))


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_constant, value))
    if isinstance(value, dict):
        return all(map(_is_constant, (*value, *value.values())))
    return isinstance(value, SIMPLE)


def attributes_of(module: nn.Module) -> Iterator[tuple[Any, str, object]]:
    """Yields all attributes of a module, its class, and its other objects, e.g. a configuration: (owner, name, value).

    Excludes tensors, submodules and rates of dropout, which `drop_slots` returns.
    """
    drops = {name for _, name in drop_slots(module, False)}
    for store in (module._parameters, module._buffers):
        yield from ((module, name, None) for name, tensor in store.items() if tensor is None)
    for cls in itertools.takewhile(lambda cls: cls is not nn.Module, class_of(module).__mro__):
        for name, value in vars(cls).items():
            if not name.startswith("__") and name not in vars(module) and _is_constant(value):
                yield module, name, getattr(module, name)
    for name, value in vars(module).items():
        if (
            name in _OF_MODULES
            or name in drops
            or name.startswith("vit_fast_")
            or isinstance(value, Tensor | nn.Module)
        ):
            continue
        yield module, name, _copied(value)
        yield from _inside(value, {id(value)})


def _inside(value: Any, seen: set[int]) -> Iterator[tuple[Any, str, object]]:
    if isinstance(value, (*SIMPLE, type, FunctionType, nn.Module, Tensor)) or not hasattr(value, "__dict__"):
        return
    for name, each in vars(value).items():
        if _is_constant(each):
            yield value, name, _copied(each)
        elif id(each) not in seen:
            seen.add(id(each))
            yield value, name, each
            yield from _inside(each, seen)


def _copied(value: Any) -> Any:
    if _is_constant(value):
        return copy.deepcopy(value)
    return list(value) if type(value) is list else dict(value) if type(value) is dict else value


def drop_slots(module: nn.Module, inside: bool = True) -> list[tuple[nn.Module, str]]:
    """Returns the attributes that may be dropout or drop path probabilities, by default of all modules inside."""
    return [
        (part, name)
        for part in (module.modules() if inside else [module])
        for name, value in vars(part).items()
        if (name == "p" or "drop" in name) and type(value) in (float, int) and 0 <= value <= 1
    ]


def structure_of(module: nn.Module) -> tuple[Any, ...]:
    """Returns names, classes and shapes of everything inside a module; blocks of equal structure share one recipe."""
    rows: list[Any] = []
    for name, part in module.named_modules(remove_duplicate=False):
        held = {name: each for name, each in vars(part).items() if isinstance(each, Tensor)}
        names = (*part._parameters, *part._buffers, *held)
        rows.append((name, class_of(part), tuple((own, Kind((part, own)).now) for own in names)))
    return tuple(rows)


@dataclass(frozen=True)
class Kind:
    """The tensor at a slot, seen by a `Watch`: `now` is its shape and True if it is boolean, None without a tensor."""

    slot: Slot

    @property
    def now(self) -> tuple[torch.Size, bool] | None:
        tensor = getattr(*self.slot)
        return (tensor.shape, tensor.dtype == torch.bool) if isinstance(tensor, Tensor) else None


def state_of(module: nn.Module) -> tuple[Any, ...]:
    """Returns the values of all attributes inside a module by path; objects count as equal if their attributes are."""
    return tuple(
        (path, name, value if _is_constant(value) or isinstance(value, type | FunctionType) else type(value))
        for path, part in module.named_modules(remove_duplicate=False)
        for _, name, value in attributes_of(part)
    )


def class_of(module: nn.Module) -> type[nn.Module]:
    return type(module).original if isinstance(module, FusedModule) else type(module)

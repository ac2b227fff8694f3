"""The call of a module that was captured: its arguments and its output."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.fp8_scales import Fp8Scales
from ..blocks.parts import Slot
from .capture import InDouble, UnreadableError
from .dependencies import SIMPLE, attributes_of, class_of, is_constant

TENSOR, CONSTANT = "tensor", "constant"
Pattern = tuple[Any, ...]  # see `pattern_of`
_ONE_TENSOR: Pattern = (tuple, (), (tuple, (), (TENSOR, 0)), (dict, ()))


@dataclass(frozen=True)
class Call:
    """The structure of a call: arguments, output, and the number of the tensor that contains the tokens.

    `given` describes the arguments: `(args, names of kwargs, *kwargs)`. A tensor may be given several times, e.g. as
    query, key and value. The output contains one computed tensor, whose number is the first unused one.
    """

    given: Pattern
    output: Pattern
    place: int = 0  # of the tokens among the tensors
    sizes: tuple[tuple[torch.Size, torch.dtype], ...] = ()  # shapes and dtypes of the other tensors
    names: tuple[int | str, ...] = ()  # of the arguments that contain other tensors
    channels_first: bool = False  # True if the module's tokens are [B, C, ...], and those of its parts [B, ..., C]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> tuple[Call, list[Tensor]]:
        """Returns a call and its tensors; the first one contains the tokens."""
        tensors: list[Tensor] = []
        names: list[int | str] = []  # of the argument in which each tensor appears first
        named: list[tuple[int | str, Any]] = [*enumerate(args), *sorted(kwargs.items())]
        for name, value in named:
            try:
                pattern_of(value, tensors)
            except UnreadableError as error:
                raise UnreadableError(f"its forward gets more than tensors and constants (argument {name})") from error
            names += [name] * (len(tensors) - len(names))
        if not tensors:
            raise UnreadableError("its forward gets no tensor")
        found = list(tensors)
        try:
            result = pattern_of(output, found)
        except UnreadableError as error:
            raise UnreadableError(f"its forward returns more than tensors and constants ({error})") from error
        try:
            same = pattern_of(rebuilt(result, found), list(found)) == result
        except Exception:  # of a constructor
            same = False
        if not same:
            raise UnreadableError("its forward returns an object that cannot be built from its contents")
        if len(found) != len(tensors) + 1:
            number = "more than one tensor" if len(found) > len(tensors) else "no tensor of its own"
            raise UnreadableError(f"its forward returns {number}")
        place = next((i for i, each in enumerate(tensors) if each.shape == found[-1].shape), 0)
        given = _given(args, kwargs, list(tensors))
        x, _ = tensors.pop(place), names.pop(place)
        sizes = tuple((each.shape, each.dtype) for each in tensors)
        return cls(given, result, place, sizes, tuple(names)), [x, *tensors]

    @property
    def has_one_tensor(self) -> bool:
        """True for calls with one argument and one output, which are tensors of tokens as the parts read them."""
        return self.given == _ONE_TENSOR and self.output == (TENSOR, 1) and not self.channels_first

    @property
    def problem(self) -> str:
        """Returns a message if the arguments contain other tensors than the tokens; "" otherwise."""
        if self.names:
            names = ", ".join(map(str, dict.fromkeys(self.names)))
            return f"its forward gets more than tokens and constants (argument {names})"
        return ""

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
        """Returns tokens and other tensors of a call; None if the call has another structure."""
        found: list[Tensor] = []
        try:
            if _given(args, kwargs, found) != self.given:
                return None
        except UnreadableError:
            return None
        return [self.tokens(found.pop(self.place)), *found]

    def tokens(self, x: Tensor) -> Tensor:
        """Returns tokens in the order of the parts."""
        return x.movedim(1, -1) if self.channels_first else x

    def arguments(self, x: Tensor, *others: Tensor) -> tuple[list[Tensor], Any, Any]:
        """Returns all tensors of a call, args and kwargs."""
        x = x.movedim(-1, 1) if self.channels_first else x
        tensors = [*others[: self.place], x, *others[self.place :]]
        return tensors, *rebuilt(self.given, tensors)

    def computed(self, output: Any, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the computed tensor of an output for the tensors of a call."""
        found = list(tensors)
        if pattern_of(output, found) != self.output:
            raise UnreadableError("the structure of its output depends on its input")
        return found[-1]

    def run(self, module: nn.Module, x: Tensor, *others: Tensor) -> Tensor:
        tensors, args, kwargs = self.arguments(x, *others)
        with InDouble() if x.dtype == torch.float64 else nullcontext():
            output = module.forward(*args, **kwargs)  # a class may override __call__, which the fused class inherits
        if _given(args, kwargs, list(tensors)) != self.given:
            raise UnreadableError("its forward changes its arguments")
        return self.tokens(self.computed(output, tensors))

    def returned(self, y: Tensor, x: Tensor, *others: Tensor) -> Any:
        """Returns the output of a call with computed tensor y."""
        tensors, *_ = self.arguments(x, *others)
        if self.channels_first:  # in the memory format of x
            y = y.movedim(-1, 1) if x.is_contiguous() else y.movedim(-1, 1).contiguous()
        return rebuilt(self.output, [*tensors, y])


def pattern_of(value: Any, tensors: list[Tensor]) -> Pattern:
    """Returns the structure of a value: (TENSOR, number), (CONSTANT, class, value) or (class, names, *patterns).

    Numbers count `tensors`, to which new ones are appended. Raises UnreadableError for other objects.
    """
    if isinstance(value, Tensor):
        for number, each in enumerate(tensors):
            if each is value:
                return TENSOR, number
        tensors.append(value)
        return TENSOR, len(tensors) - 1
    cls = type(value)
    names: tuple[Any, ...] = ()
    if cls is tuple or cls is list:
        contents = value
    elif cls is dict or cls is OrderedDict:
        names, contents = tuple(value), value.values()
    elif isinstance(value, SIMPLE):
        return CONSTANT, cls, value
    elif is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in fields(value))
        if not getattr(value, "__dict__", {}).keys() <= set(names):
            raise UnreadableError(f"{cls.__name__} object with other attributes than its fields")
        contents = [getattr(value, name) for name in names]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        contents = value
    else:
        raise UnreadableError(f"{cls.__name__} object")
    return (cls, names, *[pattern_of(each, tensors) for each in contents])


def rebuilt(pattern: Pattern, tensors: Sequence[Tensor]) -> Any:
    """Undoes `pattern_of`."""
    kind, named, *contents = pattern
    if kind == TENSOR:
        return tensors[named]
    if kind == CONSTANT:
        return contents[0]
    values = [rebuilt(each, tensors) for each in contents]
    if kind is tuple or kind is list:
        return kind(values)
    if kind is dict or kind is OrderedDict:
        return kind(zip(named, values))
    return kind(**dict(zip(named, values))) if named else kind(*values)


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Pattern:
    return pattern_of((args, dict(sorted(kwargs.items())) if kwargs else kwargs), tensors)


def structure_of(module: nn.Module) -> tuple[Any, ...]:
    """Returns names, classes and shapes of everything inside a module; blocks of equal structure share one recipe."""
    rows: list[Any] = []
    for name, part in _modules(module):
        held = {name: each for name, each in vars(part).items() if isinstance(each, Tensor)}
        names = (*part._parameters.keys(), *part._buffers.keys(), *held)
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

    def state(owner: Any, name: str, value: Any) -> Any:
        function = getattr(value, "__func__", value)
        if isinstance(function, FunctionType):  # which pickle may not find
            code = function.__code__
            return code.co_code, code.co_names, tuple(filter(is_constant, code.co_consts))
        if type(value) in (list, tuple, dict) and not is_constant(value):
            held = value.values() if isinstance(value, dict) else value
            return (*(value if isinstance(value, dict) else ()), *(state(None, "", each) for each in held))
        return value if is_constant(value) or isinstance(value, type | BuiltinFunctionType) else type(value)

    rows = ((path, *row) for path, part in _modules(module) for row in attributes_of(part))
    return tuple((path, name, state(owner, name, value)) for path, owner, name, value in rows)


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields path and module of everything inside a module, apart from the scales that `calibrate` adds."""
    found = module.named_modules(remove_duplicate=False)
    return ((path, part) for path, part in found if not isinstance(part, Fp8Scales))

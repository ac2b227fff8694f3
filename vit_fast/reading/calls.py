"""The call of a module that was captured: its arguments, the attributes that it may depend on, and its output."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.fp8_scales import Fp8Scales
from ..blocks.fused import FusedModule
from ..blocks.parts import Slot
from .capture import InDouble, UnreadableError

SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
TENSOR, CONSTANT = "tensor", "constant"
Pattern = tuple[Any, ...]  # see `pattern_of`
_ONE_TENSOR: Pattern = (tuple, (), (tuple, (), (TENSOR, 0)), (dict, ()))
_OF_MODULES = set(vars(nn.Module())) | {"training", "forward"}


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


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_constant, value))
    if isinstance(value, dict):
        return all(map(_is_constant, (*value, *value.values())))
    return isinstance(value, SIMPLE)


def attributes_of(module: nn.Module) -> Iterator[tuple[Any, str, object]]:
    """Yields all that a forward may read beside tensors, submodules and rates of dropout: (owner, name, value).

    These are the attributes of a module, of its class, and of its other objects, e.g. a configuration, methods, and
    global constants. `drop_slots` returns the rates.
    """
    drops = {name for _, name in drop_slots(module, False)}
    for store in (module._parameters, module._buffers):
        yield from ((module, name, None) for name, tensor in store.items() if tensor is None)
    for cls in itertools.takewhile(lambda cls: cls is not nn.Module, class_of(module).__mro__):
        for name, value in vars(cls).items():
            function = getattr(value, "fget", getattr(value, "__func__", value))  # of a property or static method
            is_own = isinstance(function, FunctionType) and not cls.__module__.startswith("torch.")
            if is_own and name != "__init__":
                yield from _named_in(function, module)
            if (
                ((is_own and not isinstance(value, property)) or _is_constant(value))
                and not name.startswith("__")
                and name not in {*vars(module), *_OF_MODULES}
            ):
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
        yield from _named_in(value, module) if isinstance(value, FunctionType) else _inside(value, {id(value)})


def _named_in(method: FunctionType, module: nn.Module) -> Iterator[tuple[Any, str, object]]:
    """Yields what a method, and functions that it names, read from globals, closures and defaults.

    Also yields absent attributes that the method names, as in `hasattr(self, name)`.
    """
    codes = [method.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        strings = [each for each in code.co_consts if isinstance(each, str) and each.isidentifier()]
        yield from ((module, name, None) for name in strings if not hasattr(module, name))
    functions, seen = [method], {id(method)}
    while functions:
        function = functions.pop()
        read: list[tuple[Any, str, Any]] = [(function, "__defaults__", function.__defaults__)]
        read += [(cell, "cell_contents", _content(cell)) for cell in function.__closure__ or ()]
        place, names = sys.modules.get(function.__module__), _names_in(function.__code__)
        if place is not None and vars(place) is function.__globals__:
            read += [(place, name, vars(place)[name]) for name in names if name in vars(place)]
        while read:
            owner, name, value = read.pop()
            if _is_constant(value):
                yield owner, name, _copied(value)
            elif id(value) in seen or isinstance(value, Tensor | nn.Module):
                continue
            elif isinstance(value, FunctionType):
                if _is_users(value, method):
                    functions.append(value)
                    if owner is place and vars(place).get(value.__qualname__) is value:  # so that pickle finds it
                        yield owner, name, value
            elif isinstance(value, type | ModuleType):
                top = (value.__name__ if isinstance(value, ModuleType) else value.__module__).partition(".")[0]
                if top not in _LIBRARIES and not (isinstance(value, type) and issubclass(value, nn.Module)):
                    read += [(value, each, vars(value)[each]) for each in names if each in vars(value)]
            elif isinstance(value, functools._lru_cache_wrapper):
                yield Count(value), "now", 0
                read.append((value, "__wrapped__", value.__wrapped__))
            elif type(value) in (dict, list, set) and _is_users(function, method):
                yield Count(value), "now", len(value)
            elif _is_users(type(value), method) or type(value).__module__ in ("argparse", "types"):  # e.g. a namespace
                yield from _inside(value, {id(value)})
            seen.add(id(value))


@dataclass(frozen=True, eq=False)
class Count:
    """A global container, seen by a `Watch`: `now` is its length, and 0 for a cache of a function."""

    container: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Count) and other.container is self.container

    @property
    def now(self) -> int:
        return 0 if hasattr(self.container, "cache_clear") else len(self.container)


_LIBRARIES = {"torch", "numpy", *sys.stdlib_module_names} - {"__main__"}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return nn.Module


@functools.cache
def _names_in(code: CodeType) -> tuple[str, ...]:
    """Returns the globals and attributes that a function and the functions inside it name."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return (*code.co_names, *(name for each in inner for name in _names_in(each)))


def _is_users(thing: Any, method: FunctionType) -> bool:
    """Returns True for a function or class of the package of a method, or of no installed package."""
    top = (thing.__module__ or "").partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return top not in _LIBRARIES and (top == method.__module__.partition(".")[0] or "site-packages" not in file)


def _inside(value: Any, seen: set[int]) -> Iterator[tuple[Any, str, object]]:
    """Yields the attributes of an object, and of objects in it; also of objects in a list, tuple or dictionary."""
    value = value() if isinstance(value, weakref.ref) else value
    if isinstance(value, (*SIMPLE, type, FunctionType, Tensor)):
        return
    is_module = isinstance(value, nn.Module)  # which is not a submodule, e.g. the parent in a list
    is_container = isinstance(value, list | tuple | dict)
    if is_container:
        held: list[tuple[str, Any]] = [("", each) for each in (value.values() if isinstance(value, dict) else value)]
    elif isinstance(value, functools.partial):
        held = [("keywords", value.keywords)]
    else:
        slots = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]
        slots += [name for cls in type(value).__mro__[:-1] for name, each in vars(cls).items() if _is_constant(each)]
        names = [name for name in (*getattr(value, "__dict__", ()), *slots) if name not in _OF_MODULES]
        held = [(name, getattr(value, name)) for name in names if not name.startswith("__") and hasattr(value, name)]
    for name, each in held:
        is_constant = _is_constant(each)
        if is_constant or (id(each) not in seen and not is_module):
            if not is_container:
                yield value, name, _copied(each)
            if not is_constant and (is_container or not isinstance(each, list | tuple | dict)):
                seen.add(id(each))
                yield from _inside(each, seen)


def _copied(value: Any) -> Any:
    """Returns a copy of a value that shares all objects apart from lists, tuples and dictionaries."""
    if _is_constant(value):
        return copy.deepcopy(value)
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return {name: _copied(each) for name, each in value.items()} if type(value) is dict else value


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
            return code.co_code, code.co_names, tuple(filter(_is_constant, code.co_consts))
        if type(value) in (list, tuple, dict) and not _is_constant(value):
            held = value.values() if isinstance(value, dict) else value
            return (*(value if isinstance(value, dict) else ()), *(state(None, "", each) for each in held))
        return value if _is_constant(value) or isinstance(value, type | BuiltinFunctionType) else type(value)

    rows = ((path, *row) for path, part in _modules(module) for row in attributes_of(part))
    return tuple((path, name, state(owner, name, value)) for path, owner, name, value in rows)


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields path and module of everything inside a module, apart from the scales that `calibrate` adds."""
    found = module.named_modules(remove_duplicate=False)
    return ((path, part) for path, part in found if not isinstance(part, Fp8Scales))


def class_of(module: nn.Module) -> type[nn.Module]:
    return type(module).original if isinstance(module, FusedModule) else type(module)

"""Finds the attributes, globals and closures that a forward reads, and questions that it asks, e.g. for the time.

Fused modules watch the former. Forwards that ask for anything that may differ in other calls are not read.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..blocks.fused import FusedModule
from .capture import UnreadableError

SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OF_MODULES = set(vars(nn.Module())) | {"training", "forward"}
_OUTSIDE = {
    "_io", "_random", "_thread", "builtins", "datetime", "gc", "io", "nt", "os", "platform", "posix", "random",
    "secrets", "socket", "subprocess", "sys", "threading", "time", "uuid",
}  # fmt: skip
_OF_BUILTINS = ("open", "input", "print", "id")
_TORCH = re.compile(r"_?(is|are|get|has)_|initial_seed|current_device|device_count")
_OF_TORCH = ("torch.autograd", "torch.backends", "torch.cuda", "torch.distributed", "torch.random", "torch.accelerator")
# `prove_in_contexts` tries both answers, or the answers are the same for all calls
_PROVED = re.compile(r"is_grad_enabled|(is|get)_autocast\w*|is_(tensor|floating_point|complex|nested|available|built)")
_TRACED = re.compile(r"_?is_(jit_|fx_)?(scripting|tracing|\w*compiling|\w*exporting)")
# Of tensors: what differs between equal tensors of equal strides
_OF_TENSORS = {
    "_base", "_is_view", "_version", "data_ptr", "grad_fn", "is_inference", "is_leaf", "is_pinned", "is_shared",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad", "retain_grad", "storage", "storage_offset",
    "untyped_storage",
}  # fmt: skip


def questions_of(forward: Callable[[], Any]) -> tuple[set[str], dict[str, str | None]]:
    """Runs a forward; returns the functions by which it asks whether it is traced, and the environment that it reads.

    Raises:
        UnreadableError: it draws random numbers, or asks for something that may change between calls.
    """
    found: list[str] = []
    variables: dict[str, str | None] = {}
    draws = getattr(sys.modules.get("numpy"), "random", None)  # its functions are invisible to a profiler
    before = draws and str(draws.get_state())

    def run() -> None:
        sys.setprofile(functools.partial(_note, found, variables))
        for enabled in (False, True):
            with torch.set_grad_enabled(enabled), _Tensors(found):
                forward()

    collects = gc.isenabled()
    gc.disable()  # it may call functions of other packages, e.g. hypothesis, which ask for the time
    try:
        with ThreadPoolExecutor(1) as thread:  # which has no other profiler, e.g. cProfile
            thread.submit(run).result()
    finally:
        if collects:
            gc.enable()
    if draws and before != str(draws.get_state()):
        found.append("random numbers")
    if asked := next((each for each in found if not _TRACED.fullmatch(each)), None):
        raise UnreadableError(f"its forward uses {asked}, which may differ in other calls")
    return set(found), variables


def _note(found: list[str], variables: dict[str, str | None], frame: FrameType, event: str, called: Any) -> None:
    """Notes the functions that code outside of torch and the standard library calls, if they are questions."""
    caller: FrameType | None = frame
    if event == "call":
        name, module, caller = frame.f_code.co_name, frame.f_globals.get("__name__", ""), frame.f_back
        if frame.f_locals.get("self") is os.environ or frame.f_code is os.getenv.__code__:
            if isinstance(key := frame.f_locals.get("key"), str):
                variables[key] = os.environ.get(key)  # is not profiled
                return
            module = "os"
    elif event == "c_call" and not isinstance(owner := getattr(called, "__self__", None), Tensor | nn.Module):
        name, module = called.__name__, getattr(called, "__module__", None) or type(owner).__module__
    else:
        return
    asker = caller.f_globals.get("__name__", "").partition(".")[0] if caller is not None else "torch"
    if asker not in ("torch", "vit_fast") and asker not in sys.stdlib_module_names and _is_question(name, module):
        found.append(name if _TRACED.fullmatch(name) else f"{module}.{name}")


def _is_question(name: str, module: str) -> bool:
    if module.partition(".")[0] == "torch":
        asks = _TORCH.match(name) is not None or module.startswith(_OF_TORCH)
        usual = module in ("torch.nn.modules.module", "torch.autograd.profiler")
        return asks and not usual and _PROVED.fullmatch(name) is None
    return module in _OUTSIDE and (module != "builtins" or name in _OF_BUILTINS)


class _Tensors(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if name in _OF_TENSORS:
            self.found.append(f"{name} of a tensor")
        return func(*args, **(kwargs or {}))


def is_constant(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(is_constant, value))
    if isinstance(value, dict):
        return all(map(is_constant, (*value, *value.values())))
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
                ((is_own and not isinstance(value, property)) or is_constant(value))
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
            if is_constant(value):
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
        slots += [name for cls in type(value).__mro__[:-1] for name, each in vars(cls).items() if is_constant(each)]
        names = [name for name in (*getattr(value, "__dict__", ()), *slots) if name not in _OF_MODULES]
        held = [(name, getattr(value, name)) for name in names if not name.startswith("__") and hasattr(value, name)]
    for name, each in held:
        is_fixed = is_constant(each)
        if is_fixed or (id(each) not in seen and not is_module):
            if not is_container:
                yield value, name, _copied(each)
            if not is_fixed and (is_container or not isinstance(each, list | tuple | dict)):
                seen.add(id(each))
                yield from _inside(each, seen)


def _copied(value: Any) -> Any:
    """Returns a copy of a value that shares all objects apart from lists, tuples and dictionaries."""
    if is_constant(value):
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


def class_of(module: nn.Module) -> type[nn.Module]:
    return type(module).original if isinstance(module, FusedModule) else type(module)

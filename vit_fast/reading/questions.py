"""Finds what a forward asks beside its tokens, tensors and attributes, e.g. the clock or settings of torch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .capture import UnreadableError

_OUTSIDE = {
    "_io", "_random", "_thread", "builtins", "datetime", "gc", "io", "nt", "os", "platform", "posix", "random",
    "secrets", "socket", "subprocess", "sys", "threading", "time", "uuid",
}  # fmt: skip
_OF_BUILTINS = ("open", "input", "print", "id")
_TORCH = re.compile(r"_?(is|are|get|has)_|initial_seed|current_device|device_count")
_OF_TORCH = ("torch.autograd", "torch.backends", "torch.cuda", "torch.distributed", "torch.random", "torch.accelerator")
# `prove_in_contexts` tries both answers, or the answers are the same for all calls
_PROVED = re.compile(r"is_grad_enabled|(is|get)_autocast\w*|is_(tensor|floating_point|complex|nested)")
_TRACED = re.compile(r"_?is_(jit_|fx_)?(scripting|tracing|\w*compiling|\w*exporting)")
# Of tensors: what differs between equal tensors of equal strides
_OF_TENSORS = {
    "_base", "_is_view", "_version", "data_ptr", "grad_fn", "is_inference", "is_leaf", "is_pinned", "is_shared",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad", "retain_grad", "storage", "storage_offset",
    "untyped_storage",
}  # fmt: skip


def asks_if_traced(forward: Callable[[], Any]) -> bool:
    """Runs a forward; returns True if it asks whether it is traced or compiled.

    Raises:
        UnreadableError: it draws random numbers, or asks for something that may change between calls.
    """
    found: list[str] = []
    before = _numpy_state()
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled), _Tensors(found), _profiled(found):
            forward()
    if before != _numpy_state():
        found.append("random numbers")
    if asked := next((each for each in found if not _TRACED.fullmatch(each)), None):
        raise UnreadableError(f"its forward uses {asked}, which may differ in other calls")
    return bool(found)


def _numpy_state() -> str:  # its functions are invisible to a profiler
    numpy = sys.modules.get("numpy")
    return "" if numpy is None else str(numpy.random.get_state())


@contextmanager
def _profiled(found: list[str]) -> Iterator[None]:
    """Notes the functions that code outside of torch and the standard library calls, if they are questions."""
    before = sys.getprofile()

    def note(frame: FrameType, event: str, called: Any) -> None:
        caller: FrameType | None = frame
        if event == "call":
            name, module, caller = frame.f_code.co_name, frame.f_globals.get("__name__", ""), frame.f_back
            module = "os" if frame.f_locals.get("self") is os.environ else module
        elif event == "c_call" and not isinstance(owner := getattr(called, "__self__", None), Tensor | nn.Module):
            name, module = called.__name__, getattr(called, "__module__", None) or type(owner).__module__
        else:
            return
        asker = caller.f_globals.get("__name__", "").partition(".")[0] if caller is not None else "torch"
        if asker not in ("torch", "vit_fast") and asker not in sys.stdlib_module_names and _is_question(name, module):
            found.append(name if _TRACED.fullmatch(name) else f"{module}.{name}")

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def _is_question(name: str, module: str) -> bool:
    if module.partition(".")[0] == "torch":
        asks = _TORCH.match(name) is not None and _PROVED.fullmatch(name) is None
        return (asks and module != "torch.nn.modules.module") or module.startswith(_OF_TORCH)
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

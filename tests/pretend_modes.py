"""The modes of a pretend machine (`pretend_gpu.py`), which answer for devices and run operators; torch.compile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pretend_gpu import BYTES_PER_MS, DEVICE_MS, HOST, Machine, tensors_in
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_compile = torch.compile


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    functions = []
    while torch._C._len_torch_function_stack():
        functions.append(torch.overrides._pop_mode())
    try:
        with _disable_current_modes():
            yield
    finally:
        while functions:
            torch.overrides._push_mode(functions.pop())


def transfer(machine: Machine, tensor: Tensor, after: int | None, non_blocking: bool) -> Tensor:
    """Copies a tensor to a GPU, or to the host."""
    before = machine.device_of(tensor)
    with without_modes():
        copied = tensor.clone()
    machine.copying(before, after, machine.is_pinned(tensor), non_blocking, copied.nbytes)
    return copied if after is None else machine.own(copied, after)


class Functions(TorchFunctionMode):
    """Answers questions about devices, moves tensors, and executes device arguments."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        machine, kwargs = self.machine, dict(kwargs or {})
        owner = getattr(func, "__self__", None)
        on = machine.device_of(args[0]) if args and isinstance(args[0], Tensor) else None
        if owner in (Tensor.device, Tensor.is_cuda, Tensor.is_cpu) and func.__name__ == "__get__" and on is not None:
            return torch.device("cuda", on) if owner is Tensor.device else owner is Tensor.is_cuda
        if func is torch._C._nn._parse_to:  # of nn.Module.to
            return func(*args, **kwargs)
        if func in (Tensor.to, Tensor.cuda, Tensor.cpu):
            return self._moved(func, *args, **kwargs)
        if func is Tensor.get_device:
            return -1 if on is None else on
        if func is Tensor.pin_memory:
            return args[0] if machine.is_pinned(args[0]) else machine.own(args[0].clone(), HOST)
        if func is Tensor.is_pinned:
            return machine.is_pinned(args[0])
        if func in (Tensor.numpy, Tensor.__array__) and on is not None:
            raise TypeError(f"can't convert cuda:{on} device type tensor to numpy. Use Tensor.cpu()")
        if func is Tensor.tolist and on is not None:
            machine.wait(on, "tolist")
        target, given = kwargs.get("device"), tensors_in((args, kwargs))
        if target is not None:
            target = torch.device("cuda", target) if isinstance(target, int) else torch.device(target)
        wanted = machine.index(target) if target is not None and target.type == "cuda" else None
        if wanted is not None:
            kwargs["device"] = "cpu"
        ons = (each for each in map(machine.device_of, given) if each is not None)
        with machine.allocating(wanted if target is not None else next(ons, None)):
            result = func(*args, **kwargs)
        if target is None or target.type == "meta":
            return result
        if func is torch.tensor:
            machine.copying(None, wanted, False, False, result.nbytes)
        shared = {one.untyped_storage()._cdata for one in given}

        def moved(one: Tensor) -> Tensor:
            return one if machine.device_of(one) == wanted else transfer(machine, one, wanted, non_blocking=False)

        def placed(one: Tensor) -> Tensor:
            is_new = one.untyped_storage()._cdata not in shared
            return one if wanted is None and is_new else machine.own(one, wanted) if is_new else moved(one)

        return pytree.tree_map_only(Tensor, placed, result)

    def _moved(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        machine, before = self.machine, self.machine.device_of(tensor)
        dtype, non_blocking, keeps, copies = None, kwargs.get("non_blocking", False), False, kwargs.pop("copy", False)
        if func is Tensor.cpu:
            after = None
        elif func is Tensor.cuda:
            after = machine.index(args[0] if args else kwargs.get("device"))
        else:
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
            if device is not None and device.type == "meta":
                return func(tensor, *args, **kwargs)
            if likes := tensors_in((args, kwargs)):
                after = machine.device_of(likes[0])
            else:
                keeps = device is None
                after = machine.index(device) if device is not None and device.type == "cuda" else None
        result = tensor if dtype in (None, tensor.dtype) else Tensor.to(tensor, dtype)
        if not keeps and after != before:
            return transfer(machine, result, after, non_blocking)
        return result.clone() if copies and result is tensor else result


# Operators that read a result on the host.
READS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::unique_consecutive",
    "aten::_unique2", "aten::masked_select",
}  # fmt: skip
COPIES = {"aten::copy_", "aten::_foreach_copy_", "aten::set_"}


class Operators(TorchDispatchMode):
    """Marks the outputs of operators, refuses what CUDA refuses, and lets time pass."""

    supports_higher_order_operators = True

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        machine, kwargs, name = self.machine, kwargs or {}, func.name().partition(".")[0]
        given = [one for one in tensors_in((args, kwargs)) if not one.is_meta]
        known = {one.untyped_storage()._cdata for one in given}
        ons = [machine.device_of(one) for one in given]
        # numbers on the host, and indices there, may be mixed with tensors on a GPU
        places = {on for one, on in zip(given, ons) if on is not None or one.dim()}
        if name in ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"):
            places = {ons[0], *(on for on in ons if on is not None)}
        if len(places) > 1 and name not in COPIES:
            text = ", ".join("cpu" if place is None else f"cuda:{place}" for place in places)
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {text} in {name}")
        on = next((place for place in places if place is not None), None)
        if not given:
            on = machine.here.allocating
        if on is not None and name in READS:
            machine.wait(on, name)
        if isinstance(func, HigherOrderOperator):  # e.g. FlexAttention, which consists of other operators
            with without_modes():
                result = func(*args, **kwargs)
            machine.work(on, DEVICE_MS, name)
            return pytree.tree_map_only(Tensor, lambda one: machine.own(one, on), result)
        is_random = on is not None and torch.Tag.nondeterministic_seeded in func.tags
        with machine.drawing(on) if is_random else contextlib.nullcontext():
            result = func(*args, **kwargs)
        if name == "aten::copy_" and len(set(ons)) > 1:
            non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
            machine.copying(ons[1], ons[0], machine.is_pinned(given[1]), non_blocking, given[0].nbytes)
            return result
        made = [one for one in tensors_in(result) if one.untyped_storage()._cdata not in known]
        if on is None or not (made or func._schema.is_mutable):
            return result
        for one in made:
            machine.own(one, on)
        if func.namespace == "aten":  # our own operators launch kernels
            self._queue(func, args, kwargs, result, on, name, made)
        return result

    def _queue(self, func: Any, args: Any, kwargs: Any, result: Any, on: int, name: str, made: list[Tensor]) -> None:
        machine, outputs = self.machine, tensors_in(result)
        is_empty = "empty" in name

        def again() -> None:
            if not is_empty:
                for before, now in zip(outputs, tensors_in(func(*args, **kwargs))):
                    before.copy_(now)

        if capture := machine.own_capture():
            capture.made += made
        ms = 0.0 if is_empty else DEVICE_MS + sum(one.nbytes for one in made) / BYTES_PER_MS
        if is_empty and not capture:
            machine.call(name)
        else:
            machine.work(on, ms, name, again)


def compiler(machine: Machine, function: Any, **options: Any) -> Any:
    """Does the same as torch.compile with a backend that runs graphs eagerly."""
    device = [0]

    def backend(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        machine.compiled.append([(*one.shape, one.dtype, one.requires_grad) for one in tensors_in(inputs)])
        time.sleep(machine.compile_s)
        for node in graph.graph.nodes:  # dynamo sees CPU tensors
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", device[0])}
        graph.recompile()

        def run(*args: Any) -> Any:
            with machine.modes():
                return graph(*args)

        return run

    chosen = {name: options[name] for name in ("fullgraph", "dynamic") if name in options}
    compiled = _compile(function, backend=backend, **chosen)
    forward = compiled.forward if isinstance(compiled, torch.nn.Module) else compiled

    def call(*args: Any, **kwargs: Any) -> Any:
        device[0] = next((on for on in map(machine.device_of, tensors_in((args, kwargs))) if on is not None), 0)
        with without_modes():
            return forward(*args, **kwargs)

    if not isinstance(compiled, torch.nn.Module):
        return call
    compiled.forward = call
    return compiled

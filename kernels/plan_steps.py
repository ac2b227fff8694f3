"""Steps of launch plans (`plan.py`): kernel launches and calls of torch operators, with placeholders for addresses."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils import _pytree as pytree
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import Ready

Values = list[Any]  # inputs, buffers and operator results of a replay, by number; None once freed
MAX_MAPS = 256  # maximum number of cached tensor maps (`CUtensorMap` of CUDA) per `TensorDescriptor` of Triton


class UnplannableError(LookupError):
    """Raised if a replay cannot repeat a function; the message is the reason."""


@dataclass(eq=False)
class At:
    """An address: the number of a value (`Values`), and an offset in bytes. `_Recorder.plan` renumbers the values."""

    value: int
    offset: int


@dataclass(frozen=True)
class View:
    """A tensor over the memory of a value."""

    at: At
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def of(self, values: Values) -> Tensor:
        base: Tensor = values[self.at.value]
        if not self.at.offset and base.shape == self.shape and base.stride() == self.stride:
            return base
        start = base.storage_offset() + self.at.offset // base.element_size()
        return base.as_strided(self.shape, self.stride, start)


def moved(descriptor: TensorDescriptor, address: int, at: At) -> TensorDescriptor:
    """Replaces the base tensor of a descriptor. Triton's launcher calls only the method `data_ptr` of the base."""
    elsewhere = copy.copy(descriptor)
    elsewhere.base = SimpleNamespace(data_ptr=lambda: address, at=at)
    return elsewhere


class TensorMaps:
    """Tensor maps of one descriptor, cached by address. `metadata` is Triton's description of the descriptor."""

    def __init__(self, descriptor: TensorDescriptor, metadata: Any) -> None:
        self.descriptor, self.metadata = descriptor, metadata
        self.at: At = descriptor.base.at  # `moved` made the descriptor
        self.cached: dict[int, Any] = {}

    def encode(self, address: int) -> Any:
        descriptor = moved(self.descriptor, address, self.at)
        tensor_map = _call(nvidia.make_tensordesc_arg, descriptor, self.metadata, None)[0]
        if len(self.cached) >= MAX_MAPS:
            self.cached.clear()
        self.cached[address] = tensor_map
        return tensor_map


class PlannedLaunch:
    """A kernel launch. `__call__` passes stream and addresses to the C function behind Triton's launcher.

    `values` are all arguments of the kernel in order, including constants. An `At` replaces each non-empty tensor, and
    descriptors are `moved`. Raises any exception if Triton's launcher is not supported.
    """

    def __init__(self, ready: Ready, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        self.ready, self.grid = ready, grid
        if ready.compiled.run.global_scratch_size or ready.compiled.run.profile_scratch_size:
            raise UnplannableError("the launcher needs scratch memory")
        self._launch, noted, encoders = _intercept(ready.compiled, grid, values)
        self._front: tuple[Any, ...] | None = None
        self.arguments: list[Any] = []  # tuples that contain addresses are flattened
        # Slices of `arguments` to pass as tuples. `__call__` replaces each slice by one tuple. The last slice is first,
        # because a replacement changes the positions of all later arguments.
        self._tuples: list[slice] = []
        if isinstance(noted[-1], list | tuple):  # since triton 3.7, one sequence of kernel arguments
            # The C function flattens tuples and drops constants in every launch. To save time, do so once, here.
            types, metadata = ready.compiled.src.signature.values(), ready.compiled.metadata.tensordesc_meta
            kinds = _call(nvidia.expand_signature, types, metadata, "nvTmaDesc")
            self.arguments += _without_constants(kinds, noted[-1])
            declared = [nvidia.PyKernelArg(nested_tuple=None, type=nvidia.ARG_KERNEL)] * len(noted[-2])
            self._front = (*noted[4:-3], declared, noted[-2])
            if len(declared) != len(self.arguments):
                raise UnplannableError("the launcher takes more or fewer arguments than the plan has")
        else:
            for value in noted[4:]:
                if isinstance(value, tuple) and any(isinstance(member, At) for member in value):
                    self._tuples.insert(0, slice(len(self.arguments), len(self.arguments) + len(value)))
                    self.arguments += value
                else:
                    self.arguments.append(value)
        self.pointers = {place: at for place, at in enumerate(self.arguments) if isinstance(at, At)}
        places = [place for place, value in enumerate(self.arguments) if type(value).__name__ == "PyCUtensorMap"]
        if len(places) != len(encoders):
            raise UnplannableError("a tensor descriptor was not converted to a tensor map")
        self.maps = dict(zip(places, encoders))

    def prepare(self) -> None:
        """Collects the positions of addresses in the argument list. Call it after the values are renumbered."""
        self._at_pointers = [(place, at.value, at.offset) for place, at in self.pointers.items()]
        self._at_maps = [(place, maps.at.value, maps.at.offset, maps) for place, maps in self.maps.items()]

    def uses(self) -> list[int]:
        return [at.value for at in (*self.pointers.values(), *(maps.at for maps in self.maps.values()))]

    def __call__(self, stream: int, values: Values, addresses: list[int]) -> None:
        arguments = self.arguments.copy()
        for place, value, offset in self._at_pointers:
            arguments[place] = addresses[value] + offset
        for place, value, offset, maps in self._at_maps:
            address = addresses[value] + offset
            arguments[place] = maps.cached.get(address) or maps.encode(address)
        if self._front is not None:
            self._launch(*self.grid, stream, *self._front, arguments)
            return
        for members in self._tuples:
            arguments[members] = [tuple(arguments[members])]
        self._launch(*self.grid, stream, *arguments)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a private function of Triton without the last arguments if the installed version does not take them."""
    return function(*arguments[: function.__code__.co_argcount])


def _without_constants(kinds: Sequence[Any], arguments: Sequence[Any]) -> Iterator[Any]:
    """Yields the arguments that the compiled kernel takes, with tuples flattened."""
    for kind, value in zip(kinds, arguments):
        if isinstance(kind, tuple):
            yield from _without_constants(kind, value)
        elif kind != "constexpr":
            yield value


def _intercept(
    compiled: Any, grid: tuple[int, int, int], values: Sequence[Any]
) -> tuple[Callable[..., None], tuple[Any, ...], list[TensorMaps]]:
    """Returns the C function behind Triton's launcher, the arguments it would get, and `TensorMaps` of descriptors."""
    notes: list[tuple[Any, ...]] = []

    def note(*arguments: Any) -> None:
        notes.append(arguments)

    metadata = compiled.metadata.tensordesc_meta
    launch, other = compiled.run.launch, copy.copy(compiled.run)
    other.launch = nvidia.wrap_handle_tensordesc(note, compiled.src.signature, metadata)
    described = [value for value in values if isinstance(value, TensorDescriptor)]
    if described:  # `launch` is then a closure that expands descriptors and calls the C function `launcher`
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    encoders = [TensorMaps(value, meta) for value, meta in zip(described, metadata or [None] * len(described))]
    other(*grid, 0, compiled.function, compiled.packed_metadata, None, None, None, *values)
    return launch, notes[0], encoders


@dataclass(frozen=True)
class TorchCall:
    """A call of an overload of torch.ops that returns `results` new tensors. A `View` replaces each tensor argument."""

    operator: Any
    positional: tuple[Any, ...]
    named: dict[str, Any]
    results: int

    def __call__(self, stream: int, values: Values, addresses: list[int]) -> None:
        named = {name: _resolved(value, values) for name, value in self.named.items()}
        output = self.operator(*[_resolved(value, values) for value in self.positional], **named)
        if self.results:
            for tensor in [output] if isinstance(output, Tensor) else output:
                values.append(tensor)
                addresses.append(tensor.data_ptr())

    def uses(self) -> list[int]:
        arguments = pytree.tree_leaves([*self.positional, *self.named.values()])
        return [argument.at.value for argument in arguments if isinstance(argument, View)]


def _resolved(value: Any, values: Values) -> Any:
    if isinstance(value, View):
        return value.of(values)
    return [_resolved(item, values) for item in value] if isinstance(value, list) else value


Step = PlannedLaunch | TorchCall


@dataclass(frozen=True)
class LaunchPlan:
    """A recorded call, which can be replayed with tensors at other addresses."""

    device: torch.device
    buffers: tuple[tuple[Sequence[int], Sequence[int], torch.dtype], ...]  # shape, strides and dtype
    steps: list[tuple[Step, list[int]]]  # each with the numbers of the values to free after it
    outputs: tuple[tuple[int, View | None], ...]  # number of a value, and a view of it; None: the whole value
    single: bool  # the result is one tensor, not a sequence
    kernels: tuple[Any, ...]

    def replay(self, values: Values, addresses: list[int]) -> Any:
        """Repeats the call with the input tensors `values` at `addresses`. Changes both lists."""
        device = self.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.replay(values, addresses)
        for shape, stride, dtype in self.buffers:
            buffer = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            values.append(buffer)
            addresses.append(buffer.data_ptr())
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        for step, drops in self.steps:
            step(stream, values, addresses)
            for value in drops:
                values[value] = None
        outputs = []
        for value, view in self.outputs:
            # in Python 3.11, a comprehension costs a function call
            outputs.append(values[value] if view is None else view.of(values))
        return outputs[0] if self.single else outputs

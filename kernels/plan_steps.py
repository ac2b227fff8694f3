"""Steps of launch plans: kernel launches and calls of torch operators, complete except for addresses.

A step names its tensors by number: the inputs of a plan, its buffers, then the results of its torch operators.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import Ready

Values = list[Any]  # the tensors of a replay by number; None once dropped
MAX_MAPS = 256  # cached tensor maps per descriptor


@dataclass(eq=False)
class At:
    """An address: bytes past the start of a value. The recorder renumbers values once it has seen all of them."""

    value: int
    offset: int


@dataclass(frozen=True)
class View:
    """A tensor over the memory of a value."""

    at: At
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, values: Values) -> Tensor:
        """Returns the tensor, given the values of a replay."""
        base: Tensor = values[self.at.value]
        if not self.at.offset and base.shape == self.shape and base.stride() == self.stride:
            return base
        start = base.storage_offset() + self.at.offset // base.element_size()
        return base.as_strided(self.shape, self.stride, start)


class PlannedLaunch:
    """A kernel launch without addresses and stream: a call of the C function that Triton's own launcher calls.

    Args:
        ready: The compiled kernel, kept alive.
        grid: As in `Launch`, of three axes.
        values: In the order of the kernel's parameters, constants included; in place of a tensor an `At`, in place of a
            tensor descriptor one whose base is a `Base`.
    Raises:
        LookupError: this version of Triton has another launch interface.
    """

    def __init__(self, ready: Ready, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        self.ready, self.grid = ready, grid
        compiled = ready.compiled
        self._launch, arguments, encoders = _intercept(compiled, grid, values)
        self._nested = isinstance(arguments[-1], list | tuple)  # triton 3.7 passes the kernel's arguments as one
        self._front = tuple(arguments[4:-1]) if self._nested else ()
        self.arguments = list(arguments[-1] if self._nested else arguments[4:])
        self.pointers = {place: at for place, at in enumerate(self.arguments) if isinstance(at, At)}
        places = [place for place, value in enumerate(self.arguments) if type(value).__name__ == "PyCUtensorMap"]
        if len(places) != len(encoders):
            raise LookupError("a tensor descriptor was not converted to a tensor map")
        self.maps = dict(zip(places, encoders))

    def prepare(self) -> None:
        """Collects the positions of addresses among the arguments; must be called after the last renumbering."""
        self._at_pointers = [(place, at.value, at.offset) for place, at in self.pointers.items()]
        self._at_maps = [(place, maps.at.value, maps.at.offset, maps) for place, maps in self.maps.items()]

    def uses(self) -> list[int]:
        """Numbers of the values it reads or writes."""
        return [at.value for at in (*self.pointers.values(), *(maps.at for maps in self.maps.values()))]

    def __call__(self, stream: int, values: Values, addresses: list[int]) -> None:
        arguments = self.arguments.copy()
        for place, value, offset in self._at_pointers:
            arguments[place] = addresses[value] + offset
        for place, value, offset, maps in self._at_maps:
            address = addresses[value] + offset
            arguments[place] = maps.kept.get(address) or maps.encode(address)
        if self._nested:
            self._launch(*self.grid, stream, *self._front, arguments)
        else:
            self._launch(*self.grid, stream, *arguments)


class Base:
    """Stands for the tensor of a descriptor: Triton's launcher only asks for its address."""

    def __init__(self, address: int, at: At) -> None:
        self._address, self.at = address, at

    def data_ptr(self) -> int:
        """The address."""
        return self._address


class TensorMaps:
    """The tensor maps of one descriptor, cached by address.

    Args:
        descriptor: The descriptor; `encode` replaces its base.
        at: Start of its tensor.
        make: Triton's function that encodes a descriptor; returns a list that starts with the map.
    """

    def __init__(self, descriptor: TensorDescriptor, at: At, make: Callable[[TensorDescriptor], list[Any]]) -> None:
        self.descriptor, self.at, self.make = descriptor, at, make
        self.kept: dict[int, Any] = {}

    def encode(self, address: int) -> Any:
        """Returns the map for an address, and caches it."""
        descriptor = copy.copy(self.descriptor)
        descriptor.base = Base(address, self.at)
        tensor_map = self.make(descriptor)[0]
        if len(self.kept) >= MAX_MAPS:
            self.kept.clear()
        self.kept[address] = tensor_map
        return tensor_map


def _intercept(
    compiled: Any, grid: tuple[int, int, int], values: Sequence[Any]
) -> tuple[Callable[..., None], tuple[Any, ...], list[TensorMaps]]:
    """Returns the C function behind a launcher, its arguments, and the encoders of its tensor maps."""
    notes: list[tuple[Any, ...]] = []

    def note(*arguments: Any) -> None:
        notes.append(arguments)

    launch, other = compiled.run.launch, copy.copy(compiled.run)
    other.launch, encoders = note, []
    described = [value for value in values if isinstance(value, TensorDescriptor)]
    if described:  # the launcher is a closure that expands them, and then calls its own `launcher`
        cells = dict(zip(launch.__code__.co_freevars, launch.__closure__ or ()))
        make, metadata = launch.__globals__["make_tensordesc_arg"], cells["tensordesc_meta"].cell_contents
        noting = cells | {"launcher": types.CellType(note)}
        other.launch = types.FunctionType(launch.__code__, launch.__globals__, closure=tuple(noting.values()))
        launch = cells["launcher"].cell_contents
        encoders = [
            TensorMaps(descriptor, descriptor.base.at, partial(make, metadata=meta))
            for descriptor, meta in zip(described, metadata)
        ]
    other(*grid, 0, compiled.function, compiled.packed_metadata, None, None, None, *values)
    return launch, notes[0], encoders


@dataclass(frozen=True)
class TorchCall:
    """The call of a torch operator.

    Args:
        operator: An overload of torch.ops.
        positional, named: Its arguments, with `View` in place of tensors.
        results: Number of tensors that it returns.
    """

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
        """Numbers of the values it reads or writes."""
        flat = [item for value in (*self.positional, *self.named.values()) for item in _flat(value)]
        return [item.at.value for item in flat if isinstance(item, View)]


def _resolved(value: Any, values: Values) -> Any:
    if isinstance(value, View):
        return value.of(values)
    return [_resolved(item, values) for item in value] if isinstance(value, list) else value


def _flat(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


Step = PlannedLaunch | TorchCall


@dataclass(frozen=True)
class LaunchPlan:
    """The steps of one call, for any addresses.

    Args:
        device: Device of all tensors.
        buffers: Arguments of `torch.empty_strided`: shape, strides, dtype; numbered after the inputs.
        steps: The steps in order, each with the values that no later step uses. Results of torch operators are
            numbered in order.
        outputs: The results.
        single: True if the result is one tensor, not a tuple.
        kernels: The functions decorated with `triton.jit`.
    """

    device: torch.device
    buffers: tuple[tuple[Sequence[int], Sequence[int], torch.dtype], ...]
    steps: tuple[tuple[Step, tuple[int, ...]], ...]
    outputs: tuple[View, ...]
    single: bool
    kernels: tuple[Any, ...]

    def replay(self, values: Values, addresses: list[int]) -> Any:
        """Returns the results for the tensors of a call and their addresses; extends both lists."""
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
        if self.single:
            return self.outputs[0].of(values)
        outputs = []
        for view in self.outputs:
            outputs.append(view.of(values))  # a comprehension would be one more function call
        return outputs

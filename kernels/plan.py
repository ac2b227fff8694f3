"""Launch plans: the launches of an operator, recorded once and replayed in later calls.

    result = run(function, arguments)        # function(*arguments), replayed if there is a plan

The first call with a signature runs the function, the second call also records a plan, and later calls replay the plan.
The signature consists of the function, `torch.backends.cuda.matmul.fp32_precision`, and the arguments. A tensor is
represented by its shape, strides, dtype, device and alignment. The launches must depend only on the signature.

A plan contains the compiled kernels, their grids and their arguments. It numbers its tensors, called values: the
inputs, buffers (tensors that the function allocates), and results of torch operators. An address is stored as the
number of a value and an offset in bytes. A replay allocates the buffers and launches the kernels on the current stream.

The function may allocate tensors, create views, launch kernels and call torch operators. A replay repeats the calls of
torch operators. A function that, e.g., uses a global tensor or returns a number has no plan and runs in every call.

Buffers that only kernels use share one allocation, and may overlap if their live ranges are disjoint. Such a buffer may
initially contain data of another buffer. Kernels must therefore write to a buffer before they read it.

Functions run without plans in Triton's interpreter, and while launch hooks or debug options are active.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import Launch, Ready, ceil_div, is_interpreted, is_watched, listening
from .plan_steps import At, LaunchPlan, PlannedLaunch, Step, TorchCall, UnplannableError, View, moved

MAX_PLANS = 2048
MAX_SEEN = 16384
_plans: dict[tuple[Any, ...], LaunchPlan | None] = {}  # None: cannot be planned
_seen: set[int] = set()  # hashes of signatures that ran once; if hashes collide, the first call already records a plan
_UNSEEN: Any = object()
_INTERPRETED = is_interpreted()

_ALIGNMENT = 256  # alignment in bytes of each buffer in the shared allocation
_ATEN = torch.ops.aten
_ALLOCATIONS = {
    _ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default,
    _ATEN.new_empty.default, _ATEN.new_empty_strided.default,
}  # fmt: skip
_UNREPEATABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def run(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Returns function(*arguments), replayed if there is a plan.

    Args:
        arguments: Tensors, None, and hashable values.
    """
    if _INTERPRETED:
        return function(*arguments)
    key: list[Any] = [function, torch.backends.cuda.matmul.fp32_precision]
    tensors: list[Tensor] = []
    addresses: list[int] = []
    for value in arguments:
        if isinstance(value, Tensor):
            address = value.data_ptr()
            tensors.append(value)
            addresses.append(address)
            key += (value.shape, value.stride(), value.dtype, value.get_device(), address & 15)
        else:
            key.append(value)
    signature = tuple(key)
    plan = _plans.get(signature, _UNSEEN)
    if plan is _UNSEEN:
        if is_watched():
            return function(*arguments)
        if hash(signature) in _seen:
            return _record(signature, function, arguments)
        if len(_seen) >= MAX_SEEN:
            _seen.clear()
        _seen.add(hash(signature))
        return function(*arguments)
    if plan is None or is_watched(*plan.kernels):
        return function(*arguments)
    return plan.replay(tensors, addresses)


def forget() -> None:
    """Deletes all plans, e.g. after a change of the launch policy."""
    _plans.clear()
    _seen.clear()


def plans() -> list[LaunchPlan | None]:
    """Returns all plans, with None for each signature that cannot be planned."""
    return list(_plans.values())


def _record(key: tuple[Any, ...], function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Runs the function and stores its plan, unless triton is still compiling a kernel (`triton.AsyncCompileMode`)."""
    # detach() makes new tensor objects, so a tensor passed twice is recorded as two inputs
    own = [value.detach() if isinstance(value, Tensor) else value for value in arguments]
    recorder = _Recorder([value for value in own if isinstance(value, Tensor)])
    outer, listening.listener = getattr(listening, "listener", None), recorder.record_launch
    try:
        with recorder:
            result = function(*own)
    finally:
        listening.listener = outer
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    if recorder.complete:
        try:
            _plans[key] = recorder.plan(result)
        except UnplannableError:
            _plans[key] = None
    return result


@dataclass(frozen=True)
class _Value:
    """One block of memory in a plan: an input, a buffer, or an operator result."""

    kind: str  # "input", "buffer", or "result" of a torch operator
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class _Recorder(TorchDispatchMode):
    """Records the torch operators that run while the mode is active, and the launches passed to `record_launch`."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.complete = True  # False if `record_launch` got no `Ready` (compiled kernel) for a launch
        self._device = inputs[0].device if inputs else torch.device("cpu")
        self._values: list[_Value] = []
        self._steps: list[Step] = []
        self._addresses: list[At] = []
        self._kernels: dict[int, Any] = {}
        # tensor object -> (number, start address) of its value; not keyed by address, which two values may share
        self._places: Any = WeakIdKeyDictionary()
        self._inputs = len(inputs)
        self._failed = not inputs or any(tensor.device != self._device for tensor in inputs)
        for tensor in inputs if not self._failed else ():
            self._add(tensor, "input")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        try:
            self._record_operator(func, args, kwargs or {}, result)
        except UnplannableError:
            self._failed = True
        return result

    def _record_operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func in _ALLOCATIONS:
            self._add(result, "buffer")
            return
        flat = pytree.tree_leaves((args, kwargs))
        own = {tensor.untyped_storage()._cdata: tensor for tensor in flat if isinstance(tensor, Tensor)}
        outputs = pytree.tree_leaves(result)
        if not all(isinstance(tensor, Tensor) for tensor in outputs) or _UNREPEATABLE & set(func.tags):
            raise UnplannableError(f"{func} must return tensors of fixed shapes only")
        fresh = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in own]
        if not fresh and not func._schema.is_mutable:
            for tensor in outputs:
                self._places[tensor] = self._place(own[tensor.untyped_storage()._cdata])
            return
        if fresh and len(fresh) < len(outputs):
            raise UnplannableError(f"{func} returns both views and new tensors")
        positional = tuple(map(self._argument, args))
        named = {name: self._argument(value) for name, value in kwargs.items()}
        for tensor in fresh:
            self._add(tensor, "result")
        self._steps.append(TorchCall(func, positional, named, len(fresh)))

    def record_launch(self, launch: Launch, ready: Ready | None) -> None:
        """Records a launch. `ready` is None e.g. while triton is compiling the kernel."""
        if ready is None:
            self.complete = False
            return
        self._kernels[id(launch.kernel)] = launch.kernel
        everything = {**launch.constants, **launch.args}
        try:
            values = [self._planned_value(everything[name]) for name in ready.names]
            self._steps.append(PlannedLaunch(ready, (launch.programs, 1, 1), values))
        except UnplannableError:
            self._failed = True
        except Exception as error:  # a private function of triton has changed
            self._failed = True
            message = f"launch plans do not support triton {triton.__version__}, so launches take longer: {error!r}"
            warnings.warn(message, stacklevel=2)

    def _planned_value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._at(value) if value.numel() else 0  # kernels never read an empty tensor
        if isinstance(value, tuple):
            return tuple(map(self._planned_value, value))
        if not isinstance(value, TensorDescriptor):
            return value
        return moved(value, value.base.data_ptr(), self._at(value.base))

    def _add(self, tensor: Tensor, kind: str) -> None:
        if tensor.device != self._device:
            raise UnplannableError(f"all tensors must be on {self._device}, got one on {tensor.device}")
        self._places[tensor] = (len(self._values), tensor.data_ptr())
        size = tensor.untyped_storage().nbytes()
        self._values.append(_Value(kind, tensor.shape, tensor.stride(), tensor.dtype, size))

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        place: tuple[int, int] | None = self._places.get(tensor)
        if place is None:
            raise UnplannableError("a tensor is neither an argument nor created by the function")
        return place

    def _at(self, tensor: Tensor) -> At:
        number, start = self._place(tensor)
        at = At(number, tensor.data_ptr() - start if tensor.numel() else 0)
        self._addresses.append(at)
        return at

    def _argument(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._argument(item) for item in value]
        return self._view(value) if isinstance(value, Tensor) else value

    def _view(self, tensor: Tensor) -> View:
        at = self._at(tensor)
        if tensor.dtype != self._values[at.value].dtype:
            raise UnplannableError("a tensor is viewed with another dtype")
        return View(at, tensor.shape, tensor.stride(), tensor.dtype)

    def plan(self, result: Any) -> LaunchPlan:
        """Returns the plan; raises `UnplannableError` if a replay cannot repeat the recorded steps."""
        single = isinstance(result, Tensor)
        flat = [result] if single else result
        if self._failed or not all(isinstance(value, Tensor) for value in flat):
            raise UnplannableError("a step cannot be repeated, or a result is not a tensor")
        outputs = tuple(self._view(tensor) for tensor in flat)
        if any(self._values[view.at.value].kind == "input" for view in outputs):
            raise UnplannableError("a result is a view of an argument")
        places, buffers = self._arrange(outputs)
        for at in self._addresses:
            place = places[at.value]
            at.value, at.offset = place.value, place.offset + at.offset
        for step in self._steps:
            if isinstance(step, PlannedLaunch):
                step.prepare()
        last = {value: position for position, step in enumerate(self._steps) for value in step.uses()}
        for value in (*range(self._inputs), *(view.at.value for view in outputs)):
            last.pop(value, None)  # a replay frees all values after their last use, except inputs and outputs
        drops: list[list[int]] = [[] for _ in self._steps]
        for value, position in last.items():
            drops[position].append(value)
        kernels = tuple(self._kernels.values())
        allocated = {self._inputs + number: buffer for number, buffer in enumerate(buffers)}
        returned = []
        for view in outputs:
            is_whole = not view.at.offset and allocated.get(view.at.value) == (view.shape, view.stride, view.dtype)
            returned.append((view.at.value, None if is_whole else view))
        return LaunchPlan(self._device, buffers, list(zip(self._steps, drops)), tuple(returned), single, kernels)

    def _arrange(self, outputs: Sequence[View]) -> tuple[dict[int, At], tuple[Any, ...]]:
        """Renumbers the values. Buffers that share an allocation get the number of the allocation.

        Returns {recorded number: At(number in the plan, offset)}, and (shape, stride, dtype) of each allocation.
        """
        spans: dict[int, tuple[int, int]] = {}  # value -> indices of the first and last steps that use it
        as_tensor = {view.at.value for view in outputs}
        for position, step in enumerate(self._steps):
            for number in step.uses():
                spans[number] = spans.get(number, (position, 0))[0], position
                if isinstance(step, TorchCall):
                    as_tensor.add(number)
        inputs = self._inputs
        places = {number: At(number, 0) for number in range(inputs)}
        buffers: list[Any] = []
        shared = []
        for number, value in enumerate(self._values):
            if value.kind != "buffer":
                continue
            if number in as_tensor:
                places[number] = At(inputs + len(buffers), 0)
                views = [view for view in outputs if view.at.value == number]
                own: Any = value  # if one output covers the whole buffer, allocate the shape of the output
                if len(views) == 1 and not views[0].at.offset and views[0].bytes == value.bytes:
                    own = views[0]
                buffers.append((own.shape, own.stride, own.dtype))
            elif number in spans:
                shared.append(number)
        if shared:
            offsets, size = _overlay({number: (self._values[number].bytes, *spans[number]) for number in shared})
            places |= {number: At(inputs + len(buffers), offsets[number]) for number in shared}
            buffers.append(((size,), (1,), torch.uint8))
        following = inputs + len(buffers)
        for number, value in enumerate(self._values):
            if value.kind == "result":
                places[number] = At(following, 0)
                following += 1
        return places, tuple(buffers)


def _overlay(needs: dict[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """Returns {buffer: offset in the shared allocation}, and the size of the allocation, in bytes.

    Buffers may overlap if their live ranges are disjoint. `needs`: {buffer: (bytes, first step, last step)}.
    """
    offsets: dict[int, int] = {}
    for number, (size, first, last) in sorted(needs.items(), key=lambda item: -item[1][0]):
        occupied = sorted(
            (offsets[other], offsets[other] + needs[other][0])
            for other in offsets
            if needs[other][1] <= last and first <= needs[other][2]
        )
        offset = 0
        for start, end in occupied:
            if offset + size <= start:
                break
            offset = max(offset, ceil_div(end, _ALIGNMENT) * _ALIGNMENT)
        offsets[number] = offset
    return offsets, max(offset + needs[number][0] for number, offset in offsets.items())

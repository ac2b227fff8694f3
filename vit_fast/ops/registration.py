"""Registers operators with torch: schema, implementation, fake kernel, FLOP formula and backward.

All operators have the schema (Tensor[] tensors, ..., str words) -> Tensor[]. `tensors` are the present tensors. The
numbers of the settings follow, which torch.compile may replace by SymInts. `words` encodes the other settings, and the
positions of the present tensors (`text_of`).

Calls need less host time than with `torch.library.custom_op`, because `dispatch` usually calls the implementation
directly. The implementation runs through a launch plan (`kernels/plan.py`): later calls with the same signature usually
replay the recorded launches.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch import library as torch_library
from torch.autograd import forward_ad

from ..errors import UnsupportedInputError

_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
CACHED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Maps the address of the first tensor of each `Frozen` (cached weights, `blocks/frozen.py`) to the `Frozen`.
The key of a `Frozen` without tensors is the id of the `Frozen`."""
_LIBRARY = torch_library.Library("vit_fast", "FRAGMENT")

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_to_compiler(function: Function) -> Function:
    """Does the same as torch.compiler.assume_constant_result without importing the compiler and Triton."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # an attribute of a function
    return function


Tensors = Sequence[Any]  # with None for absent tensors; in FLOP formulas, shapes replace the tensors
_Function = Callable[[Tensors, Any], Sequence[Tensor]]
_NUMBERS = {int: "SymInt", float: "float"}


def operator(
    name: str, names: Sequence[str], settings: type[Any], forward: _Function, backward: Callable[..., dict[str, Any]],
    *, what: str, fake: _Function, flop: Callable[[Tensors, Any], tuple[int, int]],
    with_gradient: Callable[[Any], Collection[str]],
    saved: Callable[[Tensors, Tensors, Any], Tensors] = lambda tensors, outputs, s: (*tensors, *outputs),
    unsaved_dtype: torch.dtype | None = None, cached: int | None = None,
) -> Callable[..., Sequence[Tensor]]:  # fmt: skip
    """Registers vit_fast::name and vit_fast::name_backward for every device; returns a function that calls the first.

    The returned function takes tensors, the numbers in the settings, and all other settings. If it also takes the
    places of the tensors in `names`, no tensor may be None, and all must be on the same device.

    The functions below take tensors and settings `s`. They must not change arguments, and no output may share memory
    with a tensor. Only the first output of vit_fast::name is differentiable.

    Args:
        names: Names of the tensors. The first tensor is always present.
        settings: Type of `s`, a NamedTuple. Its numbers come first, and become arguments of the operators.
        forward: (tensors, s) -> outputs.
        backward: (grad_output, tensors, outputs, s) -> gradients by name. Gets the tensors and outputs from `saved`.
        what: Name of the operator in error messages.
        fake: (tensors, s) -> empty outputs with the shapes, strides and dtypes of the real outputs.
        flop: (shapes, s) -> FLOPs of forward and backward.
        with_gradient: s -> names of the tensors that have a gradient if they are present.
        saved: (tensors, outputs, s) -> tensors, with None for those that the backward does not need, and the last
            outputs. Must depend only on `s`, on which tensors are present, and on the dtype of the first one.
        unsaved_dtype: Dtype of the first tensor if it is not saved; None means the dtype of grad_output.
        cached: Position, among the present tensors, of one that may be a cached weight. Every call, also in a compiled
            graph, looks up its address in `CACHED`. If the cached weights are outdated, the call updates them.
    """
    behind = len(names) + 1  # place of the saved outputs among the tensors of the backward

    def gradient_names(tensors: Tensors, s: Any) -> list[str]:
        found, first = with_gradient(s), names[0]
        return [name for name, each in zip(names, tensors) if name in found and (name == first or each is not None)]

    def run_backward(tensors: Tensors, s: Any) -> list[Tensor]:
        gradients = backward(tensors[0], tensors[1:behind], tensors[behind:], s)
        return [gradients[name] for name in gradient_names(tensors[1:], s)]

    def fake_backward(tensors: Tensors, s: Any) -> list[Tensor]:
        like = dict(zip(names, tensors[1:]))
        if tensors[1] is None:
            like[names[0]] = tensors[0].new_empty(tensors[0].shape, dtype=unsaved_dtype)
        return [like[name].new_empty(like[name].shape) for name in gradient_names(tensors[1:], s)]

    def flop_backward(shapes: Tensors, s: Any) -> int:
        return flop([shapes[0] if shapes[1] is None else shapes[1], *shapes[2:behind]], s)[1]

    _, backward_op = _register(f"{name}_backward", behind, settings, run_backward, what, fake_backward, flop_backward)

    def layout(tensors: Tensors, outputs: Tensors, s: Any) -> tuple[list[int], int, list[bool], str]:
        """Returns which present tensors and how many outputs to save, has_gradient, and the words of the backward."""
        kept, found = saved(tensors, outputs, s), gradient_names(tensors, s)
        present = [number for number, tensor in enumerate(tensors) if tensor is not None]
        numbers = [place for place, number in enumerate(present) if kept[number] is not None]
        places = (0, *(present[number] + 1 for number in numbers), *range(behind, len(kept) + 1))
        words = text_of(*backward_op.words(s), places)
        return numbers, len(kept) - len(names), [names[number] in found for number in present], words

    call, op = _register(name, len(names), settings, forward, what, fake, lambda shapes, s: flop(shapes, s)[0], cached)
    op.layout, op.call_backward = layout, backward_op.invoke
    return call


def _register(
    name: str, count: int, settings: type[Any], function: _Function, what: str, fake: _Function,
    flop: Callable[[Tensors, Any], int], cached: int | None = None,
) -> tuple[Callable[..., Sequence[Tensor]], Any]:  # fmt: skip
    """Registers an operator with at least `count` tensors. Returns a function that calls it, and its functions."""
    numbers = [f"{_NUMBERS[kind]} {field}, " for field, kind in get_type_hints(settings).items() if kind in _NUMBERS]
    schema = f"{name}(Tensor[] tensors, {''.join(numbers)}str words) -> Tensor[]"
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    registered = getattr(torch.ops.vit_fast, name).default
    first_word, end = len(numbers), -len(numbers) - 1

    def nested(flat: Sequence[Any]) -> tuple[Any, ...]:
        return list(flat[:end]), *flat[end:]

    def restored(given: Tensors, *rest: Any) -> tuple[list[Any], Any]:
        """Returns tensors and settings from the arguments of the operator."""
        *words, present = words_of(rest[-1])
        tensors: list[Any] = [None] * max(count, present[-1] + 1)
        for number, tensor in zip(present, given, strict=True):
            tensors[number] = tensor
        return tensors, settings(*rest[:-1], *words)

    def on_flat(*flat: Any) -> Any:
        return function(*restored(*nested(flat)))

    def implementation(given: Tensors, *rest: Any) -> Any:
        if cached is not None and CACHED and (weights := CACHED.get(given[cached].data_ptr())) is not None:
            weights.ensure_current()
        return _run_by_plan()(on_flat, (*given, *rest))

    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch_library.register_fake(registered, lambda *args: fake(*restored(*args)), lib=_LIBRARY)
    _flop_formulas.append((registered.overloadpacket, lambda *args, out_val=None, **_: flop(*restored(*args))))

    def dispatch(keys: Any, given: Tensors, *rest: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*given):
            return _Differentiable.apply(op, keys, *given, *rest)  # type: ignore[no-untyped-call]  # of torch
        with torch._C._AutoDispatchBelowAutograd():
            # skip the dispatcher, which would convert all arguments again before it calls `implementation`
            if (keys & torch._C._after_ADInplaceOrView_keyset).highestPriorityTypeId() in _DEVICES:
                return implementation(given, *rest)
            return registered.redispatch(keys & torch._C._after_autograd_keyset, given, *rest)

    _LIBRARY.impl(name, dispatch, "Autograd", with_keyset=True)

    def invoke(*args: Any) -> Any:
        if in_transform():  # forward-mode AD would silently treat tangents as 0
            reason = "the call must be outside of torch.func transforms and forward-mode AD: use backend='eager'"
            raise UnsupportedInputError(f"{what} with backend='triton'", [reason])
        return registered(*args)

    def call(tensors: Tensors, numbers: Any, words: Any, present: tuple[int, ...] | None = None) -> Any:
        if present is None:
            given: list[Tensor] = []
            places: list[int] = []
            device = tensors[0].device
            for place, tensor in enumerate(tensors):  # faster than a comprehension
                if tensor is None:
                    continue
                if tensor.device != device:  # raise an error before torch dispatches to one of the devices
                    function(tensors, settings(*numbers, *words))
                given.append(tensor)
                places.append(place)
            tensors, present = given, tuple(places)
        return invoke(tensors, *numbers, text_of(*words, present))

    op = SimpleNamespace(
        what=what, end=end, nested=nested, restored=restored, dispatch=dispatch, invoke=invoke, layout=None, layouts={},
        words=lambda s: s[first_word:],
    )  # fmt: skip
    return call, op


class _Differentiable(torch.autograd.Function):  # without setup_context, which would take 20 us per call
    """Calls an operator; `op` contains functions of `_register`."""

    @staticmethod
    def forward(ctx: Any, op: Any, keys: Any, *flat: Any) -> Any:
        args, layouts = op.nested(flat), op.layouts
        outputs = tuple(op.dispatch(keys, *args))  # gradients are disabled here
        ctx.op, ctx.count = op, len(flat)
        if op.layout is not None:
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*outputs[1:])
            key = flat[-1], flat[0].dtype  # `layout` depends on nothing else
            if key not in layouts:
                tensors, s = op.restored(*args)
                layouts[key] = op.layout(tensors, outputs, s)
            numbers, last, ctx.has_gradient, words = layouts[key]
            ctx.save_for_backward(*[flat[number] for number in numbers], *outputs[len(outputs) - last :])
            ctx.settings = (*flat[op.end : -1], words)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *others: Any) -> Any:
        if ctx.op.layout is None:
            reason = "the backward kernels are not differentiable: use backend='eager'"
            raise UnsupportedInputError(f"the second derivative of {ctx.op.what} with backend='triton'", [reason])
        if grad_output is None:
            return (None,) * (2 + ctx.count)
        if torch.is_grad_enabled() and not grad_output.requires_grad:
            # otherwise autograd may not record the backward operator: second derivatives would silently be 0
            grad_output = grad_output.detach().requires_grad_()
        found = iter(ctx.op.call_backward([grad_output, *ctx.saved_tensors], *ctx.settings))
        gradients = [next(found) if each else None for each in ctx.has_gradient]
        return (None, None, *gradients, *(None,) * (ctx.count - len(gradients)))


_flop_formulas: list[tuple[Any, Callable[..., int]]] = []  # not yet registered with torch
_flop_lock = threading.Lock()


@functools.cache
def register_flop_formulas() -> None:
    """Registers the FLOP formulas with torch and with existing FlopCounterModes, which contain copies of torch's table.

    `backends.py` calls this for a supported device, not on import, because torch.utils.flop_counter imports triton.
    """
    may_have_counters = "torch.utils.flop_counter" in sys.modules
    from torch.utils import flop_counter

    with _flop_lock:  # torch raises an error if another thread already registered the formula
        while _flop_formulas:
            packet, formula = _flop_formulas.pop()
            flop_counter.register_flop_formula(packet)(formula)
    if may_have_counters:
        for thing in gc.get_objects():
            if issubclass(type(thing), flop_counter.FlopCounterMode):
                thing.flop_registry = flop_counter.flop_registry | thing.flop_registry


def in_transform() -> bool:
    """True in torch.func transforms (grad, vjp, jvp, vmap) or forward-mode AD."""
    return forward_ad._current_level >= 0 or _in_torch_func()


@constant_to_compiler
def _in_torch_func() -> bool:
    """True inside a transform of torch.func other than functionalize, which supports custom operators."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return False
    functionalize = torch._C._functorch.TransformType.Functionalize
    return any(level.key() != functionalize for level in torch._C._functorch.get_interpreter_stack() or ())


def needs_gradient(*tensors: Tensor | None) -> bool:
    """True if autograd may call the backward of an operator on these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


@constant_to_compiler
def is_exporting() -> bool:
    """True during torch.export or torch.jit.trace, whose results must run without vit-fast's operators."""
    # torch.compile in torch 2.11 replaces torch.compiler.is_exporting() by True, also outside of an export
    return torch.compiler._is_exporting_flag or torch.jit.is_tracing()


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of matmuls of x: the autocast dtype if autocast is enabled and x is not fp64, else x.dtype."""
    device_type = x.device.type
    if x.dtype == torch.float64 or device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return x.dtype  # torch has no autocast state for meta
    return torch.get_autocast_dtype(device_type)


@constant_to_compiler
def text_of(*words: Any) -> str:
    """Encodes strings, flags, dtypes and tuples of numbers as one argument of an operator."""
    return _text(words)


_text = functools.lru_cache(4096)(functools.partial(json.dumps, default=str))


@functools.lru_cache(4096)
def words_of(text: str) -> tuple[Any, ...]:
    """Restores the arguments of `text_of`, with dtypes as text and tuples as lists."""
    return tuple(json.loads(text))


@functools.cache
def _run_by_plan() -> Callable[[Callable[..., Any], Sequence[Any]], Any]:
    if importlib.util.find_spec("triton") is None:
        return lambda function, arguments: function(*arguments)  # the operator reports that triton is missing
    from ..kernels import plan

    return plan.run

"""Registers operators with torch: schema, implementation, fake kernel, FLOP formula and, for a forward, the backward.

Calls need less host time than with `torch.library.custom_op`, because `dispatch` usually calls the implementation
directly. The implementation runs through a launch plan (`kernels/plan.py`): later calls with the same signature usually
replay the recorded launches.

`text_of` encodes constant arguments of an operator as one string argument. Numbers that torch.compile may replace by
SymInts must stay separate arguments of the operator.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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


def operator(
    name: str, schema: str, function: Callable[..., Any], *, what: str, fake: Callable[..., Any],
    flop: Callable[..., int], save: Callable[..., Any] | None = None, backward: Callable[..., Any] | None = None,
    cached: int | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Registers a function as the operator vit_fast::name for every device; returns a function that calls the operator.

    Args:
        schema: Arguments and outputs in torch's notation, with at most one list of tensors as an argument.
        function: The implementation. Must not change its arguments; no output may share memory with an argument.
        what: Name of the operator in error messages.
        fake: Returns empty outputs with the shapes, strides and dtypes of the real outputs.
        flop: Returns the number of FLOPs from the arguments, with shapes in place of tensors.
        save: Maps the list of arguments and the outputs to a pair: tensors and other values that `backward` needs.
        backward: Takes the gradient of the first output, and both parts of the pair from `save`. Returns a gradient or
            None per argument, in order. It may omit arguments at the end, which then have no gradient. If an argument
            is a list of tensors, each of them counts as one argument. Only the first output is differentiable. If
            backward is None, differentiating the operator raises an error.
        cached: Position of an argument that may be a cached weight, counted as for `backward`. Every call, also in a
            compiled graph, looks up the address of this argument in `CACHED`. If the cached weights are outdated, the
            call updates them.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    registered = getattr(torch.ops.vit_fast, name).default
    kinds = [str(argument.type) for argument in registered._schema.arguments]
    at = next((position for position, kind in enumerate(kinds) if kind.startswith("List")), None)
    behind = 0 if at is None else len(kinds) - at - 1

    def flattened(args: Sequence[Any]) -> Sequence[Any]:
        return args if at is None else (*args[:at], *args[at], *args[at + 1 :])

    def nested(flat: Sequence[Any]) -> Sequence[Any]:
        if at is None:
            return flat
        end = len(flat) - behind
        return (*flat[:at], list(flat[at:end]), *flat[end:])

    def on_flat(*flat: Any) -> Any:
        return function(*nested(flat))

    def implementation(*args: Any) -> Any:
        flat = flattened(args)
        if cached is not None and CACHED and (weights := CACHED.get(flat[cached].data_ptr())) is not None:
            weights.ensure_current()
        return _run_by_plan()(on_flat, flat)

    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch_library.register_fake(registered, fake, lib=_LIBRARY)
    _flop_formulas.append((registered.overloadpacket, lambda *args, out_val=None, **_: flop(*args)))

    def dispatch(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled():
            flat = flattened(args)
            if torch._C._any_requires_grad(*flat):
                return differentiable.apply(keys, *flat)
        with torch._C._AutoDispatchBelowAutograd():
            # skip the dispatcher, which would convert all arguments again before it calls `implementation`
            if (keys & torch._C._after_ADInplaceOrView_keyset).highestPriorityTypeId() in _DEVICES:
                return implementation(*args)
            return registered.redispatch(keys & torch._C._after_autograd_keyset, *args)

    differentiable = _differentiable(dispatch, nested, what, save, backward)
    _LIBRARY.impl(name, dispatch, "Autograd", with_keyset=True)

    def call(*args: Any) -> Any:
        if in_transform():  # forward-mode AD would silently treat tangents as 0
            reason = "the call must be outside of torch.func transforms and forward-mode AD: use backend='eager'"
            raise UnsupportedInputError(f"{what} with backend='triton'", [reason])
        return registered(*args)

    return call


def _differentiable(
    dispatch: Callable[..., Any], nested: Callable[..., Any], what: str, save: Callable[..., Any] | None,
    backward: Callable[..., Any] | None,
) -> Any:  # fmt: skip
    """Returns the autograd function of an operator; for the arguments, see `operator`."""

    class Differentiable(torch.autograd.Function):  # without setup_context, which would take 20 us per call
        @staticmethod
        def forward(ctx: Any, keys: Any, *flat: Any) -> Any:
            output = dispatch(keys, *nested(flat))  # gradients are disabled here
            if not isinstance(output, Tensor):
                output = tuple(output)
            ctx.count = len(flat)
            if save is not None:
                ctx.set_materialize_grads(False)
                if isinstance(output, tuple):
                    ctx.mark_non_differentiable(*output[1:])
                saved, ctx.rest = save(nested(flat), output)
                ctx.save_for_backward(*saved)
            return output

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor | None, *others: Any) -> Any:
            if backward is None:
                reason = "the backward kernels are not differentiable: use backend='eager'"
                raise UnsupportedInputError(f"the second derivative of {what} with backend='triton'", [reason])
            if grad_output is None:
                return (None,) * (1 + ctx.count)
            if torch.is_grad_enabled() and not grad_output.requires_grad:
                # otherwise autograd may not record the backward operator: second derivatives would silently be 0
                grad_output = grad_output.detach().requires_grad_()
            gradients = backward(grad_output, ctx.saved_tensors, ctx.rest)
            return (None, *gradients, *(None,) * (ctx.count - len(gradients)))

    return Differentiable


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

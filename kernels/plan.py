"""Launch plans: the launches of an operator, recorded once and replayed in later calls.

    result = run(function, arguments)        # function(*arguments), replayed if there is a plan

The first call with a signature runs the function, the second call records a plan, and later calls replay the plan. A
signature consists of the function, the shapes, strides, dtypes, devices and alignments of the tensor arguments, the
other arguments, and torch's setting for fp32 matmuls. The launches must not depend on anything else.

A plan contains the compiled kernels, their grids and their arguments. Each address is stored as an offset into an
input, a buffer, or the result of a torch operator. A replay allocates the buffers and launches the kernels on the
current stream. Tensor maps (encoded TMA descriptors) are cached by address.

The function may allocate tensors, create views, launch kernels, and call torch operators, which a replay calls again. A
function that uses a tensor from outside, or returns anything but tensors, cannot be planned and runs in every call.
Buffers that only kernels use share one allocation, and overlap if their live ranges are disjoint. So a kernel must
never read buffer memory that no kernel has written before.

Under Triton's interpreter and with launch hooks, functions run without plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .launch import is_interpreted, is_watched
from .plan_recorder import record
from .plan_steps import LaunchPlan

Function = Callable[..., Any]

MAX_PLANS = 2048
MAX_SEEN = 16384
_plans: dict[tuple[Any, ...], LaunchPlan | None] = {}  # None: cannot be planned
_seen: set[int] = set()  # hashes of the signatures that ran once; a collision only records a plan one call early
_UNSEEN: Any = object()
_INTERPRETED = is_interpreted()


def run(function: Function, arguments: Sequence[Any]) -> Any:
    """Returns function(*arguments), replayed if there is a plan.

    Args:
        arguments: Tensors, None, and hashable values. No result of `function` may share memory with a tensor argument.
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
        if is_watched() or _is_first(signature):
            return function(*arguments)
        return _record(signature, function, arguments)
    if plan is None or is_watched(*plan.kernels):
        return function(*arguments)
    return plan.replay(tensors, addresses)


def forget() -> None:
    """Drops all plans, e.g. after a change of the launch policy."""
    _plans.clear()
    _seen.clear()


def plans() -> list[LaunchPlan | None]:
    """Returns all plans; None for each signature that cannot be planned."""
    return list(_plans.values())


def _is_first(key: tuple[Any, ...]) -> bool:
    """Adds a signature to `_seen`; returns True if the signature is new."""
    signature = hash(key)
    if signature in _seen:
        return False
    if len(_seen) >= MAX_SEEN:
        _seen.clear()
    _seen.add(signature)
    return True


def _record(key: tuple[Any, ...], function: Function, arguments: Sequence[Any]) -> Any:
    result, complete, plan = record(function, arguments)
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    if complete:
        _plans[key] = plan
    return result

"""Launch plans: what an operator launches, recorded at the second call of a signature and replayed from the third on.

    result = run(function, arguments)        # function(*arguments), by its plan where there is one

`function` allocates, builds launches and runs them; which, depends on the shapes, strides, dtypes, devices and
alignments of its tensors, on its other arguments, and on torch's setting for fp32 products. So all of these are the key
of a plan. A plan holds the compiled kernels with their grids and arguments, every address as an offset into an input or
into a buffer. To replay one, the buffers are allocated, and the kernels launched on the current stream. Tensor maps are
kept by address.

What a function may do: allocate, take views, launch, and call torch operators on such tensors, which a replay calls
again in their place. Of anything else (a tensor from elsewhere, a result that is no tensor) no plan is made, and the
function runs each time. Buffers that only kernels use share one allocation, where those that are never needed at the
same time lie on top of each other; so nothing may read what it did not write.

Under Triton's interpreter, and while someone listens to launches, functions simply run.
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
_plans: dict[tuple[Any, ...], LaunchPlan | None] = {}  # None: it cannot be planned
_seen: set[int] = set()  # hashes of the signatures that ran once; a collision only records one call early
_UNSEEN: Any = object()
_INTERPRETED = is_interpreted()


def run(function: Function, arguments: Sequence[Any]) -> Any:
    """function(*arguments), replayed where its plan is known.

    Args:
        arguments: Tensors, None, and hashable values. No result may share memory with one of the tensors.
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
    found = tuple(key)
    plan = _plans.get(found, _UNSEEN)
    if plan is _UNSEEN:
        if is_watched() or _is_first(found):
            return function(*arguments)
        return _record(found, function, arguments)
    if plan is None or is_watched(*plan.kernels):
        return function(*arguments)
    return plan.replay(tensors, addresses)


def forget() -> None:
    """Drop every plan and what was seen: for whoever changes by hand what decides the launches."""
    _plans.clear()
    _seen.clear()


def plans() -> list[LaunchPlan | None]:
    """The plans kept; None for each call that could not be planned."""
    return list(_plans.values())


def _is_first(key: tuple[Any, ...]) -> bool:
    """Notes a signature; True if it was not noted before."""
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
